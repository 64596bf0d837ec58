"""Models that are made once, and short ways to make requests, records and backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gcore_algorithms.advantages import Grpo
from gcore_algorithms.config import GrpoConfig, PpoClipConfig
from gcore_algorithms.objectives import PpoClip
from gcore_diffusion.config import DiffusionGeneratorConfig, DiffusionTrainerConfig
from gcore_diffusion.generator import DiffusionGenerator
from gcore_diffusion.tiny import TinyConfig, TinyNet, save_tiny
from gcore_diffusion.training import DiffusionTrainer
from gcore_diffusion.watch import RealImages, coverage
from gcore_testing.contracts.weights import exported, push

from gcore_core.contract.algorithms import GroupScalars
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import ScoredRecord
from gcore_core.contract.trainer import TrainRecord

DIGITS = 10
GROUP = 24


def random_tiny(directory: Path, **changes: Any) -> Path:
    """A tiny model whose output is not zero, as a fresh one's is."""
    torch.manual_seed(0)
    net = TinyNet(TinyConfig(width=32, blocks=1, **changes))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save_tiny(net, directory)
    return directory


class Reinforce:
    """-advantage * logp over trained actions."""

    def __init__(self, requires: frozenset[str] = frozenset()) -> None:
        self.requires = requires

    def loss(self, columns: Any, current: Any) -> Any:
        mask = columns["mask"].float()
        return -(columns["advantage"] * current["logp"] * mask).sum(), mask.sum(), {}

    def weight(self, columns: Any) -> Any:
        return columns["mask"].float().sum()


def make_generator(directory: Path, **settings: Any) -> DiffusionGenerator:
    context = WorkerContext(role="rollout", model={"path": str(directory)})
    return DiffusionGenerator(DiffusionGeneratorConfig(**settings), context)


def make_trainer(directory: Path, objective: Any = None, **settings: Any) -> DiffusionTrainer:
    parts = {"objective": objective or Reinforce()}
    context = WorkerContext(
        role="policy",
        model={"path": str(directory)},
        parts=parts,
        steps=100,
        directory=str(directory),
    )
    return DiffusionTrainer(DiffusionTrainerConfig(**{"learning_rate": 1e-3, **settings}), context)


def make_requests(
    groups: int = 3, samples: int = 4, *, step: int = 0, greedy: bool = False, text: str = "digit"
) -> list[SampleRequest]:
    return [
        SampleRequest(
            ordinal=step * groups + group,
            sample=sample,
            seed=(step * groups + group) * 1000 + sample,
            prompt=Prompt(row=group, text=f"{text} {group % 10}", fields={"label": group % 10}),
            greedy=greedy,
        )
        for group in range(groups)
        for sample in range(samples)
    ]


def sampled(generator: Any, requests: Sequence[SampleRequest]) -> list[Finished]:
    generator.submit(requests)
    found: list[Finished] = []
    while len(found) < len(requests):
        found += generator.step()
    return sorted(found, key=lambda record: (record.request.ordinal, record.request.sample))


def records_of(finished: Sequence[Finished], minibatches: int = 1) -> list[TrainRecord]:
    return [
        TrainRecord(
            ordinal=f.request.ordinal,
            sample=f.request.sample,
            minibatch=f.request.ordinal % minibatches,
            columns=f.columns,
            media=f.media,
        )
        for f in finished
    ]


def scored_of(finished: Sequence[Finished]) -> list[ScoredRecord]:
    return [
        ScoredRecord(
            ordinal=f.request.ordinal,
            sample=f.request.sample,
            prompt=f.request.prompt,
            text="",
            status=f.status,
            columns=f.columns,
            media=f.media,
        )
        for f in finished
    ]


def only(record: TrainRecord, k: int) -> TrainRecord:
    """The record as if its k-th stochastic step were its only one."""
    own = record.columns
    cut = {name: own[name][k : k + 1] for name in ("steps", "logp", "action_mask")}
    return replace(record, columns={**own, **cut, "latents": own["latents"][k : k + 2]})


def train(
    trainer: Any, records: Sequence[TrainRecord], *, step: int = 0, minibatches: int = 1
) -> dict[str, float]:
    trainer.prepare(records, frozenset())
    advantages = np.where(np.arange(len(records)) % 2, 1.0, -1.0)
    return trainer.train(step, advantages, minibatches, 1)


def run_digits(
    directory: Path, reward: Any, sampler: dict[str, Any] | None = None, **settings: Any
) -> Iterator[tuple[dict[str, float], float]]:
    """The recipe's step, again and again; (metrics, coverage of 500 images of the weights after the
    step).

    sampler: settings of the generator; the others are the trainer's. Beside the trainer's metrics,
    ``reward`` is that of the records, ``greedy`` that of the 500 images, ``begins`` the first step
    that was trained.
    """
    generator = make_generator(directory, **(sampler or {}))
    objective = PpoClip(PpoClipConfig(clip_low=2e-3, clip_high=2e-3))
    trainer = make_trainer(directory, objective, **{"learning_rate": 3e-4, **settings})
    advantage, real = Grpo(GrpoConfig(group_size=GROUP)), RealImages.of_model(directory)
    assert real is not None
    step = 0
    while True:
        drawn = sampled(generator, make_requests(DIGITS, GROUP, step=step))
        for record in drawn:  # every step asks for the ten digits
            assert record.request.prompt.fields["label"] == record.request.ordinal % DIGITS
        values = np.array([score.value for score in reward.score(scored_of(drawn))])
        actions = len(drawn[0].columns["logp"])
        groups = [
            GroupScalars(rewards=part, lengths=np.full(GROUP, actions))
            for part in values.reshape(DIGITS, GROUP)
        ]
        trainer.prepare(records_of(drawn, minibatches=2), frozenset())
        metrics = trainer.train(step, np.concatenate(advantage.of(groups, np.zeros(0))), 2, 1)
        push(generator, exported(trainer), step + 1)
        images = sampled(generator, make_requests(DIGITS, 50, greedy=True))
        covered = [
            coverage(
                np.stack([r.media["image"] for r in images if r.request.ordinal == digit]),
                real.of(digit),
            )
            for digit in range(DIGITS)
        ]
        own = {
            "reward": float(values.mean()),
            "greedy": float(np.mean([score.value for score in reward.score(scored_of(images))])),
            "begins": float(drawn[0].columns["steps"][0]),
        }
        yield metrics | own, float(np.mean(covered))
        step += 1
