"""Diversity, coverage, and the alarm: silent while a run learns, loud while a reward is
exploited.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gcore_diffusion.config import ClassifierConfig
from gcore_diffusion.rewards import Brightness, Classifier
from gcore_diffusion.watch import ALARMS, after_step, alarm_in, coverage, diversity, flat

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import RunFacts, StepReport
from gcore_core.run.directory import MetricsFile
from tests.support import diffusion_models as kit

pytestmark = pytest.mark.rest


def test_equal_images_have_zero_diversity_and_one_image_has_none() -> None:
    image = np.random.default_rng(0).integers(0, 256, (1, 8, 8, 1)).astype(np.uint8)
    assert diversity(np.repeat(image, 5, 0)) == pytest.approx(0, abs=1e-3)
    assert diversity(image) is None
    black_and_white = np.stack([np.zeros((8, 8, 1), np.uint8), np.full((8, 8, 1), 255, np.uint8)])
    assert diversity(black_and_white) == pytest.approx(1)


def test_large_images_are_scaled_down_for_comparison() -> None:
    large = np.repeat(np.repeat(np.eye(16, dtype=np.uint8)[None, :, :, None] * 255, 64, 1), 64, 2)
    np.testing.assert_allclose(flat(large)[0], np.eye(16, dtype=np.float32).reshape(-1))
    assert flat(np.zeros((2, 33, 50, 3), np.uint8)).shape == (2, 8 * 12 * 3)


def test_coverage_is_high_for_all_real_images_and_low_for_one() -> None:
    real = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1)).astype(np.uint8)
    assert coverage(real, real) == 1
    assert coverage(real[:1], real) < 0.5
    assert coverage(np.zeros((9, 8, 8, 1), np.uint8), real) == 0
    assert coverage(real, None) is None


def steps(**series: list[float]) -> list[dict[str, float]]:
    return [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]


def test_the_alarm_needs_a_reward_that_rises_while_images_become_alike() -> None:
    rising = [0.1, 0.2, 0.3, 0.4, 0.5]
    falling = [0.5, 0.4, 0.3, 0.2, 0.1]
    flat_ = [0.3] * 5
    assert alarm_in(steps(reward=rising, diversity=flat_)) == ""
    assert alarm_in(steps(reward=falling, diversity=falling)) == ""
    alarm = alarm_in(steps(reward=rising, diversity=falling))
    assert alarm == "reward rose from 0.100 to 0.450 while diversity fell from 0.500 to 0.150"
    assert "coverage fell" in alarm_in(steps(reward=rising, diversity=flat_, coverage=falling))
    away = steps(
        reward=rising,
        diversity=flat_,
        kl_to_reference=[0, 0.01, 0.02, 0.04, 0.05],
        path_kl=[0, 1, 2, 3, 40],
    )
    assert (
        alarm_in(away)
        == "reward rose from 0.100 to 0.450 while the policy went 40 nats away from its reference"
    )
    assert alarm_in(steps(reward=rising[:2], diversity=[0.5, 0.1])) == "", "two steps say nothing"


def test_an_alarm_is_written_once_for_each_stretch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunFacts(name="r", directory=str(tmp_path), steps=9, config={})
    file = MetricsFile(tmp_path)
    for step, value in enumerate([0.5, 0.5, 0.5, 0.1, 0.1, 0.1]):
        report = StepReport(
            step=step + 1, version=step + 1, metrics={"reward": step * 1.0, "diversity": value}
        )
        file.append(report)
        after_step(run, report)
    file.close()
    lines = [json.loads(line) for line in (tmp_path / ALARMS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [5]
    assert "diversity fell" in lines[0]["alarm"] and "step 5: reward rose" in caplog.text


def test_only_the_first_and_last_steps_of_a_long_run_are_read(tmp_path: Path) -> None:
    run = RunFacts(name="r", directory=str(tmp_path), steps=9, config={})
    file = MetricsFile(tmp_path)
    padding = {f"padding/{i}": 0.123456 for i in range(100)}
    for step in range(200):
        value = 0.5 if step < 199 else 0.1
        metrics = {"reward": float(step), "diversity": value, **padding}
        file.append(StepReport(step=step, version=step, metrics=metrics if step else {}))
    assert (tmp_path / "metrics.jsonl").stat().st_size > 200_000
    after_step(run, StepReport(step=199, version=199, metrics=metrics))
    assert not (tmp_path / ALARMS).exists(), "one step is not yet an alarm"
    file.append(StepReport(step=200, version=200, metrics={**metrics, "reward": 200.0}))
    after_step(run, StepReport(step=200, version=200, metrics=metrics))
    assert (
        "from 1.000 to 199.500 while diversity fell from 0.500 to 0.100"
        in (tmp_path / ALARMS).read_text()
    )


# -- on the digits ---------------------------------------------------------------------------------


def test_the_alarm_fires_before_brightness_alone_has_cost_coverage(taught_dir: Path) -> None:
    """KL off: the pictures turn white, and the reward alone would call that a success."""
    reward = Brightness(None, WorkerContext(role="scorer"))
    seen = []
    for metrics, covered in kit.run_digits(taught_dir, reward):
        seen.append(metrics)
        if alarm_in(seen):
            break
        assert covered >= 0.3, f"no alarm in {len(seen)} steps"
    assert covered >= 0.3
    assert seen[-1]["reward"] > seen[0]["reward"]


def test_no_alarm_while_the_digits_are_learned(taught_dir: Path) -> None:
    reward = Classifier(ClassifierConfig(path=str(taught_dir)), WorkerContext(role="scorer"))
    seen: list[dict[str, float]] = []
    coverages = []
    for metrics, covered in kit.run_digits(taught_dir, reward, kl_coefficient=0.1):
        seen.append(metrics)
        coverages.append(covered)
        assert alarm_in(seen) == "", f"step {len(seen)}"
        if len(seen) == 12:
            break
    assert seen[-1]["reward"] > seen[0]["reward"] + 0.1
    assert coverages[-1] > coverages[0] - 0.05
