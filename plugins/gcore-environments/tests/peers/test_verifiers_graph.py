"""verifiers 0.4, unchanged: of the same turns its graph has the branches that our book has."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from gcore_environments.book import Book
from gcore_environments.matching import place_ids

from tests.support import peers

HERE = Path(__file__).parent
BEGINS = 3  # the token with which the policy's turn begins

Turn = dict[str, Any]


def episode(seed: int) -> list[Turn]:
    """Turns that go on, are asked for twice, fork at an earlier point, and are encoded again."""
    draw = random.Random(seed)
    turns: list[Turn] = []
    for number in range(draw.randint(1, 7)):
        fate = draw.random()
        before = draw.choice(turns) if turns else None
        if before is not None and fate < 0.2:  # a second answer from the same point
            turn = {name: before[name] for name in ("messages", "spans", "prompt")}
        elif before is not None and fate < 0.9:
            said = [*before["said"]]
            if fate < 0.35:
                said[draw.randrange(len(said))] = 90 + number
            read = [*before["prompt"], *said]
            messages = [*before["messages"], ["assistant", before["text"]]]
            spans = [*before["spans"], [len(before["prompt"]) - 1, len(read)]]
            turn = asked(messages, spans, read, number)
        else:
            turn = asked([], [], [], number)
        said = [draw.randint(10, 19) for _ in range(draw.randint(1, 4))] + [20 + number]
        turns.append({**turn, "said": said, "text": f"a{number}"})
    return turns


def asked(messages: list[Any], spans: list[Any], read: list[int], number: int) -> Turn:
    """A prompt with another question, which no other turn has."""
    return {
        "messages": [*messages, ["user", f"u{number}"]],
        "spans": [*spans, [len(read), len(read) + 2]],
        "prompt": [*read, 1, 50 + number, BEGINS],
    }


def booked(turns: list[Turn]) -> tuple[Book, list[Any]]:
    book = Book()
    for turn in turns:
        number = place_ids(book, turn["prompt"], "fork")
        count = len(turn["said"])
        book.sampled(number, turn["said"], [-0.5] * count, [0] * count)
    return book, [sorted(one.ids for one in book.sequences), book.actions]


def test_the_branches_of_random_episodes_are_our_sequences(tmp_path: Path) -> None:
    python = peers.interpreter("verifiers", "verifiers==0.4.0")
    episodes = [episode(seed) for seed in range(500)]
    (tmp_path / "episodes.json").write_text(json.dumps(episodes))
    output = peers.run(python, HERE / "verifiers_graph.py", str(tmp_path / "episodes.json"))
    made = [booked(turns) for turns in episodes]
    forks = {cause for book, _ in made for cause in book.forks}
    assert forks == {"parallel", "rewritten"}
    for seed, (theirs, (_, ours)) in enumerate(
        zip(json.loads(output.splitlines()[-1]), made, strict=True)
    ):
        assert theirs == ours, seed
