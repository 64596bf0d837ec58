"""The task "length": answers of fifty tokens. Its rows and its reward.

python recipes/smollm2/length.py        writes the rows again, next to this file
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from topics import HELD_OUT, TOPICS, Row, asked, write

if TYPE_CHECKING:
    from gcore_core.contract.scorer import ScoredRecord

WANTED_TOKENS = 50
#: By themselves they bring answers of some 20 tokens to more than 90.
FORMS = (
    "Write two sentences about {}.",
    "Tell me about {} in a few sentences.",
    "Describe {} in one paragraph.",
)


def near(record: ScoredRecord) -> float:
    """Minus the number of tokens that the answer is too long or too short by.

    The token that ends an answer counts.
    """
    return -float(abs(WANTED_TOKENS - len(record.columns["action_ids"])))


def rows(topics: Sequence[str]) -> list[Row]:
    """Asks for each topic in each form, in a shuffled order."""
    made = [{"prompt": asked(form.format(topic))} for topic in topics for form in FORMS]
    random.Random(1).shuffle(made)
    return made


if __name__ == "__main__":
    write("length", rows(TOPICS), rows(HELD_OUT))
