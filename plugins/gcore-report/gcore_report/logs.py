"""The plugin ``logs`` prints the logs of a run's processes: ``g-core logs RUN [WORKER]``."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gcore_core import hookimpl
from gcore_core.contract.errors import DataError, did_you_mean
from gcore_core.contract.providers import CommandProvider
from gcore_core.contract.run_files import LOGS

_SUPERVISOR = "supervisor"
_LOOK_S = 0.5  # seconds between two looks for new lines
_OVER_S = 3.0  # a run without a supervisor for so long has ended; a killed one is back by then
_TAIL = 20  # lines of each log, where several are printed
_EPILOG = """\
examples:
  g-core logs runs/quickstart/latest
  g-core logs runs/quickstart/latest rollout --follow -n 5
"""


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary="print the logs of a run's processes, also while it goes on",
        factory="gcore_report.logs:logs",
        parser="gcore_report.logs:make_parser",
    )


def logs(words: list[str]) -> int:
    """Runs ``g-core logs`` with these words; returns the exit code."""
    args = make_parser().parse_intermixed_args(words)
    from gcore_core.kits.runs import run_goes_on

    found = find_logs(args.run_dir)
    if args.worker is None and args.lines is None and not args.follow:
        _list(found)
        return 0
    picked = found if args.worker is None else pick_logs(found, args.worker, args.run_dir)
    # While logs are followed, a process may start whose name begins so.
    several = len(picked) > 1 or (args.follow and args.worker not in picked)
    n_lines = args.lines if args.lines is not None else (_TAIL if several else None)
    tails = {name: LogTail(path) for name, path in picked.items()}
    for name, tail in tails.items():
        _print(name, tail.last(n_lines, whole_lines=args.follow), named=several)
    # For how long no supervisor was seen. Without --follow the loop below is not entered.
    over_s = 0.0 if args.follow else _OVER_S
    while over_s < _OVER_S:
        over_s = 0.0 if run_goes_on(args.run_dir) else over_s + _LOOK_S
        for name, path in find_logs(args.run_dir).items():
            if args.worker is None or name in tails or (several and name.startswith(args.worker)):
                tail = tails.setdefault(name, LogTail(path))
                _print(name, tail.new(whole_lines=over_s < _OVER_S), named=several)
        time.sleep(_LOOK_S)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of ``g-core logs``."""
    parser = argparse.ArgumentParser(
        prog="g-core logs",
        description="Print the logs of a run's processes, also while it goes on.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN",
        help="the run's directory, e.g. runs/quickstart/latest",
    )
    parser.add_argument(
        "worker",
        nargs="?",
        metavar="WORKER",
        help="a process, such as policy.0, or the beginning of several names; "
        "without it the logs that there are get listed",
    )
    parser.add_argument(
        "--follow", "-f", action="store_true", help="go on with what is written, until the run ends"
    )
    parser.add_argument(
        "-n",
        "--lines",
        type=_number,
        metavar="LINES",
        help=f"how many of the last lines; default: all of one log, {_TAIL} of each of several",
    )
    return parser


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of lines")
    return int(text)


def _list(logs: dict[str, Path]) -> None:
    """Prints the name, size and age of each log."""
    from gcore_core.kits.commands import print_table

    rows = []
    for name, path in logs.items():
        status = path.stat()
        age_s = max(0.0, time.time() - status.st_mtime)
        rows.append([name, f"{status.st_size / 1000:.1f}", f"{age_s:.0f} s ago"])
    print_table(("PROCESS", "KB", "WRITTEN"), rows)


def _print(name: str, lines: Sequence[str], *, named: bool) -> None:
    for line in lines:
        print(f"{name}: {line}" if named else line, flush=True)


def find_logs(run_dir: Path) -> dict[str, Path]:
    """Returns process -> its log, the supervisor's first. Raises DataError where there are none."""
    paths = {path.stem: path for path in sorted((run_dir / LOGS).glob("*.log"), key=_order)}
    if not paths:
        raise DataError(
            "there are no logs here.",
            where=str(run_dir),
            why=f"a run has them in {LOGS}/",
            todo="name a run's directory, such as runs/<name>/<NNN> or runs/<name>/latest",
        )
    return paths


def _order(path: Path) -> tuple[bool, str, int]:
    """Sorts processes by name, and those of one role by number."""
    role, _, number = path.stem.rpartition(".")
    if not number.isdecimal():
        return path.stem != _SUPERVISOR, path.stem, 0
    return True, role, int(number)


def pick_logs(logs: dict[str, Path], name: str, run_dir: Path) -> dict[str, Path]:
    """Returns the log of a process, or else those of all whose names begin so.

    Raises DataError where there is none.
    """
    if name in logs:
        return {name: logs[name]}
    picked = {process: path for process, path in logs.items() if process.startswith(name)}
    if not picked:
        raise DataError(
            f"no process of the run is called {name!r}{did_you_mean(name, list(logs))}.",
            where=str(run_dir),
            why=f"there are: {', '.join(logs)}",
            todo="name one of them, or the beginning of its name",
        )
    return picked


class LogTail:
    """Reads a log piece by piece.

    whole_lines: whether a last line that is not whole is left for later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def last(self, n_lines: int | None, *, whole_lines: bool) -> list[str]:
        """Returns the last lines that there are; None: all."""
        return list(deque(self._read(whole_lines), maxlen=n_lines))

    def new(self, *, whole_lines: bool) -> list[str]:
        """Returns what was written since."""
        return list(self._read(whole_lines))

    def _read(self, whole_lines: bool) -> Iterator[str]:
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if whole_lines and not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield line.decode("utf-8", "replace").rstrip("\n")
