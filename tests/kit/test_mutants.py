"""The kit is tested by broken backends: each is caught by the test that names its fault, and the
clean ones pass.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from gcore_testing import Contract

from gcore_core.contract.factories import import_file

HERE = Path(__file__).parent
FILES = sorted((HERE / "mutants").glob("*.py"))


def contracts(file: Path) -> dict[str, Any]:
    return {
        f"{file.stem}_{name}": value
        for name, value in vars(import_file(file)).items()
        if isinstance(value, type) and issubclass(value, Contract) and hasattr(value, "caught_by")
    }


ALL = {name: value for file in FILES for name, value in contracts(file).items()}
CLEAN = [name for name, value in ALL.items() if not value.caught_by]
MUTANTS = [name for name, value in ALL.items() if value.caught_by]


INNER = """
from pathlib import Path
from gcore_core.contract.factories import import_file
for name, file in {names!r}.items():
    globals()["Test" + name] = getattr(import_file(Path(file)), name.partition("_")[2])
"""


class Results:
    """Outcomes of an inner session: mutant -> test without its case -> outcomes."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            _, contract, test = report.nodeid.split("::", 2)
            outcome = "not claimed" if dict(report.user_properties) else report.outcome
            self.found[contract.removeprefix("Test")][test.partition("[")[0]].add(outcome)

    def failures(self, name: str) -> set[str]:
        return {test for test, outcomes in self.found[name].items() if "failed" in outcomes}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All mutants in one session of pytest inside this process, with settings of its own."""
    folder = tmp_path_factory.mktemp("inner")
    (folder / "pytest.ini").write_text("[pytest]\n")
    names = {name: str(HERE / "mutants" / f"{name.partition('_')[0]}.py") for name in ALL}
    (folder / "test_inner.py").write_text(INNER.format(names=names))
    results = Results()
    options = [
        "-c",
        str(folder / "pytest.ini"),
        "--rootdir",
        str(folder),
        "-q",
        "--tb=no",
        "--show-capture=no",
    ]
    options += [
        "--no-summary",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        f"--basetemp={folder / 'base'}",
    ]
    pytest.main([*options, str(folder / "test_inner.py")], plugins=[results])
    return results


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 25


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_backend_passes_every_test(name: str, results: Results) -> None:
    outcomes = set().union(*results.found[name].values())
    assert results.failures(name) == set()
    assert "passed" in outcomes
    assert outcomes <= {"passed", "not claimed"}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught_by_the_test_that_names_its_fault(name: str, results: Results) -> None:
    """By that one, and by no others than those that the mutant lists."""
    assert results.failures(name) == set(ALL[name].caught_by)


def test_every_test_of_every_contract_catches_a_mutant() -> None:
    """A test that no fault fails proves nothing."""
    caught = {(value.kind, test) for value in ALL.values() for test in value.caught_by}
    held = {
        (value.kind, test)
        for value in ALL.values()
        for test in dir(value)
        if test.startswith("test_") and not test.startswith(("test_it_is_a", "test_it_has_rows"))
    }
    assert sorted(held - caught) == []
