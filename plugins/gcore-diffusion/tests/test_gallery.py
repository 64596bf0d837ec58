"""Pictures of a run: grids at each evaluation, before and after at the end, from what the core has
written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_diffusion.gallery import CONTACT_SHEET, after_step, contact_sheet, grid
from PIL import Image

from gcore_core.contract.records import Header, RunFacts, StepReport
from gcore_core.contract.run_files import read_samples
from gcore_core.run import summary
from gcore_core.run.directory import create, write_samples


def row(level: int, mode: str = "greedy", **changes: Any) -> dict[str, Any]:
    image = np.full((8, 8, 1), level, np.uint8)
    values = {
        "prompt": f"digit {level}",
        "text": "",
        "rewards": {"digit": 0.5},
        "mode": mode,
        "status": "finished",
    }
    return {**values, "arrays": {"image": image}, **changes}


@pytest.fixture
def run(tmp_path: Path) -> RunFacts:
    return RunFacts(name="r", directory=str(create(tmp_path, "r")), steps=20, config={})


def test_images_of_an_evaluation_become_files_and_a_grid(run: RunFacts) -> None:
    directory = Path(run.directory)
    rows = [row(level, mode) for level in (0, 100, 200) for mode in ("greedy", "sampled")]
    write_samples(directory, 20, rows)
    samples = read_samples(directory, 20)
    assert samples[2]["arrays"] == {"image": "step_000020/2-image.npy"}
    np.testing.assert_array_equal(
        np.load(directory / "samples/step_000020/2-image.npy"), rows[2]["arrays"]["image"]
    )
    after_step(
        run,
        StepReport(
            step=20, version=20, metrics={}, samples=[Header(ordinal=-1, sample=0, row=0, seed=1)]
        ),
    )
    picture = Image.open(directory / "samples/step_000020.png")
    assert picture.width == 3 * 100, "the deterministic ones alone"
    assert [picture.getpixel((place * 100 + 48, 48)) for place in range(3)] == [
        (0,) * 3,
        (100,) * 3,
        (200,) * 3,
    ]


def test_an_evaluation_without_images_writes_no_picture(run: RunFacts) -> None:
    write_samples(Path(run.directory), 20, [row(1, arrays={})])
    after_step(
        run,
        StepReport(
            step=20, version=20, metrics={}, samples=[Header(ordinal=-1, sample=0, row=0, seed=1)]
        ),
    )
    after_step(run, StepReport(step=21, version=21, metrics={}))
    contact_sheet(run)
    assert list(Path(run.directory).rglob("*.png")) == []


def test_the_contact_sheet_shows_first_and_last_and_stands_in_the_summary(run: RunFacts) -> None:
    directory = Path(run.directory)
    for step, level in ((0, 0), (10, 50), (20, 255)):
        write_samples(directory, step, [row(level)])
        header = Header(ordinal=-1, sample=0, row=0, seed=1)
        after_step(run, StepReport(step=step, version=step, metrics={}, samples=[header]))
    contact_sheet(run)
    sheet = Image.open(directory / CONTACT_SHEET)
    colours = {sheet.getpixel((48, height)) for height in range(sheet.height)}
    assert {(0, 0, 0), (255, 255, 255)} <= colours and (50, 50, 50) not in colours
    text = summary.write(run, wall_s=1, cpu_s=1).read_text()
    assert "![contact sheet](contact_sheet.png)" in text


def test_large_images_are_scaled_down() -> None:
    image = np.zeros((1024, 512, 3), np.uint8)
    assert grid([{"image": image, "prompt": "a", "rewards": {}}]).width == 96 + 4
