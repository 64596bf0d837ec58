"""The lead's part of placement: asks the policy at a step's boundary, sleeps and wakes replicas, writes it all down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gcore_core.controllers.measuring import idle_share
from gcore_core.placement import journal
from gcore_core.placement.devices import Cell, Decision, Device, Need, Window
from gcore_core.placement.measured import Outcome, Requests
from gcore_core.processes.insist import insist
from gcore_core.processes.messages import Nothing, SleepRequest, WakeReply
from gcore_core.processes.service import Peer

if TYPE_CHECKING:
    from gcore_core.controllers.context import ControllerContext

MOVE_DEADLINE_S = 600.0
POLICY = "rollout"
_OUTCOMES = 64  # that a policy sees


class PlacementFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What the lead tells a placement policy. devices: index, kind, node. needs: kind, followed role, slots of a
    replica. engines: generator role -> device indexes of each of its replicas. sleeps: roles whose backend can.
    needed: groups that a step must keep. directory: the run's, for the journal; empty: none is kept.
    """

    devices: list[tuple[int, str, str]]
    slots: dict[str, int]
    needs: dict[str, tuple[str, str, int]]
    engines: dict[str, list[list[int]]]
    sleeps: list[str]
    needed: int = 0
    directory: str = ""


class Awake(msgspec.Struct, frozen=True):
    """Generator role -> its replicas that are awake. in_turns: they are so one role after the other: every cell serves
    the policy until all its records are there, then judges."""

    replicas: dict[str, list[int]]
    in_turns: bool


class Mover:
    def __init__(self, context: ControllerContext, peers: Mapping[str, Sequence[Peer]]) -> None:
        assert context.facts.placement is not None and context.placement is not None
        self._facts, self._policy = context.facts.placement, context.placement
        self._peers = peers
        self._devices = {i: Device(index=i, kind=kind, node=node) for i, kind, node in self._facts.devices}
        self._asleep: dict[str, set[int]] = {role: set() for role in peers}
        self._decision: Decision | None = None
        self._before: Mapping[str, Any] = context.facts.state.get("placement", {})
        self._outcomes: list[Outcome] = []
        self._step = self._moved = 0
        self._switch_s: float | None = None
        self._last_switch_s = 0.0
        self._wanted: dict[str, list[int]] = {role: list(range(len(own))) for role, own in peers.items()}
        self._release_before = 0

    async def decide(self, step: int, release_before: int, measured: Mapping[str, Requests], took_s: float) -> Awake:
        """Tells the policy what the last rollout was; has awake in the next one whom it names."""
        if self._decision is not None and measured:
            self._look_back(measured, took_s)
        began_s = time.perf_counter()
        decision = self._policy.revise(
            None if self._decision is None else self._decision.partition, self._window(step, measured, took_s)
        )
        self._write(journal.decided(step, decision, time.perf_counter() - began_s))
        self._step, self._release_before, self._decision = step, release_before, decision
        self._wanted = {role: self._ranks(role, decision.partition.cells[role]) for role in self._peers}
        in_turns = decision.mode == "colocated"
        await self._arrange({**self._wanted, **({r: [] for r in self._peers if r != POLICY} if in_turns else {})})
        return Awake(self._wanted, in_turns)

    async def turn(self, judging: bool) -> None:
        """Gives the cells to the judges, or back to the policy."""
        await self._arrange({r: own if (r != POLICY) == judging else [] for r, own in self._wanted.items()})

    def _ranks(self, role: str, cells: Sequence[Cell]) -> list[int]:
        """The replicas of a role that lie in the cells."""
        taken = {device.index for cell in cells for device in cell.devices}
        return [i for i, own in enumerate(self._facts.engines[role]) if taken.issuperset(own)]

    async def _arrange(self, awake: Mapping[str, Sequence[int]]) -> None:
        """Those that sleep give their memory back before others take it."""
        sleep, wake = [], []
        for role, peers in self._peers.items():
            asleep = set(range(len(peers))) - set(awake[role])
            sleep += [(role, i) for i in sorted(asleep - self._asleep[role])]
            wake += [(role, i) for i in sorted(self._asleep[role] - asleep)]
            self._asleep[role] = asleep
        can = set(self._facts.sleeps)
        began_s = asyncio.get_running_loop().time()
        request = SleepRequest(self._release_before)
        await asyncio.gather(
            *(insist(self._peers[r][i], "sleep", request, Nothing, MOVE_DEADLINE_S) for r, i in sleep if r in can)
        )
        await asyncio.gather(
            *(insist(self._peers[r][i], "wake", Nothing(), WakeReply, MOVE_DEADLINE_S) for r, i in wake if r in can)
        )
        self._moved = len(wake)
        self._last_switch_s = asyncio.get_running_loop().time() - began_s if sleep or wake else 0.0
        if wake and can:
            self._switch_s = self._last_switch_s

    def _window(self, step: int, measured: Mapping[str, Requests], took_s: float) -> Window:
        facts, idle = self._facts, self._idle(measured, took_s)
        return Window(
            devices=tuple(self._devices.values()),
            slots=facts.slots,
            needs={role: Need(kind=kind, follows=follows, size=n) for role, (kind, follows, n) in facts.needs.items()},
            step=step,
            needed=facts.needed,
            requests=measured,
            busy={role: 1 - share for role, share in idle.items()},
            switch_s=self._switch_s,
            outcomes=tuple(self._outcomes[-_OUTCOMES:]),
            state=self.state(),
        )

    def state(self) -> dict[str, Any]:
        return dict(self._before if self._decision is None else self._decision.state)

    def _idle(self, measured: Mapping[str, Requests], took_s: float) -> dict[str, float]:
        return {role: idle_share(found, self._wanted[role], took_s) for role, found in measured.items()}

    def _look_back(self, measured: Mapping[str, Requests], took_s: float) -> None:
        """What the latest decision came to."""
        assert self._decision is not None
        chosen, work = self._decision.chosen, float(sum(found.actions.sum() for found in measured.values()))
        predicted_s = self._decision.predicted_s.get(chosen)
        self._outcomes.append(
            Outcome(step=self._step, candidate=chosen, predicted_s=predicted_s, measured_s=took_s, work=work)
        )
        shares, cells = self._idle(measured, took_s), sum(map(len, self._wanted.values()))
        self._write(
            journal.Measured(
                step=self._step,
                measured_s=took_s,
                work=work,
                moved=self._moved,
                switch_s=self._last_switch_s,
                idle={f"{r} waits": s * len(self._wanted[r]) / cells for r, s in shares.items()},
            )
        )

    def _write(self, line: journal.Decided | journal.Measured) -> None:
        if self._facts.directory:
            journal.append(Path(self._facts.directory), line)
