"""Answers to the quickstart's problems: what the chain's models are taught from.

    demonstrations.jsonl   prompts with answers: half are worked and right, half careless guesses
    pairs.jsonl            prompts with a chosen answer, worked and right, and a rejected one,
                           careless and wrong
    ..._heldout.jsonl      the same of problems that no training text has contained

``python answers.py write`` makes the files anew, the same ones every time.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
import arithmetic  # the quickstart's task, which lies beside this folder

ROWS, HELDOUT_ROWS = 2048, 256


def worked(problem: int) -> str:
    """The running totals, all of them right."""
    totals = [sum(_digits(problem)[: i + 1]) for i in range(arithmetic.DIGITS)]
    return ":" + "".join(f"{total:02d}" for total in totals)


def worked_wrong(problem: int, draw: random.Random) -> str:
    """The running totals with a mistake in one addition: all totals from there on are wrong."""
    first = draw.randrange(arithmetic.DIGITS)
    right = [sum(_digits(problem)[: i + 1]) for i in range(arithmetic.DIGITS)]
    mistake = 0
    while not mistake or right[first] + mistake < 0:
        mistake = draw.randint(-6, 6)
    totals = [max(0, total + mistake * (i >= first)) for i, total in enumerate(right)]
    return ":" + "".join(f"{total:02d}" for total in totals)


def careless(problem: int, draw: random.Random, *, wrong: bool = False) -> str:
    """A guess near the sum. wrong: not the sum itself."""
    right = sum(_digits(problem))
    guess = right
    while True:
        guess = max(0, right + draw.randint(-6, 6))
        if not (wrong and guess == right):
            return f"?{guess:02d}"


def demonstrations(*, held_out: bool) -> Iterator[dict[str, Any]]:
    draw = random.Random(0)
    for i, problem in enumerate(problems(held_out=held_out)):
        answer = worked(problem) if i % 2 else careless(problem, draw)
        yield {"prompt": arithmetic.prompt_of(problem), "completion": answer}


def pairs(*, held_out: bool) -> Iterator[dict[str, Any]]:
    draw = random.Random(1)
    for problem in problems(held_out=held_out):
        rejected = careless(problem, draw, wrong=True)
        prompt = arithmetic.prompt_of(problem)
        yield {"prompt": prompt, "chosen": worked(problem), "rejected": rejected}


def problems(*, held_out: bool, count: int = 0) -> list[int]:
    """The first problems in the quickstart's order; behind those that its own rows are of.

    count: how many; 0: as many as the files have.
    """
    rows = count or (HELDOUT_ROWS if held_out else ROWS)
    known = arithmetic.HELDOUT_ROWS if held_out else arithmetic.TRAIN_ROWS
    own = [p for p in range(arithmetic.PROBLEMS) if arithmetic.is_held_out(p) == held_out]
    ordered = sorted(own, key=lambda p: random.Random(p).random())
    return ordered[known : known + rows] if len(ordered) >= known + rows else ordered[-rows:]


def _digits(problem: int) -> list[int]:
    return [int(digit) for digit in f"{problem:0{arithmetic.DIGITS}d}"]


def write(directory: Path) -> None:
    """Writes the four files."""
    for name, rows in (("demonstrations", demonstrations), ("pairs", pairs)):
        for held_out in (False, True):
            text = "".join(json.dumps(row) + "\n" for row in rows(held_out=held_out))
            file = f"{name}{'_heldout' if held_out else ''}.jsonl"
            (directory / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["write"]:
        sys.exit("usage: python answers.py write")
    write(Path(__file__).parent)
