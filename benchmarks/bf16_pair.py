"""Runs a generator and a trainer of torch in bfloat16 in one process, for what compares them.

The model, the prompts and the settings are those of the quickstart. Both sides are the plugin's own
backends: every log-prob is one that a run would have compared.
"""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from gcore_algorithms.config import PpoClipConfig
from gcore_algorithms.objectives import PpoClip
from gcore_language.packing import Batch
from gcore_torch.config import TorchGeneratorConfig, TorchTrainerConfig
from gcore_torch.generator import TorchGenerator
from gcore_torch.trainer import TorchTrainer
from quickstart_runs import RECIPE

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import Prompt, TensorSpec, WeightPlan
from gcore_core.contract.scorer import ScoredRecord
from gcore_core.contract.sentinel import Compared
from gcore_core.contract.trainer import TrainRecord

#: Answers to each prompt, and prompts of a step, as in the recipe.
SAMPLES = 8
PROMPTS = 32
Weights = list[tuple[TensorSpec, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Holds a record of one of the generators.

    replica: which one sampled it.
    """

    replica: int
    finished: Finished


class Replica:
    """Samples; ``temperature`` is what it samples with, whatever its records say."""

    def __init__(self, model: Path, number: int, *, temperature: float = 1.0) -> None:
        self.number = number
        config = TorchGeneratorConfig(
            dtype="bfloat16", max_new_tokens=14, max_batch=1024, temperature=temperature
        )
        self.generator = TorchGenerator(
            config, WorkerContext(role="rollout", rank=number, model={"path": str(model)})
        )

    def push(self, version: int, weights: Weights) -> None:
        """Gives it weights, as a run does."""
        plan = WeightPlan(version, [spec for spec, _ in weights])
        self.generator.begin_weights(plan)
        self.generator.load_weights(weights)
        self.generator.commit_weights(plan)

    def zero(self) -> str:
        """Zeroes one tensor of the weights that it holds; returns its name."""
        tensors = self.generator._tensors
        name = next(name for name in tensors if "down_proj" in name)
        with torch.no_grad():
            tensors[name].zero_()
        return name

    def sample(self, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """Returns the records of all requests, sorted by (ordinal, sample)."""
        self.generator.submit(requests)
        done: list[Finished] = []
        while len(done) < len(requests):
            done += self.generator.step()
        done.sort(key=lambda record: (record.request.ordinal, record.request.sample))
        return [Sampled(replica=self.number, finished=record) for record in done]


class Pair:
    """Trains a policy in bfloat16, and computes its log-probs of what generators sampled.

    model: directory of the policy to begin with.
    steps: how many the run makes, by which the learning rate falls.
    first: its first ordinal. Ordinals give prompts and seeds.
    """

    def __init__(self, model: Path, steps: int, *, first: int = 0) -> None:
        config = TorchTrainerConfig(
            dtype="bfloat16",
            learning_rate=2.5e-4,
            schedule="linear",
            final_fraction=0.2,
            resplit_every=0,
        )
        objective = PpoClip(PpoClipConfig(clip_low=0.2, clip_high=0.2))
        context = WorkerContext(
            role="policy",
            model={"path": str(model)},
            steps=steps,
            updates_per_step=2,
            parts={"objective": objective},
        )
        self.trainer = TorchTrainer(config, context)
        self._arithmetic = _module(RECIPE.parent / "quickstart" / "arithmetic.py")
        lines = (RECIPE.parent / "quickstart" / "train.jsonl").read_text().splitlines()
        self._rows: list[dict[str, str]] = [json.loads(line) for line in lines]
        self._ordinal = first

    @property
    def version(self) -> int:
        """Of the weights that it holds."""
        return self.trainer.version

    def weights(self) -> Weights:
        """Returns copies of the weights that it holds."""
        exported = self.trainer.export_weights()
        return [(spec, np.array(content, copy=True)) for spec, content in exported]

    def requests(self, groups: int) -> list[SampleRequest]:
        """Returns requests of the next groups; no seed comes twice."""
        first = self._ordinal
        self._ordinal += groups
        return [
            SampleRequest(
                ordinal=ordinal,
                sample=sample,
                seed=ordinal * SAMPLES + sample,
                prompt=self._prompt(ordinal),
            )
            for ordinal in range(first, first + groups)
            for sample in range(SAMPLES)
        ]

    def _prompt(self, ordinal: int) -> Prompt:
        place = ordinal * 1031 % len(self._rows)  # all rows, not in the order of the file
        row = self._rows[place]
        return Prompt(row=place, text=row["prompt"], fields={"answer": row["answer"]})

    def compare(self, sampled: Sequence[Sampled], step: int) -> list[Compared]:
        """Returns records beside the log-probs that the policy gives their actions.

        They come from the pass in which a trainer computes those of its later minibatches. It has
        entropies here.
        """
        records = [_train_record(one.finished, place=0) for one in sampled]
        batches = self.trainer.pack([list(enumerate(records))])[0]
        own: list[Any] = [None] * len(records)
        for batch in batches:
            for place, logp, entropy in self._own(batch):
                own[place] = logp, entropy
        return [
            Compared(
                ordinal=one.finished.request.ordinal,
                sample=one.finished.request.sample,
                step=step,
                replica=one.replica,
                version=step,
                rollout_logp=record.columns["logp"],
                trainer_logp=logp,
                mask=record.columns["action_mask"].astype(bool),
                entropy=entropy,
            )
            for one, record, (logp, entropy) in zip(sampled, records, own, strict=True)
        ]

    def _own(self, batch: Batch) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Returns (place, log-probs, entropies) of each record of a micro-batch."""
        engine = self.trainer._engine
        with torch.no_grad():
            logp, entropy = engine._forward(engine._policy, batch, "metric")
        assert entropy is not None
        sizes = torch.bincount(batch.columns["record"], minlength=len(batch.index))
        ends = np.cumsum(sizes.numpy())[:-1]
        parts = np.split(logp.numpy(), ends), np.split(entropy.numpy(), ends)
        return list(zip(batch.index.tolist(), *parts, strict=True))

    def train(self, sampled: Sequence[Sampled]) -> float:
        """Makes a step of GRPO on the records; returns their mean reward."""
        step = self.version
        ordinals = sorted({one.finished.request.ordinal for one in sampled})
        second = set(ordinals[len(ordinals) // 2 :])
        records = [
            _train_record(one.finished, place=int(one.finished.request.ordinal in second))
            for one in sampled
        ]
        rewards = np.array([self._reward(one.finished) for one in sampled])
        self.trainer.prepare(records, frozenset())
        self.trainer.train(step, _advantages(records, rewards), 2, 1)
        return float(rewards.mean())

    def _reward(self, finished: Finished) -> float:
        request = finished.request
        record = ScoredRecord(
            ordinal=request.ordinal,
            sample=request.sample,
            prompt=request.prompt,
            text=bytes(finished.columns["text"]).decode(),
            status=finished.status,
            columns=finished.columns,
        )
        return float(self._arithmetic.exact(record))


def _train_record(finished: Finished, *, place: int) -> TrainRecord:
    request = finished.request
    return TrainRecord(
        ordinal=request.ordinal, sample=request.sample, minibatch=place, columns=finished.columns
    )


def _advantages(records: Sequence[TrainRecord], rewards: np.ndarray) -> np.ndarray:
    """Returns rewards less their group's mean, over its deviation."""
    groups: dict[int, list[int]] = defaultdict(list)
    for place, record in enumerate(records):
        groups[record.ordinal].append(place)
    advantages = np.zeros(len(records))
    for places in groups.values():
        own = rewards[places]
        advantages[places] = (own - own.mean()) / (own.std() + 1e-4)
    return advantages


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed(sampled: Sequence[Sampled], **columns: Any) -> list[Sampled]:
    """Returns records with changed columns.

    columns: name -> function from the record's own column to the changed one.
    """
    return [
        replace(
            one,
            finished=replace(
                one.finished,
                columns=dict(one.finished.columns)
                | {name: change(one.finished.columns[name]) for name, change in columns.items()},
            ),
        )
        for one in sampled
    ]
