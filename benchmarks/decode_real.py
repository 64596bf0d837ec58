"""Measures a token step of gcore-torch's generator on a pretrained model, on one CPU thread.

    python benchmarks/decode_real.py MODEL [--rounds 5] [--rows 1 8 32 64] [--json] [--check]
                                     [--vllm-python PYTHON]

MODEL is a directory, for instance what ``recipes/smollm2/smollm2.py`` makes.

Each round measures these in turn, in seconds of the processor:

    ours           ``decoder.advance`` and the draw of a token for each row
    transformers   a step of ``model.generate(do_sample=True)`` over a cache of the same prompts
    memory bound   reading each weight once, to add it up
    vLLM           what a token step of 32 rows adds to ``LLM.generate`` (bare_engines.py)

Model and prompts are the same on both sides: at most four prompts, each with as many rows. The gap
of log-probs is that of tokens that were drawn here to the trainer's forward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gcore_language.models import load_model
from gcore_language.packing import Sample, micro_batches
from gcore_language.policy import Policy, check_layouts
from gcore_torch.decoder import Decoder, make_decoder
from gcore_torch.products import Products
from gcore_torch.sampling import choose, uniforms
from report import Claim, add_options, median_ratio, publish, repeated
from transformers import DynamicCache

PROMPT, STEPS = 76, 8
#: Rows at which transformers is compared, and the bar of its step over ours.
BARS = {1: 1.2, 8: 1.2, 32: 1.2, 64: 1.2}
VLLM_ROWS = 32
#: Of the log-probs of generator and trainer.
GAP = 1e-4


def cpu_ms(work: Callable[[], Any]) -> float:
    """Returns the milliseconds of the processor that a call takes."""
    began_s = time.process_time()
    work()
    return (time.process_time() - began_s) * 1e3


class Measured:
    """A model, the decoder that the generator takes for it, and prompts.

    path: of the model's directory.
    most_rows: how many rows the decoder has room for.
    """

    def __init__(self, path: str, most_rows: int) -> None:
        self.model: Any = load_model(path, dtype="float32", trust_remote_code=False, images=True)
        self.decoder: Decoder = make_decoder(
            self.model, "auto", most_rows, 1e-3, Products(may_pack=True)
        )
        self._draw = np.random.default_rng(0)

    def _tokens(self, *shape: int) -> np.ndarray:
        return self._draw.integers(3, self.model.config.vocab_size, shape)

    def _prompts(self, rows: int) -> tuple[list[np.ndarray], list[int]]:
        """Returns prompts, and how many rows begin with each."""
        count = min(rows, 4)
        return list(self._tokens(count, PROMPT)), [rows // count] * count

    def rows_of(self, rows: int) -> list[np.ndarray]:
        """Returns a prompt for each row."""
        prompts, repeats = self._prompts(rows)
        return [prompts[number] for number in np.repeat(np.arange(len(prompts)), repeats)]

    @torch.no_grad()
    def ours(self, rows: int) -> float:
        """Returns the milliseconds of a token step."""
        prompts, repeats = self._prompts(rows)
        self.decoder.clear()
        logits = self.decoder.prefill(prompts, repeats)

        def step(place: int) -> None:
            nonlocal logits
            logits = self.decoder.advance(self._drawn(logits, place)[0])

        step(0)
        return cpu_ms(lambda: [step(place + 1) for place in range(STEPS)]) / STEPS

    @torch.no_grad()
    def transformers(self, rows: int) -> float:
        """Returns the milliseconds of a step of ``generate``, whose prompts were read before."""
        prompts, repeats = self._prompts(rows)
        ids = torch.from_numpy(np.stack(prompts))
        cache = DynamicCache(config=self.model.config)
        self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(repeats[0])
        ids = ids.repeat_interleave(repeats[0], 0)

        def steps(ids: torch.Tensor, count: int) -> torch.Tensor:
            return self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                do_sample=True,
                max_new_tokens=count,
                min_new_tokens=count,
            )

        ids = torch.cat([ids, torch.from_numpy(self._tokens(rows, 1))], -1)
        ids = steps(ids, 1)
        return cpu_ms(lambda: steps(ids, STEPS)) / STEPS

    def memory_bound(self) -> float:
        """Returns the milliseconds of reading each weight once; tied ones are one."""
        weights = {weight.data_ptr(): weight for weight in self.model.parameters()}
        return cpu_ms(lambda: [weight.detach().sum() for weight in weights.values()])

    @torch.no_grad()
    def gap(self, rows: int) -> float:
        """Returns the largest gap of the log-probs of drawn tokens to the trainer's own pass."""
        prompts, repeats = self._prompts(rows)
        of_row = np.repeat(np.arange(len(prompts)), repeats)
        self.decoder.clear()
        logits = self.decoder.prefill(prompts, repeats)
        drawn, sampled = [], []
        for place in range(STEPS):
            tokens, logp = self._drawn(logits, place)
            drawn.append(tokens.numpy().astype(np.int32))
            sampled.append(logp.numpy())
            logits = self.decoder.advance(tokens)
        policy = Policy(self.model)
        check_layouts(policy, torch.device("cpu"), may_flat=True, tolerance=1e-3)
        layout = "flat" if "flat" in policy.layouts else "padded"
        samples = [
            Sample(
                index=row,
                ordinal=int(of_row[row]),
                prompt=prompts[of_row[row]].astype(np.int32),
                columns={
                    "action_ids": actions,
                    "action_mask": np.ones(STEPS, np.uint8),
                    "logp": np.zeros(STEPS, np.float32),
                    "temperature": np.ones((), np.float32),
                },
            )
            for row, actions in enumerate(np.stack(drawn, 1))
        ]
        gaps = [
            policy(batch)[0].numpy().reshape(-1, STEPS) - np.stack(sampled, 1)[batch.index]
            for batch in micro_batches(samples, layout, 16384, torch.device("cpu"))
        ]
        return max(float(np.abs(gap).max()) for gap in gaps)

    def _drawn(self, logits: torch.Tensor, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws a token for each row; returns tokens and their log-probs."""
        rows = len(logits)
        uniform = uniforms(np.arange(rows, dtype=np.uint64), np.full(rows, place))
        tokens, logp, _ = choose(logits, torch.from_numpy(uniform), 1.0, None)
        return tokens, logp


class Vllm:
    """vLLM in an environment of its own, in one process with one thread.

    python: an interpreter of that environment.
    """

    def __init__(self, python: str, model: str, prompts: Sequence[np.ndarray]) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("bare_engines.py")), "vllm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        )
        rows = [{"prompt_token_ids": ids.tolist()} for ids in prompts]
        self._ask(json.dumps({"model": model, "prompts": rows, "actions": 1}))
        self.step_ms()  # the first one prepares what later ones have

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def step_ms(self) -> float:
        """Returns the milliseconds of the processor of a token step of all rows."""
        one, more = (self._ask(str(actions))["cpu_s"] for actions in (1, 1 + STEPS))
        return float(more - one) / STEPS * 1e3

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(
    model: Measured, rows: Sequence[int], rounds: int, vllm: Vllm | None = None
) -> list[Claim]:
    """Returns the claims of some rounds over each number of rows."""
    bound: list[float] = []
    beside_vllm: list[tuple[float, float]] = []
    steps: dict[int, list[tuple[float, float]]] = {count: [] for count in rows}
    for _ in range(rounds):
        bound.append(model.memory_bound())
        for count in rows:
            steps[count].append((model.transformers(count), model.ours(count)))
        if vllm is not None:
            beside_vllm.append((vllm.step_ms(), model.ours(VLLM_ROWS)))
    claims = []
    if beside_vllm:
        name = f"decode_over_vllm_{VLLM_ROWS}_rows"
        claims.append(repeated(name, beside_vllm, median_ratio, "times", 1.0))
    if 1 in rows:
        pairs = [(ours, least) for (_, ours), least in zip(steps[1], bound, strict=True)]
        name = "decode_over_memory_bound_1_row"
        claims.append(repeated(name, pairs, median_ratio, "times", 1.4, "<="))
    for count in rows:
        name = f"decode_over_transformers_{count}_rows"
        claims.append(repeated(name, steps[count], median_ratio, "times", BARS.get(count)))
    gap = max(model.gap(count) for count in rows)
    claims.append(Claim("logprob_gap_max", gap, "nats", GAP, "<="))
    unit = "ms of one thread"
    claims.append(repeated("memory_bound_ms", bound, statistics.median, unit))
    for count in rows:
        theirs, ours = zip(*steps[count], strict=True)
        claims.append(repeated(f"step_ms_{count}_rows", ours, statistics.median, unit))
        name = f"step_ms_{count}_rows_transformers"
        claims.append(repeated(name, theirs, statistics.median, unit))
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(description="A token step on a pretrained model.")
    parser.add_argument("model", help="a directory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=list(BARS))
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM")
    add_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = Measured(args.model, max(*args.rows, VLLM_ROWS))
    vllm = None
    if args.vllm_python:
        vllm = Vllm(args.vllm_python, args.model, model.rows_of(VLLM_ROWS))
    claims = measure(model, args.rows, args.rounds, vllm)
    if vllm is not None:
        vllm.close()
    return publish("decode_real", claims, args, ["gcore-torch", "torch", "transformers"])


if __name__ == "__main__":
    sys.exit(main())
