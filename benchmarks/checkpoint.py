"""Compares checkpoints while training goes on, checkpoints that it waits for, and torch.save.

    python benchmarks/checkpoint.py [--json] [--check] [--rounds 5] [--sizes 200] [--folder DIR]

One rank of the torch trainer (one thread) with a Llama of so many million parameters: weights and
AdamW's two moments, float32, 12 bytes a parameter. A round, each part after what was written before
has reached the disk, and sync and torch.save in turn first:

plain: K steps without a save.
sync: ``save`` and ``commit``: part files, a hash of each, the manifest, all on the disk.
torch.save: the same tensors into one file, on the disk too, without a hash.
async: ``begin_save``, then K steps; ``finish_save`` comes between two of them, and ``commit`` runs
    beside the others.

K is so large that the writing has time to end. stall: what the training loop waits in
``begin_save`` and ``finish_save``, and before an update until the state is copied. total cost: the
K steps with a save less the K steps without, stall included. The first two rounds, which make and
warm the staging memory, do not count; ratios of medians over the others. At the end what the last
saves wrote is verified, loaded and compared bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import xxhash
from gcore_language.saving import SavingTrainer
from gcore_language.tiny import VOCABULARY, save_tokenizer
from gcore_language.weights import to_bytes
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.engine import TorchEngine
from report import Claim, add_options, median_ratio, publish, repeated
from transformers import LlamaConfig, LlamaForCausalLM

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.trainer import TrainRecord
from gcore_core.run.checkpoints import CheckpointFacts, Checkpoints
from gcore_core.testing.contracts.trainer import PolicyGradient

WARM = 2
FACTS = CheckpointFacts(run="benchmark")
PART = "policy"
LAYER_MILLIONS = 12.85
DISTRIBUTIONS = ["gcore-core", "gcore-torch", "safetensors", "torch", "xxhash"]


def save_model(directory: Path, millions: int) -> None:
    """Writes a random Llama of about so many million parameters, and a tokenizer."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=round(millions / LAYER_MILLIONS),
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)


def make_records() -> list[TrainRecord]:
    """Returns the records of four prompts with two answers of eight tokens each."""
    draw = np.random.default_rng(0)
    records = []
    for ordinal in range(4):
        prompt = draw.integers(3, VOCABULARY, 8).astype(np.int32)
        for sample in range(2):
            columns = {
                "prompt_ids": prompt,
                "action_ids": draw.integers(3, VOCABULARY, 8).astype(np.int32),
                "logp": np.full(8, -3, np.float32),
                "action_mask": np.ones(8, np.uint8),
                "temperature": np.ones((), np.float32),
            }
            records.append(
                TrainRecord(ordinal=ordinal, sample=sample, minibatch=0, columns=columns)
            )
    return records


class Rig:
    """A trainer and its checkpoints.

    engine, trainer: the trainer's two parts.
    checkpoints: where it saves.
    step: the number of the next step.
    torch_file: where ``torch.save`` writes.
    digests: step -> hashes of the state that was saved.
    """

    def __init__(self, millions: int, folder: Path) -> None:
        save_model(folder / "model", millions)
        config = TorchTrainerConfig(learning_rate=1e-4, threads=1)
        path = {"path": str(folder / "model")}
        context = WorkerContext(
            role="policy", model=path, parts={"objective": PolicyGradient()}, steps=10**6
        )
        self.engine = TorchEngine(config, context)
        self.trainer = SavingTrainer(config, context, self.engine)
        self.checkpoints = Checkpoints(folder)
        self.step = 0
        self.torch_file = folder / "torch.pt"
        self.digests: dict[int, dict[str, int]] = {}
        self._records = make_records()
        self._executor = ThreadPoolExecutor(1)

    def train(self, steps: int = 1) -> None:
        """Trains for some steps."""
        for _ in range(steps):
            self.trainer.prepare(self._records, frozenset())
            self.trainer.train(self.step, np.linspace(-1, 1, len(self._records)), 1, 1)
            self.step += 1

    def digests_of_state(self) -> dict[str, int]:
        """Returns name -> hash of what the trainer has now."""
        return {
            key: xxhash.xxh3_64_intdigest(to_bytes(tensor).data)
            for key, tensor in self.engine.rows().items()
        }

    def save(self) -> None:
        """Saves and commits a checkpoint while training waits."""
        self.trainer.save(self.checkpoints.begin(self.step) / PART)
        self.checkpoints.commit(self.step, FACTS)

    def torch_save(self) -> None:
        """Saves the same tensors with ``torch.save``, on the disk."""
        with self.torch_file.open("wb") as file:
            torch.save(self.engine.rows(), file)
            file.flush()
            os.fsync(file.fileno())

    def save_beside(self, steps: int) -> float:
        """Saves a checkpoint while training goes on; returns the seconds of the stall.

        steps: steps that are trained meanwhile.
        """
        saved = self.step
        directory = self.checkpoints.begin(saved)
        waited_s = self.engine.staging.waited_s
        stall_s = seconds(lambda: self.trainer.begin_save(directory / PART))
        self.train(steps_before_finish := math.ceil(0.6 * steps))
        stall_s += seconds(self.trainer.finish_save)
        committed = self._executor.submit(self.checkpoints.commit, saved, FACTS)
        self.train(steps - steps_before_finish)
        committed.result()
        return stall_s + self.engine.staging.waited_s - waited_s

    def check(self, saved: int) -> None:
        """Ends the benchmark unless what the trainer loads has the bits that were saved."""
        expected = self.digests[saved]
        self.trainer.load(self.checkpoints.open(saved).path / PART)
        if self.digests_of_state() != expected or self.trainer.version != saved:
            raise SystemExit("what was loaded is not what was saved")

    def bytes_of_last(self) -> int:
        """Returns the bytes of the last checkpoint."""
        return self.checkpoints.open().manifest.nbytes

    def clear(self) -> None:
        """Removes everything that was saved."""
        shutil.rmtree(self.checkpoints.directory, ignore_errors=True)
        self.torch_file.unlink(missing_ok=True)
        os.sync()


def seconds(work: Callable[[], object]) -> float:
    """Runs ``work`` and returns the seconds it took."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def measure(
    millions: int, rounds: int, folder: Path
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Returns the seconds of each part, round by round, and (steps, bytes) as facts."""
    rig = Rig(millions, folder)
    rig.train(2)
    step_s = seconds(rig.train)
    save_s = seconds(rig.save)
    steps = max(4, math.ceil(2.5 * save_s / step_s))
    facts = {"steps": float(steps)}
    counted: list[dict[str, float]] = []
    for i in range(rounds + WARM):
        last = i == rounds + WARM - 1
        rig.clear()
        times = {"plain": seconds(lambda: rig.train(steps))}
        rig.clear()
        rig.digests[rig.step] = rig.digests_of_state() if last else {}
        for name in ("sync", "torch.save") if i % 2 else ("torch.save", "sync"):
            times[name] = seconds(rig.save if name == "sync" else rig.torch_save)
            os.sync()
        facts |= {"bytes": rig.bytes_of_last(), "torch_bytes": rig.torch_file.stat().st_size}
        if last:
            rig.check(rig.step)
        rig.clear()
        saved = rig.step
        rig.digests[saved] = rig.digests_of_state() if last else {}
        began_s = time.perf_counter()
        times["stall"] = rig.save_beside(steps)
        times["async"] = time.perf_counter() - began_s
        if last:
            rig.check(saved)
        print(f"{millions} M, round {i}: {timings_text(times)}", file=sys.stderr, flush=True)
        counted += [times] if i >= WARM else []
    rig.clear()
    return counted, facts


def timings_text(times: dict[str, float]) -> str:
    """Returns the seconds of a round in one line."""
    return ", ".join(f"{name} {value:.3f}" for name, value in times.items())


def claims_of(
    millions: int, rounds: list[dict[str, float]], facts: dict[str, float]
) -> list[Claim]:
    """Returns the claims of one size; some bars hold from 200 million parameters on.

    rounds: seconds of each part, round by round.
    """
    size = f"_{millions}M"
    ratio = "ratio"
    large = millions >= 200
    median = statistics.median
    cost = [times["async"] - times["plain"] for times in rounds]
    sync = [times["sync"] for times in rounds]
    stall = [times["stall"] for times in rounds]
    torch_save = [times["torch.save"] for times in rounds]
    return [
        repeated(
            f"async_stall_over_sync_save{size}",
            list(zip(stall, sync, strict=True)),
            median_ratio,
            ratio,
            0.1,
            "<=",
        ),
        repeated(
            f"async_total_cost_over_sync_save{size}",
            list(zip(cost, sync, strict=True)),
            median_ratio,
            ratio,
            0.5 if large else None,
            "<=",
        ),
        repeated(
            f"save_time_over_torch_save{size}",
            list(zip(sync, torch_save, strict=True)),
            median_ratio,
            ratio,
            1.3 if large else None,
            "<=",
        ),
        Claim(
            f"save_bytes_over_torch_save{size}",
            facts["bytes"] / facts["torch_bytes"],
            ratio,
            1.3,
            "<=",
        ),
        repeated(f"stall_ms{size}", [1000 * stall_s for stall_s in stall], median, "ms"),
        repeated(f"sync_save_s{size}", sync, median, "s"),
        repeated(f"torch_save_s{size}", torch_save, median, "s"),
        repeated(f"total_cost_s{size}", cost, median, "s"),
        repeated(
            f"step_s{size}", [times["plain"] / facts["steps"] for times in rounds], median, "s"
        ),
        Claim(f"steps_beside_a_save{size}", facts["steps"], "steps"),
        Claim(f"checkpoint_mb{size}", facts["bytes"] / 1e6, "MB"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="that count")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[200], help="millions of parameters"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="on the disk that is measured; by default that of temporary files",
    )
    add_options(parser)
    args = parser.parse_args()
    claims: list[Claim] = []
    for millions in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            claims += claims_of(millions, *measure(millions, args.rounds, Path(folder)))
        gc.collect()
    return publish("checkpoint", claims, args, DISTRIBUTIONS)


if __name__ == "__main__":
    sys.exit(main())
