"""The kit is tested by broken backends: each is caught by the test that names its fault, and the
clean ones pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
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
#: Files of mutants of environments, of generators that take tokens, and of renderers.
_OF_EPISODES = ("environments_", "tokens_", "renderers_")
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
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """Gives the results of the file that a mutant lies in.

    All mutants of a file are one session of pytest inside this process, with settings of its own.
    Each file is a session, so that workers of pytest-xdist, which share out the mutants, share out
    the sessions as well.
    """

    @cache
    def run(stem: str) -> Results:
        folder = tmp_path_factory.mktemp(stem)
        (folder / "pytest.ini").write_text("[pytest]\n")
        file = str(HERE / "mutants" / f"{stem}.py")
        names = {name: file for name in ALL if name.partition("_")[0] == stem}
        inner = folder / f"test_inner_{stem}.py"
        inner.write_text(INNER.format(names=names))
        results = Results()
        options = ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "-q", "--tb=no"]
        options += ["--show-capture=no", "--no-summary", "-p", "no:cacheprovider"]
        options += ["-p", "no:asyncio", f"--basetemp={folder / 'base'}"]
        pytest.main([*options, str(inner)], plugins=[results])
        return results

    return lambda name: run(name.partition("_")[0])


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 25


def test_what_episodes_rest_on_has_mutants_of_each_part() -> None:
    counts = Counter(ALL[name].kind for name in MUTANTS if name.startswith(_OF_EPISODES))
    assert sum(counts.values()) >= 20
    assert min(counts.values()) >= 8 and len(counts) == 3


@pytest.mark.parametrize("name", ALL)
def test_a_mutant_is_caught_by_the_tests_that_name_its_fault_and_a_clean_one_by_none(
    name: str, results_of: Callable[[str], Results]
) -> None:
    """By those that the mutant lists, and by no others."""
    results = results_of(name)
    assert results.failures(name) == set(ALL[name].caught_by)
    if not ALL[name].caught_by:
        outcomes = set().union(*results.found[name].values())
        assert "passed" in outcomes
        assert outcomes <= {"passed", "not claimed"}


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
