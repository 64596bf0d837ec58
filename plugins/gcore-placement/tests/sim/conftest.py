"""A small job of emulated backends."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gcore_testing import fake

JOB: dict[str, Any] = {
    "run": {"name": "sim", "steps": 1},
    "launcher": {"use": "sim/crowd", "config": {"processes": 2}},
    "cluster": {"devices": 64},
    "controller": {"shards": 1, "config": {"prompts": 4, "minibatches": 2}},
    "data": {"use": "sim/prompts", "config": {"rows": 64}},
    "advantage": {"use": "fake", "config": {"group_size": 2}},
    "objective": {"use": "sim"},
    "roles": {"policy": {"use": "sim", "config": {}}, "rollout": {"use": "sim", "config": {}}},
    "rewards": {"judged": {"use": "sim/judge", "timeout_s": 600, "config": {}}},
    "local": [fake.__file__],
}


@pytest.fixture
def write_job(tmp_path: Path) -> Callable[..., Path]:
    """Writes the job with changes merged into it; JSON is YAML."""

    def write(**sections: Any) -> Path:
        job = copy.deepcopy(JOB)
        _merge(job, sections)
        file = tmp_path / "job.yaml"
        file.write_text(json.dumps(job))
        return file

    return write


def _merge(into: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
