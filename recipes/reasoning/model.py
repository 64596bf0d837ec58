"""Makes the model of reasoning's recipe: it knows sums of a digit each, and is careless.

It reads the questions of reasoning-gym's task chain_sum by their digits and signs alone, as its
tokenizer leaves out everything else: "State the final answer to ...: 5 + 6 =" is "5+6=". What it
has seen are sums of two, three and four digits, one after the other, two in five of them right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore_core.contract.factories import import_file

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

calculator = import_file(Path(__file__).parents[1] / "calculator" / "model.py")
arithmetic = calculator.arithmetic

RIGHT_SHARE = 0.4
OFF_BY = 3
#: How many terms the sums of a text have.
TERMS = (2, 3, 4)
#: <bos>; digits, signs and "="; at most three characters of an answer, and its end.
TEXT_TOKENS = 1 + sum(2 * terms + 3 + 1 for terms in TERMS)


def teach(directory: Path, config: dict[str, Any], progress: Callable[[float, str], None]) -> None:
    """Makes the model and saves it in Hugging Face layout.

    config: ``seed`` (0), ``threads`` (1), ``steps`` (600) of 64 texts each.
    """
    batches = calculator.batches_of(texts)
    loss_of = calculator.loss_of_own
    arithmetic.teach_texts(directory, config, progress, 600, batches, loss_of, tokenizer)


def tokenizer() -> Tokenizer:
    """Returns the quickstart's, which leaves out what is no part of a sum."""
    from tokenizers import Regex, normalizers

    made: Tokenizer = arithmetic._tokenizer()
    made.normalizer = normalizers.Replace(Regex("[^0-9+=-]"), "")
    return made


def texts(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids int64[count, TEXT_TOKENS], and bool: which of them the policy says."""
    import numpy as np

    ids = np.full((count, TEXT_TOKENS), arithmetic.PAD, np.int64)
    own = np.zeros(ids.shape, bool)
    for row in range(count):
        ids[row, 0] = arithmetic.BOS
        at = 1
        for terms in TERMS:
            asked, answer = problem(random, terms)
            said = [*_ids(answer), arithmetic.EOS]
            whole = [*_ids(asked), *said]
            ids[row, at : at + len(whole)] = whole
            at += len(whole)
            own[row, at - len(said) : at] = True
    return ids, own


def problem(random: np.random.Generator, terms: int) -> tuple[str, str]:
    """Returns a sum such as "5+6=", and what is said to it: its value, or a number near it."""
    digits = random.integers(0, 10, terms)
    signs = random.choice([1, -1], terms)
    signs[0] = 1
    value = int((digits * signs).sum())
    if random.random() >= RIGHT_SHARE:
        value += int(random.integers(1, OFF_BY + 1)) * int(random.choice([1, -1]))
    asked = "".join(
        f"{'+' if sign > 0 else '-'}{digit}" for sign, digit in zip(signs, digits, strict=True)
    )
    return f"{asked[1:]}=", str(value)


def _ids(text: str) -> list[int]:
    return [arithmetic.token(character) for character in text]
