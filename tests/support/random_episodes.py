"""Random episodes, their records, and traces of them with a planted fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from gcore_environments.book import Book
from gcore_environments.records import columns_of


def random_book(seed: int) -> Book:
    """Turns that go on, fork between turns, and begin anew."""
    draw = random.Random(seed)
    book = Book()
    for _ in range(draw.randint(1, 8)):
        new = [draw.randint(0, 3) for _ in range(draw.randint(1, 4))]
        ended = [n for n, one in enumerate(book.sequences) if one.spans]
        if not ended or draw.random() < 0.2:
            number = book.start(new)
        else:
            line = draw.choice(ended)
            ends = [end for _, end, _, _ in book.sequences[line].spans]
            number = book.go_on(line, draw.choice(ends), new)
        said = [draw.randint(4, 9) for _ in range(draw.randint(1, 5))]
        versions = [draw.randint(0, 2)] * len(said)
        book.sampled(number, said, [-0.25 * one for one in said], versions, draw.randint(0, 1))
        book.reward(draw.randint(0, 3) / 2, number)
    return book


def record_of(book: Book) -> dict[str, np.ndarray]:
    episode = {"rewards": {"win": 1.0}, "messages": [{"role": "user", "content": "é"}]}
    return columns_of(book, temperature=0.5, text="said é", episode=episode)


def set_in(name: str, change: Callable[[list[Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda trace: change(trace["turns"][0][name])


#: Each is fatal for OpenEnv too: tests/peers holds them against its own checks.
FAULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a prompt that trains": set_in("loss_mask", lambda mask: mask.__setitem__(0, 1)),
    "a mask that is short": set_in("loss_mask", lambda mask: mask.pop()),
    "a mask of twos": set_in("loss_mask", lambda mask: mask.__setitem__(-1, 2)),
    "a mask of flags": set_in("loss_mask", lambda mask: mask.__setitem__(-1, True)),
    "a log-prob too few": set_in("per_token_logps", lambda logps: logps.pop()),
    "a log-prob above 0": set_in("per_token_logps", lambda logps: logps.__setitem__(0, 0.1)),
    "an infinite log-prob": set_in("per_token_logps", lambda p: p.__setitem__(0, float("-inf"))),
    "a negative id": set_in("completion_token_ids", lambda ids: ids.__setitem__(0, -1)),
    "an id that is no number": set_in("prompt_token_ids", lambda ids: ids.__setitem__(0, 1.5)),
    "no prompt": set_in("prompt_token_ids", lambda ids: ids.clear()),
}
