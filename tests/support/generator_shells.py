"""Makes shells of generators in this process, with a store of their own and the fake's rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gcore_testing import fake

from gcore_core.contract.generator import Draws, Generator
from gcore_core.contract.job_settings import RunSettings
from gcore_core.runtime.compute import ThreadCompute
from gcore_core.runtime.worker_settings import GeneratorSettings
from gcore_core.store.client import StoreWriter
from gcore_core.store.server import SlabService, StoreSpec
from gcore_core.wire.in_process import InlineNetwork
from gcore_core.wire.service import Service
from gcore_core.workers.generator import GeneratorShell
from gcore_core.workers.role_sampler import RoleSampler
from gcore_core.workers.sleep_note import SleepNote

_SECRET = b"s" * 32


async def shell_around(
    generator: Generator,
    directory: Path,
    note: SleepNote | None = None,
    draws: Draws | None = None,
    asked: Sequence[RoleSampler] = (),
    **settings: Any,
) -> GeneratorShell:
    """Returns the shell ``rollout.0`` of a generator, whose store lies in the directory.

    note, draws, asked: as of ``GeneratorShell``.
    settings: of ``GeneratorSettings``.
    """
    network = InlineNetwork()
    spec = StoreSpec(node="agent.0", directory=str(directory), spill=str(directory / "spill"))
    service = Service("agent.0")
    SlabService(spec, _SECRET).register(service)
    await network.view("agent.0").serve("agent.0", service)
    view = network.view("rollout.0")
    writer = StoreWriter(directory, "agent.0", _SECRET, view.peer("agent.0"), "rollout.0")
    dataset = fake.FakeDataset(fake.FakeDataConfig(rows=4))
    datasets = {"train": dataset, "evaluation": dataset}
    made = GeneratorSettings(run=RunSettings(), batch_s=0.0, **settings)
    shell = GeneratorShell(
        generator,
        datasets,
        writer,
        ThreadCompute(),
        view,
        made,
        note=note,
        draws=draws,
        asked=asked,
    )
    shell.register(Service("rollout.0"))
    return shell
