"""Every engine plugin's own tests with its real engine, each in the venv that `g-core venv
create` makes.

    python tests/engines/suites.py [--engines vllm ...] [--slow] [--select WORDS] [--fresh]
    [--files FILE ...] [--at-once N]
    python tests/engines/suites.py --create

The venvs lie where G_CORE_VENVS says; one that is there with the same pins is taken as it is. They
are made one after the other, since each builds distributions of the checkout in place; a suite
begins when its own is there. With several suites at once, what one prints is shown when it has
ended.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gcore_core.config import venvs

ROOT = Path(__file__).parents[2]
ENGINES = ("vllm", "sglang", "megatron", "deepspeed", "ray")
#: What the tests are written with.
TEST_KIT = "gcore-testing"
#: What the tests need beside the plugin: the pair of each backend on torch, objectives.
BESIDE = ("gcore-torch", "gcore-algorithms")
#: Beyond that, what jobs of some plugins' tests and benchmarks name.
BESIDE_OF = {"ray": ("gcore-placement", "gcore-tools")}
#: Where the plugin of an engine shares a distribution: the distribution.
DISTRIBUTIONS = {"ray": "gcore-nodes"}
TOOLS = ("pytest==9.2.0", "pytest-asyncio==1.5.0", "pytest-timeout==2.4.0")


def distribution_of(engine: str) -> str:
    """Returns the distribution that brings the engine's plugin."""
    return DISTRIBUTIONS.get(engine, f"gcore-{engine}")


def tests_of(engine: str) -> str:
    """Returns the folder of the plugin's tests, from the root of the checkout."""
    folder = f"plugins/{distribution_of(engine)}/tests"
    return f"{folder}/{engine}" if engine in DISTRIBUTIONS else folder


def create_venv(engine: str, *, fresh: bool) -> str:
    """Makes the venv, with pytest in it; returns its interpreter."""
    names = (TEST_KIT, *BESIDE, *BESIDE_OF.get(engine, ()))
    beside = [word for name in names for word in ("--with", name)]
    create = [sys.executable, "-m", "gcore_core", "venv", "create", engine, "--cpu", *beside]
    subprocess.run([*create, *(["--fresh"] if fresh else [])], check=True)
    python = venvs.resolve(f"venv:{engine}", where="")
    subprocess.run([python, "-m", "pip", "install", "-q", *TOOLS], check=True)
    return python


def run_suite(
    engine: str,
    python: str,
    *,
    slow: bool,
    select: str = "",
    files: Sequence[str] = (),
    is_alone: bool = True,
) -> int:
    """Runs the tests and returns pytest's exit code.

    python: the interpreter of the engine's venv.
    select: pytest's ``-k``; "": all.
    files: only these, from the root of the checkout; none: all of the plugin's.
    is_alone: whether no other suite runs beside it; else what it prints is shown at its end.
    """
    marks = "engine" if slow else "engine and not slow"
    where = files or [tests_of(engine)]
    began_s = time.perf_counter()
    done = subprocess.run(
        [
            *(python, "-m", "pytest", "-q", "-m", marks, "-k", select),
            *("--durations", "20", "--durations-min", "5"),
            *where,
        ],
        cwd=ROOT,
        check=False,
        text=True,
        stdout=None if is_alone else subprocess.PIPE,
        stderr=None if is_alone else subprocess.STDOUT,
    )
    took_s = time.perf_counter() - began_s
    last = f"{engine}: exit code {done.returncode}, {took_s:.0f} s"
    print(f"{done.stdout or ''}{last}", flush=True)
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description="The tests of engine plugins with their real engines."
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--slow", action="store_true", help="the slow tests too")
    parser.add_argument("--select", default="", metavar="WORDS", help="pytest's -k")
    parser.add_argument("--files", nargs="+", default=(), metavar="FILE", help="only these")
    parser.add_argument("--fresh", action="store_true", help="make the venvs anew")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="suites at a time (1)")
    parser.add_argument("--create", action="store_true", help="make the venvs, and run nothing")
    args = parser.parse_args()

    def run(engine: str) -> int:
        return run_suite(
            engine,
            pythons[engine].result(),
            slow=args.slow,
            select=args.select,
            files=args.files,
            is_alone=args.at_once == 1,
        )

    with ThreadPoolExecutor(1) as making, ThreadPoolExecutor(args.at_once) as pool:
        pythons = {
            engine: making.submit(create_venv, engine, fresh=args.fresh) for engine in args.engines
        }
        if args.create:
            for python in pythons.values():
                python.result()
            return 0
        return max(pool.map(run, args.engines))


if __name__ == "__main__":
    sys.exit(main())
