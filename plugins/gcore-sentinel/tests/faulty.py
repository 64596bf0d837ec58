"""A local plugin: the torch generator with one planted fault, on one replica or on all.

With ``BESIDE`` in the environment, controllers in the process that imports it join rewards to the
row beside.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gcore_torch.config import TorchGeneratorConfig
from gcore_torch.generator import TorchGenerator

from gcore_core import hookimpl
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.providers import GeneratorProvider
from gcore_core.contract.records import Header, WeightPlan
from gcore_core.kits.programs import Producer

FIRST = 3
"""The version of the weights from which on faults of weights and rewards are there."""
BESIDE = "GCORE_TEST_REWARDS_BESIDE"


@dataclass(frozen=True, kw_only=True)
class FaultyConfig(TorchGeneratorConfig):
    """Settings of the faulty generator."""

    fault: str = "none"
    """none, old, zeroed, temperature, shifted or masked."""
    replica: int = -1
    """The replica that has it; -1: all."""


class Faulty(TorchGenerator):
    def __init__(self, config: FaultyConfig, context: WorkerContext) -> None:
        has_it = config.replica in (-1, context.rank)
        self._fault = config.fault if has_it else "none"
        if self._fault == "temperature":
            config = replace(config, temperature=0.99)
        super().__init__(config, context)
        self._older: dict[str, torch.Tensor] = {}
        self._due = False

    def begin_weights(self, plan: WeightPlan) -> None:
        self._older = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
        super().begin_weights(plan)

    def commit_weights(self, plan: WeightPlan) -> None:
        super().commit_weights(plan)
        self._due = plan.version >= FIRST

    @torch.no_grad()
    def submit(self, requests: list[SampleRequest]) -> None:
        """Plants a fault of weights after the push was verified, before anything is sampled."""
        if self._due and self._fault == "old":
            for name, tensor in self._older.items():
                self._tensors[name].copy_(tensor)
        if self._due and self._fault == "zeroed":
            name = next(name for name in self._tensors if "down_proj" in name)
            self._tensors[name].zero_()
        self._due = False
        super().submit(requests)

    def step(self) -> list[Finished]:
        return [self._changed(record) for record in super().step()]

    def _changed(self, record: Finished) -> Finished:
        columns: dict[str, Any] = dict(record.columns)
        if self._fault == "temperature" and not record.request.greedy:
            columns["temperature"] = np.float32(1.0)
        elif self._fault == "shifted" and len(columns["logp"]):
            columns["logp"] = np.roll(columns["logp"], 1)
        elif self._fault == "masked" and len(columns["action_mask"]):
            columns["action_mask"] = np.r_[columns["action_mask"][:-1], np.uint8(0)]
        return replace(record, columns=columns)


def join_rewards_to_the_row_beside() -> None:
    taken = Producer._groups_taken

    def planted(self: Producer, *arguments: Any) -> list[list[Header]]:
        groups = taken(self, *arguments)
        headers = [header for group in groups for header in group]
        if headers and headers[0].versions[0] >= FIRST:
            rewards = [header.rewards for header in headers]
            for header, other in zip(headers, rewards[1:] + rewards[:1], strict=True):
                header.rewards = other
        return groups

    Producer._groups_taken = planted  # type: ignore[method-assign]


if os.environ.get(BESIDE):
    join_rewards_to_the_row_beside()


@hookimpl
def gcore_generators() -> Iterable[GeneratorProvider]:
    yield GeneratorProvider(
        summary="torch with a planted fault",
        factory="faulty:Faulty",
        config=FaultyConfig,
        capabilities=frozenset({"determinism", "sleep", "weights.fingerprint", "weights.push"}),
    )
