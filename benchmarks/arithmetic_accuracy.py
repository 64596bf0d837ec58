"""Measures how well a model adds: greedy accuracy and share of worked answers.

    python benchmarks/arithmetic_accuracy.py MODEL_DIRECTORY [--seed 0]

Answers come from transformers' own ``generate``. The script knows neither trainer, so it scores
both alike, on all of recipes/quickstart/heldout.jsonl, whose problems no training text contains.

right: the model ended the answer, and its last two characters are the sum.
worked: five totals of two digits stand in the answer after its first character, whatever that is:
    the mark ':' was taught, but no reward asks for it, and some policies drop it.

Greedy answers give the accuracy, samples at temperature 1 the share of worked ones.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HELD_OUT = Path(__file__).parents[1] / "recipes/quickstart/heldout.jsonl"
MAX_NEW_TOKENS = 14
WORKED = re.compile(r".\d{10}")
SAMPLING = {"temperature": 1.0, "top_k": 0}


def answers(
    model: torch.nn.Module, tokenizer: object, prompts: list[str], sample: bool
) -> list[tuple[str, bool]]:
    """Returns (text, whether the model ended it) for each prompt.

    All prompts must have the same length in tokens.

    sample: whether to sample at temperature 1; else answers are greedy.
    """
    inputs = tokenizer(prompts, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        ids = model.generate(
            **inputs,
            do_sample=sample,
            max_new_tokens=MAX_NEW_TOKENS,
            **(SAMPLING if sample else {}),
        )
    completions = ids[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    ended = (completions == tokenizer.eos_token_id).any(dim=1).tolist()
    return list(zip(texts, ended, strict=True))


def score(directory: Path, seed: int) -> dict[str, float]:
    """Returns the shares of right and worked answers, between 0 and 1, and the seconds it took.

    directory: of the model and its tokenizer.
    seed: of the sampled answers.
    """
    began_s = time.perf_counter()
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    prompts = [row["prompt"] for row in rows]
    sums = [row["answer"] for row in rows]
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    torch.manual_seed(seed)
    shares: dict[str, float] = {}
    for mode in ("greedy", "sampled"):
        completions = answers(model, tokenizer, prompts, sample=mode == "sampled")
        right = [
            ended and text[-2:] == total
            for (text, ended), total in zip(completions, sums, strict=True)
        ]
        shares[f"{mode}_accuracy"] = sum(right) / len(right)
        shares[f"{mode}_worked_share"] = sum(
            WORKED.fullmatch(text) is not None for text, _ in completions
        ) / len(completions)
    return shares | {"seconds": time.perf_counter() - began_s}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(score(args.model, args.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
