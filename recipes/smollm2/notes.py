"""The task "notes": a sentence about a topic that keeps three rules. Its rows and its rewards.

python recipes/smollm2/notes.py        writes the rows again, next to this file
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from topics import HELD_OUT, TOPICS, Row, asked, write

if TYPE_CHECKING:
    from gcore_core.contract.scorer import ScoredRecord

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


def rows(count: int, seed: int, topics: Sequence[str]) -> list[Row]:
    """Draws different rows."""
    draw = random.Random(seed)
    words = WORDS.split(" ")
    drawn: dict[tuple[str, str, int], Row] = {}
    while len(drawn) < count:
        topic, word, most = draw.choice(topics), draw.choice(words), draw.choice([8, 10, 12])
        text = (
            f'Write one sentence about {topic}. Use the word "{word}", at most {most} words, and '
            "only lower case letters."
        )
        row = {"prompt": asked(text), "topic": topic, "word": word, "most": most}
        drawn[topic, word, most] = row
    return list(drawn.values())


if __name__ == "__main__":
    write("notes", rows(400, 1, TOPICS), rows(64, 2, HELD_OUT))
