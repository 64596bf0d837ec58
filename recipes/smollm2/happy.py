"""The task "happy": film reviews that go on in a happy way. Its rows and its reward.

python recipes/smollm2/happy.py        writes the rows again, next to this file

Needs the package vaderSentiment.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from topics import Row, write

try:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the package {error.name} is not installed: pip install vaderSentiment"
    ) from error

if TYPE_CHECKING:
    from gcore_core.contract.scorer import ScoredRecord

OPENINGS = (
    "I watched this film with my sister on {day}.",
    "We went to the cinema on {day} to see this film.",
    "A neighbour lent me this film on {day}.",
    "They showed this film on television on {day}.",
    "On {day} my class was shown this film.",
    "I saw this film on a train on {day}.",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
BEGUN = ("The actors", "The story", "The music", "The first half", "The pictures", "It", "The end")
#: No row that is trained on ends with one of these.
HELD_OUT = ("The director", "The last scene", "The main character", "The dialogue")

_ANALYZER = SentimentIntensityAnalyzer()


def feeling(record: ScoredRecord) -> float:
    """From -1, a sad or angry text, to 1, a happy one: VADER's compound score of the answer."""
    return float(_ANALYZER.polarity_scores(record.text)["compound"])


def rows(begun: Sequence[str]) -> list[Row]:
    """Begins reviews in all ways, in a shuffled order; they say nothing good or bad."""
    drawn = itertools.product(OPENINGS, DAYS, begun)
    made = [{"prompt": f"{opening.format(day=day)} {begin}"} for opening, day, begin in drawn]
    random.Random(1).shuffle(made)
    return made


if __name__ == "__main__":
    write("happy", rows(BEGUN), rows(HELD_OUT)[:64])
