"""Measures attention over contexts that four ranks share, on gloo, against one rank by itself.

cp_logprob_gap_max_float64   the largest difference of a log-prob from one rank's, in float64 and
                             nats, over ring, Ulysses and both, of packed records of 17 to 32,768
                             tokens
cp_logprob_gap_max_float32   the same in float32
cp_gradient_gap_max          the largest norm of the difference of a gradient, over its norm, in
                             float32, of one record of 32,768 tokens
cp4_peak_memory_over_cp1_32k the most anonymous memory of the worst of four ranks, in forward and
                             backward of that record, above itself with the model and a short one,
                             over that of one rank: activations; the worst of ring and both
cp4_peak_memory_over_cp1_32k_ulysses
                             the same of Ulysses alone
ring_step_time_over_ideal    processor seconds of forward and backward of the slowest of four ranks
                             in a ring, over a quarter of what the same record takes one rank by
                             itself. Processor seconds, since four ranks may share fewer cores:
                             uneven work is part of them, waiting not. In each round each of the
                             four ranks also computes the whole record by itself, and the mean of
                             these is one rank's: so both share cores and caches alike
long_records_dynamic_degree_over_fixed
                             the same seconds of a row with a heavy tail of lengths, in which short
                             records stay whole, over those of the row with all records cut

The model is a random Llama with few heads; one rank runs transformers' own SDPA, record by record.

    python benchmarks/large.py --parts context [--context-tokens 32768] [--context-rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import Claim, median_ratio, repeated

RANKS = 4
#: Way -> (ring, ulysses).
WAYS = {"ring": (4, 1), "ulysses": (1, 4), "both": (2, 2)}
VOCABULARY = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the part's own words."""
    parser.add_argument("--context-tokens", type=int, default=32768)
    parser.add_argument("--context-rounds", type=int, default=3)


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns the part's claims."""
    tokens = args.context_tokens
    spec = {
        "packed": [17, tokens, 1000, 64, tokens // 8, 333],
        "tokens": tokens,
        "rounds": args.context_rounds,
    }
    with tempfile.TemporaryDirectory(prefix="large-context-") as name:
        alone = _run(Path(name) / "alone", spec, 1)[0]["alone"]
        ranks = _run(Path(name) / "ranks", spec, RANKS)
    return [
        _gap_claim("float64", 1e-10, alone, ranks[0]),
        _gap_claim("float32", 1e-4, alone, ranks[0]),
        *_step_claims(alone, ranks),
    ]


def _gap_claim(dtype: str, bar: float, alone: dict[str, Any], rank: dict[str, Any]) -> Claim:
    gaps = [_gap(alone[dtype], rank[way][dtype]) for way in WAYS]
    return Claim(f"cp_logprob_gap_max_{dtype}", max(gaps), "nats", bar, "<=")


def _step_claims(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> list[Claim]:
    """Returns the claims on forward and backward passes of one long record."""
    gap = max(_apart(alone["gradient"], ranks[0][way]["gradient"]) for way in WAYS)
    memory = {way: max(rank[way]["memory"] for rank in ranks) / alone["memory"] for way in WAYS}
    whole = zip(*(rank["ring"]["whole"] for rank in ranks), strict=True)
    times = [
        (slowest, statistics.fmean(by_rank) / RANKS)
        for slowest, by_rank in zip(_slowest(ranks, "shared"), whole, strict=True)
    ]
    name = "cp4_peak_memory_over_cp1_32k"
    return [
        Claim("cp_gradient_gap_max", gap, "of its norm", 1e-5, "<="),
        Claim(name, max(memory["ring"], memory["both"]), "x", 0.35, "<="),
        Claim(f"{name}_ulysses", memory["ulysses"], "x"),
        repeated("ring_step_time_over_ideal", times, median_ratio, "x", 1.3, "<="),
        repeated(
            "long_records_dynamic_degree_over_fixed",
            list(zip(_slowest(ranks, "dynamic"), _slowest(ranks, "fixed"), strict=True)),
            median_ratio,
            "x",
            0.85,
            "<=",
        ),
    ]


def _slowest(ranks: list[dict[str, Any]], what: str) -> list[float]:
    """Returns the processor seconds of the slowest rank in the ring, by round."""
    return [max(seconds) for seconds in zip(*(rank["ring"][what] for rank in ranks), strict=True)]


def _gap(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def _apart(one: list[float], other: list[float]) -> float:
    """Returns the norm of the difference of two vectors over that of the first."""
    squares = sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
    return float((squares / sum(a * a for a in one)) ** 0.5)


def _run(work: Path, spec: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Runs one rank alone, or several that share; returns what each found, by way."""
    work.mkdir()
    (work / "spec.json").write_text(json.dumps({**spec, "ranks": ranks}))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed is given back at once
        "MALLOC_TRIM_THRESHOLD_": "0",
    }
    started = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(work)], env=environment)
        for rank in range(ranks)
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        sys.exit(f"ranks ended with {codes}")
    return [json.loads((work / f"{rank}.json").read_text()) for rank in range(ranks)]


# -- in the processes of the ranks -----------------------------------------------------------------


def _rank(rank: int, work: Path) -> None:
    """Writes what one rank found."""
    import torch
    import torch.distributed as dist

    spec = json.loads((work / "spec.json").read_text())
    torch.set_num_threads(1)
    if spec["ranks"] > 1:
        store = dist.FileStore(str(work / "meet"), spec["ranks"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=spec["ranks"])
    ways = ["alone"] if spec["ranks"] == 1 else list(WAYS)
    found = {way: _found(spec, way, rank) for way in ways}
    (work / f"{rank}.json").write_text(json.dumps(found))
    if spec["ranks"] > 1:
        dist.barrier()


def _found(spec: dict[str, Any], way: str, rank: int) -> dict[str, Any]:
    """Returns log-probs by dtype, and what ``_step`` gives."""
    import torch

    found: dict[str, Any] = {}
    is_shared = way != "alone"
    for dtype in ("float64", "float32"):
        policy = _policy(dtype, spec["tokens"], way, rank)
        with torch.no_grad():
            parts = [_logp(policy, b) for b in _batches(spec["packed"], whole_row=is_shared)]
        found[dtype] = torch.cat(parts).tolist()
    (batch,) = _batches([spec["tokens"]], whole_row=is_shared)
    found |= _step(policy, batch)
    if way == "ring":
        alone = _policy("float32", spec["tokens"], "alone", rank)
        found |= _seconds(policy, alone, spec["tokens"], spec["rounds"])
        (batch,) = _batches(_heavy_tail(spec["tokens"]), whole_row=True)
        found |= _degrees(policy, batch, spec["rounds"])
    return found


def _seconds(policy: Any, alone: Any, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Returns processor seconds by round, of a record that is shared, and of one that is whole.

    All ranks compute the whole record at the same time, each by itself.
    """
    import torch.distributed as dist

    (shared_row,) = _batches([tokens], whole_row=True)
    (whole_row,) = _batches([tokens], whole_row=False)
    seconds: dict[str, list[float]] = {"shared": [], "whole": []}
    for _ in range(rounds):
        seconds["shared"].append(_cpu_s(policy, shared_row))
        dist.barrier()
        seconds["whole"].append(_cpu_s(alone, whole_row))
        dist.barrier()
    return seconds


def _heavy_tail(tokens: int) -> list[int]:
    """Returns lengths of records, log-normal with a spread of 1.2, of so many tokens or more."""
    import numpy as np

    draw = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(tokens, 16 + int(draw.lognormal(5.0, 1.2))))
    return lengths


def _degrees(policy: Any, batch: Any, rounds: int) -> dict[str, list[float]]:
    """Returns processor seconds by round, with all records cut, and with short ones whole."""
    from gcore_context.layout import cut_where_needed, shared_by_all

    ring, width = RANKS, policy.model.config.hidden_size
    splits = {
        "fixed": lambda lengths: shared_by_all(lengths, ring, 1),
        "dynamic": lambda lengths: cut_where_needed(lengths, ring, 1, width),
    }
    seconds: dict[str, list[float]] = {name: [] for name in splits}
    for _ in range(rounds):
        for name, split in splits.items():
            policy.split = split
            seconds[name].append(_cpu_s(policy, batch))
    return seconds


def _policy(dtype: str, tokens: int, way: str, rank: int) -> Any:
    """Returns a random model's policy, which the ranks share unless it is alone."""
    import torch
    from gcore_context.groups import make_groups
    from gcore_context.layout import shared_by_all
    from gcore_context.policy import SharedPolicy
    from gcore_language.policy import Policy
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokens + 1,
        initializer_range=0.2,
    )
    policy = Policy(LlamaForCausalLM(config).to(getattr(torch, dtype)).eval())
    policy.head_apart = True
    if way == "alone":
        return policy
    ring, ulysses = WAYS[way]
    groups = make_groups(ring, ulysses, rank, RANKS)
    return SharedPolicy(policy, groups, lambda lengths: shared_by_all(lengths, ring, ulysses))


def _batches(lengths: list[int], *, whole_row: bool) -> list[Any]:
    """Returns random records of so many tokens, in one row or each by itself."""
    import numpy as np
    import torch
    from gcore_language.packing import Sample, in_one_row, micro_batches

    draw = np.random.default_rng(0)
    samples = []
    for index, tokens in enumerate(lengths):
        actions = max(1, tokens // 2)
        columns = {
            "action_ids": draw.integers(0, VOCABULARY, actions).astype(np.int32),
            "action_mask": np.ones(actions, np.uint8),
            "logp": np.zeros(actions, np.float32),
            "temperature": np.ones((), np.float32),
        }
        prompt = draw.integers(0, VOCABULARY, tokens - actions + 1).astype(np.int32)
        samples.append(Sample(index=index, ordinal=index, prompt=prompt, columns=columns))
    device = torch.device("cpu")
    if whole_row:
        return [in_one_row(samples, device)]
    return [b for s in samples for b in micro_batches([s], "padded", 10**9, device)]


def _logp(policy: Any, batch: Any) -> Any:
    """Returns log-probs of the actions in the model's own dtype; a policy's are float32."""
    logp = policy.logits(batch).log_softmax(-1)
    return logp.gather(1, batch.targets[:, None])[:, 0]


def _step(policy: Any, batch: Any) -> dict[str, Any]:
    """Runs forward and backward; returns memory in bytes and the gradient."""
    import torch
    import torch.distributed as dist
    from anonymous_memory import Peak, anonymous_bytes

    _pass(policy, _batches([64], whole_row=batch.positions is not None)[0])  # first calls allocate
    policy.zero_grad(set_to_none=False)  # so that gradients are there before
    before = anonymous_bytes()
    with Peak() as peak:
        _pass(policy, batch)
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    if dist.is_initialized():
        dist.all_reduce(gradient)  # over a context group gradients add up
    return {"memory": peak.most - before, "gradient": gradient.tolist()}


def _pass(policy: Any, batch: Any) -> None:
    """Runs forward and backward."""
    import torch

    logp, _ = policy(batch, "metric")
    (logp * torch.linspace(-1, 1, len(logp))).sum().backward()


def _cpu_s(policy: Any, batch: Any) -> float:
    """Returns the processor seconds of one forward and backward pass."""
    start = time.process_time()
    _pass(policy, batch)
    return time.process_time() - start


if __name__ == "__main__":
    _rank(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # all is written; a thread of gloo may abort a process that exits as usual
