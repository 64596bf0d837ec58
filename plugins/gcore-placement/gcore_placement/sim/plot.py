"""Draws the steps of a simulation.

This is the only module that needs matplotlib: the extra ``plot``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.installing import install_command
from gcore_placement.sim.cluster import ORACLE, Row


def plot(rows: Sequence[Row], file: Path, title: str = "") -> None:
    """Draws three panels into one picture, with a line or a bar for each policy.

    The panels are the seconds of every step, the share of cells that judge, and the idle shares by
    cause. Raises ConfigError where matplotlib is missing.

    rows: of one simulation, the oracle's too.
    file: where the picture is written; its ending says the format.
    title: a line above the panels; empty: none.
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError(
            "matplotlib is not installed.",
            where="--plot",
            todo=install_command("gcore-placement[plot]"),
        ) from None
    figure, (seconds, shares, idle) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    names = list(dict.fromkeys(row.policy for row in rows))
    for name in names:
        policy_rows = [row for row in rows if row.policy == name]
        dashed = "--" if name == ORACLE else "-"
        color = "black" if name == ORACLE else None
        (line,) = seconds.plot(
            [row.step for row in policy_rows],
            [row.seconds for row in policy_rows],
            dashed,
            color=color,
            label=name,
        )
        if all(row.mode == "split" for row in policy_rows):
            shares.plot(
                [row.step for row in policy_rows],
                [row.share for row in policy_rows],
                dashed,
                color=line.get_color(),
            )
    causes = list(rows[0].idle)
    bar_starts = [0.0] * len(names)
    for cause in causes:
        means = []
        for name in names:
            policy_rows = [row for row in rows if row.policy == name]
            means.append(sum(row.idle[cause] for row in policy_rows) / len(policy_rows))
        idle.barh(names, means, left=bar_starts, label=cause)
        bar_starts = [a + b for a, b in zip(bar_starts, means, strict=True)]
    seconds.set(title="rollout, seconds", xlabel="step")
    shares.set(title="share of the cells that judge", xlabel="step", ylim=(0, None))
    idle.set(title="idle share by cause")
    seconds.legend(fontsize=8)
    idle.legend(fontsize=7)
    figure.suptitle(title)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
