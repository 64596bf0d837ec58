"""Has a host leave a run that goes on: ``g-core nodes drain RUN HOST``.

exit code 0     the host has left
          2     the run keeps it, and says why
          7     nobody answers, it has not left in time and may still leave, or the run has ended
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gcore_core.contract.errors import AddressError, ConfigError
from gcore_core.contract.run_files import LEAVE
from gcore_core.kits.runs import run_goes_on

_LOOK_S = 0.2
_OVER_S = 5.0  # a run whose supervisor was killed has another one within these


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments; returns the exit code. Raises ConfigError."""
    args = _parser().parse_args(words)
    return drain(Path(args.run), args.host, args.wait)


def drain(run: Path, host: str, wait_s: float) -> int:
    """Asks a run to do without a host, and prints what it answers until the host has left.

    The run begins again from its next checkpoint, without the host.

    The file that asks is removed afterwards. Raises ConfigError when the run keeps the host or does
    not exist, and AddressError when nothing of that is said in time.
    """
    if not (run / "logs").is_dir():
        raise ConfigError(
            f"{run} is no directory of a run",
            where="g-core nodes drain RUN",
            todo="give the one that g-core run has printed, such as runs/NAME/001",
        )
    if host in ("", ".", "..") or Path(host).name != host or host.startswith("."):
        raise ConfigError(
            f"{host!r} is no name of a host",
            where="g-core nodes drain HOST",
            todo="name it as launcher.config.hosts or its g-core nodes join does",
        )
    file = run / LEAVE / host
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    try:
        return _followed(file, run, host, wait_s)
    finally:
        file.unlink(missing_ok=True)


def _followed(file: Path, run: Path, host: str, wait_s: float) -> int:
    """Prints each answer as it comes; returns 0 when the host has left.

    It ends with the run, which then has nothing on the host any more.

    Raises ConfigError when the file that asks is gone.
    """
    until_s = time.monotonic() + wait_s
    said = ""
    over_s = 0.0  # for how long nobody has been supervising the run
    while time.monotonic() < until_s and over_s < _OVER_S:
        over_s = 0.0 if run_goes_on(run) else over_s + _LOOK_S
        try:
            answer = file.read_text().strip()
        except FileNotFoundError:
            raise ConfigError(
                f"nobody asks {host} to leave any more",
                where="g-core nodes drain",
                why=f"{file} was removed, as another drain of the host does at its end",
                todo="see what that one has printed, or call this again",
            ) from None
        if answer and answer != said:
            said = answer
            print(answer, flush=True)
            # A host may be named by its node, such as agent.2; the answer has the host's own name.
            verdict = answer.partition(" ")[2]
            if verdict.startswith("has left"):
                return 0
            if verdict.startswith("does not leave"):
                return 2
        time.sleep(_LOOK_S)
    if over_s < _OVER_S:
        why = f"{host} has not left in {wait_s:g} s: {said or 'no run answers'}"
    else:
        why = f"the run has ended, and uses {host} no more"
    print(why, file=sys.stderr)
    return AddressError.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="g-core nodes drain",
        description="Has a host leave a run that goes on: at its next checkpoint, which is saved "
        "at the end of the step, it begins again from that without the host. Start it on the "
        "machine of g-core run.",
        epilog="exit codes: 0 it has left, 2 the run keeps it, 7 it has not left in time\n\n"
        "example:\n  g-core nodes drain runs/grpo/001 node7",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="the run's directory")
    parser.add_argument("host", metavar="HOST", help="as the run calls it")
    parser.add_argument(
        "--wait",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="for how long its leaving is waited for; default: 600, as launcher.config.leave_s",
    )
    return parser
