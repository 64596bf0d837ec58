"""A site is closed with the error that ended the run, so that a launcher can tell its nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcore_core.contract.errors import WorkerDied
from gcore_core.run.kept_site import KeptSite

SUPERVISOR: Any = SimpleNamespace(name="supervisor")


class Recorder:
    """Is a launcher that writes down how each of its sites was closed."""

    def __init__(self) -> None:
        self.closed: list[BaseException | None] = []

    @contextlib.asynccontextmanager
    async def site(self, where: Any, supervisor: Any, logs: Path) -> AsyncIterator[Any]:
        try:
            yield SimpleNamespace(has_processes=True, nodes={})
        except BaseException as error:
            self.closed.append(error)
            raise
        self.closed.append(None)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr("gcore_core.run.kept_site.build", lambda factory: recorder)
    return recorder


def job() -> Any:
    plan = SimpleNamespace(factory=lambda name: name)
    placed = SimpleNamespace(host=lambda node: node)
    return SimpleNamespace(
        plan=plan, where=dict, directory=Path("run"), launcher=None, placed=placed
    )


def test_a_run_that_ends_well_closes_its_site_without_an_error(launcher: Recorder) -> None:
    async def run() -> None:
        async with KeptSite(job()) as place:
            await place.open(SUPERVISOR)

    asyncio.run(run())
    assert launcher.closed == [None]


def test_an_error_goes_through_the_site(launcher: Recorder) -> None:
    error = KeyError("on purpose")

    async def run() -> None:
        async with KeptSite(job()) as place:
            await place.open(SUPERVISOR)
            raise error

    with pytest.raises(KeyError, match="on purpose"):
        asyncio.run(run())
    assert launcher.closed == [error]


def test_a_run_that_goes_on_elsewhere_closes_the_site_before_with_an_error(
    launcher: Recorder,
) -> None:
    """A site that is kept is not closed: its agents go on."""

    async def run() -> None:
        async with KeptSite(job()) as place:
            first = await place.open(SUPERVISOR)
            await place.clear(is_kept=True)
            assert await place.open(SUPERVISOR) is first
            await place.clear(is_kept=False)
            assert await place.open(SUPERVISOR) is not first

    asyncio.run(run())
    lost, end = launcher.closed
    assert isinstance(lost, WorkerDied) and end is None
    assert lost.what == "the run goes on from its newest checkpoint"
