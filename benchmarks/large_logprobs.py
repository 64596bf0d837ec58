"""Measures what log-probs of a large vocabulary hold when the head is applied in slices.

chunked_logprobs_peak_over_full
                      the most anonymous memory of a forward and backward pass over log-probs and
                      entropies, above what weights and hidden states take, over that of the same
                      pass with all logits at once; 4,096 actions, a vocabulary of 65,536, float32
chunked_logprobs_time_over_full
                      the processor time of one over that of the other: the backward pass computes
                      the logits of each slice again

    python benchmarks/large.py --parts logprobs [--logprobs-actions 4096] [--logprobs-words 65536]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from report import Claim

WIDTH = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the part's own words."""
    parser.add_argument("--logprobs-actions", type=int, default=4096)
    parser.add_argument("--logprobs-words", type=int, default=2**16)


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns the part's claims."""
    chunked, full = (_process(args, whole=whole) for whole in (False, True))
    return [
        Claim(
            "chunked_logprobs_peak_over_full", chunked["peak"] / full["peak"], "ratio", 0.3, "<="
        ),
        Claim("chunked_logprobs_time_over_full", chunked["cpu_s"] / full["cpu_s"], "ratio"),
    ]


def _process(args: argparse.Namespace, *, whole: bool) -> dict[str, float]:
    """Measures one way in a process of its own; whole: all logits at once."""
    words = [str(args.logprobs_actions), str(args.logprobs_words), str(int(whole))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _pass(actions: int, words: int, whole: int) -> dict[str, float]:
    """Returns bytes above the beginning, and seconds, of a pass."""
    import torch
    from anonymous_memory import Peak, anonymous_bytes
    from gcore_language import policy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if whole:
        policy._CHUNK_LOGITS = 2**62
    head = torch.nn.Linear(WIDTH, words, bias=False)
    hidden = torch.randn(actions, WIDTH, requires_grad=True)
    targets = torch.randint(0, words, (actions, 1))
    batch: Any = SimpleNamespace(temperature=None)
    head.weight.grad = torch.zeros_like(head.weight)
    begun = anonymous_bytes()
    began_s = time.process_time()
    with Peak() as peak:
        logp, entropies = policy._head_logp(head, hidden, batch, "gradient", targets)
        assert entropies is not None
        (logp.sum() + entropies.sum()).backward()
    return {"peak": float(peak.most - begun), "cpu_s": time.process_time() - began_s}


if __name__ == "__main__":
    print(json.dumps(_pass(*map(int, sys.argv[1:4]))))
