"""The store between real processes: what the death of one leaves, a store that is full, two
nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_nodes.agent import MachineAgentSpec
from gcore_nodes.bulk import BulkClient, StoredContent

from gcore_core.contract.errors import WorkerDied
from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.job_settings import RunSettings
from gcore_core.contract.launching import Site
from gcore_core.contract.records import Header, Lease
from gcore_core.node import handshake
from gcore_core.node.launchers import AGENT, LocalLauncher
from gcore_core.node.spawn import spawn_process
from gcore_core.runtime.messages import (
    EXITS,
    GENERATE,
    HELLO,
    RELEASE,
    SPAWN,
    TRAIN,
    GenerateRequest,
    Hello,
    Nothing,
    ReleaseRequest,
    SpawnRequest,
    StorePlace,
    WorkerSpec,
)
from gcore_core.runtime.worker_settings import GeneratorSettings, PlainContext
from gcore_core.store.client import StoreReader, StoreWriter
from gcore_core.store.server import StoreSpec
from gcore_core.wire.service import Call, Service
from gcore_core.wire.sockets import RpcNetwork
from tests.support import runs
from tests.support.wires import Wire, free_address, shared_identity

MEMORY = Path("/dev/shm")
PAGE_GIB = 4096 / 2**30
PATIENCE_S = 60.0


# -- runs ------------------------------------------------------------------------------------------


def tiny(directory: Path, **more: Any) -> dict[str, Any]:
    """A store of one page, which two generators fill at once; what is over goes to disk after 0.1
    s.
    """
    return {"store_gib": PAGE_GIB, "spill_dir": str(directory), "spill_after_s": 0.1, **more}


def test_a_run_with_a_store_of_one_page_is_slower_and_ends_with_the_same_weights(
    tmp_path: Path,
) -> None:
    spill = tmp_path / "spill"
    roles = {"rollout": {"use": "fake", "slots": 2}}
    config = runs.job(cluster={"devices": 4}, roles=roles)
    code, wanted = runs.finish(tmp_path / "wide", config)
    assert code == 0, wanted.output
    code, run = runs.finish(
        tmp_path / "tiny", {**config, "launcher": {"use": "core/local", "config": tiny(spill)}}
    )
    assert code == 0, run.output
    assert run.batches() == wanted.batches()
    assert run.weights() == wanted.weights()
    notes = re.findall(
        r"the store is full \(0\.00390625 MiB, launcher\.config\.store_gib\): generators wait",
        run.output,
    )
    assert len(notes) == 1, run.output
    assert "the store is full" not in wanted.output
    assert list(spill.iterdir()) == []


@pytest.mark.protects
def test_images_reach_rewards_and_trainer_and_are_stored_once_per_group(tmp_path: Path) -> None:
    roles = {"rollout": {"use": "trouble/pictures"}, "policy": {"use": "trouble/sees"}}
    code, run = runs.finish(
        tmp_path, runs.job(roles=roles, rewards={"letters": {"use": "trouble/looks"}})
    )
    assert code == 0, run.output
    seen = [line.split() for line in (tmp_path / "pictures.txt").read_text().splitlines()]
    assert (
        len(seen) == 2 * 3 * 6 * 4
    )  # by scorer and trainer, in three steps, of six groups of four
    places = {ordinal: {place for other, place in seen if other == ordinal} for ordinal, _ in seen}
    assert len(places) == 18
    assert max(map(len, places.values())) == 2  # one in each process


def test_a_too_large_header_ends_the_run_with_its_size(tmp_path: Path) -> None:
    code, run = runs.finish(
        tmp_path, runs.job(roles={**runs.JOB["roles"], "rollout": {"use": "trouble/verbose"}})
    )
    assert code == 3, run.output
    assert re.search(
        r"^ordinal \d+, sample \d: the header of a record has \d+ bytes, the limit is 512$",
        run.output,
        re.M,
    )
    assert "  it names 9 media: image 0, image 1, " in run.output


PROCESSES = [
    "rollout.0",
    "rollout.1",
    "policy.0",
    "scorer.0",
    "controller.0",
    "controller.1",
    "agent.0",
    "supervisor",
]


@pytest.mark.protects
@pytest.mark.parametrize("name", PROCESSES)
def test_the_death_of_any_process_leaves_nothing_in_memory_or_on_disk(
    name: str, tmp_path: Path
) -> None:
    spill = tmp_path / "spill"
    private = tempfile.mkdtemp(prefix="gc-", dir="/tmp")
    config = runs.job(
        run={"steps": 1_000_000},
        cluster={"devices": 4},
        roles={**runs.JOB["roles"], "rollout": {"use": "fake", "slots": 2}},
        launcher={"config": tiny(spill, socket_dir=private, spill_after_s=0.0)},
    )
    try:
        with runs.running(tmp_path, config) as run:
            run.read_until(" 2/")
            pids = {**run.pids(), "supervisor": run.supervisor()}
            watched = runs.Watched([pid for who, pid in pids.items() if who != "supervisor"])
            (place,) = spill.iterdir()
            store = MEMORY / place.name.removeprefix("spill-")
            assert store.is_dir()
            os.kill(pids[name], signal.SIGKILL)
            if name.startswith(
                ("rollout", "scorer")
            ):  # these are started again, and end with the run
                run.read_until(f"{name} ended with signal SIGKILL; it is started again")
                run.process.terminate()
            run.wait()
            assert watched.all_end_within(10)
            assert list(MEMORY.glob(f"*{store.name}*")) == []
            assert list(spill.iterdir()) == []
            assert os.listdir(private) == []
    finally:
        os.rmdir(private)


# -- a generator that dies -------------------------------------------------------------------------


@dataclass
class Hellos:
    """What a supervisor is to a worker."""

    pids: asyncio.Queue[int] = field(default_factory=asyncio.Queue)

    async def hello(self, request: Hello, call: Call) -> Nothing:
        self.pids.put_nowait(request.pid)
        return Nothing()

    def service(self) -> Service:
        service = Service("supervisor")
        service.add(HELLO, self.hello)
        return service


def generator(site: Site, logs: Path) -> WorkerSpec:
    return WorkerSpec(
        role="rollout",
        rank=0,
        ranks=1,
        peers=site.views[AGENT],
        factories={
            "backend": FactorySpec(
                "gcore_testing.fake:FakeGenerator",
                "gcore_testing.fake:FakeGeneratorConfig",
            ),
            "dataset/train": FactorySpec(
                "gcore_testing.fake:FakeDataset", "gcore_testing.fake:FakeDataConfig"
            ),
        },
        secret=site.secret,
        settings=GeneratorSettings(
            run=RunSettings(steps=1, deterministic=True), context=PlainContext(directory=str(logs))
        ),
        store=StorePlace(str(site.home_node.store), AGENT, AGENT),
        versions=handshake.versions([]),
        log=str(logs / "rollout.0.log"),
    )


async def drawn(site: Site, step: int) -> list[Header]:
    request = GenerateRequest(step, 0, 0, TRAIN, [Lease(step, 0, 0, (0, 1))], least=0)
    stream = site.network.peer("rollout.0").stream(GENERATE, request, deadline_s=PATIENCE_S)
    return [header async for headers in stream for header in headers]


async def test_records_of_a_killed_generator_stay_readable_and_its_slab_is_reused(
    tmp_path: Path,
) -> None:
    hellos = Hellos()
    async with LocalLauncher().site({"rollout.0": AGENT}, hellos.service(), tmp_path) as site:
        spec, reader = (
            generator(site, tmp_path),
            StoreReader(site.home_node.store, AGENT, site.secret),
        )
        exits = site.home_node.agent.stream(EXITS, Nothing(), deadline_s=PATIENCE_S)
        await site.home_node.agent.call(SPAWN, SpawnRequest([spec]))
        pid = await hellos.pids.get()
        before = await drawn(site, 0)
        wanted = [columns["text"].tobytes() for columns, _ in await reader.records(before)]
        os.kill(pid, signal.SIGKILL)
        assert (await anext(exits)).pid == pid
        await exits.aclose()
        await site.home_node.agent.call(SPAWN, SpawnRequest([spec]))
        await hellos.pids.get()
        again = await drawn(site, 0)
        assert slabs(again).isdisjoint(slabs(before))
        for headers in (before, again):
            assert [
                columns["text"].tobytes() for columns, _ in await reader.records(headers)
            ] == wanted
        await site.home_node.agent.call(RELEASE, ReleaseRequest("controller", {0: (0, 1)}))
        assert slabs(before) < slabs(await drawn(site, 1)) | slabs(await drawn(site, 2))


def slabs(headers: list[Header]) -> set[str]:
    return {header.columns.slab for header in headers if header.columns is not None}


# -- two nodes -------------------------------------------------------------------------------------


@dataclass
class TwoNodes:
    network: RpcNetwork
    wire: Wire
    writer: StoreWriter
    reader: StoreReader
    directories: list[Path]
    agents: list[asyncio.subprocess.Process]


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="gc-", dir="/tmp") as place:
        yield Path(place)


@contextlib.asynccontextmanager
async def two_nodes(short: Path) -> AsyncIterator[TwoNodes]:
    """Two agents in processes of their own; the second reads from the first over a wire."""
    secret = secrets.token_bytes(32)
    identity = shared_identity()
    addresses = {name: f"unix:{short / name}" for name in ("supervisor", "agent.0", "agent.1")}
    network, wire = RpcNetwork(addresses, secret), Wire(free_address(), free_address())
    started, directories = [], [short / "memory.0", short / "memory.1"]
    with wire.opened():
        try:
            for i, store in enumerate(directories):
                name = f"agent.{i}"
                spec = MachineAgentSpec(
                    name=name,
                    addresses=addresses,
                    secret=secret,
                    store=StoreSpec(
                        node=name, directory=str(store), spill=str(short / f"spill.{i}")
                    ),
                    meeting=str(short / f"meeting.{i}"),
                    bulk={"agent.0": wire.address if i else wire.target},
                    identity=identity,
                )
                command = [sys.executable, "-m", "gcore_nodes.agent"]
                started.append(await spawn_process(command, spec, short / f"{name}.log"))
            writer = StoreWriter(
                directories[0], "agent.0", secret, network.peer("agent.0"), "rollout.0"
            )
            reader = StoreReader(directories[1], "agent.1", secret, network.peer("agent.1"))
            agents = [process for process, _ in started]
            yield TwoNodes(network, wire, writer, reader, directories, agents)
        finally:
            await network.close()
            for process, lifeline in started:
                os.close(lifeline)
                await process.wait()


async def test_a_pull_between_nodes_resumes_after_a_broken_connection(short: Path) -> None:
    large = np.random.default_rng(0).integers(0, 256, 24 << 20, np.uint8)
    async with two_nodes(short) as nodes:
        nodes.wire.cut_after = 4 << 20
        ref = await nodes.writer.put(0, frozenset({0}), [{"x": large}])
        header = Header(ordinal=0, sample=0, row=0, seed=0, columns=ref)
        ((columns, _),) = await nodes.reader.records([header])
        assert np.array_equal(columns["x"], large)
        assert nodes.wire.connections > 1
        assert nodes.wire.nbytes < 1.2 * large.nbytes  # it did not begin anew
        again = await nodes.reader.records([header])
        assert np.array_equal(again[0][0]["x"], large)
        assert nodes.wire.nbytes < 1.2 * large.nbytes  # and has a copy from then on
    assert not any(directory.exists() for directory in nodes.directories)


async def test_a_sending_agent_that_is_killed_ends_the_pull(short: Path) -> None:
    large = np.random.default_rng(0).integers(0, 256, 24 << 20, np.uint8)
    async with two_nodes(short) as nodes:
        nodes.wire.hold_after = 4 << 20
        ref = await nodes.writer.put(0, frozenset({0}), [{"x": large}])
        client = BulkClient(
            {"agent.0": nodes.wire.address},
            nodes.network.secret,
            shared_identity(),
            patience_s=1.0,
        )
        memory = bytearray(ref.nbytes)
        reads = client.read("agent.0", StoredContent(ref), memoryview(memory), lambda: None)
        read = asyncio.ensure_future(reads)
        await asyncio.to_thread(nodes.wire.holds.wait)
        nodes.agents[0].kill()
        nodes.wire.go_on.set()
        with pytest.raises(WorkerDied, match=rf"agent\.0: it sent \d+ of {ref.nbytes} bytes"):
            await read
        client.close()
