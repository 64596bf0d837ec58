"""Measures how far ``g-core plan`` is off: memory that it foresees against memory that is held.

plan_memory_error_max  the largest relative error of the peak of a training step, over eight
                       configurations of the trainer torch: models of several sizes, tied or not,
                       packed padded or with shared prompts, float32 or bfloat16, with and without
                       checkpointing, on one rank and as one of several

A configuration takes two steps of two full micro-batches with the plugin's own trainer on a CPU.
Its peak is that of torch's memory tracker (``torch.distributed._tools.mem_tracker``), which counts
every storage that an operator makes. Of several ranks the first one runs, in a process group whose
collectives send nothing: FSDP2 gathers and frees as it always does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from gcore_language.tiny import save_tokenizer
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.memory import trainer_memory
from gcore_torch.trainer import TorchTrainer
from report import Claim
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.memory import WorkerShape
from gcore_core.contract.trainer import TrainRecord
from gcore_core.testing.contracts.agreement import PolicyGradient

#: Of one device, by kind: phase whose needs are compared.
PHASE = "training"
_KINDS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration.

    kind, hidden, layers, heads, kv_heads, channels, vocabulary, tied: of the model.
    tokens: of a micro-batch.
    row: of a record, or of a group where prompts are shared; more than the flat layout takes.
    """

    name: str
    kind: str = "llama"
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    channels: int = 704
    vocabulary: int = 4096
    tied: bool = True
    tokens: int = 1024
    row: int = 512
    packing: str = "padded"
    dtype: str = "float32"
    checkpointing: bool = False
    ranks: int = 1


CASES = (
    Case(name="llama tied"),
    Case(name="qwen2 untied", kind="qwen2", tied=False, hidden=384, channels=1024, heads=6),
    Case(name="qwen3 bfloat16", kind="qwen3", dtype="bfloat16"),
    Case(name="llama checkpointed", checkpointing=True, layers=8, vocabulary=512),
    Case(name="qwen3 shared prompts", kind="qwen3", packing="shared_prompt"),
    Case(name="llama two ranks", ranks=2, tied=False, vocabulary=1024),
    Case(name="qwen2 bfloat16 checkpointed", kind="qwen2", dtype="bfloat16", checkpointing=True),
    Case(name="qwen3 eight ranks checkpointed", kind="qwen3", ranks=8, checkpointing=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the part's own words."""
    parser.add_argument("--plan-cases", type=int, default=len(CASES), help="how many are measured")


def measure(args: argparse.Namespace) -> list[Claim]:
    """Returns the part's claims."""
    errors = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as room:
        for number, case in enumerate(CASES[: args.plan_cases]):
            foreseen, held = compare(case, Path(room) / str(number))
            errors.append(abs(foreseen / held - 1))
            print(
                f"{case.name}: foreseen {foreseen / 2**20:.1f} MiB, held {held / 2**20:.1f}, "
                f"{foreseen / held - 1:+.1%}",
                file=sys.stderr,
            )
    return [Claim("plan_memory_error_max", max(errors), "share", 0.1, "<=")]


def compare(case: Case, folder: Path) -> tuple[int, int]:
    """Returns the bytes that the plan foresees for a training step, and those that were held."""
    settings = TorchTrainerConfig(
        packing=case.packing,  # type: ignore[arg-type]
        dtype=case.dtype,  # type: ignore[arg-type]
        gradient_checkpointing=case.checkpointing,
        budget_tokens=case.tokens,
        resplit_every=0,
    )
    config = config_of(case)
    shape = WorkerShape(role="policy", slots=case.ranks, model={"path": str(folder)})
    save(config, folder)
    said = trainer_memory(settings, shape)
    # torch's tracker sees no library
    needs = [need for need in said if need.phase == PHASE and need.what != "libraries"]
    if os.environ.get("SHOW"):
        for need in needs:
            print(f"   {need.what}: {(need.nbytes or 0) / 2**20:.2f}", file=sys.stderr)
    return sum(need.nbytes or 0 for need in needs), peak(case, settings, folder)


def config_of(case: Case) -> PreTrainedConfig:
    """Returns the model's configuration as transformers has it."""
    return _KINDS[case.kind](
        hidden_size=case.hidden,
        intermediate_size=case.channels,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.hidden // case.heads,
        vocab_size=case.vocabulary,
        tie_word_embeddings=case.tied,
        max_position_embeddings=4096,
    )


def save(config: PreTrainedConfig, folder: Path) -> None:
    """Writes a random model and a tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    save_tokenizer(folder)
    written = json.loads((folder / "config.json").read_text())
    assert written["vocab_size"] == config.vocab_size


class WholeTracker(MemTracker):
    """Tracks all storages together. What torch's tracker also tells of each module, for which a
    module may run once only, is left out.
    """

    def _pre_fw_hook(self, module: Any, inputs: Any) -> None:
        pass

    def _post_fw_hook(self, module: Any, inputs: Any, outputs: Any) -> None:
        pass

    def _pre_bw_hook(self, module: Any, args: Any) -> None:
        pass

    def _post_bw_hook(self, module: Any, args: Any) -> None:
        pass


def peak(case: Case, settings: TorchTrainerConfig, folder: Path) -> int:
    """Returns the most bytes that all storages together had in two training steps."""
    with ranks(case.ranks):
        tracker = WholeTracker()
        context = WorkerContext(
            role="policy",
            rank=0,
            ranks=case.ranks,
            rendezvous=str(folder),
            model={"path": str(folder)},
            parts={"objective": PolicyGradient()},
        )
        trainer = TorchTrainer(settings, context)
        engine: Any = trainer._engine
        tracker.track_external(engine._policy, engine._optimizer)
        with tracker:
            for step in range(2):
                trainer.prepare(records(case), frozenset())
                trainer.train(step, np.ones(len(records(case))), 1, 1)
        trainer.close()
    by_device = tracker.get_tracker_snapshot("peak")
    return sum(kinds["Total"] for device, kinds in by_device.items() if device.type == "cpu")


@contextmanager
def ranks(count: int) -> Iterator[None]:
    """Has the first of so many ranks run alone: collectives send nothing."""
    real = dist.init_process_group

    def alone(backend: str, **words: Any) -> None:
        real("fake", store=FakeStore(), rank=0, world_size=count)

    with patch.object(dist, "init_process_group", alone):
        yield


def records(case: Case) -> list[TrainRecord]:
    """Returns the records of two full micro-batches; nearly all of their tokens are actions."""
    draw = np.random.default_rng(0)
    shared = case.packing == "shared_prompt"
    in_row = 4 if shared else 1  # records of a group share a row
    prompt = 4
    actions = (case.row - prompt) // in_row + 1  # the last one is not fed
    rows = 2 * case.tokens // case.row
    return [
        TrainRecord(
            ordinal=row,
            sample=sample,
            minibatch=0,
            columns={
                "prompt_ids": np.full(prompt, row % 8, np.int32),
                "action_ids": draw.integers(0, 8, actions).astype(np.int32),
                "action_mask": np.ones(actions, np.uint8),
                "logp": np.zeros(actions, np.float32),
                "temperature": np.ones((), np.float32),
            },
        )
        for row in range(rows)
        for sample in range(in_row)
    ]
