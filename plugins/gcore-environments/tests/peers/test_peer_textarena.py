"""Games of TextArena, for one player and for two."""

from __future__ import annotations

from typing import Any


def test_a_game_of_one_player_comes_to_its_end(player: Any) -> None:
    guesses = iter(range(1, 21))
    seen = player.play(
        "textarena:TextArena",
        lambda _: {"text": f"[{next(guesses)}]"},
        seed=5,
        game="GuessTheNumber-v0",
    )
    assert seen[-1]["done"] and list(seen[-1]["rewards"]) == ["game"] and seen[-1]["reason"]
    assert all(one["player"] == "" for one in seen)
    assert "guess" in seen[0]["messages"][0]["content"].lower()


def test_both_seats_of_a_game_are_played_and_rewarded(player: Any) -> None:
    moves = iter(["[4]", "[0]", "[3]", "[1]", "[5]"])
    seen = player.play(
        "textarena:TextArena",
        lambda _: {"text": next(moves)},
        game="TicTacToe-v0",
        players=2,
    )
    assert [one["player"] for one in seen[:-1]] == ["0", "1", "0", "1", "0"]
    assert seen[-1]["done"] and seen[-1]["rewards"] == {"0/game": 1.0, "1/game": -1.0}
    assert seen[-1]["reason"] == "Player 0 has won!"


def test_each_seat_reads_once_what_is_new_to_it(player: Any) -> None:
    moves = iter(["[4]", "[0]", "[3]"])
    seen = player.play(
        "textarena:TextArena",
        lambda _: {"text": text} if (text := next(moves, "")) else None,
        game="TicTacToe-v0",
        players=2,
    )
    told = [one["messages"][0]["content"] for one in seen]
    assert "you will be 'O'" in told[0] and "you will be 'X'" in told[1]
    assert "you will be" not in told[2] + told[3]
    assert "Player 1 placed their symbol (X) in cell 0" in told[2]
    assert "[Player 1] [0]" in told[2] and "[Player 0] [3]" in told[3]


def test_a_game_of_two_by_the_same_seed_is_the_same(player: Any) -> None:
    """Two episodes in one process, in steps that alternate, draw from generators of their own."""
    hosts = player.hosts("textarena:TextArena", game="GuessTheNumber-v0")
    host = hosts.of((0, 0))
    told: dict[int, list[str]] = {0: [], 1: []}
    for sample in told:
        host.send(op="open", id=[0, sample], seed=11, row={}, endpoint={})
        told[sample].append(player.next(hosts)["messages"][0]["content"])
    for turn in range(1, 5):
        for sample in told:
            text = f"[{turn}]"
            host.send(op="step", id=[0, sample], turn=turn, text=text, status="finished")
            told[sample].append(player.next(hosts)["messages"][0]["content"])
    assert told[0] == told[1]
