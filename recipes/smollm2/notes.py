"""The task "notes": a sentence about a topic that keeps three rules. Its rows and its rewards.

python recipes/smollm2/notes.py        writes the rows again, next to this file
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore_core.contract.records import ScoredRecord

TOPICS = (
    "the sea;a mountain;bread;winter;a bicycle;the moon;a library;coffee;rain;a train;the desert;"
    "a cat;a farmer;the city;a garden;music;a bridge;the stars;a doctor;chess;a river;the market;"
    "an island;snow;a teacher;apples;a lighthouse;the forest;a clock;tea;a ship;the wind;football;"
    "a painter;honey;a castle;the sun;a dog;a letter;fire;a kitchen;the night;a horse;paper;"
    "an airport;a storm;the beach;a baker"
)
#: No row that is trained on has one of these.
HELD_OUT = (
    "books;a museum;friendship;the spring;a farm;glass;a robot;the harbour;a violin;salt;a village;"
    "summer"
)
WORDS = (
    "blue old quiet small bright always under home water green light people slow warm never time "
    "little open road hand"
)


def kept(record: ScoredRecord) -> float:
    """A third for each rule that the answer keeps."""
    return sum(_rules(record)) / 3


def all_kept(record: ScoredRecord) -> float:
    """1 where it keeps all three."""
    return float(all(_rules(record)))


def _rules(record: ScoredRecord) -> tuple[bool, bool, bool]:
    """Says whether the answer is short and has ended, has the word, and is in lower case."""
    fields = record.prompt.fields
    words = re.findall(r"[A-Za-z'-]+", record.text)
    short = record.status == "finished" and 4 <= len(words) <= fields["most"]
    has_word = fields["word"] in [word.lower() for word in words]
    lower = bool(words) and record.text == record.text.lower()
    return short, has_word, lower


def rows(count: int, seed: int, topics: str) -> list[dict[str, Any]]:
    """Draws different rows."""
    draw = random.Random(seed)
    named, words = topics.split(";"), WORDS.split(" ")
    drawn: dict[tuple[str, str, int], dict[str, Any]] = {}
    while len(drawn) < count:
        topic, word, most = draw.choice(named), draw.choice(words), draw.choice([8, 10, 12])
        text = (
            f'Write one sentence about {topic}. Use the word "{word}", at most {most} words, and '
            "only lower case letters."
        )
        chat = [{"role": "user", "content": text}]
        drawn[topic, word, most] = {"prompt": chat, "word": word, "most": most}
    return list(drawn.values())


def main() -> None:
    here = Path(__file__).parent
    for name, drawn in (("train", rows(400, 1, TOPICS)), ("heldout", rows(64, 2, HELD_OUT))):
        lines = "".join(json.dumps(row) + "\n" for row in drawn)
        (here / f"notes_{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
