"""What a run writes down of what it runs on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gcore_core.contract.run_files import ENVIRONMENT, read_environment
from gcore_core.run import environment
from gcore_core.runtime.named_files import named_files


def test_the_files_that_a_job_names_are_digested_and_texts_are_none(tmp_path: Path) -> None:
    """A judge's template may be longer than a path can be, and has slashes."""
    (tmp_path / "rows.jsonl").write_text("{}")
    config = {
        "data": {"config": {"path": f"{tmp_path}/rows.jsonl", "limit": 3}},
        "rewards": {"judge": {"config": {"template": f"{'word ' * 100} Is it right/wrong?"}}},
        "roles": {"policy": {"model": {"path": "org/model"}}},
    }
    assert list(named_files(config, tmp_path)) == ["data.config.path"]


def test_a_file_beside_a_function_is_digested_and_its_change_is_known(tmp_path: Path) -> None:
    """A run that goes on says what is not as it was."""
    (tmp_path / "rewards.py").write_text("from helpers import score")
    (tmp_path / "helpers.py").write_text("def score(record): return 0.0")
    key = "rewards.own.config.path"
    config = {"rewards": {"own": {"config": {"path": f"{tmp_path}/rewards.py"}}}}
    files = named_files(config, tmp_path)
    assert list(files) == [key, f"{key}/helpers.py"]
    plan: Any = SimpleNamespace(lock=(), config=config, settings=SimpleNamespace(roles={}))
    environment.write(tmp_path, plan, 0, files)
    assert environment.changed_files(tmp_path, 2, files) == []
    (tmp_path / "helpers.py").write_text("def score(record): return 1.0")
    files = named_files(config, tmp_path)
    assert environment.changed_files(tmp_path, 2, files) == [f"{key}/helpers.py"]


def test_a_start_behind_half_a_line_is_read(tmp_path: Path) -> None:
    """A killed run, or a full disk, may have left half a line at an earlier start."""
    plan: Any = SimpleNamespace(lock=(), config={}, settings=SimpleNamespace(roles={}))
    environment.write(tmp_path, plan, 0, {})
    with (tmp_path / ENVIRONMENT).open("ab") as file:
        file.write(b'{"files":{},"mach')
    environment.write(tmp_path, plan, 2, {})
    environment.write(tmp_path, plan, 4, {})
    starts = [read_environment(tmp_path, step) for step in (1, 3, 5)]
    assert [start and start.step for start in starts] == [0, 2, 4]
    assert (tmp_path / ENVIRONMENT).read_bytes().count(b"\n") == 4
