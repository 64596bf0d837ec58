"""Jobs that run at once and know nothing of each other, for a benchmark: they begin together."""

from __future__ import annotations

import importlib
import os
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PLAN = {"run": {"steps": 1}, "launcher": {"use": "sim/crowd", "config": {"processes": 1}}}


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("strangers")


def test_no_stranger_goes_on_before_all_have_come(strangers: ModuleType, tmp_path: Path) -> None:
    lock = threading.Lock()
    here: list[int] = []
    seen: list[int] = []

    def run(plan: dict[str, Any]) -> list[dict[str, float]]:
        with lock:
            here.append(len(here))
            (tmp_path / f"here.{here[-1]}").touch()
        while not (tmp_path / "open").exists():
            time.sleep(0.001)
        seen.append(len(here))
        return [{"steps": plan["run"]["steps"]}]

    metrics = strangers.run_strangers(run, PLAN, 7, strangers.Gate(tmp_path))
    assert metrics == [[{"steps": 1}]] * 7
    assert seen == [7] * 7
    assert "filter" not in PLAN


def test_a_stranger_that_fails_before_the_gate_fails_all(
    strangers: ModuleType, tmp_path: Path
) -> None:
    def run(plan: dict[str, Any]) -> list[dict[str, float]]:
        raise SystemExit("a run ended with 1")

    with pytest.raises(SystemExit, match="ended with 1"):
        strangers.run_strangers(run, PLAN, 3, strangers.Gate(tmp_path))


def test_user_code_is_installed_inside_the_block_only(
    strangers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    user_code = importlib.import_module("user_code")
    with user_code.user_code(16, 0) as gate:
        folder = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
        compile((folder / "gcore_user.py").read_text(), "gcore_user", "exec")
        assert gate.count() == 0
    assert os.environ["PYTHONPATH"] == "elsewhere"
    assert not folder.exists()
