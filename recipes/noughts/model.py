"""Makes the model of the game's recipe: it plays by lot, and has learned the form alone.

It has seen games of two who choose an empty square by lot, each game as one of them saw it. What it
learned to say is the squares; it has seen no more wins than there are by luck.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore_core.contract.factories import import_file

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

HERE = Path(__file__).parent
noughts = import_file(HERE / "noughts.py")
calculator = import_file(HERE.parent / "calculator" / "model.py")
arithmetic = calculator.arithmetic

CHARACTERS = "012345678xo="
#: <bos>, then up to five times a board of ten characters, a square and its end.
TEXT_TOKENS = 1 + 5 * (10 + 2)


def teach(directory: Path, config: dict[str, Any], progress: Callable[[float, str], None]) -> None:
    """Makes the model and saves it in Hugging Face layout.

    config: ``seed`` (0), ``threads`` (1), ``steps`` (250) of 64 texts each.
    """
    losses = calculator.losses_of(texts)
    arithmetic.teach_by(losses, directory, {"steps": 250, **config}, progress, tokenizer)


def tokenizer() -> Tokenizer:
    """Returns one of what stands on a board, a token a character."""
    made: Tokenizer = arithmetic._tokenizer(CHARACTERS)
    return made


def texts(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids int64[count, TEXT_TOKENS], and bool: which of them the policy says."""
    import numpy as np

    ids = np.full((count, TEXT_TOKENS), arithmetic.PAD, np.int64)
    own = np.zeros(ids.shape, bool)
    for row in range(count):
        ids[row, 0] = arithmetic.BOS
        at = 1
        for board, square in game(random, str(row % 2)):
            ids[row, at : at + 12] = [*_ids(board + square), arithmetic.EOS]
            own[row, at + 10 : at + 12] = True
            at += 12
    return ids, own


def game(random: np.random.Generator, player: str) -> list[tuple[str, str]]:
    """Returns the turns of a player in a game by lot: a board, and the square that it takes.

    player: "0", who begins, or "1".
    """
    owner: dict[str, str] = {}
    turns = []
    moves = "0"
    while empty := noughts.free(owner):
        square = empty[int(random.integers(len(empty)))]
        if moves == player:
            turns.append((noughts.board_of(owner, player), square))
        owner[square] = moves
        if noughts.has_line(owner, moves):
            break
        moves = noughts.other(moves)
    return turns


def _ids(text: str) -> list[int]:
    return [len(arithmetic.SPECIAL) + CHARACTERS.index(character) for character in text]
