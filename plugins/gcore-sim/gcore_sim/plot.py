"""Steps of a simulation as a picture. The only module that needs matplotlib: ``pip install
gcore-sim[plot]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gcore_core.contract.errors import ConfigError
from gcore_sim.cluster import ORACLE, Row


def plot(rows: Sequence[Row], file: Path, title: str = "") -> None:
    """Seconds and judges' cells of every step, a line for each policy; idle shares, a bar for
    each.
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError(
            "matplotlib is not installed.", where="--plot", todo="pip install 'gcore-sim[plot]'"
        ) from None
    figure, (seconds, shares, idle) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    names = list(dict.fromkeys(row.policy for row in rows))
    for name in names:
        own = [row for row in rows if row.policy == name]
        dashed = "--" if name == ORACLE else "-"
        color = "black" if name == ORACLE else None
        (line,) = seconds.plot(
            [row.step for row in own], [row.seconds for row in own], dashed, color=color, label=name
        )
        if all(row.mode == "split" for row in own):
            shares.plot(
                [row.step for row in own],
                [row.share for row in own],
                dashed,
                color=line.get_color(),
            )
    causes = list(rows[0].idle)
    left = [0.0] * len(names)
    for cause in causes:
        means = []
        for name in names:
            own = [row for row in rows if row.policy == name]
            means.append(sum(row.idle[cause] for row in own) / len(own))
        idle.barh(names, means, left=left, label=cause)
        left = [a + b for a, b in zip(left, means, strict=True)]
    seconds.set(title="rollout, seconds", xlabel="step")
    shares.set(title="share of the cells that judge", xlabel="step", ylim=(0, None))
    idle.set(title="idle share by cause")
    seconds.legend(fontsize=8)
    idle.legend(fontsize=7)
    figure.suptitle(title)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
