"""Runs every benchmark on the present code and writes their results.

    python benchmarks/run_all.py [--only NAME ...] [--minutes N] [--at-once N] [--fresh] [--list]

`tox run -e results` runs it. A result that is not older than the code it measures (measured.py) is
kept. Of the others, those without times in them come first, two at once, each with its output when
it is over. Then come the timed ones, each alone on the machine. Within both the quickest comes
first. Each result, and the page of results, is written when its benchmark is over, so a second call
goes on where the first one stopped, and an interruption loses what was under way. ``--list`` says
what is stale and how long it took last time. ``--minutes`` starts none that would not be over by
then, going by that. ``--fresh`` measures everything.

Those for a GPU are left out on machines without one. A benchmark that fails keeps its old result,
and the others go on. What is measured must be committed: a result names the commit that it was
measured at.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import page
from measured import BENCHMARKS, ROOT, Benchmark, digest, uncommitted


def is_fresh(benchmark: Benchmark, root: Path = ROOT) -> bool:
    """Whether there is a result, and everything that it measures is as it was then."""
    if not benchmark.result.exists():
        return False
    result = json.loads(benchmark.result.read_text())
    return bool(result.get("code") == digest(benchmark.paths, root))


def run_benchmark(benchmark: Benchmark, root: Path = ROOT, output: Path | None = None) -> str:
    """Runs a benchmark and writes its result; returns what went wrong, "" for nothing.

    output: a file for what the commands print; None: where this process prints.
    """
    if changed := uncommitted(benchmark.paths, root):
        return f"{changed[0]} is not committed, so no commit would say what was measured"
    code = digest(benchmark.paths, root)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        for command in benchmark.commands:
            words = [
                word.format(python=sys.executable, script=benchmark.script, out=out)
                for word in shlex.split(command)
            ]
            exit_code = run_command(words, root, output)
            if exit_code:
                return f"exit code {exit_code} of: {shlex.join(words)}"
        if not out.exists():
            return f"no result was written by: {shlex.join(words)}"
        result = json.loads(out.read_text())
    write_result(benchmark.result, result, code, time.monotonic() - began_s)
    return ""


def run_command(words: Sequence[str], root: Path, output: Path | None) -> int:
    """Runs a command in ``root`` and returns its exit code; ``output`` gets what it prints."""
    if output is None:
        return subprocess.run(words, cwd=root, check=False).returncode
    with output.open("ab") as file:
        return subprocess.run(
            words, cwd=root, check=False, stdout=file, stderr=subprocess.STDOUT
        ).returncode


def write_result(path: Path, result: dict[str, object], code: str, took_s: float) -> None:
    """Writes a result with the digest of the code it measures; whole or not at all.

    code: the digest from before the run, so that a change during the run makes the result stale.
    took_s: seconds of all commands of the benchmark.
    """
    head = {key: result[key] for key in ("benchmark", "commit", "date")}
    head |= {"code": code, "took_s": round(took_s)}
    content = json.dumps(head | result, indent=2)
    beside = path.with_suffix(".part")
    beside.write_text(content + "\n")
    os.replace(beside, path)


def run_all(
    benchmarks: Sequence[Benchmark],
    *,
    fresh: bool,
    minutes: float | None = None,
    at_once: int = 1,
    run: Callable[[Benchmark], str] = run_benchmark,
    can_keep: Callable[[Benchmark], bool] = is_fresh,
    now_s: Callable[[], float] = time.monotonic,
) -> int:
    """Runs benchmarks and returns the exit code: 1 when one of them failed.

    fresh: measure those too whose results are not stale.
    minutes: start none that would not be over after so many; None: there is no such limit.
    at_once: how many of those that are not timed run beside one another.
    """
    until_s = None if minutes is None else now_s() + minutes * 60

    def run_one(benchmark: Benchmark) -> tuple[str, bool]:
        """Returns a line that says what came of it, and whether it failed."""
        has_failed = False
        if not fresh and can_keep(benchmark):
            line = f"{benchmark.name}: kept"
        elif until_s is not None and now_s() + benchmark.expected_s > until_s:
            line = f"{benchmark.name}: not started, it takes {duration(benchmark)}"
        elif reason := run(benchmark):
            line = f"{benchmark.name}: FAILED, {reason}"
            has_failed = True
        else:
            line = f"{benchmark.name}: measured"
        print(line, flush=True)
        return line, has_failed

    ordered = in_order(benchmarks)
    with ThreadPoolExecutor(at_once) as pool:
        ended = list(pool.map(run_one, (b for b in ordered if not b.timed)))
    ended += [run_one(benchmark) for benchmark in ordered if benchmark.timed]
    print("\n".join(["==", *(line for line, _ in ended)]), flush=True)
    return int(any(has_failed for _, has_failed in ended))


def in_order(benchmarks: Sequence[Benchmark]) -> list[Benchmark]:
    """Returns them as they run: those that are not timed first, then the quickest first."""
    return sorted(benchmarks, key=lambda b: (b.timed, b.expected_s))


#: One result at a time goes into the page, and one output to the terminal.
_WRITING = threading.Lock()


def run_and_show(benchmark: Benchmark) -> str:
    """Runs a benchmark and writes the page of results; returns what went wrong, "" for nothing.

    What a timed one prints is seen as it comes; that of others, which may be beside one another,
    when they are over.
    """
    print(f"== {benchmark.name}: takes {duration(benchmark)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        output = None if benchmark.timed else Path(folder) / "output.txt"
        reason = run_benchmark(benchmark, output=output)
        with _WRITING:
            if output is not None and output.exists():
                print(f"== {benchmark.name} printed\n{output.read_text(errors='replace')}")
            page.write()
    return reason


def duration(benchmark: Benchmark) -> str:
    """Returns how long a benchmark takes, in words."""
    seconds = round(benchmark.expected_s)
    text = f"{seconds} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    return text if benchmark.last_s is not None else f"about {text}"


def listing(benchmarks: Sequence[Benchmark]) -> list[str]:
    """Returns a line for each benchmark in the order in which they run, and one for all."""
    ordered = in_order(benchmarks)
    stale = [benchmark for benchmark in ordered if not is_fresh(benchmark)]
    lines = [
        f"{'stale' if benchmark in stale else 'fresh'}  {benchmark.name}: takes "
        f"{duration(benchmark)}{'' if benchmark.timed else ', not timed'}"
        for benchmark in ordered
    ]
    minutes = sum(benchmark.expected_s for benchmark in stale) / 60
    return [*lines, f"{len(stale)} of {len(ordered)} are stale: {minutes:.0f} min"]


def has_gpu() -> bool:
    """Returns whether there is a driver of NVIDIA's."""
    return shutil.which("nvidia-smi") is not None


def main() -> int:
    parser = argparse.ArgumentParser(description="Every benchmark on the present code.")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--minutes", type=float, help="start none that would not be over by then")
    parser.add_argument(
        "--at-once",
        type=int,
        default=2,
        metavar="N",
        help="how many that are not timed run beside one another (default: 2)",
    )
    parser.add_argument("--fresh", action="store_true", help="keep no result")
    parser.add_argument(
        "--list", action="store_true", help="say what is stale and how long it takes; run nothing"
    )
    args = parser.parse_args()
    names = [benchmark.name for benchmark in BENCHMARKS]
    if unknown := sorted(set(args.only) - set(names)):
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(names)}")
    chosen = [
        b
        for b in BENCHMARKS
        if (not args.only or b.name in args.only) and (not b.on_gpu or has_gpu())
    ]
    if args.list:
        print("\n".join(listing(chosen)))
        return 0
    exit_code = run_all(
        chosen, fresh=args.fresh, minutes=args.minutes, at_once=args.at_once, run=run_and_show
    )
    page.write()
    print("\n".join(page.complaints()))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
