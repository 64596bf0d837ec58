"""Devices that move by the processor time of real workers, as ``signal: hardware`` reads it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gcore_core.config.plan import load_plan
from gcore_core.contract import run_files
from gcore_core.contract.errors import ConfigError
from gcore_core.run.initial_placement import find_nodes, place
from tests.support import runs

WORKS = '''
"""Fakes of which one kind uses a processor for what it does."""
import time
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_testing import fake
from gcore_testing.fake_judge import FakeAskerConfig


class Works(fake.FakeGenerator):
    """Uses 20 ms of a processor for each step in which it has something to do."""

    def step(self):
        end_s = time.process_time() + (0.02 if self._running else 0.0)
        while time.process_time() < end_s:
            pass
        return super().step()


@dataclass(frozen=True, kw_only=True)
class Sleeping(fake.FakeGeneratorConfig):
    def traits(self):
        return Traits(
            receives_weights=True, fingerprints=True, determinism=True, abort=True, sleeps=True
        )


@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(
        summary="-", factory="works:Works", config=Sleeping
    )


@hookimpl
def gcore_rewards():
    yield p.RewardProvider(
        name="asks", summary="-", config=FakeAskerConfig,
        factory="gcore_testing.fake_judge:FakeAsker",
    )
'''


def job(directory: Path, worker: str) -> dict[str, Any]:
    """Four devices, of which judges have two at first; the generator role ``worker`` works."""
    directory.mkdir(parents=True)
    (directory / "works.py").write_text(WORKS)
    roles: dict[str, Any] = {
        role: {"use": "works" if role == worker else "fake", "slots": 4}
        for role in ("rollout", "judge")
    }
    base = runs.job(
        cluster={"devices": 4},
        rewards={"judged": {"use": "works/asks", "role": "judge"}},
        placement={"use": "placement/utilisation", "config": {"signal": "hardware", "share": 0.5}},
    )
    roles = {"policy": {"use": "fake"}, **roles}
    return {**base, "roles": roles, "local": [str(runs.FAKE), "works.py"]}


@pytest.mark.parametrize(("worker", "cells"), [("judge", 3), ("rollout", 1)])
def test_a_cell_moves_to_the_role_that_uses_its_processors_more(
    worker: str, cells: int, tmp_path: Path
) -> None:
    """How much is used depends on the machine; that idle workers use less does not."""
    pytest.importorskip("gcore_placement")
    code, run = runs.finish(tmp_path / "run", job(tmp_path / "run", worker))
    assert code == 0, run.output
    decisions, _ = run_files.read_placement(run.path)
    first, second = decisions[0], decisions[1]
    assert len(first.cells["judge"]) == 2
    assert len(second.cells["judge"]) == cells
    assert second.seen["signal"] == "hardware"
    more, less = second.seen["judge"], second.seen["policy"]
    if worker == "rollout":
        more, less = less, more
    assert 0 <= less < more <= 1


def test_the_hardware_signal_is_refused_where_workers_share_a_process(tmp_path: Path) -> None:
    pytest.importorskip("gcore_placement")
    config = {**job(tmp_path / "run", "judge"), "launcher": {"use": "core/inline"}}
    code, run = runs.finish(tmp_path / "run", config)
    assert code == 2
    assert "placement.config.signal: hardware" in run.output


def test_a_missing_library_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_VISIBLE_DEVICES makes this look like a machine with GPUs; pynvml is kept away."""
    pytest.importorskip("gcore_placement")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    config = job(tmp_path / "run", "judge")
    (tmp_path / "run" / "job.yaml").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    plan = load_plan(Path("job.yaml"), [])
    with pytest.raises(ConfigError, match=r"pip install .*gcore-placement\[nvml\]'"):
        place(plan, find_nodes(plan))
