"""Pushes between the stores of many nodes: who sends how much, and what a lost node does.

No trainer and no generator is here. A file stands for the trainer's memory, and each node is asked
for one bucket after the other, as its generators would ask.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from gcore_nodes import bulk, mirrors
from gcore_nodes.bulk import MirroredContent

from gcore_core.contract.errors import ContractError
from gcore_core.contract.remote_store import MirrorRequest
from gcore_core.store.server import SlabService, StoreSpec
from gcore_core.wire.service import Call, Service
from gcore_core.workers.push import parents_of
from tests.support.joined_stores import joining, of_service, sent_bytes
from tests.support.wires import Wire, free_address

SECRET = b"s" * 32
PART_BYTES = 1 << 18
PIECE_BYTES = PART_BYTES // 8
#: The buckets of a push: where each begins, and its bytes. They overlap as those of a trainer do.
BUCKETS = [(0, 2 * PART_BYTES + 11), (3 * PART_BYTES, 0), (3 * PART_BYTES, 4099), (0, PART_BYTES)]
MODEL_BYTES = sum(nbytes for _, nbytes in BUCKETS)
TRAINER = "agent.0"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has buckets of this size come in several parts, and each part in several pieces."""
    for module in (bulk, mirrors):
        monkeypatch.setattr(module, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(bulk, "_PIECE_BYTES", PIECE_BYTES)


class Nodes:
    """The trainer's node and some others, of which each reads from its parent.

    stores: node -> its store.
    wires: node -> the wire through which others read from it.
    parents: node -> those that it reads from, the nearest first; empty for the trainer's.
    """

    def __init__(self, place: Path, others: int, fan_out: int) -> None:
        names = [f"agent.{number}" for number in range(others + 1)]
        self.parents = parents_of(names[1:], fan_out)
        self.memory = place / "memory"
        self.memory.write_bytes(bytes(4 * PART_BYTES))
        self.wires = {name: Wire(free_address(), free_address()) for name in names}
        self.stores = {}
        for name in names:
            spec = StoreSpec(node=name, directory=str(place / name), spill=str(place / "spill"))
            seen = {other: wire.address for other, wire in self.wires.items()}
            addresses = {**seen, name: self.wires[name].target}
            self.stores[name] = SlabService(
                spec, SECRET, joining(SECRET, addresses, push_memory=lambda worker: self.memory)
            )
            self.stores[name].register(Service(name))
            self.stores[name].remote.open()

    def fill(self, version: int, index: int) -> bytes:
        """Has the trainer fill a bucket; returns its bytes."""
        offset, nbytes = BUCKETS[index]
        content = np.random.default_rng(index).bytes(nbytes)
        if nbytes:  # most of it is as it was
            place = nbytes // 3
            content = content[:place] + bytes([version]) * 10 + content[place + 10 :]
        with open(self.memory, "r+b") as file:
            file.seek(offset)
            file.write(content)
        return content

    async def bring(self, node: str, version: int, index: int, attempt: int = 0) -> bytes:
        """Has a node bring a bucket; returns what its generators would read."""
        request = MirrorRequest(
            TRAINER,
            "policy.0",
            version,
            attempt,
            index,
            *BUCKETS[index],
            self.parents[node],
        )
        path = await self.stores[node].mirror(request, Call(lambda: None))
        offset, nbytes = BUCKETS[index]
        return Path(path).read_bytes()[offset : offset + nbytes]

    async def push(self, version: int, attempt: int = 0) -> None:
        """Brings every bucket to every node; the last nodes ask first."""
        for index in range(len(BUCKETS)):
            content = self.fill(version, index)
            found = await asyncio.gather(
                *(self.bring(node, version, index, attempt) for node in reversed(self.parents))
            )
            assert all(each == content for each in found)

    def sent(self) -> dict[str, int]:
        """Returns how many bytes of content each node has sent."""
        return {name: sent_bytes(store) for name, store in self.stores.items()}

    def close(self) -> None:
        for store in self.stores.values():
            store.close()


@contextlib.asynccontextmanager
async def opened(place: Path, others: int, fan_out: int = 2) -> AsyncIterator[Nodes]:
    with contextlib.ExitStack() as stack:
        nodes = Nodes(place, others, fan_out)
        for wire in nodes.wires.values():
            stack.enter_context(wire.opened())
        try:
            yield nodes
        finally:
            nodes.close()


def test_every_node_has_a_way_to_the_trainer_and_no_node_more_children_than_allowed() -> None:
    for fan_out in (1, 2, 3, 8):
        for n_nodes in range(30):
            nodes = [f"agent.{number}" for number in range(n_nodes)]
            parents = parents_of(reversed(nodes), fan_out)
            assert parents.keys() == set(nodes)
            for node, parent in parents.items():
                assert parent[:1] < [node], "those of two trees would wait for each other"
                assert not parent or parent[1:] == parents[parent[0]]
            nearest = [tuple(parent[:1]) for parent in parents.values()]
            assert all(nearest.count(parent) <= fan_out for parent in nearest)


@pytest.mark.parametrize("fan_out", [1, 2, 3])
async def test_no_node_sends_more_copies_than_allowed(fan_out: int, tmp_path: Path) -> None:
    """Seven other nodes get two pushes, and every byte; the trainer's sends no more than others."""
    async with opened(tmp_path, others=7, fan_out=fan_out) as nodes:
        for version in (1, 2):
            await nodes.push(version)
            sent = nodes.sent()
            assert sent[TRAINER] == version * fan_out * MODEL_BYTES
            assert max(sent.values()) == sent[TRAINER]
            assert sum(sent.values()) == version * 7 * MODEL_BYTES, "one copy a node"


async def test_a_node_passes_on_what_it_has_while_the_rest_still_comes(tmp_path: Path) -> None:
    """The trainer's node has sent a part and stops: its grandchild gets that part meanwhile."""
    async with opened(tmp_path, others=2, fan_out=1) as nodes:
        nodes.wires[TRAINER].hold_after = 6 * PIECE_BYTES
        nodes.fill(1, 0)
        pulls = [asyncio.ensure_future(nodes.bring(node, 1, 0)) for node in ("agent.2", "agent.1")]
        await asyncio.to_thread(nodes.wires[TRAINER].holds.wait)
        async with asyncio.timeout(30):
            while nodes.wires["agent.1"].nbytes < 2 * PIECE_BYTES:
                await asyncio.sleep(0.01)
        assert not any(pull.done() for pull in pulls)
        nodes.wires[TRAINER].hold_after = None
        nodes.wires[TRAINER].go_on.set()
        await asyncio.gather(*pulls)


async def test_a_parent_that_dies_in_the_middle_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its children turn to its own source, the trainer's; their own children notice nothing."""
    monkeypatch.setattr(mirrors, "PARENT_PATIENCE_S", 1.0)
    async with opened(tmp_path, others=7) as nodes:
        dying = "agent.1"
        heirs = [node for node, parents in nodes.parents.items() if parents == [dying]]
        assert heirs == ["agent.3", "agent.4"]
        content = nodes.fill(1, 0)
        wire = nodes.wires[dying]
        wire.hold_after = PIECE_BYTES
        pulls = {node: asyncio.ensure_future(nodes.bring(node, 1, 0)) for node in nodes.parents}
        await asyncio.to_thread(wire.holds.wait)
        wire.cut()  # before its store, which would say in an answer that it ends
        nodes.stores[dying].close()
        # What was on its way to the dying node may still come, but its files are gone.
        with contextlib.suppress(ContractError, FileNotFoundError):
            await pulls.pop(dying)
        for pull in pulls.values():
            assert await pull == content
        # To agent.2 and to two heirs, and to the dying node what it still asked for; on a machine
        # that is busy to one that was not patient enough besides.
        nbytes = BUCKETS[0][1]
        assert 3 * nbytes <= nodes.sent()[TRAINER] < 7 * nbytes
        told = [record.getMessage() for record in caplog.records]
        assert sum(line.startswith(f"{dying} does not pass") for line in told) >= len(heirs)
        # The next bucket does not wait for the lost parent again.
        content = nodes.fill(1, 2)
        monkeypatch.setattr(mirrors, "PARENT_PATIENCE_S", 600.0)
        async with asyncio.timeout(60):
            for node in pulls:
                assert await nodes.bring(node, 1, 2) == content


async def test_a_parent_that_never_asks_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes to its mirror, and it has one of another push."""
    async with opened(tmp_path, others=2, fan_out=1) as nodes:
        await nodes.push(1)
        monkeypatch.setattr(mirrors, "PARENT_PATIENCE_S", 0.2)
        content = nodes.fill(2, 0)
        assert await nodes.bring("agent.2", 2, 0) == content


async def test_a_bucket_of_an_earlier_push_is_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its region has other bytes by then."""
    async with opened(tmp_path, others=2, fan_out=1) as nodes:
        await nodes.push(1)
        monkeypatch.setattr(mirrors, "_WAIT_S", 0.1)
        what = MirroredContent(TRAINER, "policy.0", 1, 0, 0, *BUCKETS[0])
        assert of_service(nodes.stores["agent.1"])._mirrors.find(what).nbytes == BUCKETS[0][1]
        nodes.fill(2, 0)
        await nodes.bring("agent.1", 2, 0)
        with pytest.raises(ContractError, match="nobody here has asked for this bucket"):
            of_service(nodes.stores["agent.1"])._mirrors.find(what)


async def test_a_push_that_failed_at_its_source_fails_at_every_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever, and the next attempt brings every byte."""
    monkeypatch.setattr(mirrors, "PARENT_PATIENCE_S", 0.3)
    async with opened(tmp_path, others=3, fan_out=1) as nodes:
        for store in nodes.stores.values():
            of_service(store).client._patience_s = 0.3
        nodes.wires[TRAINER].hold_after = 1000
        nodes.fill(1, 0)
        pulls = (nodes.bring(node, 1, 0) for node in nodes.parents)
        found = await asyncio.gather(*pulls, return_exceptions=True)
        assert all(isinstance(each, ContractError) for each in found), found
        nodes.wires[TRAINER].hold_after = None
        nodes.wires[TRAINER].go_on.set()
        await nodes.push(1, attempt=1)
