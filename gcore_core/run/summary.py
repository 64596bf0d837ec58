"""Writes ``summary.md``, and makes the table that is printed at the end of a run.

The summary says what ran, what it changed, and where the run's files are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gcore_core.contract import run_files
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.records import RunFacts
from gcore_core.contract.run_files import stage_seconds
from gcore_core.run import directory as d
from gcore_core.run.display import duration
from gcore_core.run.saved_weights import weights_sha256

Rows = Sequence[Mapping[str, Any]]  # rows of metrics as ``read_metrics`` returns them

ANSWERS = 3  # how many prompts are shown with their answers
ANSWER_LIMIT = 800  # how many characters of one prompt or answer are shown

_FILES = (
    (run_files.CONFIG, "the resolved configuration"),
    (run_files.LOCK, "plugins and their versions"),
    (run_files.METRICS, "one JSON object a step"),
    (run_files.SAMPLES, "evaluated answers"),
    (run_files.LOGS, "one log a process"),
    (run_files.WEIGHTS, "the final policy, Hugging Face layout"),
    (run_files.TENSORBOARD, "scalars for TensorBoard"),
    (run_files.CURVES, "the curves below"),
)


def write(run: RunFacts, wall_s: float, cpu_s: float) -> Path:
    """Writes ``summary.md`` from the files in the run's directory and returns its path.

    wall_s: seconds since the run was started or resumed.
    cpu_s: CPU seconds that all its processes have used since then.

    Raises ConfigError when it cannot be written.
    """
    run_dir = Path(run.directory)
    metrics = run_files.read_metrics(run_dir)
    sections = [
        f"# {run.name}\n",
        _what_ran(run, metrics, wall_s, cpu_s),
        _section("Before and after", _markdown(_before_and_after(metrics))),
        _section("Answers", _answers(run_dir, metrics)),
        _section("Time", _markdown(_stage_times(metrics))),
        *(
            file.read_text("utf-8")
            for file in sorted(run_dir.glob("*.md"))
            if file.name != run_files.SUMMARY
        ),
        _section("Files", _files(run_dir)),
        *(f"![{file.stem.replace('_', ' ')}]({file.name})\n" for file in _pictures(run_dir)),
    ]
    path = run_dir / run_files.SUMMARY
    d.write_text(path, "\n".join(section for section in sections if section))
    return path


def table(metrics: Rows) -> str:
    """Returns the before-and-after table as aligned plain text; "" when nothing was evaluated."""
    rows = _before_and_after(metrics)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.lstrip().ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


# -- the parts -------------------------------------------------------------------------------------


def _what_ran(run: RunFacts, metrics: Rows, wall_s: float, cpu_s: float) -> str:
    """Returns the list at the top: steps, times and plugins."""
    last_step = metrics[-1]["step"] if metrics else 0
    steps = (
        f"{last_step} steps"
        if last_step >= run.steps
        else f"ended at step {last_step} of {run.steps}"
    )
    if run.resumed_from:
        steps += f", resumed from step {run.resumed_from}"
    plugins = [
        f"{name} {facts.get('version', '?')}"
        for name, facts in run_files.read_lock(Path(run.directory)).items()
    ]
    since = " since then" if run.resumed_from else ""
    lines = [f"- {steps}", f"- {duration(wall_s)} wall time, {cpu_s:.0f} CPU seconds{since}"]
    rewarded = [row for row in metrics if "reward" in row["metrics"]]
    if rewarded:
        shown = [f"{row['metrics']['reward']:.3f} in step {row['step']}" for row in rewarded]
        ends = dict.fromkeys((shown[0], shown[-1]))  # one where there is one step
        lines.append(f"- mean reward of the answers trained on: {', '.join(ends)}")
    if plugins:
        lines.append(f"- plugins: {', '.join(plugins)}")
    if weights_sha256 := _final_weights_sha256(Path(run.directory)):
        lines.append(f"{run_files.WEIGHTS_SHA256}{weights_sha256}")
    return "\n".join(lines) + "\n"


def _final_weights_sha256(run_dir: Path) -> str:
    """Hashes the files of the final weights; "" where there are none that can be read."""
    weights = run_dir / run_files.WEIGHTS
    if not any(weights.glob("*.safetensors")):
        return ""
    try:
        return weights_sha256(weights)
    except (GcoreError, OSError):
        return ""


def _before_and_after(metrics: Rows) -> list[list[str]]:
    """Returns a header and rows of cells that compare the first and the last evaluation.

    There is one row for each evaluated reward and mode (greedy or sampled), and the lengths come
    last. The list is empty when nothing was evaluated.
    """
    evaluated = [row for row in metrics if row["evaluation"]]
    if not evaluated:
        return []
    first = evaluated[0]
    last = evaluated[-1]
    only = first is last
    after_title = "after" if only else f"after (step {last['step']})"
    rows = [["", f"before (step {first['step']})", after_title, "change"]]
    keys = list(dict.fromkeys([*first["evaluation"], *last["evaluation"]]))
    names = list(dict.fromkeys(key.partition("/")[2] for key in keys))
    # False sorts before True, and the sort is stable: the length comes last, all else stays.
    names.sort(key="length".__eq__)
    for key in sorted(keys, key=lambda key: names.index(key.partition("/")[2])):
        mode, _, name = key.partition("/")
        after = None if only else last["evaluation"].get(key)
        rows.append(_change(f"{name}, {mode}", first["evaluation"].get(key), after))
    if not any(key.endswith("/length") for key in keys):
        lengths = [row["metrics"]["length"] for row in metrics if "length" in row["metrics"]]
        if lengths:
            rows.append(_change("length, training", lengths[0], None if only else lengths[-1]))
    return rows


def _change(label: str, before: float | None, after: float | None) -> list[str]:
    """Returns the cells of one row: label, before, after, change. An unknown value is "-"."""
    digits = 1 if label.startswith("length, ") else 3
    cells = ["-" if value is None else f"{value:.{digits}f}" for value in (before, after)]
    change = "" if before is None or after is None else f"{after - before:+.{digits}f}"
    return [label, *cells, change]


def _stage_times(metrics: Rows) -> list[list[str]]:
    """Returns a header and rows of cells with the time of each stage.

    The columns are the seconds in all, the seconds a step, and the share of the steps' time.
    """
    steps = [row["metrics"] for row in metrics if "seconds/step" in row["metrics"]]
    if not steps:
        return []
    whole_s = sum(step["seconds/step"] for step in steps)
    totals: dict[str, float] = {}
    for step in steps:
        for stage, seconds in stage_seconds(step).items():
            totals[stage] = totals.get(stage, 0.0) + seconds
    totals["whole step"] = whole_s
    rows = [["stage", "seconds", "a step", "share"]]
    for stage, seconds in totals.items():
        share = f"{seconds / whole_s:.0%}" if whole_s > 0 else "-"
        rows.append([stage, f"{seconds:.1f}", f"{seconds / len(steps):.3f}", share])
    evaluation_s = sum(
        row["metrics"].get("seconds/evaluation", 0.0) for row in metrics if row["evaluation"]
    )
    return [*rows, ["evaluation", f"{evaluation_s:.1f}", "-", "-"]] if evaluation_s else rows


def _answers(run_dir: Path, metrics: Rows) -> str:
    """Returns the first prompts of the evaluation with their first and last answers.

    They are the first ones in the file, and are never chosen by how well they went.
    """
    steps = [
        row["step"] for row in metrics if run_files.samples_path(run_dir, row["step"]).exists()
    ]
    if not steps:
        return ""
    before, after = (
        _by_prompt(run_files.read_samples(run_dir, step)) for step in (steps[0], steps[-1])
    )
    # An answer that is a picture has no text and is left out.
    keys = [key for key in before if key in after and before[key]["text"]][:ANSWERS]
    parts = []
    for key in keys:
        parts.append(f"**Prompt** ({before[key].get('mode', '')})\n\n{_fenced(key[1])}")
        for step, rows in {steps[0]: before, steps[-1]: after}.items():
            rewards = ", ".join(
                f"{name} {value:.3g}" for name, value in rows[key].get("rewards", {}).items()
            )
            parts.append(
                f"Step {step}{': ' if rewards else ''}{rewards}\n\n{_fenced(str(rows[key]['text']))}"  # noqa: E501
            )
    return "\n".join(parts)


def _by_prompt(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns (mode, prompt) -> row of its first answer; greedy answers come first."""
    first_answers: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row.get("mode") != "greedy"):
        prompt = (
            row["prompt"]
            if isinstance(row["prompt"], str)
            else json.dumps(row["prompt"], ensure_ascii=False)
        )
        first_answers.setdefault((str(row.get("mode", "")), prompt), row)
    return first_answers


def _pictures(run_dir: Path) -> list[Path]:
    """Returns the pictures that observers have drawn, the curves last."""
    return sorted(
        run_dir.glob("*.png"), key=lambda file: (file.name == run_files.CURVES, file.name)
    )


def _files(run_dir: Path) -> str:
    """Returns a list of the run's files that exist, and their meanings; no path."""
    listed = [f"- `{name}`: {meaning}" for name, meaning in _FILES if (run_dir / name).exists()]
    return "\n".join(["Beside this one:\n", *listed]) + "\n"


# -- Markdown --------------------------------------------------------------------------------------


def _section(title: str, body: str) -> str:
    """Returns a section with a title; "" when its body is empty."""
    return f"## {title}\n\n{body}" if body else ""


def _markdown(rows: list[list[str]]) -> str:
    """Returns a Markdown table whose first row is the header; "" when there are no rows."""
    if not rows:
        return ""
    ruler = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], ruler, *rows[1:])) + "\n"


def _fenced(text: str) -> str:
    """Returns a code block that nothing in ``text`` can end, since answers may hold Markdown.

    Its fence is longer than any run of backticks in the text.
    """
    if len(text) > ANSWER_LIMIT:
        text = text[:ANSWER_LIMIT] + " [...]"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}\n"
