"""Copies a run's final weights out, after checking that they are whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from gcore_core.contract.errors import ConfigError, DataError, did_you_mean
from gcore_core.contract.job_settings import POLICY
from gcore_core.contract.run_files import CHECKPOINTS, CONFIG, EARLIER, METRICS, WEIGHTS
from gcore_core.kits.runs import check_weights


def export(run_dir: Path, to: Path, role: str = POLICY) -> int:
    """Copies ``run_dir/weights`` to the new directory ``to``; returns the number of bytes copied.

    role: of another role than the policy it is ``run_dir/weights-<role>``.

    Every safetensors file is checked before and after: its header parses, its tensors fill the file
    exactly, and all tensors that the index names are there. ``to`` appears whole or not at all.

    Raises DataError when there is no such run, it has no final weights or a file is damaged, and
    ConfigError when ``to`` exists or cannot be written, or the run trains no such role.
    """
    weights = _final_weights(run_dir, WEIGHTS if role == POLICY else f"{WEIGHTS}-{role}")

    def copy(fresh: Path) -> None:
        check_weights(weights)
        shutil.copytree(weights, fresh)

    return write_whole(to, copy)


def write_whole(to: Path, write: Callable[[Path], None]) -> int:
    """Calls ``write`` to make a directory of weights, checks it and moves it to ``to``.

    Returns its size in bytes. Raises ConfigError when ``to`` exists or cannot be written, DataError
    when a file in it is damaged.
    """
    if to.exists() or to.is_symlink():
        raise ConfigError(
            f"{to} exists already.",
            where="g-core export",
            todo="name a directory that does not exist yet",
        )
    fresh = to.with_name(f".{to.name}.{os.getpid()}.new")
    try:
        to.absolute().parent.mkdir(parents=True, exist_ok=True)
        write(fresh)
        check_weights(fresh)
        fresh.rename(to)
    except (OSError, shutil.Error) as error:
        raise ConfigError(
            f"the weights could not be copied to {to}.",
            where="g-core export",
            why=f"the system says: {error}",
            todo="free some space, or name another directory",
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # after a success it is no longer there
    return sum(file.stat().st_size for file in to.rglob("*") if file.is_file())


def _final_weights(run_dir: Path, name: str) -> Path:
    if not run_dir.is_dir():
        raise DataError(
            "no such run directory.", where=str(run_dir), todo="runs are in runs/<name>/<NNN>"
        )
    weights = run_dir / name
    # A pipeline has them in its parts' directories.
    if any(weights.rglob("*.safetensors")):
        return weights
    if name != WEIGHTS and any((run_dir / WEIGHTS).rglob("*.safetensors")):
        raise _untrained(run_dir, name.removeprefix(f"{WEIGHTS}-"))
    if not (run_dir / CONFIG).exists() and not (run_dir / METRICS).exists():
        raise DataError(
            "this directory holds no run.",
            where=str(run_dir),
            why=f"it has neither {CONFIG} nor {METRICS}",
            todo="name a directory such as runs/<name>/<NNN>",
        )
    todo = f"start it again: g-core run {run_dir / CONFIG} run.dir=null"
    if any((run_dir / CHECKPOINTS).glob("step-*")):
        todo = (
            f"go on with it: g-core resume {run_dir}; or export what it has saved: --step N, of "
            f"g-core checkpoint list {run_dir}"
        )
    why = f"{name}/ is written when a run ends well; this one has not"
    if (run_dir / EARLIER / name).exists():
        why = f"it has gone on since it ended; the weights of that end are in {EARLIER}/{name}"
    raise DataError(
        "this run has no final weights.",
        where=str(run_dir),
        why=why,
        todo=todo,
    )


def _untrained(run_dir: Path, role: str) -> ConfigError:
    """Returns the error for a role without final weights in a run that has the policy's."""
    folders = sorted(run_dir.glob(f"{WEIGHTS}-*"))
    roles = [POLICY, *(folder.name.removeprefix(f"{WEIGHTS}-") for folder in folders)]
    return ConfigError(
        f"no role {role!r} is trained in this run{did_you_mean(role, roles)}.",
        where="g-core export --role",
        why=f"there are: {', '.join(roles)}",
    )
