"""Runs one rank of a sharded trainer in a process of its own.

The program is ``python -m gcore_testing.contracts.rank SPEC``.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.factories import FactorySpec, build, config_object, reference_to
from gcore_core.contract.providers import Provider
from gcore_core.contract.trainer import Trainer
from gcore_core.contract.traits import traits_of
from gcore_testing.contracts.trainer import PolicyGradient, make_records, train
from gcore_testing.runs import run_together
from gcore_testing.safetensors_files import Tensors, read_safetensors, write_safetensors


class RankSpec(msgspec.Struct, kw_only=True):
    """Tells a rank what it needs to know.

    directory: where ranks leave what they made, and meet unless they have an address for that.
    address: see ``WorkerContext.meeting_address``.
    """

    factory: FactorySpec
    model: dict[str, Any]
    directory: str
    vocabulary: int
    rank: int
    ranks: int
    address: str = ""


def trained_by(
    ranks: int,
    provider: Provider,
    settings: Mapping[str, Any],
    model: Mapping[str, Any],
    room: tuple[Path, int],
    *,
    at_address: bool = False,
) -> Tensors:
    """Returns the weights after two steps on the kit's records.

    The records are shared by ``ranks`` data-parallel ranks. Each rank has as many processes as a
    replica has slots. Raises RuntimeError with the output of a rank that failed.

    room: (directory, vocabulary).
    at_address: the ranks meet at an address, as on several nodes, and not in a directory.
    """
    directory, vocabulary = room
    directory.mkdir()
    config_class = "" if provider.config is None else reference_to(provider.config)
    factory = FactorySpec(provider.factory, config_class, dict(settings))
    programs = []
    size = traits_of(config_object(factory)).replica_slots
    address = f"127.0.0.1:{_free_port()}" if at_address else ""
    for rank in range(ranks * size):
        spec = RankSpec(
            factory=factory,
            model=dict(model),
            directory=str(directory),
            vocabulary=vocabulary,
            rank=rank,
            ranks=ranks * size,
            address=address,
        )
        file = directory / f"rank{rank}.json"
        file.write_bytes(msgspec.json.encode(spec))
        programs.append(["-m", "gcore_testing.contracts.rank", str(file)])
    run_together(programs)
    return read_safetensors(directory / "weights.safetensors")


def main(file: str) -> None:
    spec = msgspec.json.decode(Path(file).read_bytes(), type=RankSpec)
    context = WorkerContext(
        role="policy",
        rank=spec.rank,
        ranks=spec.ranks,
        steps=100,
        model=spec.model,
        rendezvous=spec.directory if spec.ranks > 1 and not spec.address else "",
        meeting_address=spec.address,
        parts={"objective": PolicyGradient()},
        directory=spec.directory,
    )
    trainer: Trainer = build(spec.factory, context)
    records = make_records(spec.vocabulary)
    advantages = np.random.default_rng(1).standard_normal(len(records))
    size = traits_of(config_object(spec.factory)).replica_slots
    indexes = shard(len(records), spec.rank // size, spec.ranks // size)
    for step in (0, 1):
        train(trainer, [records[i] for i in indexes], advantages[indexes], step=step)
    tensors = [(tensor, np.array(array, copy=True)) for tensor, array in trainer.export_weights()]
    if spec.rank == 0:
        write_safetensors(Path(spec.directory) / "weights.safetensors", tensors)
    trainer.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shard(records: int, rank: int, ranks: int) -> list[int]:
    """Returns the indexes of one rank's records, in unequal shares.

    The first of several ranks has a third of the records; the others get the rest in turn.
    """
    first = records // 3
    if ranks == 1:
        return list(range(records))
    return list(range(first)) if rank == 0 else list(range(first, records))[rank - 1 :: ranks - 1]


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    # A worker ends like this too: a library's thread that still runs must not turn it to a failure.
    os._exit(0)
