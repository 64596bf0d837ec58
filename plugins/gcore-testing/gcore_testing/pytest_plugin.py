"""Tells the outcomes of contracts: "not claimed" and "not run" beside pass and fail, a list at the
end, a report as JSON.

A contract's first test adds this to the session by itself; ``-p gcore_testing.pytest_plugin``
adds the option ``--conformance-report FILE``.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Generator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from gcore_core import __version__
from gcore_core.contract.providers import Provider
from gcore_testing.contracts.base import Contract, NotClaimed

_NAME = "gcore-conformance"
_ENGINES = ("numpy", "torch", "transformers", "vllm", "sglang", "deepspeed", "megatron")
#: Outcomes of a test.
PASS = "pass"
FAIL = "fail"
NOT_CLAIMED = "not claimed"  # it was ended as not claimed, or skipped
KNOWN_GAP = "known gap"  # it failed, as ``known_gaps`` of its contract says
NOT_RUN = "not run"  # it needs a fixture that the contract's author has to give
#: How many lines of a message are told whose first line names the exception alone.
_LINES = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption(
        "--conformance-report",
        metavar="FILE",
        default=None,
        help="write outcomes of contracts as JSON",
    )


def pytest_configure(config: pytest.Config) -> None:
    show_outcomes(config)


def show_outcomes(config: pytest.Config) -> None:
    """Registers ``Outcomes`` in a session, once."""
    if not config.pluginmanager.has_plugin(_NAME):
        config.pluginmanager.register(Outcomes(config), _NAME)


class Outcomes:
    """Collects a row for each test of a contract."""

    def __init__(self, config: pytest.Config) -> None:
        self.rows: list[dict[str, Any]] = []
        self._file = config.getoption("--conformance-report", None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        cls = getattr(item, "cls", None)
        if not isinstance(cls, type) or not issubclass(cls, Contract):
            return report
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, NotClaimed):
            report.user_properties.append(
                (NOT_CLAIMED, str(error.msg).removeprefix("not claimed: "))
            )
        if call.when == "call" or report.outcome != "passed":
            self._add(item, cls, report, error)
        return report

    def _add(
        self,
        item: pytest.Item,
        cls: type[Contract],
        report: pytest.TestReport,
        error: BaseException | None,
    ) -> None:
        outcome = PASS
        remark = ""
        if NOT_CLAIMED in dict(report.user_properties):
            outcome = NOT_CLAIMED
            remark = str(dict(report.user_properties)[NOT_CLAIMED])
        elif report.skipped and hasattr(report, "wasxfail"):
            outcome = KNOWN_GAP
            remark = report.wasxfail
        elif report.skipped:
            outcome = NOT_CLAIMED
            remark = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "skipped")
        elif isinstance(error, pytest.FixtureLookupError):
            outcome = NOT_RUN
            remark = (
                f"there is no fixture {error.argname!r}: give it in the contract's class, or in "
                "the module that has the class"
            )
        elif report.failed:
            outcome = FAIL
            remark = _first_line(report)
        # Classes that are made in a loop have one __name__; collected, each has a name of its own.
        collected = item.getparent(pytest.Class)
        provider = cls.provider.name if isinstance(cls.provider, Provider) else cls.provider
        row = {
            "contract": cls.__name__ if collected is None else collected.name,
            "kind": cls.kind,
            "provider": provider,
            "trait": getattr(getattr(item, "function", None), "trait", ""),
            "test": item.name,
            "outcome": outcome,
            "remark": remark,
            "tolerance": cls.tolerance,
            "seconds": round(report.duration, 3),
        }
        if (
            outcome == FAIL
            and self.rows
            and all(self.rows[-1][key] == row[key] for key in ("contract", "test"))
        ):
            self.rows[-1] = row  # it passed, and what followed it failed
        else:
            self.rows.append(row)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        # a module that is skipped as a whole has no properties
        if report.skipped and NOT_CLAIMED in dict(getattr(report, "user_properties", ())):
            return "not claimed", "n", "NOT CLAIMED"
        return None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        listed = [row for row in self.rows if row["outcome"] in (NOT_CLAIMED, KNOWN_GAP, NOT_RUN)]
        if listed:
            terminalreporter.section("contracts")
        for row in listed:
            terminalreporter.line(
                f"{row['outcome']}: {row['contract']}::{row['test']} ({row['remark']})"
            )

    def pytest_sessionfinish(self) -> None:
        if self._file:
            Path(self._file).write_text(
                json.dumps(self.report(), indent=2) + "\n", encoding="utf-8"
            )

    def report(self) -> dict[str, Any]:
        """Returns everything that a reader needs to judge the rows: counts, versions, hardware."""
        counts = Counter(row["outcome"] for row in self.rows)
        return {
            "outcomes": dict(counts),
            "versions": _versions(),
            "hardware": _hardware(),
            "tests": self.rows,
        }


def _first_line(report: pytest.TestReport) -> str:
    """Returns what was raised, in one line.

    numpy's messages begin with an empty line; where the first line names the exception alone, the
    next lines say what was wrong.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):
        return f"{lines[0]} {'; '.join(lines[1 : 1 + _LINES])}"[:200]
    return "".join(lines[:1])[:200]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "gcore-core": __version__}
    for name in _ENGINES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _hardware() -> dict[str, Any]:
    """Describes the machine; accelerators only where the tested engine has brought torch."""
    hardware: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
    }
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    hardware["accelerators"] = (
        [] if cuda is None else [cuda.get_device_name(i) for i in range(cuda.device_count())]
    )
    return hardware
