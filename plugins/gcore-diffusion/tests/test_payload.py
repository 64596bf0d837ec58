"""Images of any size go from sampler to reward and trainer past the controllers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gcore_testing import fake

from gcore_core.contract.run_files import read_metrics

pytestmark = pytest.mark.rest

PICTURES = '''
"""A generator that spends no time on its images."""
from dataclasses import dataclass, replace

import numpy as np

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_testing import fake


@dataclass(frozen=True, kw_only=True)
class Config:
    side: int = 64

    def traits(self):
        return Traits(receives_weights=True)


class Pictures(fake.FakeGenerator):
    def __init__(self, config, context):
        super().__init__(fake.FakeGeneratorConfig(), context)
        self._side = config.side

    def _finished(self, request, letters, status):
        found = super()._finished(request, letters, status)
        image = np.full((self._side, self._side, 3), request.seed % 251, np.uint8)
        return replace(found, media={"image": image})


@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(summary="-", factory="pictures:Pictures", config=Config)
'''  # noqa: E501


def run(directory: Path, side: int, *, prompts: int) -> dict[str, float]:
    """The metrics of the last of two steps: ``prompts`` groups of 8 images, two controllers."""
    directory.mkdir()
    (directory / "pictures.py").write_text(PICTURES)
    job: dict[str, Any] = {
        "run": {"name": "images", "steps": 2},
        "controller": {"shards": 2, "config": {"prompts": prompts}},
        "data": {"use": "fake"},
        "advantage": {"use": "fake", "config": {"group_size": 8}},
        "objective": {"use": "fake"},
        "roles": {
            "policy": {"use": "fake"},
            "rollout": {"use": "pictures", "config": {"side": side}},
        },
        "rewards": {"bright": {"use": "diffusion/brightness", "timeout_s": 120}},
        "local": [fake.__file__, "pictures.py"],
    }
    (directory / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-m", "gcore_core", "run", "job.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    metrics: dict[str, float] = read_metrics(directory / "runs/images/001")[-1]["metrics"]
    return metrics


def test_a_controller_sees_only_references_of_images(tmp_path: Path) -> None:
    metrics = run(tmp_path / "images", 256, prompts=4)
    assert 0.3 < metrics["reward/bright"] < 0.7
    assert metrics["controller/bytes_per_record"] < 2000, (
        "both controllers, requests and headers and agreements"
    )


@pytest.mark.slow
def test_512_large_images_cost_controllers_no_more_than_small_ones(tmp_path: Path) -> None:
    """1024x1024x3 against 64x64x3: under 1 KB an image through a controller, the same memory within
    5%.
    """
    small, large = (run(tmp_path / str(side), side, prompts=64) for side in (64, 1024))
    for metrics in (small, large):
        assert metrics["controller/bytes_per_record"] < 1000, "both controllers together"
    for shard in range(2):
        name = f"memory_mib/controller.{shard}"
        assert large[name] == pytest.approx(small[name], rel=0.05)
