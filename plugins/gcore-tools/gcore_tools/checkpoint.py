"""The plugin ``checkpoint``: ``g-core checkpoint list RUN`` and ``g-core checkpoint verify PATH``
say what a run has saved, and whether it is whole.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider

if TYPE_CHECKING:
    from gcore_core.kits.runs import Manifest

SUMMARY = "list what a run has saved, or verify that it is whole"

_HEAD = ("CHECKPOINT", "SAVED", "FILES", "MB", "PROBLEMS")
_SHOWN_PROBLEMS = 20


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary=SUMMARY,
        factory="gcore_tools.checkpoint:run",
        parser="gcore_tools.checkpoint:make_parser",
    )


def make_parser() -> argparse.ArgumentParser:
    from gcore_core.kits.commands import command_parser

    parser = command_parser("checkpoint", SUMMARY)
    parser.add_argument(
        "action", choices=["list", "verify"], help="list: names and sizes; verify: every byte"
    )
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="a run's directory; for verify also one checkpoint"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of lines"
    )
    parser.epilog = (
        "verify ends with exit code 1 when there is a problem\n\n"
        "examples:\n  g-core checkpoint list runs/quickstart/001\n"
        "  g-core checkpoint verify runs/quickstart/001/checkpoints/step-000020"
    )
    return parser


def run(words: Sequence[str]) -> int:
    args = make_parser().parse_intermixed_args(words)
    if args.action == "list":
        return _list(args.path, as_json=args.json)
    return _verify(args.path, as_json=args.json)


def _list(run_dir: Path, *, as_json: bool) -> int:
    """Prints every checkpoint with its problems; looks at names and sizes, not at contents."""
    from gcore_core.kits.commands import print_table
    from gcore_core.kits.runs import inspect_checkpoint

    rows: list[list[str]] = []
    facts: dict[str, object] = {}
    for path in _checkpoints(run_dir):
        manifest, problems = inspect_checkpoint(path, hashes=False)
        if manifest is None:
            facts[path.name] = {"problems": problems}
            rows.append([path.name, "", "", "", _count(problems)])
            continue
        facts[path.name] = {
            "saved_unix_s": manifest.saved_unix_s,
            "files": len(manifest.parts),
            "bytes": manifest.nbytes,
            "metrics": manifest.metrics,
            "problems": problems,
        }
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_unix_s))
        size_mb = f"{manifest.nbytes / 1e6:.1f}"
        rows.append([path.name, saved, str(len(manifest.parts)), size_mb, _count(problems)])
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print_table(_HEAD, rows)
    return 0


def _verify(path: Path, *, as_json: bool) -> int:
    """Reads every byte of one checkpoint, or of all that a run has; 1 when there is a problem."""
    from gcore_core.kits.runs import CHECKPOINT_NAME, inspect_checkpoint

    is_one_checkpoint = CHECKPOINT_NAME.fullmatch(path.resolve().name)
    checkpoints = [path] if is_one_checkpoint else _checkpoints(path)
    problems_of: dict[str, list[str]] = {}
    for checkpoint in checkpoints:
        manifest, problems = inspect_checkpoint(checkpoint)
        problems_of[str(checkpoint)] = problems
        if not as_json:
            lines = [f"{checkpoint}: {_count(problems) or _size(manifest)}"]
            lines += problems[:_SHOWN_PROBLEMS]
            print("\n  ".join(lines), flush=True)  # at once: the next one may take minutes
    if as_json:
        print(json.dumps(problems_of, indent=2))
    return int(any(problems_of.values()))


def _count(problems: list[str]) -> str:
    """Counts in words: ``2 problems``; empty when there are none."""
    if not problems:
        return ""
    return "1 problem" if len(problems) == 1 else f"{len(problems)} problems"


def _size(manifest: Manifest | None) -> str:
    if manifest is None:
        return ""
    return f"whole, {len(manifest.parts)} files, {manifest.nbytes / 1e6:.1f} MB"


def _checkpoints(run_dir: Path) -> list[Path]:
    """Returns the checkpoints of a run, in the order of their steps.

    Raises CheckpointError when there are none.
    """
    from gcore_core.contract.errors import CheckpointError
    from gcore_core.contract.run_files import CHECKPOINTS
    from gcore_core.kits.runs import CHECKPOINT_NAME

    directory = run_dir / CHECKPOINTS
    paths: list[Path] = []
    if directory.is_dir():
        paths = [path for path in directory.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)]
    if not paths:
        raise CheckpointError(
            "there are no checkpoints here.",
            where=str(run_dir),
            why=f"a run has them in {CHECKPOINTS}/",
            todo="name a run's directory, such as runs/<name>/<NNN>, or one of its checkpoints",
        )
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))
