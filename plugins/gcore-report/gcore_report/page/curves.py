"""Makes the curves of all metrics, a chart for each, with a line for each run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gcore_core.contract import run_files
from gcore_report.page import limits
from gcore_report.page.runs import Run

#: Group -> the metrics that belong to it, in the order in which groups stand on the page.
GROUPS = {
    "Held-out": r"evaluation:",
    "Rewards and answers": r"reward(/|$)|rewards/|length$|truncated_share$",
    "Training": r"(loss|grad_norm|learning_rate|entropy|kl|clip_share|ratio|updates|masked_share"
    r"|skipped|gate|kl_\w+|log_ratio\w*|correction_\w+|entropy_\w+|loss_\w+|logp/.*|teacher_\w+"
    r"|policy_tail|path_kl|diversity|coverage|replay_gap|router_\w+)$",
    "Generator against trainer": r"logprob_gap|sentinel/",
    "Time": r"seconds/|actions_per_s$|actions$",
    "Running ahead": r"age/|window/",
    "Balance": r"balance_",
    "Placement": r"placement/|trainer_(sleep|wake)_s$|nodes/",
    "Memory": r"memory_mib/",
    "Processor time": r"cpu_seconds",
    "Groups": r"groups/|ordinals/",
    "Controllers": r"controller/|loop_delay",
}
OTHERS = "Others"
#: Of what a run has nothing to show: its charts are flat lines.
ZEROS = "Zero in every step"
#: Groups that other panels show.
OF_PANELS = ("Balance", "Placement", "Memory", "Processor time")
#: Groups that are closed when the page opens.
CLOSED = ("Groups", "Controllers", "Running ahead", ZEROS)
#: Metrics whose zeros are news, such as a reward that nothing earns.
_NEWS = re.compile(r"evaluation:|reward(/|$)|rewards/|loss$|grad_norm$|learning_rate$|kl$")

_PATTERNS = {group: re.compile(pattern) for group, pattern in GROUPS.items()}
_EVALUATION = "evaluation:"
#: Metrics of which there is one for each process.
_OF_PROCESSES = ("memory_mib", "cpu_seconds", "loop_delay_ms_p99")


def group_of(key: str) -> str:
    """Returns the group of a metric; one of an evaluation begins with ``evaluation:``."""
    return next((group for group, form in _PATTERNS.items() if form.match(key)), OTHERS)


def curves(runs: Sequence[Run], limit: int = limits.CURVE_POINTS) -> list[dict[str, Any]]:
    """Returns the groups of charts, in order, without those that have none.

    A group has ``title``, ``closed`` and ``charts``. A chart has ``key``, ``group``, ``lines`` and,
    where lines lie on top of each other, ``stacked``. A line has ``run`` (its number), ``key`` (of
    the metric), ``name`` and ``x``, ``y``: steps and values, at most ``limit`` of each.
    """
    charts: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(runs):
        if stages := _stages(run, number):
            charts[stages["key"]] = stages
        for key, steps, values in _series(run.rows):
            name, line_name = _chart_of(key)
            chart = charts.setdefault(name, {"key": name, "group": group_of(key), "lines": []})
            x, y = thinned(steps, values, limit)
            line = {"run": number, "key": key, "name": line_name, "x": x.tolist(), "y": rounded(y)}
            chart["lines"].append(line)
    for chart in charts.values():
        if chart["group"] not in OF_PANELS and _is_zero(chart):
            chart["group"] = ZEROS
    groups = []
    for title in [*GROUPS, OTHERS, ZEROS]:
        own = [chart for chart in charts.values() if chart["group"] == title]
        if own:
            groups.append({"title": title, "closed": title in CLOSED, "charts": own})
    return groups


def _is_zero(chart: Mapping[str, Any]) -> bool:
    """Returns whether a chart says nothing: all its values are 0, and that is what one expects."""
    values = (value for line in chart["lines"] for value in line["y"])
    return not _NEWS.match(chart["key"]) and not any(values)


def _chart_of(key: str) -> tuple[str, str]:
    """Returns the chart that a metric is drawn in, and the name of its line there.

    The greedy and the sampled value of one reward share a chart, and so do all processes.
    """
    if key.startswith(_EVALUATION):
        mode, _, name = key.removeprefix(_EVALUATION).partition("/")
        return f"{_EVALUATION}{name}", mode
    head, slash, process = key.partition("/")
    return (head, process) if slash and head in _OF_PROCESSES else (key, "")


def _stages(run: Run, number: int) -> dict[str, Any] | None:
    """Returns the chart of a run's stages on top of each other; None before the first step."""
    timed = [(row["step"], run_files.stage_seconds(row["metrics"])) for row in run.rows]
    timed = [(step, seconds) for step, seconds in timed if seconds]
    if not timed:
        return None
    names = list(dict.fromkeys(name for _, seconds in timed for name in seconds))
    table = np.array([[seconds.get(name, 0.0) for name in names] for _, seconds in timed])
    parts = np.array_split(np.arange(len(timed)), min(len(timed), limits.MAP_COLUMNS))
    steps = [timed[part[0]][0] for part in parts]
    means = np.array([table[part].mean(axis=0) for part in parts])
    metric_of = {name: f"seconds/{part}" for part, name in run_files.STAGES.items()}
    lines = [
        {
            "run": number,
            "key": metric_of.get(name, f"seconds/{name}"),
            "name": name,
            "x": steps,
            "y": rounded(means[:, column]),
        }
        for column, name in enumerate(names)
    ]
    key = f"seconds of a step, by stage ({run.label})"
    return {"key": key, "group": "Time", "lines": lines, "stacked": True}


def _series(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields each metric of a run: name, steps int64[N], values float64[N]; all are finite."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        step = row["step"]
        parts = ((row["metrics"], ""), (row["evaluation"], _EVALUATION))
        for values, prefix in parts:
            for name, value in values.items():
                if np.isfinite(value):
                    steps, numbers = found.setdefault(prefix + name, ([], []))
                    steps.append(step)
                    numbers.append(value)
    for key, (steps, numbers) in found.items():
        yield key, np.array(steps, np.int64), np.array(numbers, np.float64)


def thinned(steps: np.ndarray, values: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most ``limit`` points of a curve, which keep its extremes and its ends.

    The steps are cut into spans of equal length, and of each the lowest and the highest point stay.
    So a spike of a single step is seen, which a mean would hide.
    """
    if len(values) <= limit:
        return steps, values
    spans = limit // 2 - 1
    edges = np.linspace(0, len(values), spans + 1).astype(np.int64)
    kept = {0, len(values) - 1}
    for first, end in zip(edges[:-1], edges[1:], strict=True):
        part = values[first:end]
        kept.add(int(first + part.argmin()))
        kept.add(int(first + part.argmax()))
    order = np.array(sorted(kept))
    return steps[order], values[order]


def rounded(values: Iterable[float]) -> list[float]:
    """Returns values with six significant digits, which halves the page."""
    return [float(f"{value:.6g}") for value in values]
