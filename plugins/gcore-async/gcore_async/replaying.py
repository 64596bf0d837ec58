"""Says whether a job can repeat an earlier run: it must be the same job over the same data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.run_files import CONFIG, DATA, LATEST
from gcore_core.controllers.window.journal import read_memberships
from gcore_core.kits.runs import read_config

#: Settings that decide nothing of what a run computes. Of ``plugins`` and ``local`` the run takes
#: what other settings name, and those are compared.
_FREE = (
    *("run.name", "run.dir", "run.patience_s", "run.spares"),
    *("launcher", "cluster", "placement"),
    *("plugins", "local", "observers"),
    *("checkpoint", "evaluation"),
    *("controller.shards", "controller.replicas"),
    *("controller.config.replay", "controller.config.unfinished"),
    *("roles.rollout.slots", "roles.rollout.least"),
)
_MISSING = "nothing"


def problems(plan: Mapping[str, Any], replay: str) -> Iterator[str]:
    """Yields why a job cannot repeat the run in the directory ``replay``; at most one thing.

    plan: the resolved configuration.
    """
    where = "controller.config.replay"
    directory = Path(replay).expanduser()
    if not (directory / CONFIG).is_file():
        yield f"{where}: {replay} holds no run; give the directory of one, such as runs/NAME/001."
        return
    if directory.name == LATEST and directory.is_symlink():
        run = directory.parent / directory.readlink()
        yield f"{where}: {replay} goes on to the next run of its name; give {run}."
        return
    try:
        lines = read_memberships(directory)
    except DataError as error:
        yield f"{where}: {error.where}: {error.what} {error.why}"
        return
    earlier = read_config(directory)
    settings = earlier.get("controller", {}).get("config") or {}
    if settings.get("unfinished") == "keep":
        yield (
            f"{where}: {replay} had checkpoints keep unfinished samples (controller.config."
            "unfinished), so the clock said where samples went on with other random numbers; give "
            "another run."
        )
        return
    if settings.get("midway") == "recompute" and any(line.cuts is None for line in lines):
        yield (
            f"{where}: the journal of {replay} does not say where pushes cut samples, since an "
            "older version wrote it; give another run, or one of midway: wait."
        )
        return
    difference = first_difference(earlier, plan)
    if difference:
        yield f"{where}: {difference} A run repeats only as it was; leave that as it is there."


def first_difference(earlier: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """Returns a sentence on the first setting by which two jobs compute different things; "": none.

    earlier, plan: resolved configurations.
    """
    there = dict(_computed(earlier))
    here = dict(_computed(plan))
    for key in sorted({*there, *here}):
        if there.get(key, _MISSING) != here.get(key, _MISSING):
            return (
                f"{key} was {there.get(key, _MISSING)!r} in that run and is "
                f"{here.get(key, _MISSING)!r} here."
            )
    return ""


def check_rows(own: Path, replay: str) -> None:
    """Raises ConfigError where the data set of the earlier run had other rows.

    own: the directory of this run.
    """
    files = [Path(replay).expanduser() / DATA, own / DATA]
    if not all(file.is_file() for file in files):
        return
    there, here = (msgspec.json.decode(file.read_bytes()) for file in files)
    if there == here:
        return
    what = f"{there['rows']} rows there, {here['rows']} here"
    for row, digest in there["digests"].items():
        if there["rows"] == here["rows"] and here["digests"].get(row) != digest:
            what = f"row {row} is another one"
            break
    raise ConfigError(
        f"the data set is not that of {replay}: {what}.",
        where="controller.config.replay",
        why="the same ordinals mean other prompts, so the run would not repeat",
        todo="give it that run's data, or leave replay out",
    )


def _computed(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted key and value of the settings that decide what is computed."""
    if prefix in _FREE:
        return
    if not (isinstance(tree, Mapping) and tree):
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from _computed(value, f"{prefix}.{key}" if prefix else str(key))
