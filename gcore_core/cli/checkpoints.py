"""What ``g-core checkpoint`` prints."""

from __future__ import annotations

import json
import time
from pathlib import Path

from gcore_core.cli.table import print_table
from gcore_core.contract.errors import CheckpointError
from gcore_core.run.checkpoints import CHECKPOINTS
from gcore_core.run.manifest import NAME, inspect

HEAD = ("CHECKPOINT", "SAVED", "FILES", "MB", "PROBLEMS")


def list_checkpoints(run_dir: Path, *, as_json: bool) -> int:
    """Looks at names and sizes, at no content."""
    rows: list[list[str]] = []
    told: dict[str, object] = {}
    for path in _checkpoints(run_dir):
        manifest, problems = inspect(path, hashes=False)
        if manifest is None:
            told[path.name] = {"problems": problems}
            rows.append([path.name, "", "", "", _shortly(problems)])
            continue
        files, nbytes, saved_unix_s = len(manifest.parts), manifest.nbytes, manifest.saved_unix_s
        facts = {
            "saved_unix_s": saved_unix_s,
            "files": files,
            "bytes": nbytes,
            "metrics": manifest.metrics,
        }
        told[path.name] = facts | {"problems": problems}
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved_unix_s))
        rows.append([path.name, saved, str(files), f"{nbytes / 1e6:.1f}", _shortly(problems)])
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        print_table(HEAD, rows)
    return 0


def verify_checkpoints(path: Path, *, as_json: bool) -> int:
    """Reads every byte of one checkpoint, or of all that a run has."""
    found = {}
    for checkpoint in [path] if NAME.fullmatch(path.resolve().name) else _checkpoints(path):
        manifest, problems = inspect(checkpoint)
        found[str(checkpoint)] = problems
        if not as_json:
            size = (
                f"whole, {len(manifest.parts)} files, {manifest.nbytes / 1e6:.1f} MB"
                if manifest
                else ""
            )
            print(
                "\n  ".join([f"{checkpoint}: {_shortly(problems) or size}", *problems[:20]]),
                flush=True,
            )
    if as_json:
        print(json.dumps(found, indent=2))
    return int(any(found.values()))


def _shortly(problems: list[str]) -> str:
    return f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else ""


def _checkpoints(run_dir: Path) -> list[Path]:
    """In the order of their steps. Raises CheckpointError when there are none."""
    directory = run_dir / CHECKPOINTS
    found = (
        [path for path in directory.iterdir() if NAME.fullmatch(path.name)]
        if directory.is_dir()
        else []
    )
    if not found:
        raise CheckpointError(
            "there are no checkpoints here.",
            where=str(run_dir),
            why=f"a run has them in {CHECKPOINTS}/",
            todo="name a run's directory, such as runs/<name>/<NNN>, or one of its checkpoints",
        )
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))
