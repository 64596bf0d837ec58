"""What a change must pass, stage by stage.

    python tests/stages.py [STAGE ...]

``tox run`` runs FIRST, the stages that protect most for their time. ``tox run -e rest`` runs REST:
every other test that is not slow. A change must pass both.

Each stage has a budget: the minutes that it is to take on two quiet cores, from nothing; some take
more (docs/decisions/tests.md). Its time and its budget are printed when it ends. A stage fails when
a command of it fails, and when it takes four times its budget, by which it hangs: then what it runs
is ended. A machine that is busy or slow fails no stage. The first stage that fails ends the whole.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
#: Whoever shows what a command has printed; several may end at once.
PRINTING = threading.Lock()
#: Ends a stage that takes this many times its budget.
PATIENCE = 4
GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Commands, and the minutes that they take together.

    commands: each begins when those before it have ended. ``{python}`` is this interpreter.
    began_before: the stage's time counts from the start of the process that started this one, which
        is tox: so it holds what tox installed.
    at_once: whether the commands do not wait for each other. What one prints is then shown when it
        has ended.
    """

    name: str
    budget_min: float
    commands: tuple[str, ...]
    began_before: bool = False
    at_once: bool = False


#: Engines whose tests every change must pass. Those on Ray are slow: `tox run -e engines` has them.
#: In the order in which their venvs are made: what is there soonest, then what takes longest.
ENGINES = "megatron sglang deepspeed vllm"
#: The slowest tests are told, since a stage grows by them.
PYTEST = "{python} -m pytest -q --durations 20 --durations-min 5"
#: Workers for two cores: where tests compute, and where they also wait for processes and sockets.
COMPUTING, WAITING = "-n 2", "-n 3"
IN_PROCESS = (
    "tests/architecture tests/fuzz tests/kit tests/museum tests/unit plugins contrib/gcore-migrate"
)
PROCESSES = "tests/gpu tests/integration tests/oracles tests/wheels"
FIRST = (
    Stage(
        name="install",
        budget_min=3,
        began_before=True,
        commands=(),  # it is tox's own work
    ),
    Stage(
        name="lint",
        budget_min=2,
        at_once=True,  # each takes one core at most
        commands=(
            "{python} -m ruff check",
            "{python} -m ruff format --check",
            "{python} -m mypy",
            "{python} -m tox run -e pages",  # which installs its environment, too
        ),
    ),
    Stage(
        name="unit",
        budget_min=7,
        commands=(
            f"{PYTEST} {COMPUTING} -m 'not slow and not engine and not rest' --dist worksteal"
            f" {IN_PROCESS}",
        ),
    ),
    Stage(
        name="processes",
        budget_min=6,
        # Tests of one file stay together, since they share runs.
        commands=(
            f"{PYTEST} {WAITING} -m 'protects and not slow and not engine' --dist loadfile"
            f" {PROCESSES}",
        ),
    ),
)
REST = (
    Stage(
        name="more-unit",
        budget_min=10,
        # Tests of one file stay together, since they share models and runs.
        commands=(
            f"{PYTEST} {WAITING} -m 'rest and not slow and not engine' --dist loadfile"
            f" {IN_PROCESS}",
        ),
    ),
    Stage(
        name="more-processes",
        budget_min=12,
        commands=(
            f"{PYTEST} {WAITING} -m 'not protects and not slow and not engine' --dist loadfile"
            f" {PROCESSES}",
        ),
    ),
    Stage(
        name="engines",
        budget_min=16,
        commands=(
            "{python} tests/engines/suites.py --at-once 3 --engines " + ENGINES,
            "{python} benchmarks/engine_pairs.py --check"
            " --pairs vllm:megatron-tp2 sglang:deepspeed-zero3",
        ),
    ),
)


class StageFailed(Exception):
    pass


def run_stage(stage: Stage, began_s: float) -> float:
    """Runs a stage that began at ``began_s`` of ``time.time``; returns the seconds it took.

    Raises StageFailed with one line that says which command failed and how.
    """
    limit_s = stage.budget_min * 60 * PATIENCE

    def run(command: str) -> str:
        """Returns what is wrong; "" where nothing is."""
        words = [word.format(python=sys.executable) for word in shlex.split(command)]
        shown = shlex.join(["python" if word == sys.executable else word for word in words])
        print(f"$ {shown}", flush=True)
        command_began_s = time.time()
        try:
            code = run_command(words, limit_s - (command_began_s - began_s), later=stage.at_once)
        except subprocess.TimeoutExpired:
            budget = minutes(stage.budget_min * 60)
            return f"took {PATIENCE} times its budget of {budget}: {command}"
        print(f"  {minutes(time.time() - command_began_s)}: {shown}", flush=True)
        return f"exit code {code} of: {command}" if code else ""

    if stage.at_once:
        with ThreadPoolExecutor(len(stage.commands)) as pool:
            found: Iterable[str] = list(pool.map(run, stage.commands))
    else:
        found = map(run, stage.commands)  # each runs when it is asked for
    for wrong in found:
        if wrong:
            raise StageFailed(wrong)
    return time.time() - began_s


def run_command(words: Sequence[str], timeout_s: float, *, later: bool = False) -> int:
    """The exit code. Raises TimeoutExpired when time is up; then nothing of the command is left.

    later: what it prints is shown when it has ended.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            start_new_session=True,
            stdout=output if later else None,
            stderr=subprocess.STDOUT if later else None,
        )
        try:
            return process.wait(timeout=max(timeout_s, 0))
        finally:
            if process.returncode is None:
                end_session(process)
            output.seek(0)
            with PRINTING:
                print(output.read().decode(errors="replace"), end="", flush=True)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and what it started: first asks, as Ctrl-C does, then kills."""
    for number, patience_s in ((signal.SIGINT, GRACE_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience_s)


def run_stages(stages: Sequence[Stage]) -> int:
    """Runs stages in their order, up to the first that fails; returns the exit code."""
    lines: list[str] = []
    failed = False
    for stage in stages:
        began_s = parent_began_s() if stage.began_before else time.time()
        print(f"== stage {stage.name}", flush=True)
        try:
            took_s = run_stage(stage, began_s)
        except StageFailed as failure:
            lines.append(f"stage {stage.name}: FAILED, {failure}")
            failed = True
            break
        lines.append(f"stage {stage.name}: {minutes(took_s)} of {minutes(stage.budget_min * 60)}")
        print(lines[-1], flush=True)
    print("\n".join(["==", *lines]), flush=True)
    return int(failed)


def parent_began_s() -> float:
    """When the process that started this one began."""
    return psutil.Process(os.getppid()).create_time()


def minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"


def main() -> int:
    parser = argparse.ArgumentParser(description="What a change must pass, stage by stage.")
    stages = {stage.name: stage for stage in (*FIRST, *REST)}
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(stages))
    parser.add_argument("--rest", action="store_true", help="what `tox run` leaves out")
    args = parser.parse_args()
    for name in args.stages:
        if name not in stages:
            parser.error(f"no stage {name!r}; there are {', '.join(stages)}")
    if args.stages:
        return run_stages([stages[name] for name in args.stages])
    return run_stages(REST if args.rest else FIRST)


if __name__ == "__main__":
    sys.exit(main())
