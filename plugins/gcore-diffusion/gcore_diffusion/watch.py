"""Watches for a reward that is being exploited.

A reward that rises says nothing about whether it is exploited. So three more numbers are watched:
how much the images of one prompt differ, how many real images they cover, and the KL to the
reference.

This module imports numpy alone, so that it loads quickly.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gcore_core.contract.records import RunFacts, StepReport
from gcore_core.contract.run_files import METRICS

ALARMS = "alarms.jsonl"
#: A real image is covered when a generated image is nearer to it than its fifth nearest real image
#: (Naeem et al. 2020).
NEIGHBOURS = 5
_SIDE = 16  # images are compared at most this large
_TAIL_BYTES = 1 << 16
_RECENT = 2  # steps that are averaged, against the noise of a few images

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits at which an alarm is raised.

    diversity: an alarm when it falls below this share of its first value.
    coverage: likewise.
    kl_to_reference: an alarm when the KL of a transition rises above this, in nats a dimension.
    """

    diversity: float = 0.6
    coverage: float = 0.7
    kl_to_reference: float = 0.02


def flat(images: np.ndarray) -> np.ndarray:
    """Turns images uint8[S, H, W, C] into rows of pixels float32[S, *] in 0..1.

    Large images are averaged over squares, so that neither side is longer than 16 pixels.
    """
    _, height, width, _ = images.shape
    square = max(1, -(-max(height, width) // _SIDE))
    cut = (
        images[:, : height - height % square or None, : width - width % square or None].astype(
            np.float32
        )
        / 255
    )
    count, height, width, channels = cut.shape
    small: np.ndarray = cut.reshape(
        count, height // square, square, width // square, square, channels
    ).mean((2, 4))
    rows: np.ndarray = small.reshape(count, -1)
    return rows


def distances(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the root mean squared difference of pixels between all pairs, float32[N, M].

    first: float32[N, pixels].
    second: float32[M, pixels].
    """
    squares = (
        (first**2).mean(1)[:, None]
        + (second**2).mean(1)[None]
        - 2 * (first @ second.T) / first.shape[1]
    )
    distances: np.ndarray = np.sqrt(np.maximum(squares, 0))
    return distances


def diversity(images: np.ndarray) -> float | None:
    """Returns the mean distance between two of the images; None for a single image.

    images: uint8[S, H, W, C].
    """
    count = len(images)
    if count < 2:
        return None
    pixels = flat(images)
    return float(distances(pixels, pixels).sum() / (count * (count - 1)))


def coverage(images: np.ndarray, real: np.ndarray | None) -> float | None:
    """Returns the share of the real images that are covered; see ``NEIGHBOURS``.

    It is None without real images, or with too few of them.

    images: uint8[S, H, W, C], the generated ones.
    real: uint8[N, H, W, C].
    """
    if real is None or len(real) <= NEIGHBOURS:
        return None
    points = flat(real)
    between_real = distances(points, points)
    np.fill_diagonal(between_real, np.inf)
    radius = np.partition(between_real, NEIGHBOURS - 1, axis=1)[:, NEIGHBOURS - 1]
    return float((distances(flat(images), points) < radius[None]).any(0).mean())


@dataclass(frozen=True, kw_only=True)
class RealImages:
    """The real images in ``real.safetensors`` beside a model.

    images: uint8[N, H, W, C].
    labels: int64[N], the class of each.
    """

    images: np.ndarray
    labels: np.ndarray

    @classmethod
    def of_model(cls, directory: Path) -> RealImages | None:
        """Reads the real images beside a model; None when there are none."""
        from safetensors.numpy import load_file

        file = directory / "real.safetensors"
        if not file.is_file():
            return None
        arrays = load_file(file)
        return cls(images=arrays["images"], labels=arrays["labels"])

    def of(self, label: int | None) -> np.ndarray | None:
        """Returns the images of a class, uint8[*, H, W, C]; None without a class."""
        return None if label is None else self.images[self.labels == label]


def alarm_in(steps: Sequence[Mapping[str, float]], limits: Limits | None = None) -> str:
    """Says what is wrong at the last of the steps; empty when nothing is.

    Something is wrong when the reward has risen since the first step while diversity or coverage
    fell below its limit, or the KL rose above its own.

    steps: metrics of the steps, in order.
    """
    limits = limits or Limits()

    def before_and_now(name: str) -> tuple[float, float] | None:
        values = [
            step[name] for step in steps if step.get(name) is not None
        ]  # a NaN is written as null
        return (values[0], float(np.mean(values[-_RECENT:]))) if len(values) > _RECENT else None

    reward = before_and_now("reward")
    if reward is None or not reward[1] > reward[0]:
        return ""
    rose = f"reward rose from {reward[0]:.3f} to {reward[1]:.3f} while"
    for name, limit in (("diversity", limits.diversity), ("coverage", limits.coverage)):
        first_and_now = before_and_now(name)
        if first_and_now is not None and first_and_now[1] < limit * first_and_now[0]:
            return f"{rose} {name} fell from {first_and_now[0]:.3f} to {first_and_now[1]:.3f}"
    path_kl = steps[-1].get("path_kl")
    if path_kl is not None and steps[-1]["kl_to_reference"] > limits.kl_to_reference:
        return f"{rose} the policy went {path_kl:.0f} nats away from its reference"
    return ""


def after_step(run: RunFacts, report: StepReport) -> None:
    """Adds a line to ``alarms.jsonl`` and to the log when something begins to be wrong.

    Nothing is added while something was already wrong at the step before.
    """
    if "diversity" not in report.metrics:
        return
    steps = _first_and_last(Path(run.directory, METRICS))
    alarm = alarm_in(steps)
    if not alarm or alarm_in(steps[:-1]):
        return
    log.warning("step %d: %s", report.step, alarm)
    with Path(run.directory, ALARMS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": report.step, "alarm": alarm}) + "\n")


def _first_and_last(file: Path) -> list[dict[str, Any]]:
    """Reads the metrics of the first step and of the last ones.

    It reads the file's beginning and end, so that a long run's file is not read through at every
    step.
    """
    with file.open("rb") as opened:
        first = next((row for row in map(json.loads, opened) if row["step"]), None)
        if (tail := file.stat().st_size - _TAIL_BYTES) > opened.tell():
            opened.seek(tail)
            opened.readline()  # skip the rest of a line that began before
        last = [json.loads(line) for line in opened if line.endswith(b"\n")]
    return [row["metrics"] for row in ([first] if first else []) + last[-_RECENT - 1 :]]
