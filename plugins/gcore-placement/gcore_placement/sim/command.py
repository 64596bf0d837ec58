"""Runs ``g-core sim run FILE``, which is ``g-core run`` in one process and on virtual time."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from gcore_core.contract.errors import PluginError
from gcore_core.contract.installing import install_command
from gcore_core.kits.commands import load_plan, run_file


def _virtual_loops() -> asyncio.AbstractEventLoopPolicy:
    """Returns the policy that makes event loops whose clock is virtual."""
    try:
        from gcore_testing.simulation import VirtualLoop
    except ModuleNotFoundError as error:
        raise PluginError(
            "virtual time comes with gcore-testing, which is not installed.",
            where="g-core sim run",
            todo=install_command("gcore-placement[sim]"),
        ) from error

    class VirtualPolicy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            return VirtualLoop()

    return VirtualPolicy()


def run(words: list[str]) -> int:
    """Runs ``g-core sim run`` with these command-line arguments; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="g-core sim run",
        description="Runs a job of emulated backends in one process, on virtual time: seconds "
        "are the emulated "
        "cluster's, and nobody waits for them. Times are not scaled unless an override says so.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the job, a YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="values that win over the file",
    )
    args = parser.parse_intermixed_args(words)
    loops = _virtual_loops()
    overrides = [*_unscaled(args.file, args.overrides), *args.overrides, "launcher.use=sim/inline"]
    asyncio.set_event_loop_policy(loops)
    try:
        return run_file(args.file, overrides)
    finally:
        asyncio.set_event_loop_policy(None)


def _unscaled(file: Path, overrides: Sequence[str]) -> list[str]:
    """Returns overrides that set ``time_scale`` to 1 for every emulated backend of the job.

    On virtual time nobody waits, so there is no need to hurry.
    """
    plan = load_plan(file, [*overrides, "launcher.use=sim/inline"])
    scaled = [
        path for path, provided in plan.provided.items() if "time_scale" in plan.at(path)["config"]
    ]
    return [
        f"{path}.config.time_scale=1.0" for path in scaled if plan.provided[path].plugin == "sim"
    ]
