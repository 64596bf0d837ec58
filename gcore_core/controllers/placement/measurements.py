"""Gathers what the placement policy learns of a rollout: its requests, and how devices were in use.

Each shard packs its own requests into columns of numbers and sends them. The lead reads what
all shards sent; it sees no record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gcore_core.contract.launching import Peer
from gcore_core.contract.measurements import Requests
from gcore_core.contract.placement import Device
from gcore_core.contract.records import TRAINED
from gcore_core.contract.run_files import RecordTrace
from gcore_core.runtime.messages import METER, MeterReply, MeterRequest
from gcore_core.wire.retry import insist

#: One row for each record: 27 bytes. With a question to a judge (23 bytes) it stays below the 64
#: bytes that the lead may know of a record.
SAMPLED = np.dtype(
    [
        ("group", "<i8"),
        ("start_s", "<f4"),
        ("end_s", "<f4"),
        ("prompt", "<i4"),
        ("actions", "<i4"),
        ("kept", "?"),
        ("replica", "<i2"),
    ]
)
#: One row for each question to a judge: 23 bytes. parent: index of the record in this shard's
#: ``SAMPLED`` rows; role: index in the list of judges.
ANSWERED = np.dtype(
    [
        ("parent", "<i4"),
        ("role", "u1"),
        ("replica", "<i2"),
        ("prompt", "<i4"),
        ("actions", "<i4"),
        ("start_s", "<f4"),
        ("end_s", "<f4"),
    ]
)


def pack_requests(
    records: Sequence[RecordTrace], roles: Sequence[str], since_s: float
) -> tuple[bytes, bytes]:
    """Packs one shard's records and the questions about them.

    Returns the bytes of two arrays: ``SAMPLED``, a row for each record, and ``ANSWERED``, a row for
    each question.

    records: of this shard's latest rollout, with what their rewards asked.
    roles: the judges, in the order that ``ANSWERED`` counts them in.
    since_s: start of this shard's rollout; times are packed in seconds since then.
    """
    sampled = np.zeros(len(records), SAMPLED)
    answered = []
    for i, r in enumerate(records):
        replica = int(r.replica.rpartition(".")[2])
        times = r.sent_s - since_s, r.finished_s - since_s
        sampled[i] = (r.ordinal, *times, r.n_prompt, r.n_actions, r.verdict == TRAINED, replica)
        for a in r.asked:
            asked_s = a.sent_s - since_s, a.finished_s - since_s
            answered.append((i, roles.index(a.role), a.replica, a.n_prompt, a.n_actions, *asked_s))
    return sampled.tobytes(), np.array(answered, ANSWERED).tobytes()


def unpack_requests(
    packed: Sequence[tuple[bytes, bytes]], step: int, policy: str, roles: Sequence[str]
) -> dict[str, Requests]:
    """Unpacks the requests of all shards: role -> its requests.

    packed: what ``pack_requests`` returned on each shard, in shard order.
    step: the step of the rollout.
    policy: the role that drew the records.
    roles: the judges, in the order in which ``pack_requests`` got them.
    """
    parts = [np.frombuffer(sampled, SAMPLED) for sampled, _ in packed]
    answers = [np.frombuffer(answered, ANSWERED) for _, answered in packed]
    offsets = np.cumsum([0, *(len(part) for part in parts)])
    sampled = np.concatenate(parts)
    nobody = np.full(len(sampled), -1, np.int64)
    start_s = sampled["start_s"]
    by_role = {policy: _requests(step, sampled, sampled["group"], start_s, nobody)}
    by_role[policy] = replace(by_role[policy], kept=sampled["kept"].copy())
    # Each shard counted its own records from 0; here they stand one shard after the other.
    parent = np.concatenate(
        [part["parent"] + offset for part, offset in zip(answers, offsets, strict=False)]
    )
    answered = np.concatenate(answers)
    for index, role in enumerate(roles):
        is_of_role = answered["role"] == index
        about = parent[is_of_role].astype(np.int64)
        by_role[role] = _requests(
            step, answered[is_of_role], sampled["group"][about], sampled["end_s"][about], about
        )
    return by_role


def _requests(
    step: int, rows: np.ndarray, group: np.ndarray, arrival_s: np.ndarray, parent: np.ndarray
) -> Requests:
    """Makes the requests of one role.

    rows: of ``SAMPLED`` or ``ANSWERED``.
    group, arrival_s, parent: as of ``Requests``, which the rows do not have.
    """
    times = {name: rows[name].astype(float) for name in ("start_s", "end_s")}
    counts = {name: rows[name].astype(np.int64) for name in ("prompt", "actions", "replica")}
    return Requests(
        step=np.full(len(rows), step, np.int64),
        group=group.copy(),
        arrival_s=arrival_s.astype(float),
        parent=parent,
        kept=np.zeros(len(rows), bool),
        **times,
        **counts,
    )


class Gauge:
    """Asks each node's agent for its meter when a rollout begins and ends; the lead has one.

    A reading is a task next to the rollout, which does not wait for it. The agent's clock is part
    of the reading, so a late one costs no accuracy, and clocks of nodes need not agree.
    """

    def __init__(self, meter: str, nodes: Sequence[NodeGauge]) -> None:
        """Reads nothing yet.

        meter: the factory of the meter.
        nodes: those on which generators have devices.
        """
        self._nodes = nodes
        self._requests = [MeterRequest(meter, node.numbers()) for node in nodes]
        self._readings: list[asyncio.Future[list[MeterReply]]] = []

    def begin(self) -> None:
        """Begins a rollout: what was read before is forgotten."""
        for reading in self._readings:
            reading.cancel()
        self._readings = []
        self._read()

    def end(self) -> None:
        """Ends the rollout."""
        self._read()

    def _read(self) -> None:
        replies = (
            insist(node.agent, METER, request)
            for node, request in zip(self._nodes, self._requests, strict=True)
        )
        self._readings.append(asyncio.gather(*replies))

    async def shares(self) -> dict[int, float]:
        """Returns device index -> share of the latest rollout in which it was in use, 0 to 1.

        It is empty before the first rollout. Raises what the meter raised.
        """
        if len(self._readings) < 2:
            return {}
        first = await self._readings[0]
        last = await self._readings[-1]
        shares: dict[int, float] = {}
        for node, before, after in zip(self._nodes, first, last, strict=True):
            shares |= node.shares(before, after)
        return dict(sorted(shares.items()))


class NodeGauge:
    """Knows one node's part of the generators.

    agent: the node's agent.
    workers: name of each generator's worker on the node -> its devices.
    """

    def __init__(self, agent: Peer, workers: Mapping[str, Sequence[Device]]) -> None:
        self.agent = agent
        self._workers = workers
        # The meter numbers devices as its node does, the placement policy those of all nodes.
        self._index_of = {
            device.local_index: device.index for devices in workers.values() for device in devices
        }

    def numbers(self) -> dict[str, list[int]]:
        """Returns worker -> the numbers of its devices on the node."""
        return {
            name: [device.local_index for device in devices]
            for name, devices in self._workers.items()
        }

    def shares(self, before: MeterReply, after: MeterReply) -> dict[int, float]:
        """Returns device index -> share of the time between two readings in which it was in use."""
        lasted_s = max(after.clock_s - before.clock_s, 1e-9)
        both = before.used_s.keys() & after.used_s.keys()
        # A worker of several threads may use more processor time than its devices, which are cores.
        return {
            self._index_of[number]: min(
                (after.used_s[number] - before.used_s[number]) / lasted_s, 1.0
            )
            for number in both
        }
