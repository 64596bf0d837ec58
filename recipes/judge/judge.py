"""A very small judge of the quickstart's task: told an answer and the problem, it adds up by itself
and says y or n.

    asked    25*7+3+8+5+2=      the last two characters of a completion, '*', the problem
    answers  :0710182325y       the running totals, then its verdict

``teach`` makes it: 134,208 parameters, the policy's architecture with weights of its own. It has
not seen a problem of quickstart/heldout.jsonl. ``python judge.py DIRECTORY`` says how often the
judge in a directory agrees with the sum.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore_core.contract.factories import import_file

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

arithmetic = import_file(Path(__file__).parents[1] / "quickstart" / "arithmetic.py")

QUESTION_END = 1 + 3 + 2 * arithmetic.DIGITS  # <bos>, the answer, '*', the problem
VERDICT = QUESTION_END + 1 + 2 * arithmetic.DIGITS  # ':' and the totals stand between
TEXT_TOKENS = VERDICT + 2  # the verdict, <eos>
#: Also by 10 and 20: a judge that has seen no such mistake compares the last digit alone, and a
#: policy finds that out.
WRONG_BY = 20
#: The verdict is one token of thirteen and all that counts; weighted like the others, it is hardly
#: learned.
VERDICT_WEIGHT = 12.0


def teach(directory: Path, config: dict[str, Any], progress: Callable[[float, str], None]) -> None:
    """Makes the judge and saves it in Hugging Face layout.

    config: ``seed`` (0), ``threads`` (1), ``steps`` (900) of 64 texts each: about half a minute on
    one core. Fewer make a worse judge, for those who want to see what comes of it.
    """
    arithmetic.teach_by(_losses, directory, {"steps": 900, **config}, progress)


def _losses(model: Any, seed: int, steps: int) -> Iterator[Tensor]:
    """Yields the loss of each step; see ``teach_by`` of the quickstart."""
    import torch

    for batch in texts(seed, steps):
        yield _loss(model, torch.from_numpy(batch))


def _loss(model: Any, ids: Tensor) -> Tensor:
    """Weighted mean over the tokens that the judge writes in ``ids``, int64[B, 27]."""
    import torch

    answer = ids[:, QUESTION_END:]
    logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=answer.shape[1]).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), answer, reduction="none")
    weights = torch.ones(answer.shape[1])
    weights[VERDICT - QUESTION_END] = VERDICT_WEIGHT
    return (losses * weights).sum() / (weights.sum() * len(ids))


def texts(seed: int, steps: int, size: int = 64, held_out: bool = False) -> Iterator[np.ndarray]:
    """int64[size, 27] each: <bos>, answer, '*', problem, totals, verdict, <eos>; half of the
    answers are right.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    allowed = np.array(
        [p for p in range(arithmetic.PROBLEMS) if arithmetic.is_held_out(p) == held_out]
    )
    problems = random.choice(allowed, steps * size)
    digits = problems[:, None] // 10 ** np.arange(arithmetic.DIGITS)[::-1] % 10
    totals = digits.cumsum(1)
    off = random.integers(1, WRONG_BY + 1, len(problems)) * random.choice([-1, 1], len(problems))
    answers = np.where(
        random.random(len(problems)) < 0.5, totals[:, -1], np.abs(totals[:, -1] + off)
    )
    right = answers == totals[:, -1]  # |sum + off| may be the sum

    zero = arithmetic.token("0")
    ids = np.empty((len(problems), TEXT_TOKENS), np.int64)
    ids[:, 0] = arithmetic.BOS
    ids[:, 1] = zero + answers // 10
    ids[:, 2] = zero + answers % 10
    ids[:, 3] = arithmetic.token("*")
    ids[:, 4:QUESTION_END:2] = zero + digits
    ids[:, 5:QUESTION_END:2] = arithmetic.token("+")
    ids[:, QUESTION_END - 1] = arithmetic.token("=")
    ids[:, QUESTION_END] = arithmetic.token(":")
    ids[:, QUESTION_END + 1 : VERDICT : 2] = zero + totals // 10
    ids[:, QUESTION_END + 2 : VERDICT : 2] = zero + totals % 10
    ids[:, VERDICT] = np.where(right, arithmetic.token("y"), arithmetic.token("n"))
    ids[:, VERDICT + 1] = arithmetic.EOS
    yield from ids.reshape(steps, size, -1)


def measure(directory: Path, ids: np.ndarray) -> dict[str, float]:
    """How the greedy verdicts of a judge compare with those in ``ids``, int64[N, 27]: shares of
    all, of n and of y.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    question, answer = torch.from_numpy(ids).split([QUESTION_END, TEXT_TOKENS - QUESTION_END], 1)
    ones = torch.ones_like(question)
    said = model.generate(
        question, attention_mask=ones, max_new_tokens=answer.shape[1], do_sample=False
    )
    verdict, right = said[:, VERDICT], answer[:, VERDICT - QUESTION_END]
    yes = right == arithmetic.token("y")
    agree = verdict == right
    return {
        "agreement": agree.float().mean().item(),
        "wrong_yes": 1 - agree[~yes].float().mean().item(),
        "wrong_no": 1 - agree[yes].float().mean().item(),
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python judge.py DIRECTORY")
    held_out = next(texts(1, 1, 4096, held_out=True))
    print(
        "  ".join(
            f"{name} {value:.4f}" for name, value in measure(Path(sys.argv[1]), held_out).items()
        )
    )
