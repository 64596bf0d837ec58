"""Long test runs, part by part: what has passed on this code is not run again.

nightly.py and engines/every_test.py say which parts there are. A part that is over is written to a
result, with the digest of the files that it tests. A part that passed is kept until one of these
files changes; ``--fresh`` runs everything. A part that fails, or takes four times its budget,
does not end the others, and a run that was cut off loses one part.

The result, tests/long_tests.json, is committed: it says on which commit each part passed last.
Where the digest is not that of the files as they are, ``--list`` says "on older code", and the part
is run again. What both scripts name alike is run once.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # where it is run as a script

import report  # noqa: E402

from tests.stages import PATIENCE, minutes, run_command  # noqa: E402

RESULT = ROOT / "tests" / "long_tests.json"
#: What parts run that name no distributions: all of them, recipes, pins, what tests share.
CODE = ("gcore_core", "plugins/*/gcore_*", "recipes", "constraints.txt", "tests/support")
#: What every part needs: the core, what tests take of the kit, pins, what tests share. Those that
#: run contracts need the whole kit.
KIT = "plugins/gcore-testing/gcore_testing"
SHARED = (
    "gcore_core",
    f"{KIT}/contracts/weights.py",
    f"{KIT}/pytest_plugin.py",
    f"{KIT}/runs.py",
    f"{KIT}/safetensors_files.py",
    "constraints.txt",
    "tests/support",
)
QUICKSTART = ("recipes/quickstart", "recipes/quickstart.yaml")


def code_of(*names: str, recipes: tuple[str, ...] = QUICKSTART) -> tuple[str, ...]:
    """Returns the files that runs of some distributions need, those that these require included.

    names: of distributions in ``plugins/``, without "gcore-". recipes: files and folders.
    """
    needed: set[str] = set()
    waiting = [f"gcore-{name}" for name in names]
    while waiting:
        name = waiting.pop()
        if name in needed or name == "gcore-core":
            continue
        needed.add(name)
        project = tomllib.loads((ROOT / "plugins" / name / "pyproject.toml").read_text())["project"]
        requirements = [re.match(r"[\w-]+", line) for line in project["dependencies"]]
        waiting += [found[0] for found in requirements if found and found[0].startswith("gcore-")]
    packages = (f"plugins/{name}/{name.replace('-', '_')}" for name in sorted(needed))
    return (*SHARED, *recipes, *packages)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command, the minutes that it takes on two quiet cores, and the files that it runs.

    ``{python}`` in the command is this interpreter.
    runs: files and folders, from the root of the checkout, or git's patterns of them.
    """

    name: str
    budget_min: float
    command: str
    runs: tuple[str, ...] = CODE

    def words(self) -> list[str]:
        """Returns the command as its program and arguments."""
        return [word.format(python=sys.executable) for word in shlex.split(self.command)]

    def code(self) -> str:
        """Returns the digest of what the part runs."""
        return digest(self.runs, ROOT)


def digest(paths: Iterable[str], root: Path) -> str:
    """Returns what the tracked files under ``paths`` hash to, names included, as they lie there.

    Of Python only what runs is hashed: another comment, docstring or line break changes nothing.
    """
    command = ["git", "ls-files", "-z", "--", *paths]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    names = sorted(name for name in listing.split("\0") if name and (root / name).is_file())
    total = hashlib.sha256()
    for name in names:
        content = (root / name).read_bytes()
        hashed = what_runs(content) if name.endswith(".py") else content
        total.update(hashlib.sha256(hashed).digest())
        total.update(name.encode() + b"\0")
    return total.hexdigest()[:16]


@lru_cache(maxsize=4096)
def what_runs(source: bytes) -> bytes:
    """Returns Python's source without comments, docstrings and layout; as it is if it has none.

    A string that stands alone in a statement runs nothing; where it was all of a block, ``pass``
    stands for it.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not _is_text(line)] or [ast.Pass()]
    return ast.unparse(tree).encode()


def _is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a string and nothing else."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def read_parts(path: Path) -> dict[str, Any]:
    """Returns what is known of parts: name -> outcome, seconds, code, commit and date."""
    return dict(json.loads(path.read_text())["parts"]) if path.exists() else {}


def write_parts(path: Path, parts: Mapping[str, Any]) -> None:
    """Writes what is known of parts, whole or not at all."""
    content = {"machine": report.machine(), "parts": parts}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(beside, path)


def run_part(part: Part) -> str:
    """Runs a part and returns its outcome: "passed", or what went wrong."""
    print(f"== {part.name}: {part.command}", flush=True)
    limit_s = part.budget_min * 60 * PATIENCE
    try:
        code = run_command(part.words(), limit_s)
    except subprocess.TimeoutExpired:
        return f"took {PATIENCE} times its budget of {minutes(part.budget_min * 60)}"
    return "passed" if code == 0 else f"exit code {code}"


def has_passed(part: Part, known: Mapping[str, Any]) -> bool:
    """Whether the part passed on the code that there is now."""
    entry = known.get(part.name, {})
    return entry.get("outcome") == "passed" and entry.get("code") == part.code()


def run_parts(parts: Sequence[Part], path: Path, *, fresh: bool) -> int:
    """Runs the parts that have not passed on this code; returns 1 when one of all fails.

    path: of the result; it is written after each part.
    """
    known = read_parts(path)
    for part in parts:
        if not fresh and has_passed(part, known):
            continue
        code = part.code()
        commit = report.commit()
        began_s = time.time()
        outcome = run_part(part)
        known[part.name] = {
            "outcome": outcome,
            "seconds": round(time.time() - began_s),
            "commit": commit,
            "date": time.strftime("%Y-%m-%d"),
            "code": code,
        }
        write_parts(path, known)
    print("==", flush=True)
    for part in parts:
        print(line_of(part, known), flush=True)
    return int(not all(has_passed(part, known) for part in parts))


def line_of(part: Part, known: Mapping[str, Any]) -> str:
    """Returns what is known of a part, in one line."""
    budget = minutes(part.budget_min * 60)
    if part.name not in known:
        return f"{part.name}: not run, budget {budget}"
    entry = known[part.name]
    older = "" if entry["code"] == part.code() else ", on older code"
    return f"{part.name}: {entry['outcome']}, {minutes(entry['seconds'])} of {budget}{older}"


def main(parts: Sequence[Part], description: str) -> int:
    """Runs what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--fresh", action="store_true", help="run what has passed, too")
    parser.add_argument("--list", action="store_true", help="print the parts; run nothing")
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    names = [part.name for part in parts]
    for chosen in args.parts:
        if chosen not in names:
            parser.error(f"no part {chosen!r}; there are {', '.join(names)}")
    asked = [part for part in parts if not args.parts or part.name in args.parts]
    if args.list:
        known = read_parts(args.result)
        print("\n".join(line_of(part, known) for part in asked))
        return 0
    return run_parts(asked, args.result, fresh=args.fresh)
