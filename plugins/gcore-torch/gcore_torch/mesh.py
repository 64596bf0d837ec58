"""Arranges a trainer's ranks: which of them share a model, and which hold a copy of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gcore_language.ranks import Ranks

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_torch.sharding_settings import ShardingSettings, problems_of_slots


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of a trainer, of which this process is one.

    of_layers: torch's device mesh for FSDP2. It has one dimension, or two: replicas, then the
        ranks that share one.
    of_rest: the same for what is no layer, embeddings above all. It has all ranks.
    of_tensor: the ranks that split the layers with this one; None: there are none.
    of_experts: the ranks that the experts are spread over with this one; None: there are none.
    of_same_experts: the ranks that hold the same experts as this one, each some rows of them, as a
        mesh for FSDP2; None: as ``of_layers``.
    records: how many ranks get other records than each other.
    speaks: see ``Ranks``; of a tensor group the first rank does.
    is_first_replica: whether this rank's replica is the one that is saved.
    """

    of_layers: Any
    of_rest: Any
    of_tensor: Any = None
    of_experts: Any = None
    of_same_experts: Any = None
    records: int
    speaks: bool = True
    is_first_replica: bool = True


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
    for setting, problem in problems_of_slots(settings, ranks.count):
        raise ConfigError(f"{problem}.", where=f"{where}.{setting}")
    for setting in ("replicas", "tensor", "experts"):
        if getattr(settings, setting) > 1 and context.deterministic:
            raise ConfigError(
                "this layout does not go with a deterministic run.",
                where=f"{where}.{setting}",
                why="Sums over it have other bits for another number of ranks.",
                todo="Set it to 1.",
            )
    if ranks.count == 1 and not always:
        return None
    if settings.tensor > 1:
        return _of_tensor_groups(settings.tensor, ranks, device)
    if settings.replicas > 1:
        return _of_replicas(settings.replicas, ranks, device)
    if settings.experts > 1:
        return _of_spread_experts(settings.experts, ranks, device)
    every = dist.init_device_mesh(device.type, (ranks.count,))
    return Mesh(of_layers=every, of_rest=every, records=ranks.count)


def _of_replicas(replicas: int, ranks: Ranks, device: torch.device) -> Mesh:
    shards = ranks.count // replicas
    mesh = dist.init_device_mesh(
        device.type, (replicas, shards), mesh_dim_names=("replica", "shard")
    )
    return Mesh(
        of_layers=mesh,
        of_rest=mesh,
        records=ranks.count,
        is_first_replica=ranks.rank < shards,
    )


def _of_tensor_groups(size: int, ranks: Ranks, device: torch.device) -> Mesh:
    """Neighbouring ranks are one group. Layers are cut by ``tensor`` first, then by ``data``."""
    groups = ranks.count // size
    mesh = dist.init_device_mesh(device.type, (groups, size), mesh_dim_names=("data", "tensor"))
    return Mesh(
        of_layers=mesh["data"],
        of_rest=dist.init_device_mesh(device.type, (ranks.count,)),
        of_tensor=mesh["tensor"],
        records=groups,
        speaks=ranks.rank % size == 0,
    )


def _of_spread_experts(size: int, ranks: Ranks, device: torch.device) -> Mesh:
    """Neighbouring ranks are one group. All but experts is shared out over all ranks, by rows.

    Of experts ``group`` cuts first, then ``data``.
    """
    groups = ranks.count // size
    mesh = dist.init_device_mesh(device.type, (groups, size), mesh_dim_names=("data", "group"))
    every = dist.init_device_mesh(device.type, (ranks.count,))
    return Mesh(
        of_layers=every,
        of_rest=every,
        of_experts=mesh["group"],
        of_same_experts=mesh["data"],
        records=ranks.count,
    )


def refuse_images(settings: ShardingSettings, role: str) -> None:
    """Raises ConfigError for a layout that has not been tested with a model that takes images."""
    if settings.replicas > 1:
        raise ConfigError(
            "replicas of a model that takes images have not been tested.",
            where=f"roles.{role}.config.sharding.replicas",
            todo="Set it to 1.",
        )
