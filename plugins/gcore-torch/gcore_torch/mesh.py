"""Arranges a trainer's ranks: which of them share a model, and which hold a copy of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from gcore_language.ranks import Ranks

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_torch.sharding_settings import ShardingSettings, problem_of_slots


class Place(Protocol):
    """Where a rank is among those that share a model.

    rank: its number; it holds the rows with that number.
    count: how many ranks share the model.
    """

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...


@dataclass(frozen=True)
class Mesh:
    """The ranks of a trainer, of which this process is one.

    of_weights: torch's device mesh for FSDP2. It has one dimension, or two: replicas, then the
        ranks that share one.
    rank, count: see ``Place``.
    is_first_replica: whether this rank's replica is the one that is saved.
    """

    of_weights: Any
    rank: int
    count: int
    is_first_replica: bool


def make_mesh(
    settings: ShardingSettings,
    context: WorkerContext,
    ranks: Ranks,
    device: torch.device,
    *,
    always: bool = False,
) -> Mesh | None:
    """Returns None where a single rank holds the model as it is.

    always: make a mesh for a single rank too, which has then met itself.

    Neighbouring ranks share a replica: a launcher puts them on one machine where it can.

    Raises ConfigError for ranks that cannot be arranged so, and for what does not go with it.
    """
    where = f"roles.{context.role}.config.sharding"
    problem = problem_of_slots(settings, ranks.count)
    if problem:
        raise ConfigError(f"{problem}.", where=f"{where}.replicas")
    if settings.replicas > 1 and context.deterministic:
        raise ConfigError(
            "replicas of a model do not go with a deterministic run.",
            where=f"{where}.replicas",
            why="Sums over them have other bits for another number of replicas.",
        )
    if ranks.count == 1 and not always:
        return None
    if settings.replicas == 1:
        whole = dist.init_device_mesh(device.type, (ranks.count,))
        return Mesh(whole, ranks.rank, ranks.count, is_first_replica=True)
    shards = ranks.count // settings.replicas
    mesh = dist.init_device_mesh(
        device.type, (settings.replicas, shards), mesh_dim_names=("replica", "shard")
    )
    replica, shard = divmod(ranks.rank, shards)
    return Mesh(mesh, shard, shards, is_first_replica=replica == 0)


def refuse_images(settings: ShardingSettings, role: str) -> None:
    """Raises ConfigError for a layout that has not been tested with a model that takes images."""
    if settings.replicas > 1:
        raise ConfigError(
            "replicas of a model that takes images have not been tested.",
            where=f"roles.{role}.config.sharding.replicas",
            todo="Set it to 1.",
        )
