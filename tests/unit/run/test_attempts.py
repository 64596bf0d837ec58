"""A run makes attempts until one ends well: each on a site of its own, from what is there then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcore_core.contract.errors import WorkerDied, WorkerError
from gcore_core.contract.site_files import OneDisk
from gcore_core.run import attempts
from gcore_core.run.initial_placement import Placed
from gcore_core.run.jobs import Job
from gcore_core.run.machines import MachinesChange
from gcore_core.run.restart_supervisor import Lost
from gcore_core.run.signals import Signals
from gcore_core.run.supervisor import Supervisor

DIED = WorkerDied("ended with signal SIGKILL", where="policy.0")
MOVES = MachinesChange("the run goes on with other machines", where="supervisor")


class Run:
    """Replaces what an attempt does: each ends as it is told, then another is made.

    ends: how the attempts end, in order; None: well.
    begun: (the step that an attempt goes on from, the machine it does without) of each.
    """

    def __init__(self, *ends: BaseException | None) -> None:
        self._ends = iter(ends)
        self.begun: list[tuple[int, str]] = []
        self.told: list[Any] = []
        self.overs: list[str] = []

    def tell(self, message: Any) -> None:
        self.told.append(message)

    def supervisor(self, job: Job, display: Any, observers: Any) -> Any:
        step = 0 if job.resumed is None else job.resumed.step
        self.begun.append((step, ", ".join(job.placed.missing)))

        async def run() -> None:
            end = next(self._ends)
            if end is not None:
                raise end

        return SimpleNamespace(run=run, stop=lambda within_s: True, over=self.overs.append)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns a function that makes the attempts of a run, and returns its notes."""
    (tmp_path / "logs").mkdir()
    found = iter(range(1, 99))

    async def place_run(*_: Any, again: bool) -> Placed:
        assert again
        return Placed(missing={f"node{next(found)}": "no route"})

    monkeypatch.setattr(attempts, "chosen_observers", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(attempts, "place_run", place_run)
    monkeypatch.setattr(attempts, "say_changes", lambda *_: None)
    monkeypatch.setattr(attempts, "begins_from", lambda *_: SimpleNamespace(step=4))
    monkeypatch.setattr(attempts, "Checkpoints", lambda _: SimpleNamespace(steps=lambda: [4]))

    def made(run: Run, restarts: int) -> list[str]:
        monkeypatch.setattr(attempts, "Supervisor", run.supervisor)
        job: Any = Job(
            plan=SimpleNamespace(),  # type: ignore[arg-type]
            directory=tmp_path,
            models={},
            rows={"train": 8},
            launcher=SimpleNamespace(),  # type: ignore[arg-type]
            restarts=restarts,
        )
        notes: list[str] = []
        display: Any = SimpleNamespace(note=notes.append)
        starter: Any = run
        signals = Signals()
        with signals.handled():
            attempts.supervise(job, display, signals, starter)
        return notes

    yield made


def test_each_attempt_begins_from_the_newest_checkpoint_on_the_machines_that_there_are(
    make: Any,
) -> None:
    run = Run(DIED, DIED, None)
    notes = make(run, 2)
    assert run.begun == [(0, ""), (4, "node1"), (4, "node2")]
    assert run.told == [Lost(), Lost()]
    assert notes == [str(DIED), "the run goes on from step 4"] * 2
    assert run.overs == [""], "observers hear of one end"


def test_a_run_ends_with_the_loss_behind_its_last_restart(make: Any) -> None:
    run = Run(DIED, DIED)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        make(run, 1)
    assert len(run.begun) == 2 and run.told == [Lost()]
    assert run.overs == [str(DIED)]


def test_machines_that_come_or_leave_cost_no_restart(make: Any) -> None:
    run = Run(MOVES, MOVES, None)
    assert make(run, 0) == ["the run goes on from step 4"] * 2
    assert len(run.begun) == 3 and run.told == []


def test_an_error_that_is_nobodys_death_ends_the_run(make: Any) -> None:
    run = Run(KeyError("on purpose"))
    with pytest.raises(KeyError, match="on purpose"):
        make(run, 3)
    assert len(run.begun) == 1


def test_a_signal_while_a_site_closes_ends_the_run_when_it_is_closed(make: Any) -> None:
    run = Run(None)
    supervisor = run.supervisor

    def closing(*given: Any) -> Any:
        made = supervisor(*given)

        async def died() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
            raise DIED

        made.run = died
        return made

    run.supervisor = closing  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        make(run, 3)
    assert len(run.begun) == 1 and run.overs == [str(DIED)]


# -- the site of one attempt -----------------------------------------------------------------------


class Launcher:
    """Writes down how each of its sites was closed."""

    def __init__(self) -> None:
        self.closed: list[BaseException | None] = []
        self.closing = asyncio.Event()
        self.may_close = asyncio.Event()
        self.may_close.set()

    @contextlib.asynccontextmanager
    async def site(self, where: Any, supervisor: Any, logs: Path) -> AsyncIterator[Any]:
        error: BaseException | None = None
        try:
            yield SimpleNamespace(nodes={}, files=OneDisk())
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.closing.set()
            await self.may_close.wait()
            self.closed.append(error)


class Attempt:
    """What ``Supervisor.run`` and ``stop`` use of a supervisor."""

    run = Supervisor.run
    stop = Supervisor.stop

    def __init__(self, launcher: Launcher, error: BaseException | None) -> None:
        placed = SimpleNamespace(host=lambda node: node)
        self._job = SimpleNamespace(
            launcher=launcher, where=dict, directory=Path("run"), placed=placed
        )
        self._error = error
        self._moves_on = False
        self._stopping = None
        self._changes = None
        self._is_closing = False
        self._site = None
        self._ready = asyncio.Event()
        self._metrics = SimpleNamespace(close=lambda: None)

    def _service(self) -> None:
        return None

    async def _attempt(self, site: Any) -> None:
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [None, DIED, KeyError("on purpose")])
async def test_a_site_is_closed_with_the_error_that_ended_its_attempt(
    error: BaseException | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a launcher can tell its nodes whether another site may follow."""
    monkeypatch.setattr("gcore_core.run.directory.remove_earlier_end", lambda directory: None)
    launcher = Launcher()
    attempt: Any = Attempt(launcher, error)
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        await attempt.run()
    assert launcher.closed == [error]


async def test_machines_that_come_or_leave_close_the_site_as_a_loss_does() -> None:
    launcher = Launcher()
    attempt: Any = Attempt(launcher, None)
    attempt._moves_on = True
    with pytest.raises(MachinesChange):
        await attempt.run()
    (error,) = launcher.closed
    assert isinstance(error, WorkerError)


async def test_a_signal_interrupts_no_closing_and_is_not_asked_to_save() -> None:
    launcher = Launcher()
    launcher.may_close.clear()
    attempt: Any = Attempt(launcher, DIED)
    running = asyncio.ensure_future(attempt.run())
    await launcher.closing.wait()
    assert attempt.stop(20.0)
    launcher.may_close.set()
    with pytest.raises(WorkerDied):
        await running
    assert not attempt.stop(20.0), "nothing is there that could be saved"
