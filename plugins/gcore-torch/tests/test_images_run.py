"""Runs of a tiny image-text model in real processes."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_language.tiny import save_image_model, save_model
from gcore_testing.safetensors_files import read_safetensors
from PIL import Image

from gcore_core.contract.run_files import read_metrics

pytestmark = pytest.mark.rest

STEPS, PROMPTS, GROUP = 2, 4, 4

SEEING = '''
"""A reward and a trainer that write down where in memory the pixels of a record are."""
from dataclasses import dataclass
from pathlib import Path

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_torch.config import TorchTrainerConfig


def saw(process, record):
    pixels = record.media["pixel_values"]
    if len(pixels) != record.columns["image_grid_thw"].prod(1).sum():
        raise ValueError("pixels of another image")
    with open(Path(__file__).with_name("seen.txt"), "a") as file:
        file.write(f"{process} {record.ordinal} {pixels.__array_interface__['data'][0]} {pixels.nbytes}\\n")


def digits(record):
    saw("scorer", record)
    if not Path(record.prompt.images[0]).is_file():
        raise ValueError("no image to look at")
    return sum(c.isdigit() for c in record.text) / 8


def trainer(config, context):
    from gcore_torch.trainer import TorchTrainer

    class Sees(TorchTrainer):
        def prepare(self, records, scalars):
            for record in records:
                saw("trainer", record)
            return super().prepare(records, scalars)

    return Sees(config, context)


@dataclass(frozen=True, kw_only=True)
class Config(TorchTrainerConfig):
    def traits(self):
        return Traits(images=True, saves_in_background=True, sharding=True)


@hookimpl
def gcore_trainers():
    yield p.TrainerProvider(summary="-", factory="seeing:trainer", config=Config)
'''  # noqa: E501


def write_job(directory: Path, *, images: bool = True) -> None:
    """Two controllers, a group of four for each of four prompts a step; every prompt shows another
    image.
    """
    save_image_model(directory / "model") if images else save_model(directory / "model", "llama")
    (directory / "seeing.py").write_text(SEEING)
    (directory / "images").mkdir()
    draw = np.random.default_rng(0)
    rows = []
    for row in range(PROMPTS * STEPS):
        name = f"images/{row}.png"
        Image.fromarray(draw.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(directory / name)
        turns = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"{row}="}]}
        ]
        rows.append(json.dumps({"chat": turns, "pictures": [name]}))
    (directory / "rows.jsonl").write_text("\n".join(rows))
    data = {"path": "rows.jsonl", "messages": "chat", "images": "pictures", "index_dir": "index"}
    job: dict[str, Any] = {
        "run": {"name": "images", "steps": STEPS},
        "controller": {"shards": 2, "config": {"prompts": PROMPTS}},
        "data": {"use": "core/jsonl", "config": data},
        "advantage": {"use": "algorithms/grpo", "config": {"group_size": GROUP}},
        "objective": {"use": "algorithms/ppo_clip"},
        "roles": {
            "policy": {
                "use": "seeing",
                "model": {"path": "model"},
                "config": {"learning_rate": 1e-3},
            },
            "rollout": {"use": "torch", "config": {"max_new_tokens": 8, "context_length": 100}},
        },
        "rewards": {
            "digits": {"use": "core/function", "config": {"path": "seeing.py", "name": "digits"}}
        },
        "local": ["seeing.py"],
    }
    (directory / "job.yaml").write_text(json.dumps(job))


def finish(directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gcore_core", "run", "job.yaml", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )


def test_a_run_trains_on_images_and_stores_each_once(tmp_path: Path) -> None:
    write_job(tmp_path)
    done = finish(tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [
        row["metrics"]
        for row in read_metrics(tmp_path / "runs/images/001")
        if "loss" in row["metrics"]
    ]
    assert len(rows) == STEPS
    for metrics in rows:
        assert metrics["logprob_gap_max"] < 1e-4
        assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
        # An image has 98 kB. What controllers tell each other grows with the seconds of a step.
        assert metrics["controller/bytes_per_record"] < 2000
    check_places(tmp_path / "seen.txt")
    before = read_safetensors(tmp_path / "model" / "model.safetensors")
    after = read_safetensors(tmp_path / "runs/images/001/weights/model.safetensors")
    weights = {spec.name: array.view(np.float32) for spec, array in after}
    assert all(np.isfinite(array).all() for array in weights.values())
    assert weights.keys() == {spec.name for spec, _ in before}
    changed = {
        spec.name
        for spec, array in before
        if not np.array_equal(array.view(np.float32), weights[spec.name])
    }
    assert any("visual" in name for name in changed) and any(
        "lm_head" in name or "embed" in name for name in changed
    )


def check_places(seen: Path) -> None:
    """The reward and the trainer each saw every record, and all of a group at one place in the
    node's store.
    """
    lines = [line.split() for line in seen.read_text().splitlines()]
    groups = STEPS * PROMPTS
    assert len(lines) == 2 * groups * GROUP
    stored = {
        process: {(ordinal, place) for p, ordinal, place, _ in lines if p == process}
        for process, *_ in lines
    }
    assert {process: len(found) for process, found in stored.items()} == {
        "scorer": groups,
        "trainer": groups,
    }
    # the image's size makes 16 x 16 patches of 2 frames, 3 colours and 4 x 4 pixels
    assert {int(nbytes) for *_, nbytes in lines} == {16 * 16 * 96 * 4}


@pytest.mark.slow
def test_a_broken_image_ends_the_run_with_row_and_path(tmp_path: Path) -> None:
    write_job(tmp_path)
    (tmp_path / "images/3.png").write_bytes(b"no image")
    done = finish(tmp_path)
    assert done.returncode == 4, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(r"images/3\.png: an image of row 3 cannot be read\.", done.stderr)


@pytest.mark.slow
def test_a_text_model_given_images_ends_the_run_with_that_reason(tmp_path: Path) -> None:
    write_job(tmp_path, images=False)
    done = finish(tmp_path)
    assert done.returncode == 4, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(
        r"row \d names 1 images, and this generator or its model takes none\.", done.stderr
    )
