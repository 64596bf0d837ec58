"""Draws ``curves.png``, the run at a glance, from ``metrics.jsonl``."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from gcore_core.contract.run_files import CURVES, read_metrics, stage_seconds
from gcore_core.kits.cache import replacing

Rows = Sequence[Mapping[str, Any]]

#: Okabe and Ito's palette, which colour-blind readers can tell apart, without black and yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")

STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
}


def draw(run_dir: Path) -> Path | None:
    """Draws ``curves.png`` into the run's directory and returns its path.

    Returns None when there is nothing to draw yet.
    """
    figure = view(run_dir)
    if figure is None:
        return None
    with replacing(run_dir / CURVES) as fresh, rc_context(STYLE):
        figure.savefig(fresh, dpi=150, format="png")
    return run_dir / CURVES


class Curves(Figure):
    """Is a figure that a notebook shows, though no pyplot knows it."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        with rc_context(STYLE):
            self.savefig(picture, dpi=80, format="png")
        return picture.getvalue()


def view(run_dir: Path) -> Curves | None:
    """Returns the figure of a run, or None when there is nothing to draw yet."""
    rows = read_metrics(run_dir)
    if not rows:
        return None
    with rc_context(STYLE):
        figure = Curves(figsize=(12.5, 6.8), layout="constrained")
        FigureCanvasAgg(figure)  # no pyplot: it would keep figures, and pick a window system
        title = f"{run_dir.parent.name}/{run_dir.name}   (pale: every step; full: moving mean)"
        figure.suptitle(title, x=0.01, ha="left", color="#555555")
        panels = figure.subplots(2, 3)
        for panel, fill in zip(
            panels.flat, (_held_out, _rewards, _lengths, _kl_entropy, _gap, _stages), strict=True
        ):
            fill(panel, rows)
            panel.set_xlabel("step")
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            panel.set_xlim(*_span(rows))
            if not panel.has_data():
                panel.annotate(
                    "not measured",
                    (0.5, 0.5),
                    xycoords="axes fraction",
                    ha="center",
                    color="#999999",
                )
    return figure


# -- panels ----------------------------------------------------------------------------------------


def _held_out(panel: Axes, rows: Rows) -> None:
    """Draws the rewards of held-out prompts, a line for each reward and way of sampling."""
    panel.set(title="Held-out reward", ylabel="mean reward")
    keys = [key for key in _keys(rows, "evaluation") if not key.endswith("/length")]
    names = list(dict.fromkeys(key.partition("/")[2] for key in keys))
    for key in keys:
        mode, _, name = key.partition("/")
        greedy = mode == "greedy"
        panel.plot(
            *_series(rows, key, "evaluation"),
            color=_colour(names.index(name)),
            linestyle="-" if greedy else "--",
            marker="o" if greedy else "s",
            markersize=3.5,
            markerfacecolor=None if greedy else "white",
            label=f"{name}, {mode}",
        )
    _share_axis(panel)
    _legend(panel)


def _rewards(panel: Axes, rows: Rows) -> None:
    """Draws the mean of each reward in training, and of their weighted sum where there are
    several.
    """
    panel.set(title="Training reward", ylabel="mean over the step's records")
    keys = [key for key in _keys(rows) if key.startswith("reward/")]
    if len(keys) != 1 and "reward" in _keys(rows):
        keys.append("reward")
    for i, key in enumerate(keys):
        label = "weighted" if key == "reward" else key.removeprefix("reward/")
        _smoothed(panel, *_series(rows, key), colour=_colour(i), label=label)
    _share_axis(panel)
    _legend(panel)


def _lengths(panel: Axes, rows: Rows) -> None:
    """Draws the mean number of actions of a record, in training and held-out."""
    panel.set(title="Length", ylabel="mean actions a record")
    if "length" in _keys(rows):
        _smoothed(panel, *_series(rows, "length"), colour=_colour(0), label="training")
    for i, key in enumerate(key for key in _keys(rows, "evaluation") if key.endswith("/length")):
        label = f"held-out, {key.removesuffix('/length')}"
        panel.plot(
            *_series(rows, key, "evaluation"),
            "o--",
            color=_colour(i + 1),
            markersize=3.5,
            label=label,
        )
    if panel.has_data():
        panel.set_ylim(bottom=0)
    _legend(panel)


def _kl_entropy(panel: Axes, rows: Rows) -> None:
    """Draws two scales, each in its line's colour: both in nats, but orders of magnitude apart."""
    panel.set_title("KL of the update, entropy")
    if "kl" in _keys(rows):
        _smoothed(panel, *_series(rows, "kl"), colour=_colour(0), label="KL")
    panel.set_ylabel("KL, nats", color=_colour(0))
    panel.tick_params(axis="y", colors=_colour(0))
    if "entropy" not in _keys(rows):
        return
    right = panel.twinx()
    right.grid(False)
    right.spines["right"].set_visible(True)
    _smoothed(right, *_series(rows, "entropy"), colour=_colour(1), label="entropy")
    right.set_ylabel("entropy, nats", color=_colour(1))
    right.tick_params(axis="y", colors=_colour(1))
    right.set_ylim(bottom=0)


def _gap(panel: Axes, rows: Rows) -> None:
    """Draws the gap between the log-probs of generator and trainer, on a logarithmic scale."""
    panel.set(title="Log-prob gap, generator to trainer", ylabel="nats")
    positive: list[float] = []
    for i, (key, label) in enumerate(
        {"logprob_gap_max": "largest", "logprob_gap_mean": "mean"}.items()
    ):
        steps, values = _series(rows, key)
        if len(steps):
            panel.plot(steps, values, color=_colour(i), label=label, marker=_marker(steps))
        positive += values[values > 0].tolist()
    # An exact pair has a gap of 0 throughout, which has no place on a logarithmic scale.
    if positive:
        panel.set_yscale("log")
        decades = np.floor(np.log10(min(positive))), np.floor(np.log10(max(positive))) + 1
        panel.set_ylim(10.0 ** decades[0], 10.0 ** decades[1])
        panel.yaxis.set_minor_formatter(NullFormatter())
    _legend(panel)


def _stages(panel: Axes, rows: Rows) -> None:
    """Draws the seconds of each stage of a step on top of each other."""
    panel.set(title="Time of a step", ylabel="seconds")
    timed = [(row["step"], stage_seconds(row["metrics"])) for row in rows]
    timed = [(step, seconds) for step, seconds in timed if seconds]
    if not timed:
        return
    steps = np.array([step for step, _ in timed])
    edges = np.append(steps, steps[-1] + 1) - 0.5
    floor = np.zeros(len(steps))
    stages = dict.fromkeys(stage for _, seconds in timed for stage in seconds)
    for i, stage in enumerate(stages):
        top = floor + np.nan_to_num([seconds.get(stage, 0.0) for _, seconds in timed])
        panel.stairs(
            top, edges, baseline=floor, fill=True, color=_colour(i), alpha=0.85, label=stage
        )
        floor = top
    # One slow step must not flatten all others.
    panel.set_ylim(0, 1.35 * np.percentile(floor, 98) or 1.0)
    panel.legend(loc="upper left", ncols=2)


# -- drawing ---------------------------------------------------------------------------------------


def _span(rows: Rows) -> tuple[float, float]:
    """Returns the limits of all panels' step axes, with room for the first and the last step."""
    first = rows[0]["step"]
    last = rows[-1]["step"]
    room = max(0.5, 0.02 * (last - first))
    return first - room, last + room


def _keys(rows: Rows, part: str = "metrics") -> list[str]:
    """Returns the names of all metrics that any step has, in the order in which they first occur.

    part: "metrics" or "evaluation".
    """
    return list(dict.fromkeys(key for row in rows for key in row[part]))


def _series(rows: Rows, key: str, part: str = "metrics") -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps, int64[N], and values, float64[N], at which a metric is a finite number."""
    points = [
        (row["step"], row[part][key]) for row in rows if np.isfinite(row[part].get(key, np.nan))
    ]
    return np.array([step for step, _ in points], dtype=np.int64), np.array(
        [value for _, value in points], dtype=float
    )


def _smoothed(panel: Axes, steps: np.ndarray, values: np.ndarray, colour: str, label: str) -> None:
    """Draws the values, pale, and their moving mean.

    The window of the mean is a fifteenth of the run, and narrower at both ends.
    """
    reach = len(values) // 30
    if reach:
        panel.plot(steps, values, color=colour, alpha=0.25, linewidth=1.0)
        values = np.array(
            [values[max(0, i - reach) : i + reach + 1].mean() for i in range(len(values))]
        )
    panel.plot(steps, values, color=colour, label=label, marker=_marker(steps))


def _marker(steps: np.ndarray) -> str:
    """Returns points for short lines, because the line through a single step cannot be seen."""
    return "." if len(steps) <= 20 else ""


def _share_axis(panel: Axes) -> None:
    """Gives rewards that stay between 0 and 1 the whole of that range as their axis.

    So pictures of two runs can be compared.
    """
    values = [value for line in panel.get_lines() for value in np.asarray(line.get_ydata())]
    if values and min(values) >= 0 and max(values) <= 1:
        panel.set_ylim(-0.03, 1.03)


def _legend(panel: Axes) -> None:
    """Adds a legend where a line has a name."""
    if panel.get_legend_handles_labels()[1]:
        panel.legend(loc="best")


def _colour(i: int) -> str:
    """Returns the i-th colour, and the first again after the last."""
    return COLOURS[i % len(COLOURS)]
