"""The plugin ``placement``: which cells sample and which judge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract import run_files
from gcore_core.contract.errors import DataError
from gcore_core.contract.providers import CommandProvider, PlacementProvider
from gcore_core.contract.records import RunFacts
from gcore_placement.config import ReplayConfig, SplitConfig, UtilisationConfig


@hookimpl
def gcore_placement_policies() -> Iterable[PlacementProvider]:
    for name in ("default", "replay"):
        yield PlacementProvider(
            name=name,
            summary=(
                "replays each step with the lengths then known, and jumps to the split of "
                "least regret"
            ),
            factory="gcore_placement.replay:Replay",
            config=ReplayConfig,
        )
    yield PlacementProvider(
        name="split",
        summary="a fixed share of the cells judges",
        factory="gcore_placement.fixed:FixedSplit",
        config=SplitConfig,
    )
    yield PlacementProvider(
        name="colocated",
        summary="all cells sample, then all judge",
        factory="gcore_placement.fixed:Colocated",
    )
    yield PlacementProvider(
        name="coresident",
        summary="both models awake in every cell",
        factory="gcore_placement.fixed:Coresident",
    )
    yield PlacementProvider(
        name="utilisation",
        summary="one cell at a time from the role that is used less; for comparison",
        factory="gcore_placement.utilisation:Utilisation",
        config=UtilisationConfig,
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    """Yields a problem where ``signal: hardware`` cannot tell the roles apart."""
    placement = plan["placement"]
    signal = (placement.get("config") or {}).get("signal")
    asks_hardware = placement["use"] == "placement/utilisation" and signal == "hardware"
    if asks_hardware and plan["launcher"]["use"] == "core/inline":
        yield (
            "placement.config.signal: hardware reads the processor time of each worker, and "
            "core/inline runs all of them in one process; use launcher: core/local, or signal: "
            "filled."
        )


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        name="explain",
        summary="why the devices of a step were placed as they were",
        factory="gcore_placement.explain:run",
    )
    yield CommandProvider(
        name="costs",
        summary="where the time of every device went, over a whole run",
        factory="gcore_placement.costs:run",
    )


@hookimpl
def gcore_run_end(run: RunFacts, error: str) -> None:
    """Adds the costs of placement to the run's summary.

    Does nothing where the run has no journal of placement, or where no step has ended.
    """
    if not Path(run.directory, run_files.PLACEMENT).is_file():
        return
    from gcore_placement.costs import SECTION, section

    with suppress(DataError):  # no step has ended
        Path(run.directory, SECTION).write_text(section(Path(run.directory)))
