"""The contract of an observer.

It takes every report that a run may give, in the order in which one gives them, also of a run that
fails, goes back or is resumed; and it leaves what it is told and the files of the run as they are.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from gcore_core.contract import run_files
from gcore_core.contract.observer import Observer, ObserverContext
from gcore_core.contract.records import RunFacts, StepReport, WorkerFailure
from gcore_testing.contracts.base import Contract

NAME = "observed"
#: What the metrics of a report may be, too. A metrics file has null for the first two.
_ODD = {"odd/nan": math.nan, "odd/infinite": math.inf, "odd/large": 1e300, "odd/integer": 3.0}
_TOLD = [name for name in vars(Observer) if not name.startswith("_")]


class ObserverContract(Contract):
    """To test an observer, override ``provider`` and ``config``, or the method ``made``."""

    kind: ClassVar[str] = "observer"

    def made(self, context: ObserverContext) -> Observer:
        """Makes the tested observer."""
        observer: Observer = self.build(context)
        return observer

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        """Gives the directory of a run that has evaluated its step 2."""
        return run_directory(tmp_path / "run")

    @pytest.fixture
    def observer(self, directory: Path) -> Observer:
        return self.made(ObserverContext(name=NAME, directory=str(directory)))

    def test_it_can_be_told_everything(self, observer: Observer) -> None:
        for name in _TOLD:
            method = getattr(observer, name, None)
            assert callable(method), f"it has no method {name}"
            assert not inspect.iscoroutinefunction(method), f"{name} is async; nobody awaits it"
            _, *expected = inspect.signature(getattr(Observer, name)).parameters
            inspect.signature(method).bind(*expected)

    def test_a_whole_run_is_taken(self, observer: Observer, directory: Path) -> None:
        """With metrics that are no numbers, and with names that come and go."""
        observer.run_start(run_facts(directory))
        observer.step_end(report(0, evaluation={"greedy/exact": 0.25}))
        for step in (1, 2, 3):
            observer.step_end(report(step, {**_ODD, f"only/{step}": 1.0}))
            observer.weights_published(step)
        observer.run_end("")

    def test_a_run_that_goes_back_to_a_checkpoint_is_taken(
        self, observer: Observer, directory: Path
    ) -> None:
        """Its steps come again, the one that it goes on from perhaps without metrics."""
        observer.run_start(run_facts(directory))
        for step in (1, 2, 3):
            observer.step_end(report(step))
        observer.run_start(run_facts(directory, resumed_from=1))
        observer.step_end(report(1, evaluation={"greedy/a": 0.5}))
        for step in (2, 3, 4):
            observer.step_end(report(step))
        observer.run_end("")

    def test_a_resumed_run_is_taken_by_another_process(
        self, observer: Observer, directory: Path
    ) -> None:
        observer.run_start(run_facts(directory))
        observer.step_end(report(1))
        observer.run_end("stopped by a signal")
        after = self.made(ObserverContext(name=NAME, directory=str(directory)))
        after.run_start(run_facts(directory, resumed_from=1))
        after.step_end(report(2))
        after.run_end("")

    def test_a_run_that_fails_is_taken(self, observer: Observer, directory: Path) -> None:
        observer.run_start(run_facts(directory))
        observer.worker_failed(WorkerFailure(role="rollout", rank=1, reason="lost"))
        observer.worker_failed(WorkerFailure(role="policy", rank=0, reason="lost"))
        observer.run_end("policy.0: ended with signal SIGKILL")

    def test_a_checkpoint_that_was_removed_meanwhile_is_taken(
        self, observer: Observer, directory: Path
    ) -> None:
        observer.run_start(run_facts(directory))
        observer.checkpoint_saved(1, str(directory / "checkpoints" / "step-000001"))
        observer.step_end(report(2))
        observer.run_end("")

    def test_arguments_and_the_files_of_the_run_stay_as_they_are(
        self, observer: Observer, directory: Path
    ) -> None:
        """An observer may add files of its own."""
        facts = run_facts(directory)
        step = report(2)
        before = msgspec.json.encode([facts, step]), contents(directory)
        observer.run_start(facts)
        observer.step_end(step)
        observer.run_end("")
        after = contents(directory)
        assert msgspec.json.encode([facts, step]) == before[0], "an argument was changed"
        assert {name: after.get(name) for name in before[1]} == before[1]


def run_directory(directory: Path) -> Path:
    """Makes the directory of a run as it is after two steps, the second of which was evaluated."""
    (directory / run_files.SAMPLES).mkdir(parents=True)
    (directory / run_files.LOGS).mkdir()
    (directory / run_files.CONFIG).write_text("run: {steps: 4}\n")
    rows = [
        {"step": n, "version": n, "time_unix_s": 0.0, "metrics": {"reward": 0.5}} for n in (1, 2)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / run_files.METRICS).write_text(text)
    answer: dict[str, Any] = {"prompt": "1+1=", "text": "2", "mode": "greedy", "status": "finished"}
    messages = [{"role": "user", "content": "2+2="}]
    answers = [answer | {"rewards": {"exact": 1.0}}, answer | {"prompt": messages, "rewards": {}}]
    text = "".join(json.dumps(row) + "\n" for row in answers)
    run_files.samples_path(directory, 2).write_text(text)
    return directory


def run_facts(directory: Path, resumed_from: int = 0) -> RunFacts:
    """Returns what a run says of itself when it starts."""
    config = {
        "run": {"name": "tested", "steps": 4, "dir": None},
        "rewards": {"exact": {"weight": 1.0}},
    }
    return RunFacts(
        name="tested", directory=str(directory), steps=4, config=config, resumed_from=resumed_from
    )


def report(
    step: int,
    further: Mapping[str, float] | None = None,
    evaluation: dict[str, float] | None = None,
) -> StepReport:
    """Returns the report of a step.

    further: metrics beside the usual ones.
    evaluation: of a report that brings an evaluation alone; without it step 2 has both.
    """
    if evaluation is not None:
        return StepReport(step=step, version=step, metrics={}, evaluation=evaluation)
    metrics = {"reward": 0.1 * step, "loss": -0.5, "seconds/step": 1.5, **(further or {})}
    evaluated = {"greedy/exact": 0.5} if step == 2 else {}
    return StepReport(step=step, version=step, metrics=metrics, evaluation=evaluated)


def contents(directory: Path) -> dict[str, bytes]:
    """Returns name -> content of every file in a directory."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}
