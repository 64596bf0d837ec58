"""Draws the pictures of docs/explanation/placement.md.

A long drift, growing clusters, the price of changing roles.

    python benchmarks/placement_plots.py [DIRECTORY, docs/figures]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from gcore_placement.config import ReplayConfig, SplitConfig, UtilisationConfig
from gcore_placement.fixed import Colocated, FixedSplit
from gcore_placement.replay import Replay
from gcore_placement.sim.cluster import Cluster, simulate
from gcore_placement.sim.plot import plot
from gcore_placement.sim.workloads import Published
from gcore_placement.utilisation import Utilisation
from matplotlib import pyplot

from gcore_core.contract.placement import PlacementPolicy


def policies() -> dict[str, PlacementPolicy]:
    """Returns new policies by the names that the pictures show."""
    return {
        "replay": Replay(ReplayConfig()),
        "split 0.25": FixedSplit(SplitConfig(share=0.25)),
        "utilisation (busy)": Utilisation(UtilisationConfig()),
        "utilisation (filled)": Utilisation(UtilisationConfig(signal="filled")),
        "colocated": Colocated(),
    }


def mean_excess(
    cluster: Cluster, policies_by_name: dict[str, PlacementPolicy], steps: int = 18
) -> dict[str, float]:
    """Returns policy -> mean percent over the oracle on drift, without the first three steps."""
    rows = list(
        simulate(cluster, Published(name="drift", steps=steps), policies_by_name, steps, seed=7)
    )
    return {
        name: 100 * float(np.mean([r.excess for r in rows if r.policy == name and r.step >= 3]))
        for name in policies_by_name
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "directory", type=Path, nargs="?", default=Path(__file__).parents[1] / "docs/figures"
    )
    directory = parser.parse_args().directory

    steps = 60
    policies_by_name = policies()
    cluster = Cluster(devices=128, needed=128)
    rows = list(
        simulate(cluster, Published(name="drift", steps=steps), policies_by_name, steps, seed=7)
    )
    plot(rows, directory / "placement_drift.png", "128 devices, answers grow tenfold over 60 steps")

    sizes = [32, 64, 128, 256, 512]
    excess_by_size = [
        mean_excess(Cluster(devices=n, needed=min(n, 1024)), policies()) for n in sizes
    ]
    prices = [0.0, 15.0, 30.0, 60.0]
    excess_by_price = [
        mean_excess(replace(cluster, switch_s=price), policies()) for price in prices
    ]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name in policies():
        axes[0].plot(sizes, [values[name] for values in excess_by_size], marker="o", label=name)
        axes[1].plot(prices, [values[name] for values in excess_by_price], marker="o", label=name)
    axes[0].set(
        title="drift, by the number of devices",
        xlabel="devices",
        xscale="log",
        ylabel="over the oracle, %",
    )
    axes[1].set(title="drift, 128 devices, by what changing roles takes", xlabel="seconds")
    axes[0].set_xticks(sizes, labels=list(map(str, sizes)))
    axes[0].minorticks_off()
    axes[0].legend(fontsize=8)
    figure.savefig(directory / "placement_scale.png", dpi=110)
    for sweep, points, values in (
        ("devices", sizes, excess_by_size),
        ("seconds", prices, excess_by_price),
    ):
        for point, excess in zip(points, values, strict=True):
            print(sweep, point, {name: round(value, 1) for name, value in excess.items()})


if __name__ == "__main__":
    main()
