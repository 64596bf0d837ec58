"""How outcomes of contracts are told: in a session of pytest, in a report, on the command line, on
the page.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gcore_testing import BalancerContract, Contract
from gcore_testing.installed import InstalledPlugins

from gcore_core.cli import main
from gcore_core.contract.errors import ContractError
from gcore_core.contract.installing import install_command

ROOT = Path(__file__).parents[3]

MINE = """
from gcore_core import hookimpl
from gcore_core.contract.providers import (BalancerProvider, FilterProvider, GeneratorProvider, ObjectiveProvider)
from gcore_mine_settings import Either, Settings

@hookimpl
def gcore_balancers():
    yield BalancerProvider(summary="longest first", factory="gcore_testing.fake:FakeBalancer")
    yield BalancerProvider(name="bad", summary="loses one", factory="gcore_mine_settings:Bad")

@hookimpl
def gcore_filters():
    yield FilterProvider(summary="needs a number", factory="gcore_mine_settings:Strict", config=Settings)
    yield FilterProvider(name="either", summary="needs one", factory="gcore_mine_settings:Strict", config=Either)

@hookimpl
def gcore_generators():
    yield GeneratorProvider(summary="needs a model", factory="gcore_mine_settings:Modelled")

@hookimpl
def gcore_objectives():
    yield ObjectiveProvider(summary="far away", factory="gcore_mine_settings:Bad", needs=("no-such-engine>=3",))
"""  # noqa: E501
SETTINGS = """
from dataclasses import dataclass

from gcore_core.contract.errors import ConfigError

@dataclass(frozen=True)
class Settings:
    limit: int

@dataclass(frozen=True)
class Either:
    least: int = 0
    most: int = 0

    def __post_init__(self):
        if not (self.least or self.most):
            raise ConfigError("least or most must be given", where="least")

class Bad:
    def __init__(self, config):
        pass

    def costs(self, work):
        return work.lengths

    def split(self, work, bins):
        return [list(range(len(work) - 1))] + [[] for _ in range(bins - 1)]

class Strict(Bad):
    pass

class Modelled:
    def __init__(self, config, context):
        raise ConfigError("it needs a model.", where=f"roles.{context.role}.model.path")
"""
OWN_KIND = """
from gcore_core.contract.traits import Traits
from gcore_testing import Contract, claims

class TestPainter(Contract):
    kind = "mine:painter"
    tolerance = 0.5
    traits = Traits(abort=True)

    @claims("abort")
    def test_it_paints_with_oil(self):
        pass

    @claims("sleeps")
    def test_it_draws_with_chalk(self):
        raise AssertionError
"""


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[InstalledPlugins]:
    with InstalledPlugins(tmp_path / "site") as installed:
        files = {"gcore_mine_settings.py": SETTINGS, "gcore_mine_conformance.py": OWN_KIND}
        installed.add("mine", MINE, files=files)
        yield installed


def session(directory: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A session of pytest as a plugin's author would start it."""
    (directory / "test_mine.py").write_text(source)
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:asyncio", *options]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words, "test_mine.py"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )


OUTCOMES = """
from gcore_core.contract.traits import Traits
from gcore_testing import Contract, claims

class TestMine(Contract):
    known_gaps = {"test_a_gap": "not yet", "test_a_closed_gap": "long ago"}
    traits = Traits(abort=True)

    @claims("abort")
    def test_a_claim(self): pass

    @claims("sleeps")
    def test_no_claim(self): raise AssertionError

    def test_a_gap(self): raise AssertionError

    def test_a_closed_gap(self): pass
"""


def test_outcomes_are_counted_and_listed_without_any_option(tmp_path: Path) -> None:
    done = session(tmp_path, OUTCOMES)
    assert done.returncode == 1
    assert "not claimed: TestMine::test_no_claim (sleeps)" in done.stdout
    assert "known gap: TestMine::test_a_gap (not yet)" in done.stdout
    assert "[XPASS(strict)] long ago" in done.stdout
    last = done.stdout.strip().splitlines()[-1]
    for part in ("1 failed", "1 passed", "1 xfailed", "1 not claimed"):
        assert part in last
    assert "skipped" not in done.stdout


def test_the_report_has_a_row_for_each_test(tmp_path: Path) -> None:
    session(
        tmp_path,
        OUTCOMES,
        "-p",
        "gcore_testing.pytest_plugin",
        "--conformance-report",
        "report.json",
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert {row["test"]: row["outcome"] for row in report["tests"]} == {
        "test_a_claim": "pass",
        "test_no_claim": "not claimed",
        "test_a_gap": "known gap",
        "test_a_closed_gap": "fail",
    }
    assert report["outcomes"] == {"pass": 1, "not claimed": 1, "known gap": 1, "fail": 1}
    assert report["tests"][1]["trait"] == "sleeps"
    assert {"python", "gcore-core", "numpy"} <= report["versions"].keys()
    assert {"machine", "cores", "accelerators"} <= report["hardware"].keys()


def test_a_gap_that_names_no_test_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(
        ContractError,
        match=r"names 'test_every_index_in_one_bin'.*did you mean 'test_every_index_is",
    ):
        type(
            "TestMine", (BalancerContract,), {"known_gaps": {"test_every_index_in_one_bin": "why"}}
        )


def test_a_contract_without_provider_or_fixture_says_what_to_do() -> None:
    with pytest.raises(ContractError, match=r'set provider = "<plugin>", or override the fixture'):
        type("TestMine", (BalancerContract,), {})().build()


def test_the_package_is_imported_without_pytest_and_torch() -> None:
    look = (
        "import sys, gcore_testing; print({'pytest', 'torch', 'numpy', 'pluggy'} & "
        "set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "set()"


def conformance(
    mine: InstalledPlugins,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *words: str,
) -> tuple[int, str]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(mine.directory), str(ROOT)]))
    code = main(["conformance", *words])
    return code, capsys.readouterr().out


def test_every_provider_is_tested_by_its_contract_or_listed_as_left_out(
    mine: InstalledPlugins,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "report.json"
    code, output = conformance(mine, monkeypatch, capsys, "mine", "--report", str(file))
    assert code == 3
    rows = {re.split(r"\s{2,}", line)[0]: line for line in output.splitlines()}
    assert re.search(r"^TestMineBalancer +balancer +62 +62 pass +0.1$", output, flags=re.M)
    assert re.search(r"^TestMineBadBalancer +balancer .* fail", output, flags=re.M)
    assert re.search(r"7 pass", rows["TestPlugin"]) or "not claimed" in rows["TestPlugin"]
    assert (
        "left out: filter mine (it needs settings (limit); bring a contract that gives them)"
        in output
    )
    assert (
        "left out: filter mine/either (its defaults do not make it: least: least or most must be "
        "given Bring a contract that gives more)"
    ) in output
    assert (
        "left out: generator mine (its defaults do not make it: roles.contract.model.path: it "
        "needs a model. Bring a contract that gives more)"
    ) in output
    assert "left out: objective mine (its needs are not met here: no-such-engine>=3)" in output
    assert "not claimed: TestPainter::test_it_draws_with_chalk (sleeps)" in output
    assert "fail: TestMineBadBalancer::test_every_index_is_in_one_bin[mixed]" in output
    report = json.loads(file.read_text())
    assert (report["plugin"], report["distribution"], report["version"]) == (
        "mine",
        "gcore-mine",
        "0.1.0",
    )
    own = [row for row in report["tests"] if row["kind"] == "mine:painter"]
    assert [(row["trait"], row["outcome"], row["tolerance"]) for row in own] == [
        ("abort", "pass", 0.5),
        ("sleeps", "not claimed", 0.5),
    ]


def test_without_pytest_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "pytest" else find(name)
    )
    assert main(["conformance", "core"]) == 3
    assert capsys.readouterr().err.splitlines() == [
        "g-core conformance: contracts are run by pytest, which is not installed.",
        f"  {install_command('pytest>=9')}",
    ]


HIDDEN = """
import numpy as np
import pytest
from gcore_testing import BalancerContract, Contract

@pytest.fixture
def brush():
    return "wide"

class TestOwn(Contract):
    kind = "mine:painter"

    def test_it_has_the_modules_fixture(self, brush):
        assert brush == "wide"

    def test_it_has_no_such_fixture(self, chalk):
        pass

    def test_numbers(self):
        np.testing.assert_allclose([1.0, 2.0], [1.0, 3.0], err_msg="colours")

for title in ("One", "Two"):
    class Made(BalancerContract):
        provider = "mine" if title == "One" else "mine/bad"
    globals()[f"Test{title}"] = Made
"""


def test_what_failed_is_said_in_words_and_not_as_a_line_of_the_kit(
    mine: InstalledPlugins,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The module's fixtures are seen, a missing one is no broken contract, and numpy's message is
    told though its first line is empty.
    """
    files = {"gcore_mine_settings.py": SETTINGS, "gcore_mine_conformance.py": HIDDEN}
    mine.add("mine", MINE, files=files)
    file = tmp_path / "report.json"
    words = ("mine", "-k", "TestOwn or every_index", "--report", str(file))
    code, output = conformance(mine, monkeypatch, capsys, *words)
    assert code == 3
    rows = {row["test"]: row for row in json.loads(file.read_text())["tests"]}
    assert rows["test_it_has_the_modules_fixture"]["outcome"] == "pass"
    assert rows["test_it_has_no_such_fixture"]["outcome"] == "not run"
    assert (
        "not run: TestOwn::test_it_has_no_such_fixture (there is no fixture 'chalk': give it in "
        "the contract's class, or in the module that has the class)"
    ) in output
    assert re.search(r"fail: TestOwn::test_numbers \(AssertionError: Not equal to tol", output)
    assert "colours" in rows["test_numbers"]["remark"]


def test_contracts_that_are_made_in_a_loop_have_a_row_each(
    mine: InstalledPlugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"gcore_mine_settings.py": SETTINGS, "gcore_mine_conformance.py": HIDDEN}
    mine.add("mine", MINE, files=files)
    code, output = conformance(mine, monkeypatch, capsys, "mine", "-k", "every_index")
    assert code == 3
    assert re.search(r"^TestOne +balancer +10 +10 pass", output, flags=re.M), output
    assert re.search(r"^TestTwo +balancer +10 .*fail", output, flags=re.M), output


def test_option_k_selects_tests(
    mine: InstalledPlugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = conformance(mine, monkeypatch, capsys, "mine", "-k", "TestMineBalancer and even")
    assert code == 0
    assert "mine: gcore-mine 0.1.0: 1 pass" in output


def test_a_conformance_module_that_does_not_import_is_named(
    mine: InstalledPlugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine.add(
        "mine",
        MINE,
        files={"gcore_mine_settings.py": SETTINGS, "gcore_mine_conformance.py": "1 / 0"},
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(mine.directory), str(ROOT)]))
    assert main(["conformance", "mine"]) == 3
    error = capsys.readouterr().err
    assert "the contracts of plugin 'mine' (gcore-mine 0.1.0) could not be run" in error
    assert "'gcore_mine_conformance'" in error and "division by zero" in error


# -- the page --------------------------------------------------------------------------------------

PAGE = (ROOT / "docs/how-to/conformance.md").read_text()


def test_code_on_the_page_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is collected by pytest; the one that needs no installed plugin is run."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)
    assert len(blocks) >= 6
    (complete,) = [block for block in blocks if "def split(" in block]
    done = session(tmp_path, complete)
    assert re.search(r"^62 passed, 2 not claimed", done.stdout, flags=re.M), done.stdout
    for block in blocks:
        if "contracts_of" not in block:
            done = session(tmp_path, block, "--collect-only")
            assert done.returncode in (0, 5), done.stdout  # 5: a contract alone has no tests


def test_the_page_names_every_contract_and_its_fixture() -> None:
    import gcore_testing as testing

    named = set(re.findall(r"^\| `(\w+Contract)` \|", PAGE, flags=re.M))
    assert named == {name for name in testing.__all__ if name.endswith("Contract")} - {"Contract"}
    rows: list[tuple[str, Any]] = re.findall(r"^\| `(\w+Contract)` \| (.*?) \|", PAGE, flags=re.M)
    for contract, fixtures in rows:
        cls = getattr(testing, contract)
        assert issubclass(cls, Contract)
        for fixture in re.findall(r"`(\w+)`", fixtures.partition(";")[0]):
            assert hasattr(cls, fixture), f"{contract} has no fixture {fixture}"
