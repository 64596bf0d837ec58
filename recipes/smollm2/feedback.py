"""The task "feedback": the notes of notes.py, learned from answers that are there already.

python recipes/smollm2/feedback.py        writes the rows again, next to this file

    feedback_sft_...     prompts with an answer: every fourth one keeps the rules, the others do not
    feedback_pairs_...   prompts with a chosen answer, which keeps all three rules, and a rejected
                         one, which breaks at least one
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from notes import rows as notes
from topics import HELD_OUT, TOPICS, Row, write

#: At most eight words, whatever topic and word are.
CHOSEN = (
    "i think of {topic} and {word}.",
    "{topic} and {word} belong together.",
    "say {word} and think of {topic}.",
    "my {word} song is about {topic}.",
)
REJECTED = (
    "My {word} song is about {topic}.",
    "Say {word} and think of {topic}.",
    "There is nothing in the world like {topic}.",
    "there is nothing in the world like {topic}.",
    "people in every country have a {word} story that they like to tell about {topic}.",
    "Everybody whom I have met so far has had a lot to say about {topic}.",
)


def pairs(count: int, seed: int, topics: Sequence[str]) -> list[Row]:
    """Draws prompts, each with a chosen and a rejected answer."""
    draw = random.Random(seed)
    made = []
    for row in notes(count, seed, topics):
        both = {"chosen": draw.choice(CHOSEN), "rejected": draw.choice(REJECTED)}
        made.append({**row, **{kind: _said(form, row) for kind, form in both.items()}})
    return made


def demonstrations(count: int, seed: int, topics: Sequence[str]) -> list[Row]:
    """Draws prompts with one answer each: a chosen one, then three rejected ones, and so on."""
    return [
        {"prompt": row["prompt"], "completion": row["rejected" if i % 4 else "chosen"]}
        for i, row in enumerate(pairs(count, seed, topics))
    ]


def _said(form: str, row: Row) -> list[dict[str, str]]:
    """Returns what the assistant says to a row of the notes."""
    text = form.format(topic=row["topic"], word=row["word"])
    return [{"role": "assistant", "content": text}]


if __name__ == "__main__":
    write("feedback_sft", demonstrations(320, 3, TOPICS), demonstrations(64, 4, HELD_OUT))
    write("feedback_pairs", pairs(320, 5, TOPICS), pairs(64, 6, HELD_OUT))
