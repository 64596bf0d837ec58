"""Pushes between worker processes of their own, over unix sockets, one of which is killed in the
middle.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from gcore_nodes.agent import MachineAgentSpec
from gcore_testing.push_site import PushSite, open_push_site

from gcore_core.contract.errors import ContractError, WorkerDied
from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.job_settings import RunSettings
from gcore_core.node import handshake
from gcore_core.node.spawn import spawn_process
from gcore_core.runtime.messages import (
    HELLO,
    PUSH_BEGIN,
    PUSH_PULL,
    SPAWN,
    TRAIN_RANKS,
    BeginPush,
    Hello,
    Nothing,
    PullWeights,
    SpawnRequest,
    StorePlace,
    TrainRequest,
    WorkerSpec,
)
from gcore_core.runtime.worker_settings import GeneratorSettings, PlainContext, TrainerSettings
from gcore_core.store.server import StoreSpec
from gcore_core.wire.service import Call, Service
from gcore_core.wire.sockets import RpcNetwork
from tests.support.wires import Wire, free_address, shared_identity

FAKE = "gcore_testing.fake:Fake"
PATIENCE_S = 60.0

BACKENDS = '''
"""A trainer whose weights are not those that generators begin with; a generator that stops in its first push."""
import os
from pathlib import Path

import numpy as np

from gcore_testing import fake


class Trainer(fake.FakeTrainer):
    def __init__(self, config, context):
        super().__init__(config, context)
        self._logits = np.arange(len(fake.VOCABULARY), dtype=np.float32)


class Generator(fake.FakeGenerator):
    def __init__(self, config, context):
        super().__init__(config, context)
        self._pipes = Path(context.directory)

    def load_weights(self, tensors):
        super().load_weights(tensors)
        if (self._pipes / "halted").exists():
            (self._pipes / "halted").write_text("in the middle")  # somebody reads it
            (self._pipes / "never").read_text()  # nobody writes it
'''  # noqa: E501


@pytest.fixture
async def site() -> AsyncIterator[PushSite]:
    async with open_push_site(BACKENDS, PushSite) as site:
        yield site


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="gc-", dir="/tmp") as place:
        yield Path(place)


def begun(attempt: int) -> BeginPush:
    return BeginPush(1, 1, 2, attempt)  # a bucket holds one of the two tensors


@pytest.mark.protects
async def test_a_generator_killed_in_a_push_leaves_the_trainer_able_to_push(site: PushSite) -> None:
    """The survivor is freed by the next attempt; the killed one's replacement and it hold the
    trainer's bytes.
    """
    async with asyncio.timeout(PATIENCE_S):
        halted = asyncio.Event()
        for pipe in ("halted", "never"):
            os.mkfifo(site.directory / pipe)
        told = os.open(site.directory / "halted", os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(told, halted.set)
        _, _, dying = await asyncio.gather(
            site.start("policy.0", FactorySpec("backends:Trainer", f"{FAKE}TrainerConfig")),
            site.start("rollout.0", FactorySpec(f"{FAKE}Generator", f"{FAKE}GeneratorConfig")),
            site.start("rollout.1", FactorySpec("backends:Generator", f"{FAKE}GeneratorConfig")),
        )
        assert await site.train() == 1
        await site.begin_push(begun(attempt=0))
        surviving, killed = site.pull(0, 1), site.pull(1, 1)
        await halted.wait()
        asyncio.get_running_loop().remove_reader(told)
        os.close(told)
        (site.directory / "halted").unlink()
        os.kill(dying, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await killed
        assert not surviving.done()
        await site.start("rollout.1", FactorySpec("backends:Generator", f"{FAKE}GeneratorConfig"))
        await site.begin_push(begun(attempt=1))
        with pytest.raises(ContractError, match="another push began before this one ended"):
            await surviving
        confirmed = await asyncio.gather(*(site.pull(number, 1, attempt=1) for number in range(2)))
    assert [(push.version, push.nbytes, push.verified) for push in confirmed] == [(1, 36, True)] * 2


def spec_of(
    name: str, node: str, short: Path, addresses: dict[str, str], secret: bytes
) -> WorkerSpec:
    """Returns the spec of a worker on a node."""
    role, _, rank = name.partition(".")
    run = RunSettings(steps=1, deterministic=True)
    context = PlainContext(directory=str(short))
    kind = TrainerSettings if role == "policy" else GeneratorSettings
    fake = "Trainer" if role == "policy" else "Generator"
    return WorkerSpec(
        role=role,
        rank=int(rank),
        ranks=1,
        peers=addresses,
        factories={"backend": FactorySpec(f"backends:{fake}", f"{FAKE}{fake}Config")},
        secret=secret,
        settings=kind(run=run, context=context),
        store=StorePlace(str(short / f"memory.{node}"), node, node),
        versions=handshake.versions([]),
        log=str(short / f"{name}.log"),
    )


async def test_a_push_goes_once_from_node_to_node(short: Path) -> None:
    """Three agents and their workers: the policy on the first node, two generators on the second
    and one on the third. A node sends to one other, so the third gets it from the second.
    """
    secret = secrets.token_bytes(32)
    nodes = ("agent.0", "agent.1", "agent.2")
    names = ("supervisor", *nodes, "policy.0", "rollout.0", "rollout.1", "rollout.2")
    addresses = {name: f"unix:{short / name}" for name in names}
    wires = {node: Wire(free_address(), free_address()) for node in nodes}
    network = RpcNetwork(addresses, secret)
    service = Service("supervisor")
    hellos: asyncio.Queue[str] = asyncio.Queue()

    async def hello(request: Hello, call: Call) -> Nothing:
        hellos.put_nowait(request.name)
        return Nothing()

    service.add(HELLO, hello)
    await network.serve("supervisor", service)
    (short / "backends.py").write_text(BACKENDS)
    agents = []

    try:
        with contextlib.ExitStack() as stack:
            for wire in wires.values():
                stack.enter_context(wire.opened())
            for node in nodes:
                seen = {other: wire.address for other, wire in wires.items()}
                store = StoreSpec(
                    node=node, directory=str(short / f"memory.{node}"), spill=str(short / "spill")
                )
                told = MachineAgentSpec(
                    name=node,
                    addresses=addresses,
                    secret=secret,
                    store=store,
                    meeting=str(short / f"meeting.{node}"),
                    bulk={**seen, node: wires[node].target},
                    identity=shared_identity(),
                )
                command = [sys.executable, "-m", "gcore_nodes.agent"]
                environment = {**os.environ, "PYTHONPATH": str(short)}
                log = short / f"{node}.log"
                agents.append(await spawn_process(command, told, log, environment))
            async with asyncio.timeout(PATIENCE_S):
                for node, workers in (
                    ("agent.0", ["policy.0"]),
                    ("agent.1", ["rollout.0", "rollout.1"]),
                    ("agent.2", ["rollout.2"]),
                ):
                    request = SpawnRequest(
                        [spec_of(name, node, short, addresses, secret) for name in workers]
                    )
                    await network.peer(node).call(SPAWN, request)
                assert {await hellos.get() for _ in range(4)} == set(names[4:])
                policy = network.peer("policy.0")
                await policy.call(TRAIN_RANKS.of_rank, [TrainRequest(0, [], 1, 1)])
                await policy.call(PUSH_BEGIN, BeginPush(1, 1, 3, fan_out=1))
                pulls = (
                    network.peer(f"rollout.{i}").call(PUSH_PULL, PullWeights(1, i, "policy.0"))
                    for i in range(3)
                )
                confirmed = await asyncio.gather(*pulls)
            facts = [(push.version, push.nbytes, push.verified) for push in confirmed]
            assert facts == [(1, 36, True)] * 3
            assert {push.stamp for push in confirmed} == {confirmed[0].stamp} != {0}
            for node in nodes[1:]:
                assert (short / f"memory.{node}" / "mirror-0").stat().st_size >= 32
                assert not (short / f"memory.{node}" / "policy.0-push").exists()
            assert [wires[node].connections for node in nodes] == [1, 1, 0]
    finally:
        await network.close()
        for process, lifeline in agents:
            os.close(lifeline)
            await process.wait()
