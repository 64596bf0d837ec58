"""The lead's part of placement: asks the policy at a step's boundary, has it carried out, writes it
all down.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract import run_files
from gcore_core.contract.job_settings import ROLLOUT
from gcore_core.contract.measurements import Outcome, Profile, Requests
from gcore_core.contract.placement import Cell, Decision, Rescues, Window
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placement import journal
from gcore_core.controllers.placement.measurements import (
    filled_share,
    idle_share,
    most_at_once,
    running_s,
)
from gcore_core.controllers.placement.sleepers import Replica, Sleepers
from gcore_core.runtime.placement_decisions import ask_policy, check_decision

LOOKS = 5  # at judges, one to three seconds apart
_OUTCOMES = 64  # that a policy sees


class Awake(msgspec.Struct, frozen=True):
    """Who is awake in a rollout: a value, replaced by a newer one when the lead has decided anew.

    version: counts the decisions of a run; 0 before the first.
    replicas: generator role -> its replicas that are awake.
    in_turns: they are so one role after the other: every cell serves the policy until all its
        records are there, then judges.
    """

    version: int
    replicas: dict[str, list[int]]
    in_turns: bool

    def judges(self) -> dict[str, list[int]]:
        """The replicas of the roles that rewards ask."""
        return {role: own for role, own in self.replicas.items() if role != ROLLOUT}


@dataclass(frozen=True, kw_only=True)
class Last:
    """The step that is over: its requests by role, and what its stages took. monitoring_s: of
    telling and hearing.
    """

    measured: Mapping[str, Requests] = field(default_factory=dict)
    rollout_s: float = 0.0
    training_s: float = 0.0
    pushing_s: float = 0.0
    monitoring_s: float = 0.0


class Mover:
    def __init__(
        self, context: ControllerContext, roles: Mapping[str, Sequence[int]], sleepers: Sleepers
    ) -> None:
        """roles: that move, and their replicas."""
        assert context.facts.placement is not None and context.placement is not None
        self._facts, self._policy, self._sleepers = (
            context.facts.placement,
            context.placement,
            sleepers,
        )
        self._engines = {
            role: {index for replica in replicas for index in replica}
            for role, replicas in self._facts.engines.items()
        }
        self._devices = {device.index: device for device in self._facts.devices}
        self._decision: Decision | None = None
        saved = context.facts.state.get("placement", {})
        self._saved_state: Mapping[str, Any] = saved.get("policy", {})
        self._outcomes = msgspec.convert(saved.get("outcomes", []), list[Outcome])
        self._step = 0
        self._switch_s: float | None = None
        self._boundary_s = self._turns_s = (
            0.0  # spent on changing roles, at the step's start and within it
        )
        self._profiles = msgspec.convert(saved.get("profiles", {}), dict[str, Profile])
        self._most_at_once = msgspec.convert(saved.get("most_at_once", {}), dict[str, int])
        self.metrics: dict[str, float] = {}
        self._wanted = {role: list(own) for role, own in roles.items()}
        self._served: dict[str, list[int]] = {}  # awake at any time of the rollout
        self._looks = 0
        self._version = 0  # of who is awake

    async def decide(self, step: int, release_before: int, last: Last) -> Awake:
        """Tells the policy what the last step was; has awake in the next one whom it names."""
        began_s = time.perf_counter()
        latest = self._decision
        was_measured = latest is not None and bool(last.measured)
        # What the latest decision came to is part of what the policy sees.
        if latest is not None and was_measured:
            self._remember(latest, last)
        self._learn(last)
        partition = None if latest is None else latest.partition
        window = self._window(step, last)
        decision = ask_policy(self._policy, self._facts.provider, partition, window, self._engines)
        decided_s = time.perf_counter() - began_s
        # Before anything that it reads is set for the new step: who served, moves, seconds.
        if was_measured:
            self._look_back(last, last.monitoring_s + decided_s)
        self._write(journal.decided(step, decision, decided_s))
        self._sleepers.lost = await self._sleepers.gone(self._sleepers.lost)
        self._step = step
        self._decision = self._rescued(step, decision)
        self._sleepers.moved = 0
        self._looks = 0
        self._turns_s = 0.0
        self._served = {}
        self._boundary_s = (
            await self._carry_out(self._decision, False, release_before) + self._sleepers.rest_s
        )
        if self._boundary_s and (self._sleepers.moved or self._sleepers.rest_s):
            self._switch_s = self._boundary_s
        return self._awake(self._decision)

    async def turn(self, judging: bool) -> None:
        """Gives the cells to the judges, or back to the policy."""
        took_s = await self._sleepers.arrange(self._in_turn(judging))
        self._turns_s, self._switch_s = self._turns_s + took_s, took_s

    async def rescue(self) -> Awake | None:
        """All is drawn and not all is judged: helps a judge of which nobody has answered ``LOOKS``
        times in a row.
        """
        judges = {role: own for role, own in self._wanted.items() if role != ROLLOUT}
        gone = await self._sleepers.gone([(role, i) for role, own in judges.items() for i in own])
        self._looks = self._looks + 1 if _starving(judges, gone) else 0
        before = self._decision
        if before is None or self._looks < LOOKS:
            return None
        everybody = [
            (role, i) for role, own in self._facts.engines.items() for i in range(len(own))
        ]
        self._looks, self._sleepers.lost = 0, await self._sleepers.gone(everybody)
        self._decision = self._rescued(self._step, before)
        if self._decision is before:
            return None
        self._turns_s += await self._carry_out(self._decision, True)
        return self._awake(self._decision)

    def _awake(self, decision: Decision) -> Awake:
        """What was just carried out."""
        self._version += 1
        return Awake(self._version, self._wanted, decision.mode == "colocated")

    def _rescued(self, step: int, decision: Decision) -> Decision:
        """What takes its place where a judge has nobody left and the policy knows help; else the
        decision itself.
        """
        lost, engines = self._sleepers.lost, self._facts.engines
        role = _starving(
            {r: self._ranks(r, decision.partition.cells[r]) for r in self._wanted if r != ROLLOUT},
            lost,
        )
        if not role or not isinstance(self._policy, Rescues):
            return decision
        told = {
            r: [index for own, i in sorted(lost) if own == r for index in engines[r][i]]
            for r in self._wanted
        }
        window = replace(self._window(step, Last()), starving=role, lost=told)
        found = self._policy.rescue(decision.partition, window)
        if found is None:
            return decision
        check_decision(found, self._facts.provider, window, self._engines)
        found = replace(
            found, state=decision.state, seen={**found.seen, "starving": role, "lost": told}
        )
        self._write(journal.decided(step, found, rescued=role))
        return found

    async def _carry_out(self, decision: Decision, judging: bool, release_before: int = 0) -> float:
        """Has awake whom the decision names, but for those that are lost."""
        self._wanted = {
            role: [i for i in own if (role, i) not in self._sleepers.lost] or own
            for role, own in (
                (role, self._ranks(role, decision.partition.cells[role])) for role in self._wanted
            )
        }
        for role, own in self._wanted.items():
            self._served[role] = sorted({*own, *self._served.get(role, ())})
        awake = self._in_turn(judging) if decision.mode == "colocated" else self._wanted
        return await self._sleepers.arrange(awake, release_before)

    def _in_turn(self, judging: bool) -> dict[str, list[int]]:
        return {
            role: own if (role != ROLLOUT) == judging else [] for role, own in self._wanted.items()
        }

    def _ranks(self, role: str, cells: Sequence[Cell]) -> list[int]:
        """The replicas of a role that lie in the cells."""
        taken = {device.index for cell in cells for device in cell.devices}
        return [i for i, own in enumerate(self._facts.engines[role]) if taken.issuperset(own)]

    def _learn(self, last: Last) -> None:
        """Fits the engines' profiles to the latest rollout, and how much a replica ran at once."""
        for role, requests in last.measured.items():
            self._profiles[role] = Profile.fit(requests, self._profiles.get(role, Profile()))
            most = most_at_once(requests, self._wanted[role])
            self._most_at_once[role] = max(most, self._most_at_once.get(role, 1))

    def _window(self, step: int, last: Last) -> Window:
        """What the policy sees, of what was learned so far."""
        facts, measured = self._facts, last.measured
        idle = {
            role: idle_share(requests, self._wanted[role], last.rollout_s)
            for role, requests in measured.items()
        }
        return Window(
            devices=tuple(self._devices.values()),
            slots=facts.slots,
            needs=facts.needs,
            step=step,
            needed=facts.needed,
            requests=measured,
            profiles=dict(self._profiles),
            busy={role: 1 - share for role, share in idle.items()},
            filled=self._filled(last),
            switch_s=self._switch_s,
            outcomes=tuple(self._outcomes[-_OUTCOMES:]),
            state=self.state(),
        )

    def _filled(self, last: Last) -> dict[str, float]:
        """Role -> share of its places that were taken in the rollout; see ``Window.filled``."""
        shares = {}
        for role, requests in last.measured.items():
            places = min(self._most_at_once[role], self._profiles[role].max_running)
            shares[role] = filled_share(requests, self._wanted[role], last.rollout_s, places)
        return shares

    def state(self) -> dict[str, Any]:
        return dict(self._saved_state if self._decision is None else self._decision.state)

    def learned(self) -> dict[str, Any]:
        """What a resumed run goes on with: the policy's own, and what it was told of steps; plain
        values.
        """
        told = {
            "policy": self.state(),
            "outcomes": self._outcomes,
            "profiles": self._profiles,
            "most_at_once": self._most_at_once,
        }
        return dict(msgspec.to_builtins(told, enc_hook=float))  # a policy's numbers may be numpy's

    def _remember(self, decision: Decision, last: Last) -> None:
        """What the latest decision came to, for the policy."""
        work = float(sum(found.actions.sum() for found in last.measured.values()))
        chosen, expected_s = decision.chosen, decision.predicted_s.get(decision.chosen)
        told = Outcome(
            step=self._step,
            candidate=chosen,
            predicted_s=expected_s,
            measured_s=last.rollout_s,
            work=work,
        )
        self._outcomes = [*self._outcomes[1 - _OUTCOMES :], told]

    def _look_back(self, last: Last, monitoring_s: float) -> None:
        """What the latest decision came to, for who reads the journal and the metrics."""
        served: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for role, replicas in self._served.items():
            for replica in replicas:
                served[self._facts.engines[role][replica][0]].append((role, replica))
        ran, rollout_s = {}, last.rollout_s - self._turns_s
        waited = dict[int, float]()
        for device, own in sorted(served.items()):
            ran[device] = {
                role: running_s([(last.measured[role], replica)]) for role, replica in own
            }
            waited[device] = max(
                rollout_s - running_s([(last.measured[role], replica) for role, replica in own]),
                0.0,
            )
        told, switch_s, moved = (
            self._outcomes[-1],
            self._boundary_s + self._turns_s,
            self._sleepers.moved,
        )
        spent = {
            "training_s": last.training_s,
            "pushing_s": last.pushing_s,
            "monitoring_s": monitoring_s,
        }
        spent |= {"measured_s": last.rollout_s, "switch_s": switch_s, "turns_s": self._turns_s}
        self._write(
            run_files.Measured(
                step=self._step, work=told.work, moved=moved, ran=ran, waited=waited, **spent
            )
        )
        idle_s = sum(waited.values()) / max(len(waited), 1) + self._turns_s
        self.metrics = {
            "placement/idle_share": idle_s / max(last.rollout_s, 1e-9),
            "placement/moved": float(moved),
            "placement/switch_s": switch_s,
            "placement/monitoring_s": monitoring_s,
        }
        if told.predicted_s is not None:
            self.metrics["placement/predicted_over_measured"] = told.predicted_s / max(
                last.rollout_s, 1e-9
            )

    def _write(self, line: run_files.Decided | run_files.Measured) -> None:
        if self._facts.directory:
            journal.append(Path(self._facts.directory), line)


def _starving(judges: Mapping[str, Sequence[int]], lost: set[Replica]) -> str:
    """One of which nobody is left."""
    return next(
        (role for role, own in judges.items() if lost.issuperset((role, i) for i in own)), ""
    )
