"""The contract of a step program.

Every ordinal gets one verdict, every push reaches every replica, and nothing is lost.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.controller import Controller
from gcore_core.contract.providers import ControllerProvider
from gcore_core.contract.records import FILTERED, QUARANTINED, TRAINED
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.runtime import messages as m
from gcore_core.wire.in_process import Weather
from gcore_testing.contracts.base import Contract
from gcore_testing.simulation import (
    TEACHER,
    Outcome,
    SimulatedJob,
    Storm,
    run_virtual,
    simulate,
)

#: What a shard asks of a worker -> the word for it in ``calls``.
_VERBS = {
    m.PREPARE_RANKS.of_relay.name: "prepare",
    m.TRAIN_RANKS.of_relay.name: "train",
    m.EVALUATE_RANKS.of_relay.name: "evaluate",
    m.PUSH_BEGIN.name: "push",
    m.PUSH_PULL.name: "push",
    m.SAVE_PRETRAINED.name: "save",
    m.SAVE_STATE.name: "save",
    m.FINISH_SAVE.name: "save",
    m.GENERATE.name: "generate",
    m.SLEEP.name: "sleep",
    m.TRAINER_SLEEP.name: "sleep",
    m.WAKE.name: "sleep",
    m.ANNOTATE.name: "annotate",
    m.SCORE.name: "score",
}
#: Role of the simulated job -> the word for its kind in ``calls``.
_KINDS = {
    "policy": "trainer",
    "rollout": "generator",
    TEACHER: "annotator",
    "scorer": "scorer",
}


class _Observed:
    """Records which calls a controller makes to each kind of worker, in weather without faults."""

    def __init__(self) -> None:
        self.calls: dict[str, set[str]] = defaultdict(set)

    async def travel(self, source: str, target: str, method: str) -> int:
        role = target.rpartition(".")[0].rstrip("0123456789")
        if source.startswith("controller.") and role in _KINDS and method in _VERBS:
            self.calls[_KINDS[role]].add(_VERBS[method])
        return 1


class ControllerContract(Contract):
    """To test a step program, override ``provider``.

    The program runs in virtual time with the kit's fakes, in two shards.

    config: settings under which a step is small, such as ``{"prompts": 8}``.
    takes_stale: whether the objective of the simulated job takes records of older weights.
    resumes_exactly: the step after a checkpoint is the same bit for bit; else it has the same
        prompts, since a program that generates ahead draws anew what had not been trained on.
    """

    kind: ClassVar[str] = "controller"
    takes_stale: ClassVar[bool] = False
    resumes_exactly: ClassVar[bool] = True
    job: ClassVar[SimulatedJob] = SimulatedJob(shards=2, steps=3, annotators=1, checkpoint_every=1)

    def program(self, context: ControllerContext) -> Controller:
        program = self.build(context)
        assert isinstance(program, Controller), "it has no method `run`"
        return program

    def verbs(self, kind: str) -> frozenset[str]:
        """Returns what the program says that it calls on the roles of a kind."""
        description = self.description()
        assert isinstance(description, ControllerProvider)
        return description.calls.get(kind, frozenset())

    def run(self, store: Path, weather: Weather | None = None, **changes: Any) -> Outcome:
        """Simulates a whole run of the program.

        Without rewards where it has none scored, and without pushes where it calls none.
        """
        scorers = self.job.scorers if self.verbs("scorer") else 0
        pushes = "push" in self.verbs("generator")
        stale = self.takes_stale
        job = replace(self.job, takes_stale=stale, scorers=scorers, pushes=pushes, **changes)

        def made(_: SyncConfig, context: ControllerContext) -> Controller:
            return self.program(context)

        return run_virtual(simulate(job, store, weather, made))

    @pytest.fixture(params=["calm", "lossy"], scope="class")
    @classmethod
    def outcome(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Outcome:
        """Gives the outcome of a run in which some groups are filtered out; tests only read it.

        It is tried in calm weather, and where messages are lost, late and doubled.
        """
        contract = cls()
        weather = Storm(1) if request.param == "lossy" else None
        kept = "Varied" if contract.verbs("scorer") else "KeepAll"
        filter_factory = f"gcore_core.builtin.filters:{kept}"
        store = tmp_path_factory.mktemp("outcome") / "store"
        return contract.run(store, weather, filter=filter_factory, max_new_tokens=3)

    def test_every_step_is_reported_once(self, outcome: Outcome) -> None:
        steps = list(range(self.job.steps + 1))
        assert [report.step for report in outcome.reports] == steps
        assert [report.version for report in outcome.reports] == steps

    def test_every_version_is_published_in_its_turn(self, outcome: Outcome) -> None:
        versions = range(self.job.steps + 1) if "push" in self.verbs("generator") else ()
        assert _in_turn(outcome.published) == list(versions)

    def test_every_generator_confirms_every_push(self, outcome: Outcome) -> None:
        if "push" not in self.verbs("generator"):
            assert not any(outcome.versions.values()), "a push came to a generator"
            self.not_claimed("pushes (its description calls none)")
        expected = list(range(self.job.steps + 1))
        replicas = [f"rollout.{i}" for i in range(self.job.replicas)]
        assert {name: _in_turn(outcome.versions[name]) for name in replicas} == dict.fromkeys(
            replicas, expected
        )

    def test_no_ordinal_is_trained_on_twice(self, outcome: Outcome) -> None:
        steps = [sorted({key[0] for key in letters}) for letters in outcome.letters]
        trained = list(itertools.chain(*steps))
        assert sorted(set(trained)) == sorted(trained)

    def test_every_ordinal_has_one_verdict(self, outcome: Outcome) -> None:
        """There are as many verdicts as ordinals that the run has consumed.

        Ordinals with the verdict that they are trained on have been given to the trainer.
        """
        steps = outcome.reports[1:]
        for report, letters in zip(steps, outcome.letters, strict=True):
            trained = len({ordinal for ordinal, _ in letters})
            assert report.metrics.get(f"groups/{TRAINED}", 0) == trained
        verdicts = sum(
            report.metrics.get(f"groups/{verdict}", 0)
            for report in steps
            for verdict in (TRAINED, FILTERED, QUARANTINED)
        )
        assert verdicts == outcome.ledger["next_ordinal"]

    def test_groups_are_whole(self, outcome: Outcome) -> None:
        for letters in outcome.letters:
            samples = defaultdict(list)
            for ordinal, sample in sorted(letters):
                samples[ordinal].append(sample)
            assert all(indexes == list(range(self.job.samples)) for indexes in samples.values())

    def test_only_what_passed_the_filter_is_trained_on(self, outcome: Outcome) -> None:
        """Groups whose rewards are all equal do not teach; the others do, each in its turn."""
        if not self.verbs("scorer"):
            self.not_claimed("rewards (its description calls no scorer)")
        trained = {key[0] for letters in outcome.letters for key in letters}
        rewards = defaultdict(list)
        for (ordinal, _), value in outcome.scored.items():
            if ordinal < outcome.ledger["next_ordinal"]:
                rewards[ordinal].append(value)
        varied = {ordinal for ordinal, values in rewards.items() if np.ptp(values) > 0}
        assert len(varied) < len(rewards), "the simulated job filters nothing"
        assert trained == varied

    def test_a_resumed_run_goes_on_with_the_next_step(self, tmp_path: Path) -> None:
        whole = self.run(tmp_path / "store")
        (saved,) = (one for one in whole.checkpoints if one.step == 2)
        store = tmp_path / "store-step2"
        store.rename(tmp_path / "again-step2")
        resumed = self.run(tmp_path / "again", resumed=saved)
        assert [report.step for report in resumed.reports] == [2, 3]
        ordinals = [[sorted(letters) for letters in run.letters] for run in (whole, resumed)]
        assert ordinals[1] == ordinals[0][2:]
        if self.resumes_exactly:
            assert resumed.letters == whole.letters[2:]
            assert resumed.logits == whole.logits

    def test_it_ends_when_it_is_told_to_stop(self, tmp_path: Path) -> None:
        """It saves the state at the end of a step that was reported."""
        stopped = self.run(tmp_path / "store", steps=6, stop_after=2, checkpoint_every=0)
        steps = [report.step for report in stopped.reports]
        assert steps in ([0, 1, 2], [0, 1, 2, 3]), "it went on"
        assert [saved.step for saved in stopped.checkpoints] == steps[-1:]

    def test_it_calls_what_it_says(self, tmp_path: Path) -> None:
        """Calls about sleep are left out, because they depend on the devices."""
        description = self.description()
        assert isinstance(description, ControllerProvider)
        observer = _Observed()
        self.run(tmp_path / "store", observer)
        expected = {kind: set(verbs) - {"sleep"} for kind, verbs in description.calls.items()}
        assert dict(observer.calls) == expected


def _in_turn(versions: list[int]) -> list[int]:
    """Returns the versions in order, each once even if its push was repeated."""
    return [version for version, _ in itertools.groupby(versions)]
