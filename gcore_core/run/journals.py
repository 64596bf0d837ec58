"""Takes out of a run's journals what is made again when it goes back to a checkpoint.

The journals are ``placement.jsonl``, ``tensors.jsonl``, ``tokens.jsonl`` and the files of the
trace, which processes of the run append to. ``metrics.jsonl`` is the supervisor's own: see
``directory.MetricsFile``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from gcore_core.contract.run_files import (
    PLACEMENT,
    PLACEMENT_UNDONE,
    TENSORS,
    TENSORS_UNDONE,
    TOKENS,
    TOKENS_UNDONE,
    TRACE,
    TRACE_UNDONE,
)
from gcore_core.runtime.replacing import replacing

_JOURNALS = {
    PLACEMENT: PLACEMENT_UNDONE,
    TENSORS: TENSORS_UNDONE,
    TOKENS: TOKENS_UNDONE,
}


class _Line(msgspec.Struct):
    """What is read of a line. step: counted from 0; None for one that belongs to no step."""

    step: int | None = None


def go_back(run_dir: Path, next_step: int, alarm: Callable[[str], None]) -> None:
    """Moves the lines of steps that are made again to files beside the journals.

    A file that cannot be written stays as it is, and its readers see those steps twice.

    next_step: the first step that is made again, counted from 0.
    alarm: is told of a file that stays.
    """
    for path, undone in _journals(run_dir):
        try:
            _shorten(path, undone, next_step)
        except OSError as error:
            alarm(f"{path} cannot be shortened ({error.strerror}).")


def _journals(run_dir: Path) -> Iterator[tuple[Path, Path]]:
    """Yields each journal that is there, and the file for its lines that are undone."""
    for name, undone in _JOURNALS.items():
        if (run_dir / name).exists():
            yield run_dir / name, run_dir / undone
    for path in sorted((run_dir / TRACE).glob("*.jsonl")):
        yield path, run_dir / TRACE_UNDONE / path.name


def _shorten(path: Path, undone: Path, next_step: int) -> None:
    """Appends the lines of a journal that do not stand to ``undone``, and writes the journal anew.

    The journal is replaced last, so an OSError leaves it whole.
    """
    # Line by line: the trace of a long run is larger than what should lie in memory.
    with path.open("rb") as lines:
        if all(_stands(line, next_step) for line in lines):
            return
        lines.seek(0)
        undone.parent.mkdir(exist_ok=True)
        with (
            replacing(path) as fresh,
            fresh.open("wb") as kept_file,
            undone.open("ab") as undone_file,
        ):
            for line in lines:
                if _stands(line, next_step):
                    kept_file.write(line)
                else:
                    undone_file.write(line.rstrip(b"\n") + b"\n")


def _stands(line: bytes, next_step: int) -> bool:
    """Returns whether a line is whole and of a step that is not made again."""
    if not line.endswith(b"\n"):
        return False  # half a line, as a killed run may leave it
    try:
        step = msgspec.json.decode(line, type=_Line).step
    except msgspec.MsgspecError:
        return False
    return step is None or step < next_step
