"""Defines what observes a run: it is told of everything and changes nothing.

A job names its observers under ``observers:``. Each has a process of its own, next to the
supervisor, and is told one thing after the other, in the order in which things happened. The run
never waits for it before its end: see ``gcore_core.run.observers`` for what happens to one that
fails or hangs.

    run_start                  before the first step, and again when the run goes on from a
                               checkpoint
    step_end                   after each step
    weights_published          after each push
    checkpoint_saved           after each checkpoint
    worker_failed              when a worker was lost
    run_end                    once, the last call

What it prints goes to ``logs/observer.<name>.log`` in the run's directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gcore_core.contract.records import RunFacts, StepReport, WorkerFailure


@dataclass(frozen=True, kw_only=True)
class ObserverContext:
    """Tells an observer its place, when its factory is called.

    name: what the job calls it, ``observers.<name>``.
    directory: the run's; its other files are described in ``gcore_core.contract.run_files``.
    """

    name: str
    directory: str


class Observer(Protocol):
    """Observes a run. Factory: ``(config, context: ObserverContext)``.

    An exception out of any of these, or out of the factory, is told to the user once. The observer
    is then ended, and the run goes on without it.
    """

    def run_start(self, run: RunFacts) -> None:
        """The run's processes are up. ``run.resumed_from`` says after which step it goes on.

        It comes once for each start: also in the same process, when the run goes back to a
        checkpoint. What was reported of steps after ``run.resumed_from`` is then undone, and these
        steps are reported again.
        """

    def step_end(self, report: StepReport) -> None:
        """A step is committed.

        Where it was evaluated, ``report.evaluation`` is filled and ``run_files.read_samples`` gives
        the answers that are shown. ``report.samples`` is empty, since its references lead nowhere
        in this process. The step that a run goes on from may come once more, without metrics, when
        its evaluation was still due.
        """

    def weights_published(self, version: int) -> None:
        """Every replica of the policy's generator that is awake has verified these weights."""

    def checkpoint_saved(self, step: int, path: str) -> None:
        """A whole checkpoint of the state after ``step`` steps lies in the directory ``path``.

        It may be removed at any time, as ``checkpoint.last`` says.
        """

    def worker_failed(self, failure: WorkerFailure) -> None:
        """A worker ended or was lost."""

    def run_end(self, error: str) -> None:
        """The run is over; ``error`` is empty when it ended well. All files of the run are written.

        When this returns, all that was told must be where it belongs: the process ends then.
        """
