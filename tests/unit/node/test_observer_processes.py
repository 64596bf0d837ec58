"""What the supervisor says of an observer's process that ends while it is being looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from gcore_core.contract.factories import FactorySpec
from gcore_core.node.observing import ObserverSpec, RunEnded
from gcore_core.run.observers import ObserverProcess


def test_an_observer_that_ends_well_between_two_looks_is_not_told_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last answer and its end come while ``failure`` asks whether the process is over."""
    is_over = ObserverProcess.is_over

    def over_at_once(observer: ObserverProcess) -> bool:
        observer._process.wait()
        observer._threads[1].join()
        return bool(is_over.__get__(observer))

    spec = ObserverSpec(
        name="plain",
        directory=str(tmp_path),
        factory=FactorySpec("gcore_testing.fake:FakeObserver"),
        timeout_s=60.0,
    )
    observer = ObserverProcess(spec, tmp_path / "observer.log")
    try:
        observer.tell(RunEnded(""))
        monkeypatch.setattr(ObserverProcess, "is_over", property(over_at_once))
        assert observer.failure() is None
    finally:
        observer.kill()
    assert (tmp_path / "observed.plain.jsonl").is_file(), (tmp_path / "observer.log").read_text()
