"""The plugin ``conformance`` holds an installed plugin to the contracts of what it provides:
``g-core conformance NAME``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider

_TESTS = """\
import json
from pathlib import Path

from gcore_testing.conformance import contracts_of, left_out

globals().update(contracts_of({name!r}))
Path("left_out.json").write_text(json.dumps(left_out({name!r})), encoding="utf-8")
"""
#: pytest's exit codes
_PASSED = 0
_FAILED = 1


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary="hold a plugin to the contracts of what it provides",
        factory="gcore_testing.commands.conformance:run",
        parser="gcore_testing.commands.conformance:make_parser",
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="g-core conformance",
        description="Hold a plugin to the contracts of what it provides.",
        epilog=(
            "examples:\n  g-core conformance torch\n"
            "  g-core conformance mine --report conformance.json"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="an installed plugin, or `core`")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write everything that was found as JSON"
    )
    parser.add_argument(
        "-k", metavar="WORDS", default="", help="run only matching tests, as in pytest"
    )
    return parser


def run(words: Sequence[str]) -> int:
    """Runs the command; returns 0 when nothing failed, 3 otherwise."""
    from gcore_core.contract.errors import PluginBroken, PluginError, PluginIncompatible
    from gcore_core.contract.installing import install_command
    from gcore_core.kits.commands import catalog, write_file

    args = make_parser().parse_intermixed_args(words)
    plugin = catalog.scan().get(args.name, where="g-core conformance")
    if importlib.util.find_spec("pytest") is None:
        raise PluginIncompatible(
            "contracts are run by pytest, which is not installed.",
            where="g-core conformance",
            todo=install_command("pytest>=9"),
        )
    with tempfile.TemporaryDirectory(prefix="g-core-conformance-") as directory:
        code, output = _pytest(Path(directory), args.name, args.k)
        file = Path(directory) / "report.json"
        if code not in (_PASSED, _FAILED) or not file.exists():
            raise PluginBroken(
                f"the contracts of plugin {args.name!r} ({plugin.owner}) could not be run.",
                why="\n".join(_reasons(output)),
            )
        report = json.loads(file.read_text(encoding="utf-8"))
        report["left_out"] = json.loads(
            (Path(directory) / "left_out.json").read_text(encoding="utf-8")
        )
    report = {
        "plugin": args.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        **report,
    }
    _show(report)  # first: what was found is not lost where the file cannot be written
    if args.report:
        write_file(args.report, json.dumps(report, indent=2) + "\n", option="--report")
    return 0 if code == _PASSED else PluginError.exit_code


def _pytest(directory: Path, name: str, words: str) -> tuple[int, str]:
    """Runs the contracts in a process of their own; returns its exit code and output.

    The report is written into the directory.
    """
    (directory / "test_conformance.py").write_text(_TESTS.format(name=name), encoding="utf-8")
    # A pytest.ini of its own: settings of a folder above must not reach in.
    (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "gcore_testing.pytest_plugin",
        "--tb=short",
    ]
    options += ["--conformance-report", "report.json", *(["-k", words] if words else [])]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_conformance.py"],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout


def _reasons(output: str) -> list[str]:
    """Returns the lines in which pytest says what was raised, or else its last ones."""
    lines = output.strip().splitlines()
    raised = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return (raised or lines)[-4:]


def _show(report: dict[str, Any]) -> None:
    from gcore_core.kits.commands import print_table

    outcomes: dict[tuple[str, str], Counter[str]] = {}  # by contract and trait
    for row in report["tests"]:
        key = (row["contract"], row["trait"] or row["kind"])
        outcomes.setdefault(key, Counter())[row["outcome"]] += 1
    tolerance = {row["contract"]: row["tolerance"] for row in report["tests"]}
    rows = [
        [contract, what, str(sum(counts.values())), _said(counts), f"{tolerance[contract]:g}"]
        for (contract, what), counts in outcomes.items()
    ]
    print_table(["contract", "trait", "tests", "result", "tolerance"], rows)
    for row in report["tests"]:
        if row["outcome"] != "pass":
            print(f"{row['outcome']}: {row['contract']}::{row['test']} ({row['remark']})")
    for provider, reason in report["left_out"].items():
        print(f"left out: {provider} ({reason})")
    print(
        f"{report['plugin']}: {report['distribution']} {report['version']}: "
        f"{_said(Counter(report['outcomes']))}"
    )
    print("with " + ", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    hardware = report["hardware"]
    accelerators = ", ".join(hardware["accelerators"]) or "no accelerator"
    print(
        f"on {hardware['system']} {hardware['machine']}, {hardware['cores']} cores, {accelerators}"
    )


def _said(counts: Counter[str]) -> str:
    """Says the outcomes in words, the most frequent first: ``5 pass, 1 fail``."""
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
