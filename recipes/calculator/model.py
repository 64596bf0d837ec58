"""Makes the model of the calculator's recipe: the quickstart's, taught to guess and to call.

Seven in ten of the texts that it has seen are guesses, three are calls of the adder with what the
adder said. It learned to say what the policy says, not what it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore_core.contract.factories import import_file

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import LlamaForCausalLM

arithmetic = import_file(Path(__file__).parents[1] / "quickstart" / "arithmetic.py")

CALLING_SHARE = 0.3
TEXTS_A_STEP = 64
#: Behind the prompt: a call of 11 characters, its end, ``:25y``, ``25``, the end.
TEXT_TOKENS = arithmetic.PROMPT_END + 11 + 1 + 4 + 2 + 1


def teach(directory: Path, config: dict[str, Any], progress: Callable[[float, str], None]) -> None:
    """Makes the model and saves it in Hugging Face layout.

    config: ``seed`` (0), ``threads`` (1), ``steps`` (500) of 64 texts each: some 20 s on one core.
    """
    arithmetic.teach_by(losses_of(texts), directory, {"steps": 500, **config}, progress)


def losses_of(
    texts: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]],
) -> Callable[[LlamaForCausalLM, int, int], Iterator[Tensor]]:
    """Returns the losses of what the policy says in such texts, for ``teach_by``.

    texts: called with a generator and how many; returns ids, and which of them the policy says.
    """

    def losses(model: LlamaForCausalLM, seed: int, steps: int) -> Iterator[Tensor]:
        import numpy as np
        import torch

        random = np.random.default_rng(seed)
        for _ in range(steps):
            ids, own = (torch.from_numpy(array) for array in texts(random, TEXTS_A_STEP))
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            targets = torch.where(own, ids, -100)[:, 1:]
            yield torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return losses


def texts(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids int64[count, TEXT_TOKENS], and bool: which of them the policy says."""
    import numpy as np

    ids = np.full((count, TEXT_TOKENS), arithmetic.PAD, np.int64)
    own = np.zeros(ids.shape, bool)
    for row in range(count):
        problem = int(random.integers(arithmetic.PROBLEMS))
        while arithmetic.is_held_out(problem):
            problem = int(random.integers(arithmetic.PROBLEMS))
        at = 0
        for tokens, is_own in _parts(problem, random):
            ids[row, at : at + len(tokens)] = tokens
            own[row, at : at + len(tokens)] = is_own
            at += len(tokens)
    return ids, own


def _parts(problem: int, random: np.random.Generator) -> list[tuple[list[int], bool]]:
    """Returns a text in parts: ids, and whether the policy says them."""
    prompt, total = arithmetic.prompt_of(problem), int(arithmetic.answer_of(problem))
    asked = ([arithmetic.BOS, *_ids(prompt)], False)
    if random.random() < CALLING_SHARE:
        call = [*_ids(f"*{prompt[:-1]}n"), arithmetic.EOS]
        answer = [*_ids(f"{total:02d}"), arithmetic.EOS]
        return [asked, (call, True), (_ids(f":{total:02d}y"), False), (answer, True)]
    off = arithmetic.CARELESS_OFF_BY
    guess = max(0, total + int(random.integers(-off, off + 1)))
    return [asked, ([*_ids(f"?{guess:02d}"), arithmetic.EOS], True)]


def _ids(text: str) -> list[int]:
    return [arithmetic.token(character) for character in text]
