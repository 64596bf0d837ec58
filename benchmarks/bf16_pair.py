"""Runs a generator and a trainer in bfloat16 in one process, for what compares their log-probs.

The trainer is that of torch. The generator is that of torch or that of vLLM; for the second one the
process must be of an interpreter that has vLLM. The model, the prompts and the settings are those
of the quickstart. Both sides are the plugins' own backends: every log-prob is one that a run would
have compared.
"""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    """A generator that is given weights and samples.

    Replicas may share one engine: each loads its own weights when the engine holds another's.

    number: of the replica, as records name it.
    temperature: what it samples with, whatever its records say.
    """

    def __init__(self, engine: Engine, number: int, *, temperature: float = 1.0) -> None:
        self.number = number
        self._engine = engine
        self._temperature = temperature
        self._weights: Weights = []

    def push(self, weights: Weights) -> None:
        """Gives it weights; the engine gets them before it samples the next time."""
        self._weights = weights

    def sample(self, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """Returns the records of all requests, sorted by (ordinal, sample)."""
        self._engine.hold(self._weights)
        self._engine.sample_at(self._temperature)
        done = self._engine.run(requests)
        return [Sampled(replica=self.number, finished=record) for record in done]


class Engine:
    """The generator of torch or of vLLM.

    plugin: "torch" or "vllm".
    """

    def __init__(self, plugin: str, model: Path) -> None:
        self.generator: Any = _GENERATORS[plugin](
            WorkerContext(role="rollout", model={"path": str(model)})
        )
        self._held: Weights | None = None
        self._pushes = 0

    def hold(self, weights: Weights) -> None:
        """Has it hold weights, by a push as a run does it."""
        if self._held is weights:
            return
        self._pushes += 1  # its versions only go up, whatever versions replicas have
        plan = WeightPlan(self._pushes, [spec for spec, _ in weights])
        self.generator.begin_weights(plan)
        self.generator.load_weights(weights)
        self.generator.commit_weights(plan)
        self._held = weights

    def sample_at(self, temperature: float) -> None:
        """Sets the temperature of what is submitted next."""
        self.generator._config = replace(self.generator._config, temperature=temperature)

    def run(self, requests: Sequence[SampleRequest]) -> list[Finished]:
        """Returns the records of all requests, sorted by (ordinal, sample)."""
        self.generator.submit(requests)
        done: list[Finished] = []
        while len(done) < len(requests):
            done += self.generator.step()
        return sorted(done, key=lambda one: (one.request.ordinal, one.request.sample))


def _torch(context: WorkerContext) -> Any:
    config = TorchGeneratorConfig(dtype="bfloat16", max_new_tokens=14, max_batch=1024)
    return TorchGenerator(config, context)


def _vllm(context: WorkerContext) -> Any:
    from gcore_vllm.config import VllmGeneratorConfig
    from gcore_vllm.engine import VllmGenerator

    config = VllmGeneratorConfig(dtype="bfloat16", max_new_tokens=14, kv_cache_gib=0.1)
    return VllmGenerator(config, context)


_GENERATORS = {"torch": _torch, "vllm": _vllm}


def zeroed(weights: Weights) -> Weights:
    """Returns the weights with one tensor zeroed."""
    name = next(spec.name for spec, _ in weights if "down_proj" in spec.name)
    return [(spec, np.zeros_like(a) if spec.name == name else a) for spec, a in weights]


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

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Has the trainer compute in float32, with the weights as they are pushed: rounded."""
        engine = self.trainer._engine
        config = engine._config
        exact = {name: tensor.detach().clone() for name, tensor in engine._tensors.items()}
        engine._config = replace(config, dtype="float32")
        for tensor in engine._tensors.values():
            tensor.data.copy_(tensor.data.to(torch.bfloat16))
        try:
            yield
        finally:
            engine._config = config
            for name, tensor in engine._tensors.items():
                tensor.data.copy_(exact[name])

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
