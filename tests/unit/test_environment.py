"""What a run writes down of what it runs on."""

from __future__ import annotations

from pathlib import Path

from gcore_core.run.environment import file_digests


def test_the_files_that_a_job_names_are_digested_and_texts_are_none(tmp_path: Path) -> None:
    """A judge's template may be longer than a path can be, and has slashes."""
    (tmp_path / "rows.jsonl").write_text("{}")
    config = {
        "data": {"config": {"path": f"{tmp_path}/rows.jsonl", "limit": 3}},
        "rewards": {"judge": {"config": {"template": f"{'word ' * 100} Is it right/wrong?"}}},
        "roles": {"policy": {"model": {"path": "org/model"}}},
    }
    assert list(file_digests(config)) == ["data.config.path"]
