"""Asks the placement policy, before each step, which replicas are awake; only the lead does.

The decision is then carried out. The decision, and later its outcome, go to the journal. The
policy is told what was noted of the rollout before, and measures it; its account goes to the
journal too. What the lead does for step n:

    before the rollout   decide       asks the policy; replicas wake and go to sleep
    in the rollout       begin_phase  in mode "colocated": gives the cells to the judges, and back
                         rescue       at each look of ``Producer``: is a judge without any replica?
    before step n + 1    decide       first writes what the decision for step n came to

A decision speaks of cells, and this module of replicas, by their numbers. For example, the policy
and a judge each have replicas 0 to 3, of one device each, and replica i of both is on device i. A
decision that gives the policy the cells of devices 0 to 2, and the judge that of device 3, makes

    {"rollout": [0, 1, 2], "judge": [3]}

the *serving* replicas: the judge's 0 to 2 sleep, and so does the policy's 3.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract import run_files
from gcore_core.contract.job_settings import ROLLOUT
from gcore_core.contract.measurements import Account, Outcome, Requests, Rollout
from gcore_core.contract.placement import Cell, Decision, Partition, Rescues, Window
from gcore_core.contract.run_files import Decided
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placement.sleepers import Replica, Sleepers
from gcore_core.runtime.journal import Journal
from gcore_core.runtime.placement_decisions import ask_policy, check_decision, prepare_policy

log = logging.getLogger(__name__)
# How many looks in a row must find a judge without a replica that answers, before the judge is
# helped. ``Producer`` looks every second, in a long rollout after another twentieth of its time.
# Where a replica does not answer, the look itself takes up to ``sleepers.ANSWER_S``.
LOOKS = 5
_OUTCOMES = 64  # the latest outcomes that are kept and that a policy sees


class Awake(msgspec.Struct, frozen=True):
    """Says which replicas are awake in a rollout. A new decision makes a new value.

    version: counts what has changed it: decisions and rescues; 0 before the first.
    replicas: generator role -> the numbers of its replicas that are awake.
    in_turns: whether roles share cells one after the other: every cell serves the policy until all
        records of the round are there, then it serves the judges.
    """

    version: int
    replicas: dict[str, list[int]]
    in_turns: bool

    def judges(self) -> dict[str, list[int]]:
        """Returns role -> its replicas that are awake, for roles that rewards or episodes ask."""
        return {role: numbers for role, numbers in self.replicas.items() if role != ROLLOUT}


@dataclass(frozen=True, kw_only=True)
class Last:
    """Holds what was noted of the step that is over.

    Where ``requests`` is empty, nothing was, as before the first step. The seconds mean nothing
    then. They are the lead's own.

    requests: role -> its finished requests, of all shards.
    rollout_s: seconds of the rollout.
    training_s: seconds from the end of the rollout to the next decision, less those in which
        generators were put to sleep.
    pushing_s: seconds from the decision to the start of the rollout.
    monitoring_s: seconds of work for sending the requests to the lead and reading them there.
    used: device index -> share of the rollout in which it was in use; empty where nobody asks.
    """

    requests: Mapping[str, Requests] = field(default_factory=dict)
    rollout_s: float = 0.0
    training_s: float = 0.0
    pushing_s: float = 0.0
    monitoring_s: float = 0.0
    used: Mapping[int, float] = field(default_factory=dict)


class PlacementLead:
    """Asks the placement policy and carries out its decisions; only the lead has one.

    ``decide`` runs before each step: it asks the policy, carries the decision out and writes to the
    journal what the decision before it came to. Within a rollout, ``begin_phase`` passes cells
    between the policy and the judges, and ``rescue`` helps a judge whose replicas do not answer.
    Both change who is awake without asking the policy for a new step.

    metrics: of the latest decision whose rollout is over.
    """

    def __init__(
        self, context: ControllerContext, roles: Mapping[str, Sequence[int]], sleepers: Sleepers
    ) -> None:
        """Makes it with nothing decided yet, or with the state of the run that is resumed.

        roles: generator role that moves -> the numbers of all its replicas.
        """
        assert context.facts.placement is not None and context.placement is not None
        # What never changes. Engines: role -> the indexes of all its devices.
        self._facts = context.facts.placement
        self._policy = context.placement
        self._sleepers = sleepers
        self._engines = {
            role: {index for replica in replicas for index in replica}
            for role, replicas in self._facts.engines.items()
        }
        self._devices = {device.index: device for device in self._facts.devices}
        # What goes on from step to step, and in a resumed run.
        self._decision: Decision | None = None  # the latest; None before the first
        saved = context.facts.state.get("placement", {})
        self._saved_state: Mapping[str, Any] = saved.get("policy", {})
        self._outcomes = msgspec.convert(saved.get("outcomes", []), list[Outcome])
        self._step = 0  # the step of the latest decision
        # Seconds of the latest change of roles, as the policy sees them; None before the first.
        self._switch_s: float | None = None
        # Seconds spent on changes of roles for the latest decision: before the step, and within it.
        self._boundary_s = self._turns_s = 0.0
        self._saved_account = msgspec.convert(saved.get("account", {}), Account)
        self.metrics: dict[str, float] = {}
        # Who is awake, since the latest decision.
        # The replicas that the decision wants awake, less lost ones: role -> their numbers.
        self._serving = {role: list(numbers) for role, numbers in roles.items()}
        self._served: dict[str, list[int]] = {}  # likewise, at any time of the rollout
        self._failed_looks = 0  # in a row: a judge had no replica that answers
        self._version = 0  # of the latest ``Awake``
        directory = self._facts.directory
        self._journal = Journal(Path(directory) / run_files.PLACEMENT) if directory else None

    async def decide(self, step: int, release_before: int, last: Last) -> Awake:
        """Asks the policy about the next step, and wakes and puts to sleep accordingly.

        Raises PlacementError when the policy cannot place a role, ContractError for a decision that
        cannot be carried out.

        step: the step that begins with the decision.
        release_before: no record of earlier steps is needed; replicas that sleep are told so.
        last: what was noted of the step before; the policy sees its requests and its rollout.
        """
        if self._decision is None:  # nothing is timed yet, and models are being loaded
            prepare_policy(self._policy, self._facts.provider, self._make_window(step, last))
        began_s = time.perf_counter()
        # First: what the latest decision came to.
        latest = self._decision
        was_measured = latest is not None and bool(last.requests)
        # The order matters: the outcome of the latest decision is part of what the policy sees.
        if latest is not None and was_measured:
            self._note_outcome(latest, last)
        # Second: the policy is asked.
        partition = None if latest is None else latest.partition
        window = self._make_window(step, last)
        decision = ask_policy(self._policy, self._facts.provider, partition, window, self._engines)
        decided_s = time.perf_counter() - began_s
        # Third: both are written down.
        # This must precede the resets below: it reads which replicas served, how many moved and how
        # long that took. It must follow the policy's answer, whose seconds count as monitoring.
        if was_measured:
            self._record_outcome(last, decision.account, last.monitoring_s + decided_s)
        self._write(decided_line(step, decision, decided_s))
        # Fourth: the new decision is carried out.
        # Only lost replicas are asked whether they are back. That another one is lost is found by
        # ``rescue``, when a judge needs it: to ask all before each step would hold every step up.
        self._sleepers.lost = await self._sleepers.find_lost(self._sleepers.lost)
        self._step = step
        self._decision = self._replace_if_starving(step, decision)
        # It is counted for each decision, as is what follows.
        self._sleepers.moved = 0
        self._failed_looks = 0
        self._turns_s = 0.0
        self._served = {}
        arranged_s = await self._carry_out(self._decision, False, release_before)
        self._boundary_s = arranged_s + self._sleepers.sleep_s
        # The policy sees the seconds of a change only where there was one. Where nothing woke and
        # none slept in training, some replicas only went to sleep, or learned ``release_before``.
        if self._boundary_s and (self._sleepers.moved or self._sleepers.sleep_s):
            self._switch_s = self._boundary_s
        return self._make_awake(self._decision)

    async def begin_phase(self, judging: bool) -> None:
        """Gives the cells to the judges, or back to the policy."""
        took_s = await self._sleepers.arrange(self._replicas_of_phase(judging))
        self._turns_s += took_s
        self._switch_s = took_s

    async def rescue(self) -> Awake | None:
        """Helps a judge when none of its replicas answers ``LOOKS`` times in a row.

        It is called once for each look, while all records are drawn and not all are judged. Returns
        who is awake after the help; None when no help was needed or possible.
        """
        judges = {role: numbers for role, numbers in self._serving.items() if role != ROLLOUT}
        lost = await self._sleepers.find_lost(
            [(role, i) for role, numbers in judges.items() for i in numbers]
        )
        self._failed_looks = self._failed_looks + 1 if _find_starving(judges, lost) else 0
        before = self._decision
        if before is None or self._failed_looks < LOOKS:
            return None
        everybody = [
            (role, i) for role, numbers in self._facts.engines.items() for i in range(len(numbers))
        ]
        self._failed_looks = 0
        self._sleepers.lost = await self._sleepers.find_lost(everybody)
        self._decision = self._replace_if_starving(self._step, before)
        if self._decision is before:
            return None
        self._turns_s += await self._carry_out(self._decision, True)
        return self._make_awake(self._decision)

    def _make_awake(self, decision: Decision) -> Awake:
        """Makes the message that tells the shards of the decision that was just carried out."""
        self._version += 1
        return Awake(self._version, self._serving, decision.mode == "colocated")

    def _replace_if_starving(self, step: int, decision: Decision) -> Decision:
        """Returns the policy's replacement for a decision that leaves a judge without a replica.

        Returns the decision itself when every judge has a replica, or when the policy has no help.
        """
        lost = self._sleepers.lost
        engines = self._facts.engines
        judges = {
            role: self._replicas_in(role, decision.partition.cells[role])
            for role in self._serving
            if role != ROLLOUT
        }
        starving = _find_starving(judges, lost)
        if not starving or not isinstance(self._policy, Rescues):
            return decision
        # role -> the indexes of all devices of its lost replicas
        lost_devices: dict[str, list[int]] = {role: [] for role in self._serving}
        for role, replica in sorted(lost):
            if role in lost_devices:
                lost_devices[role] += engines[role][replica]
        # A rescue sees who is lost, and no requests: within a rollout none are noted yet.
        window = replace(self._make_window(step, Last()), starving=starving, lost=lost_devices)
        replacement = self._policy.rescue(decision.partition, window)
        if replacement is None:
            return decision
        check_decision(replacement, self._facts.provider, window, self._engines)
        replacement = replace(
            replacement,
            state=decision.state,
            account=decision.account,
            seen={**replacement.seen, "starving": starving, "lost": lost_devices},
        )
        self._write(decided_line(step, replacement, rescued=starving))
        return replacement

    async def _carry_out(self, decision: Decision, judging: bool, release_before: int = 0) -> float:
        """Wakes the replicas in the decision's cells, puts others to sleep; returns the seconds.

        Lost replicas are left out. A role that has only lost ones keeps them: they may be starting.

        judging: in mode "colocated", whether it is the judges' phase.
        release_before: as in ``decide``.
        """
        serving = {}
        for role in self._serving:
            numbers = self._replicas_in(role, decision.partition.cells[role])
            present = [i for i in numbers if (role, i) not in self._sleepers.lost]
            serving[role] = present or numbers
        self._serving = serving
        for role, numbers in self._serving.items():
            self._served[role] = sorted({*numbers, *self._served.get(role, ())})
        awake = self._replicas_of_phase(judging) if decision.mode == "colocated" else self._serving
        return await self._sleepers.arrange(awake, release_before)

    def _replicas_of_phase(self, judging: bool) -> dict[str, list[int]]:
        return {
            role: numbers if (role != ROLLOUT) == judging else []
            for role, numbers in self._serving.items()
        }

    def _replicas_in(self, role: str, cells: Sequence[Cell]) -> list[int]:
        """Returns the numbers of the role's replicas whose devices all lie in the cells."""
        device_indexes = {device.index for cell in cells for device in cell.devices}
        return [
            i
            for i, replica_devices in enumerate(self._facts.engines[role])
            if device_indexes.issuperset(replica_devices)
        ]

    def _make_window(self, step: int, last: Last) -> Window:
        """Collects what the policy sees: what was noted of the last step, and its own account."""
        facts = self._facts
        return Window(
            devices=tuple(self._devices.values()),
            slots=facts.slots,
            needs=facts.needs,
            step=step,
            needed=facts.needed,
            requests=last.requests,
            rollout=Rollout(
                seconds=last.rollout_s,
                turns_s=self._turns_s,
                engines=facts.engines,
                serving=dict(self._serving),
                served=dict(self._served),
                used=last.used,
            ),
            account=self._account,
            directory=facts.directory,
            switch_s=self._switch_s,
            outcomes=tuple(self._outcomes[-_OUTCOMES:]),
            state=self.state(),
            overlaps=facts.overlaps,
        )

    @property
    def _account(self) -> Account:
        """The account of the latest decision; before the first, that of the resumed run."""
        return self._saved_account if self._decision is None else self._decision.account

    def state(self) -> dict[str, Any]:
        """Returns the policy's own state, which it gets back at the next decision."""
        return dict(self._saved_state if self._decision is None else self._decision.state)

    def learned(self) -> dict[str, Any]:
        """Returns what a resumed run goes on with, as plain values.

        That is the policy's state, the outcomes, and what the policy has measured of engines.
        """
        account = self._account
        learned = {
            "policy": self.state(),
            "outcomes": self._outcomes,
            "account": {"engines": account.engines, "state": account.state},
        }
        return dict(
            msgspec.to_builtins(learned, enc_hook=float)
        )  # a policy's numbers may be numpy's

    def _note_outcome(self, decision: Decision, last: Last) -> None:
        """Adds the outcome of the latest decision to those that the policy sees.

        The journal's line of it is written later, by ``_record_outcome``.
        """
        work = float(sum(requests.actions.sum() for requests in last.requests.values()))
        candidate = decision.chosen
        expected_s = decision.predicted_s.get(decision.chosen)
        outcome = Outcome(
            step=self._step,
            candidate=candidate,
            predicted_s=expected_s,
            measured_s=last.rollout_s,
            work=work,
        )
        # The latest, with this one.
        self._outcomes = [*self._outcomes[1 - _OUTCOMES :], outcome]

    def _record_outcome(self, last: Last, account: Account, monitoring_s: float) -> None:
        """Writes the outcome of the latest decision to the journal and into the metrics.

        account: what the policy has measured of the rollout that is over.
        monitoring_s: seconds of gathering what the policy sees, and of its answer.
        """
        switch_s = self._boundary_s + self._turns_s
        self._write(
            run_files.Measured(
                step=self._step,
                measured_s=last.rollout_s,
                work=self._outcomes[-1].work,
                moved=self._sleepers.moved,
                switch_s=switch_s,
                turns_s=self._turns_s,
                training_s=last.training_s,
                pushing_s=last.pushing_s,
                ran={device: dict(seconds) for device, seconds in account.ran.items()},
                waited=dict(account.waited),
                monitoring_s=monitoring_s,
                engines=dict(account.engines),
            )
        )
        self.metrics = {
            "placement/moved": float(self._sleepers.moved),
            "placement/switch_s": switch_s,
            "placement/monitoring_s": monitoring_s,
            **{f"placement/{name}": value for name, value in account.metrics.items()},
        }
        predicted_s = self._outcomes[-1].predicted_s
        if predicted_s is not None:
            ratio = predicted_s / max(last.rollout_s, 1e-9)
            self.metrics["placement/predicted_over_measured"] = ratio

    def _write(self, line: run_files.Decided | run_files.Measured) -> None:
        if self._journal is not None:
            self._journal.append([line])


def _find_starving(judges: Mapping[str, Sequence[int]], lost: set[Replica]) -> str:
    """Returns the first judge whose replicas are all lost; "" without one."""
    return next(
        (role for role, numbers in judges.items() if lost.issuperset((role, i) for i in numbers)),
        "",
    )


def decided_line(step: int, decision: Decision, took_s: float = 0.0, rescued: str = "") -> Decided:
    """Returns the journal's line for a decision.

    step: the step that begins with the decision.
    decision: its ``state`` and ``seen`` must be plain values. Its ``account`` is of the rollout
        before, and goes to the line of what that came to.
    took_s: seconds that the decision took, including the summary of what the policy sees.
    rescued: the judge that the decision helps; "" for a decision at a step's boundary.
    """
    plain = {
        name: value
        for name, value in vars(decision).items()
        if name not in ("partition", "engines", "account")
    }
    engines = None if decision.engines is None else _device_indexes(decision.engines)
    plain |= {"cells": _device_indexes(decision.partition), "engines": engines, "rescued": rescued}
    return Decided(step=step, took_s=took_s, **plain)


def _device_indexes(partition: Partition) -> dict[str, list[list[int]]]:
    return {
        role: [[device.index for device in cell.devices] for cell in cells]
        for role, cells in partition.cells.items()
    }
