"""The lead's part of placement: asks the policy at a step's boundary, sleeps and wakes replicas, writes it all down."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gcore_core.controllers.measuring import idle_share, running_s
from gcore_core.placement import journal
from gcore_core.placement.devices import Cell, Decision, Device, Need, Window
from gcore_core.placement.measured import Outcome, Profile, Requests
from gcore_core.processes.insist import insist
from gcore_core.processes.messages import Nothing, SleepRequest, WakeReply
from gcore_core.processes.service import Peer

if TYPE_CHECKING:
    from gcore_core.controllers.context import ControllerContext

MOVE_DEADLINE_S = 600.0
POLICY = "rollout"
_OUTCOMES = 64  # that a policy sees


class PlacementFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What the lead tells a placement policy. devices: index, kind, node. needs: the fields of a ``Need``. engines:
    generator role -> device indexes of each of its replicas. sleeps: roles whose backend can. needed: groups that a
    step must keep. directory: the run's, for the journal; empty: none is kept.
    """

    devices: list[tuple[int, str, str]]
    slots: dict[str, int]
    needs: dict[str, tuple[str, str, int, int]]
    engines: dict[str, list[list[int]]]
    sleeps: list[str]
    needed: int = 0
    directory: str = ""


class Awake(msgspec.Struct, frozen=True):
    """Generator role -> its replicas that are awake. in_turns: they are so one role after the other: every cell serves
    the policy until all its records are there, then judges."""

    replicas: dict[str, list[int]]
    in_turns: bool


@dataclass(frozen=True, kw_only=True)
class Last:
    """The step that is over: its requests by role, and what its stages took. monitoring_s: of telling and hearing."""

    measured: Mapping[str, Requests] = field(default_factory=dict)
    rollout_s: float = 0.0
    training_s: float = 0.0
    pushing_s: float = 0.0
    monitoring_s: float = 0.0


class Mover:
    def __init__(self, context: ControllerContext, peers: Mapping[str, Sequence[Peer]]) -> None:
        assert context.facts.placement is not None and context.placement is not None
        self._facts, self._policy = context.facts.placement, context.placement
        self._peers = peers
        self._devices = {i: Device(index=i, kind=kind, node=node) for i, kind, node in self._facts.devices}
        self._asleep: dict[str, set[int]] = {role: set() for role in peers}
        self._decision: Decision | None = None
        saved = context.facts.state.get("placement", {})
        self._before: Mapping[str, Any] = saved.get("policy", {})
        self._outcomes = msgspec.convert(saved.get("outcomes", []), list[Outcome])
        self._step = self._moved = 0
        self._switch_s: float | None = None
        self._boundary_s = self._turns_s = 0.0  # spent on changing roles, at the step's start and within it
        self._profiles = msgspec.convert(saved.get("profiles", {}), dict[str, Profile])
        self.metrics: dict[str, float] = {}
        self._wanted: dict[str, list[int]] = {role: list(range(len(own))) for role, own in peers.items()}
        self._release_before = 0

    async def decide(self, step: int, release_before: int, last: Last) -> Awake:
        """Tells the policy what the last step was; has awake in the next one whom it names."""
        began_s = time.perf_counter()
        before = self._decision
        if before is not None and last.measured:
            self._remember(before, last)
        decision = self._policy.revise(None if before is None else before.partition, self._window(step, last))
        decided_s = time.perf_counter() - began_s
        if before is not None and last.measured:
            self._look_back(before, last, last.monitoring_s + decided_s)
        self._write(journal.decided(step, decision, decided_s))
        self._step, self._release_before, self._decision = step, release_before, decision
        self._wanted = {role: self._ranks(role, decision.partition.cells[role]) for role in self._peers}
        self._moved, self._turns_s = 0, 0.0
        in_turns = decision.mode == "colocated"
        awake = {**self._wanted, **({r: [] for r in self._peers if r != POLICY} if in_turns else {})}
        self._boundary_s = await self._arrange(awake)
        return Awake(self._wanted, in_turns)

    async def turn(self, judging: bool) -> None:
        """Gives the cells to the judges, or back to the policy."""
        awake = {r: own if (r != POLICY) == judging else [] for r, own in self._wanted.items()}
        self._turns_s += await self._arrange(awake)

    def _ranks(self, role: str, cells: Sequence[Cell]) -> list[int]:
        """The replicas of a role that lie in the cells."""
        taken = {device.index for cell in cells for device in cell.devices}
        return [i for i, own in enumerate(self._facts.engines[role]) if taken.issuperset(own)]

    async def _arrange(self, awake: Mapping[str, Sequence[int]]) -> float:
        """Those that sleep give their memory back before others take it. Returns the seconds that it took."""
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
        self._moved += len(wake)
        took_s = asyncio.get_running_loop().time() - began_s if sleep or wake else 0.0
        if wake and can:
            self._switch_s = took_s
        return took_s

    def _window(self, step: int, last: Last) -> Window:
        facts, measured = self._facts, last.measured
        idle = {role: idle_share(found, self._wanted[role], last.rollout_s) for role, found in measured.items()}
        for role, found in measured.items():
            self._profiles[role] = Profile.fit(found, self._profiles.get(role, Profile()))
        return Window(
            devices=tuple(self._devices.values()),
            slots=facts.slots,
            needs={role: Need(kind=k, follows=f, size=n, least=m) for role, (k, f, n, m) in facts.needs.items()},
            step=step,
            needed=facts.needed,
            requests=measured,
            profiles=dict(self._profiles),
            busy={role: 1 - share for role, share in idle.items()},
            switch_s=self._switch_s,
            outcomes=tuple(self._outcomes[-_OUTCOMES:]),
            state=self.state(),
        )

    def state(self) -> dict[str, Any]:
        return dict(self._before if self._decision is None else self._decision.state)

    def learned(self) -> dict[str, Any]:
        """What a resumed run goes on with: the policy's own, and what it was told of steps; plain values."""
        told = {"policy": self.state(), "outcomes": self._outcomes, "profiles": self._profiles}
        return dict(msgspec.to_builtins(told, enc_hook=float))  # a policy's numbers may be numpy's

    def _remember(self, decision: Decision, last: Last) -> None:
        """What the latest decision came to, for the policy."""
        work = float(sum(found.actions.sum() for found in last.measured.values()))
        told = Outcome(
            step=self._step,
            candidate=decision.chosen,
            predicted_s=decision.predicted_s.get(decision.chosen),
            measured_s=last.rollout_s,
            work=work,
        )
        self._outcomes = [*self._outcomes[1 - _OUTCOMES :], told]

    def _look_back(self, decision: Decision, last: Last, monitoring_s: float) -> None:
        """What the latest decision came to, for who reads the journal and the metrics."""
        devices, waited = self._devices_of(decision.mode, last)
        total_s = max(last.rollout_s * len(devices), 1e-9)
        idle = {cause: seconds / total_s for cause, seconds in waited.items()}
        if self._turns_s:
            idle["changing roles"] = self._turns_s * len(devices) / total_s
        told = self._outcomes[-1]
        self._write(
            journal.Measured(
                step=self._step,
                measured_s=last.rollout_s,
                work=told.work,
                moved=self._moved,
                switch_s=self._boundary_s + self._turns_s,
                idle=idle,
                devices=devices,
                monitoring_s=monitoring_s,
            )
        )
        self.metrics = {
            "placement/idle_share": sum(idle.values()),
            "placement/moved": float(self._moved),
            "placement/switch_s": self._boundary_s + self._turns_s,
            "placement/monitoring_s": monitoring_s,
        }
        if told.predicted_s is not None:
            self.metrics["placement/predicted_over_measured"] = told.predicted_s / max(last.rollout_s, 1e-9)

    def _devices_of(self, mode: str, last: Last) -> tuple[dict[int, dict[str, float]], dict[str, float]]:
        """Of each cell, by its first device, the seconds by cause; and the seconds that cells waited, by role."""
        cells: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for role, replicas in self._wanted.items():
            for replica in replicas:
                cells[self._facts.engines[role][replica][0]].append((role, replica))
        found: dict[int, dict[str, float]] = {}
        waited: dict[str, float] = defaultdict(float)
        for device, served in sorted(cells.items()):
            spent = {f"{role} runs": running_s([(last.measured[role], replica)]) for role, replica in served}
            ran_s = running_s([(last.measured[role], replica) for role, replica in served])
            cause = f"{served[0][0]} waits" if mode == "split" else "all wait"
            spent[cause] = max(last.rollout_s - ran_s - self._turns_s, 0.0)
            waited[cause] += spent[cause]
            stages = {"training": last.training_s, "pushing": last.pushing_s}
            found[device] = spent | stages | {"changing roles": self._boundary_s + self._turns_s}
        return found, dict(waited)

    def _write(self, line: journal.Decided | journal.Measured) -> None:
        if self._facts.directory:
            journal.append(Path(self._facts.directory), line)
