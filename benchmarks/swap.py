"""Measures giving a device from one model to another: sleep and wake, over a plain copy.

    python benchmarks/swap.py [--json] [--check] [--sizes 50 200 1000] [--rounds 5]

Two gcore-torch generators of one size lie in this process, on the CPU. In a sleep plus wake one of
them sleeps and wakes as it was, every tensor hashed before and after. In a role swap one sleeps and
the other wakes. With ``keep`` the weights stay in host memory, which on a CPU is where they are:
what is left to pay is the hashing, and the bar is held to it. With ``discard`` they are dropped,
and the wake is followed by a push of the same bytes from memory, into fresh pages; these claims
have no bar. The plain copy is ``numpy.copyto`` of as many bytes between warm buffers. Every round
does all of it, and claims are medians. Each round compares the tokens of the model that woke up
with those it sampled before.

Memory: the peak of the process while a swap runs, less what it holds before, over the bytes of one
    model.

Then the simulator takes 0, 30 and 60 s for a swap, and ``measured``: the seconds per GB of the
largest model here with ``discard``, which is a rate of one CPU's memory, carried over to 32e9
parameters in bfloat16 on four devices that swap at once. No GPU was measured. 128 devices, 24 steps
of the published ``drift`` and ``bursty``. ``replay`` may choose another split every step, or every
second, fourth, eighth. Each change of it is charged, as where engines stay awake in training.
``colocated`` changes roles within every step. The claims are the excess over the oracle, which pays
nothing; their intervals are over the steps.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from gcore_placement.config import ReplayConfig
from gcore_placement.fixed import Colocated
from gcore_placement.replay import Replay
from gcore_sim.cluster import Cluster, simulate
from gcore_sim.workloads import Published
from report import Claim, add_options, median_ratio, publish, repeated

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.placement import Decision, Partition, PlacementPolicy, Window
from gcore_core.contract.records import Prompt, TensorSpec, WeightPlan

#: millions of parameters -> hidden size, layers
SIZES = {50: (768, 6), 200: (1280, 10), 1000: (2048, 20)}
BAR = 3.0
MODES = ("keep", "discard")
FREQUENCIES = (1, 2, 4, 8)
STEPS = 24
GB_A_DEVICE = 32e9 * 2 / 4 / 1e9  # two bytes a parameter, four devices


def make_model(directory: Path, millions: int) -> None:
    """Writes a Llama of about so many million float32 parameters, with the quickstart's
    tokenizer.
    """
    import torch
    from gcore_language.tiny import VOCABULARY, save_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers = SIZES[millions]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)


class Model:
    """A generator, and what it samples.

    generator: the generator itself.
    mode: what a sleep does with the weights, "keep" or "discard".
    tensors: the weights' bytes, for the push after a sleep that discards them.
    tokens: what it samples for one prompt.
    """

    def __init__(
        self, directory: Path, mode: str, tensors: Sequence[tuple[TensorSpec, np.ndarray]]
    ) -> None:
        from gcore_torch.config import TorchGeneratorConfig
        from gcore_torch.generator import TorchGenerator

        # one row: the cache of the default 256 would take more memory than the weights
        settings = TorchGeneratorConfig(max_new_tokens=4, max_batch=1, sleep=mode)  # type: ignore[arg-type]
        context = WorkerContext(role="rollout", model={"path": str(directory)})
        self.generator: Any = TorchGenerator(settings, context)
        self.mode = mode
        self.tensors = tensors
        self.tokens = self.sample()

    def sample(self) -> list[int]:
        """Returns the tokens of one sample for a fixed prompt and seed."""
        self.generator.submit(
            [SampleRequest(ordinal=0, sample=0, seed=1, prompt=Prompt(row=0, text="1+2="))]
        )
        while not (finished := self.generator.step()):
            pass
        return [int(token) for token in finished[0].columns["action_ids"]]

    def wake(self) -> None:
        """Wakes the generator, and pushes its weights where they were discarded."""
        self.generator.wake()
        if self.mode == "discard":
            plan = WeightPlan(self.generator.version, [spec for spec, _ in self.tensors])
            self.generator.begin_weights(plan)
            self.generator.load_weights(iter(self.tensors))
            self.generator.commit_weights(plan)


def _tensors(directory: Path) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """Yields every tensor in the safetensors files of a directory, with its bytes."""
    from safetensors.numpy import load_file

    for file in sorted(directory.glob("*.safetensors")):
        for name, array in load_file(file).items():
            yield (
                TensorSpec(name, "F32", array.shape, array.nbytes),
                array.reshape(-1).view(np.uint8),
            )


class Memory:
    """Measures the most bytes that the process adds while the block runs.

    extra: that number, after the block.
    """

    def __enter__(self) -> Memory:
        self._bytes_before = self._peak = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        """Looks at the resident set every 2 ms until the block ends."""
        while not self._stop.wait(0.002):
            self._peak = max(self._peak, _resident())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.extra = max(self._peak, _resident()) - self._bytes_before


def _resident() -> int:
    """Returns the resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


@dataclass
class Timings:
    """What the rounds of one model took.

    nbytes: bytes of the model.
    copy_s: seconds of a plain copy.
    again_s: seconds in which one model sleeps and wakes.
    swap_s: seconds in which one sleeps and the other wakes.
    extra: memory that a swap adds, over the bytes of the model.
    """

    nbytes: int = 0
    copy_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)
    swap_s: list[float] = field(default_factory=list)
    extra: list[float] = field(default_factory=list)


def measure(directory: Path, mode: str, rounds: int) -> Timings:
    """Measures a model; the first round only warms up."""
    gc.collect()  # generators of an earlier call refer to themselves, and hold their weights
    tensors = list(_tensors(directory))
    nbytes = sum(spec.nbytes for spec, _ in tensors)
    tensors = tensors if mode == "discard" else []
    first = Model(directory, mode, tensors)
    second = Model(directory, mode, tensors)
    timings = Timings(nbytes)
    buffer = np.ones((2, nbytes // 2), np.uint8)
    second.generator.sleep()
    for _ in range(rounds + 1):  # the first one warms up
        timings.copy_s.append(_timed(partial(_copy, buffer)))
        timings.again_s.append(_timed(partial(_swap, first, first)))
        with Memory() as memory:
            timings.swap_s.append(_timed(partial(_swap, first, second)))
        timings.extra.append(memory.extra / nbytes)
        if second.sample() != second.tokens:
            raise SystemExit(f"{mode}: the model that woke up samples something else")
        first, second = second, first
    for name in ("copy_s", "again_s", "swap_s", "extra"):
        del getattr(timings, name)[0]
    return timings


def _copy(buffer: np.ndarray) -> None:
    """Copies one half into the other, and back: as many bytes as a model has."""
    np.copyto(buffer[1], buffer[0])
    np.copyto(buffer[0], buffer[1])


def _swap(falling_asleep: Model, waking: Model) -> None:
    """Gives the device from one model to another, or to the same."""
    falling_asleep.generator.sleep()
    waking.wake()


def _timed(work: Callable[[], object]) -> float:
    """Runs ``work`` and returns the seconds it took."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def claims(sizes: list[int], rounds: int) -> list[Claim]:
    """Returns the claims of every size and mode; the first has the bar.

    It is held to "keep", which only hashes; that of "discard" stands beside it.
    """
    results = []
    worst = dict.fromkeys(MODES, 0.0)
    for millions in sizes:
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder), millions)
            for mode in MODES:
                timings = measure(Path(folder), mode, rounds)
                swaps = list(zip(timings.swap_s, timings.copy_s, strict=True))
                agains = list(zip(timings.again_s, timings.copy_s, strict=True))
                name = f"{millions}M_{mode}"
                worst[mode] = max(worst[mode], median_ratio(swaps))
                results += [
                    repeated(f"swap_time_over_memcpy_{name}", swaps, median_ratio, "ratio"),
                    repeated(f"sleep_and_wake_over_memcpy_{name}", agains, median_ratio, "ratio"),
                    repeated(f"swap_s_{name}", timings.swap_s, statistics.median, "s"),
                    repeated(f"memcpy_s_{name}", timings.copy_s, statistics.median, "s"),
                    Claim(f"peak_extra_memory_over_model_{name}", max(timings.extra), "ratio"),
                    Claim(f"model_gb_{name}", timings.nbytes / 1e9, "GB"),
                ]
    return [
        Claim("swap_time_over_memcpy_max", worst["keep"], "ratio, hashing only", BAR, "<="),
        Claim("swap_time_over_memcpy_max_discard", worst["discard"], "ratio, with the push"),
        *results,
    ]


class Every:
    """A policy that learns from every step, and whose choice holds for some steps.

    policy: the policy that decides.
    steps: steps for which a choice holds.
    """

    def __init__(self, policy: PlacementPolicy, steps: int) -> None:
        self._policy = policy
        self._steps = steps
        self._decision: Decision | None = None

    def revise(self, partition: Partition | None, window: Window) -> Decision:
        """Lets the policy decide, and returns the last choice until ``steps`` steps have passed."""
        decision = self._policy.revise(partition, window)
        kept_decision = self._decision
        if kept_decision is not None and window.step % self._steps:
            decision = replace(
                decision,
                partition=kept_decision.partition,
                mode=kept_decision.mode,
                chosen=kept_decision.chosen,
            )
        self._decision = decision
        return decision


def sweep(host_rate_s: float, steps: int = STEPS) -> list[Claim]:
    """Returns the excess of each policy at each price of a swap, without the first three steps.

    host_rate_s: the seconds of a swap at the rate of this machine's memory.
    steps: of each workload.
    """
    results = [
        Claim(
            "swap_s_32e9_over_four_devices_as_measured",
            host_rate_s,
            "s, at the rate of a CPU's memory",
        )
    ]
    for name, price_s in (("0s", 0.0), ("measured", host_rate_s), ("30s", 30.0), ("60s", 60.0)):
        excess: dict[str, list[float]] = {}
        for workload in ("drift", "bursty"):
            policies: dict[str, PlacementPolicy] = {
                f"replay_every_{n}": Every(Replay(ReplayConfig()), n) for n in FREQUENCIES
            }
            policies["colocated"] = Colocated()
            cluster = Cluster(devices=128, needed=128, switch_s=price_s)
            for row in simulate(
                cluster, Published(name=workload, steps=steps), policies, steps, seed=100
            ):
                if row.step >= 3 and row.policy in policies:
                    seconds = row.seconds + price_s * (row.moved > 0)
                    excess.setdefault(row.policy, []).append(seconds / row.best_s - 1)
        results += [
            repeated(f"{policy}_excess_swap_{name}", values, statistics.fmean, "of the oracle")
            for policy, values in excess.items()
        ]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument(
        "--sizes", type=int, nargs="+", choices=sorted(SIZES), default=sorted(SIZES)
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS, help="that are simulated")
    args = parser.parse_args()
    results = claims(args.sizes, args.rounds)
    values = {claim.name: claim.value for claim in results}
    largest = f"{max(args.sizes)}M_discard"
    results += sweep(
        values[f"swap_s_{largest}"] / values[f"model_gb_{largest}"] * GB_A_DEVICE, args.steps
    )
    return publish(
        "swap",
        results,
        args,
        ["gcore-core", "gcore-placement", "gcore-sim", "gcore-torch", "torch", "numpy"],
    )


if __name__ == "__main__":
    sys.exit(main())
