"""Runs every benchmark on the present code, one after the other, and writes their results.

    python benchmarks/run_all.py [--only NAME ...] [--fresh] [--list]

`tox run -e results` runs it. A result that is not older than the code it measures (measured.py) is
kept, so a second call goes on where the first one stopped; ``--fresh`` measures everything. A
benchmark that fails keeps its old result, and the others go on. What is measured must be committed:
a result names the commit that it was measured at. The page of results is written anew at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import page
from measured import BENCHMARKS, ROOT, Benchmark, digest, uncommitted


def is_fresh(benchmark: Benchmark, root: Path = ROOT) -> bool:
    """Whether there is a result, and everything that it measures is as it was then."""
    if not benchmark.result.exists():
        return False
    result = json.loads(benchmark.result.read_text())
    return bool(result.get("code") == digest(benchmark.paths, root))


def run_benchmark(benchmark: Benchmark, root: Path = ROOT) -> str:
    """Runs a benchmark and writes its result; returns what went wrong, "" for nothing."""
    if changed := uncommitted(benchmark.paths, root):
        return f"{changed[0]} is not committed, so no commit would say what was measured"
    code = digest(benchmark.paths, root)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        for command in benchmark.commands:
            words = [
                word.format(python=sys.executable, name=benchmark.name, out=out)
                for word in shlex.split(command)
            ]
            exit_code = subprocess.run(words, cwd=root, check=False).returncode
            if exit_code:
                return f"exit code {exit_code} of: {shlex.join(words)}"
        if not out.exists():
            return f"no result was written by: {shlex.join(words)}"
        result = json.loads(out.read_text())
    write_result(benchmark.result, result, code)
    return ""


def write_result(path: Path, result: dict[str, object], code: str) -> None:
    """Writes a result with the digest of the code it measures; whole or not at all.

    code: the digest from before the run, so that a change during the run makes the result stale.
    """
    head = {key: result[key] for key in ("benchmark", "commit", "date")}
    content = json.dumps(head | {"code": code} | result, indent=2)
    beside = path.with_suffix(".part")
    beside.write_text(content + "\n")
    os.replace(beside, path)


def run_all(
    benchmarks: Sequence[Benchmark],
    *,
    fresh: bool,
    run: Callable[[Benchmark], str] = run_benchmark,
    can_keep: Callable[[Benchmark], bool] = is_fresh,
) -> int:
    """Runs benchmarks in their order and returns the exit code: 1 when one of them failed.

    fresh: measure those too whose results are not stale.
    """
    lines: list[str] = []
    has_failed = False
    for benchmark in benchmarks:
        if not fresh and can_keep(benchmark):
            lines.append(f"{benchmark.name}: kept")
        elif reason := run(benchmark):
            lines.append(f"{benchmark.name}: FAILED, {reason}")
            has_failed = True
        else:
            lines.append(f"{benchmark.name}: measured")
        print(lines[-1], flush=True)
    print("\n".join(["==", *lines]), flush=True)
    return int(has_failed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Every benchmark on the present code.")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--fresh", action="store_true", help="keep no result")
    parser.add_argument("--list", action="store_true", help="say what is stale; run nothing")
    args = parser.parse_args()
    names = [benchmark.name for benchmark in BENCHMARKS]
    if unknown := sorted(set(args.only) - set(names)):
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(names)}")
    chosen = [b for b in BENCHMARKS if not args.only or b.name in args.only]
    if args.list:
        for benchmark in chosen:
            print(f"{benchmark.name}: {'fresh' if is_fresh(benchmark) else 'stale'}")
        return 0
    exit_code = run_all(chosen, fresh=args.fresh)
    page.write()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
