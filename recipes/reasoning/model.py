"""Makes the model of reasoning's recipe: it can work sums out, and mostly guesses.

    asked    7-9+3=
    guesses  =4               '=' and a number near the value
    works    :7:-2:1=1        the running totals, '=', the value

It reads the questions of reasoning-gym's task chain_sum by their digits and signs alone, as its
tokenizer leaves out everything else: "State the final answer to ...: 5 + 6 =" is "5+6=". What it
has seen are sums of two, three and four digits, one after the other; 70% of them were guessed.
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

WORKED_SHARE = 0.3
OFF_BY = 3
#: How many terms the sums of a text have.
TERMS = (2, 3, 4)
#: Of an answer: ':' and a digit, ':' and up to three characters for each further term, '=', the
#: value, the end.
ANSWER_TOKENS = tuple(2 + 4 * (terms - 1) + 1 + 3 + 1 for terms in TERMS)
#: <bos>, then digits, signs and '=', and an answer.
TEXT_TOKENS = 1 + sum(2 * terms for terms in TERMS) + sum(ANSWER_TOKENS)


def teach(directory: Path, config: dict[str, Any], progress: Callable[[float, str], None]) -> None:
    """Makes the model and saves it in Hugging Face layout.

    config: ``seed`` (0), ``threads`` (1), ``steps`` (500) of 64 texts each.
    """
    losses = calculator.losses_of(texts)
    arithmetic.teach_by(losses, directory, {"steps": 500, **config}, progress, tokenizer)


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
    """Returns a sum such as "5+6=", and what is said to it, worked out or guessed."""
    digits = random.integers(0, 10, terms)
    signs = random.choice([1, -1], terms)
    signs[0] = 1
    pairs = zip(signs.tolist(), digits.tolist(), strict=True)
    asked = "".join(f"{'+' if sign > 0 else '-'}{digit}" for sign, digit in pairs)[1:] + "="
    totals = (digits * signs).cumsum().tolist()
    if random.random() < WORKED_SHARE:
        return asked, "".join(f":{total}" for total in totals) + f"={totals[-1]}"
    return asked, f"={totals[-1] + int(random.integers(-OFF_BY, OFF_BY + 1))}"


def _ids(text: str) -> list[int]:
    return [arithmetic.token(character) for character in text]
