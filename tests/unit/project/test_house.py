"""benchmarks/house.py counts what it says: each count is held against a text with known ones."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gcore_core.contract.factories import import_file

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TEXT = '''"""A module.

Its docstring is no code.
"""

# one comment of its own line
x = 1  # none of its own line
y = x + 1
'''


@pytest.fixture(scope="module")
def house() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(BENCHMARKS)  # it imports report.py, which lies beside it
        yield import_file(BENCHMARKS / "house.py")


def test_lines_of_code_and_nodes_are_counted(house: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "text.py"
    file.write_text(TEXT)
    assert house.read_text([file]) == house.Text(code=2, nodes=10, wide=0)
    file.write_text(TEXT + f"wide = {'1' * 90}\n# {'a' * 90}\n")
    counts = house.read_text([file])
    assert (counts.code, counts.wide) == (3, 1), "a comment is no code, however long"


def test_there_are_at_most_nineteen_distributions_and_each_is_a_package(house: ModuleType) -> None:
    (claim,) = (claim for claim in house.kernel() if claim.name == "distributions")
    assert claim.value == len(house.packages()) <= 19
    projects = sorted(house.ROOT.glob("plugins/*/pyproject.toml"))
    assert [file.parent.name.replace("-", "_") for file in projects] == [
        package.name for package in house.packages()[1:]
    ]


def test_a_module_is_touched_by_an_idea_in_code_or_text(house: ModuleType, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("code.py", "text.py", "neither.py")]
    for file, text in zip(files, ["Canaries()", "# of canaries", "x = 1"], strict=True):
        file.write_text(text)
    assert house.modules_touched(files, "canar") == files[:2]
    assert house.IDEAS.keys() == {"leaving", "canaries", "unfinished_samples", "lent"}


def test_an_import_circle_is_found_and_type_only_imports_make_none(house: ModuleType) -> None:
    modules = frozenset({"a", "b", "c"})

    def circles(*pairs: tuple[str, str, bool]) -> list[str]:
        return list(house.circles([house.Import(*pair) for pair in pairs], modules))

    assert circles(("a", "b", True), ("b", "c", True)) == []
    assert circles(("a", "b", True), ("b", "a", True), ("a", "c", True)) == ["a", "b"]
    assert circles(("a", "b", True), ("b", "a", False)) == []


def test_an_endpoint_named_by_a_string_is_found(house: ModuleType) -> None:
    def words(text: str) -> list[str]:
        call = ast.parse(text, mode="eval").body
        return list(house.endpoint_words(call))

    assert words("peer.call('score', request)") == ["score"]
    assert words("insist(peer, 'score', request)") == ["score"]
    assert words("peer.call(SCORE, request)") == []


def test_only_the_contract_and_kits_are_public(house: ModuleType) -> None:
    assert house.is_public("gcore_core.contract.records")
    assert house.is_public("gcore_core.kits.commands")
    assert not house.is_public("gcore_core.runtime.worker")
    assert not house.is_public("gcore_core.contractual")


def test_the_code_has_no_circle_no_outward_import_and_no_endpoint_by_string(
    house: ModuleType,
) -> None:
    claims = house.structure()
    assert len(claims) == 3
    assert [claim.name for claim in claims if claim.missed] == []
    assert house.endpoints_by_string(house.files_of(house.packages())) == []


@pytest.fixture(scope="module")
def words(house: ModuleType) -> ModuleType:
    return importlib.import_module("house_words")


def test_words_to_know_are_imported_implemented_or_set(words: ModuleType) -> None:
    plugin = """
from dataclasses import dataclass
from gcore_core import hookimpl
from gcore_core.contract.providers import GeneratorProvider
from numpy import ndarray

@dataclass
class Config:
    version: int = 1

@hookimpl
def gcore_generators():
    yield GeneratorProvider(summary="-", factory="-")

class Mine:
    def __init__(self, config):
        self._config = config
    def submit(self, requests):
        self.own(shown=1)
    def own(self, shown):
        ...
"""
    assert words.words_of([plugin]) == {
        *("hookimpl", "GeneratorProvider", "gcore_generators", "summary", "factory", "submit"),
    }
    test = """
from gcore_testing import GeneratorContract

class TestMine(GeneratorContract):
    provider = "mine"
    flavour = "own"
"""
    assert words.words_of([test]) == {"GeneratorContract", "provider"}


def test_a_new_engine_needs_few_words(words: ModuleType) -> None:
    known = words.names_to_know("generator")
    assert {"GeneratorProvider", "GeneratorContract", "SampleRequest", "step", "version"} <= known
    assert len(known) <= 29


@pytest.fixture(scope="module")
def pairs(house: ModuleType) -> ModuleType:
    return importlib.import_module("house_pairs")


def test_each_pair_of_features_is_asked_about_once(pairs: ModuleType) -> None:
    """A feature that is refused alone is in no pair."""
    features = tuple(pairs.Feature(key, 1) for key in "abcd")

    def refusal(*asked: object) -> str:
        keys = {feature.key for feature in asked}  # type: ignore[attr-defined]
        return "no such key" if "b" in keys else "both" * ({"a", "d"} <= keys)

    found = pairs.count_pairs(features, refusal)
    assert found.gone == {"b=1": "no such key"}
    assert found.present == ("a=1", "c=1", "d=1")
    assert found.n_pairs == 3
    assert found.refused == {("a=1", "d=1"): "both"}


def test_24_features_never_give_one_key_two_values(pairs: ModuleType) -> None:
    """Else a pair would be another job than one that has both."""
    features = pairs.FEATURES
    assert len(features) == len({feature.name for feature in features}) == 24
    for feature in features:
        for other in features:
            both = pairs.job_with({}, feature, other)
            for one in (feature, other):
                section = both
                for word in one.key.split("."):
                    section = section[word]
                assert section == one.value


def test_check_accepts_the_base_job_and_refuses_what_does_not_go_together(
    pairs: ModuleType, tmp_path: Path
) -> None:
    check = pairs.Check(tmp_path)
    assert check() == ""
    one, other = (
        pairs.Feature("run.deterministic", True),
        pairs.Feature("controller.replicas", "owned"),
    )
    assert check(one) == check(other) == ""
    assert "controller.replicas" in check(one, other)


@pytest.fixture(scope="module")
def walks(house: ModuleType) -> ModuleType:
    return importlib.import_module("house_walks")


def test_a_comprehension_is_walked_with_its_function(walks: ModuleType) -> None:
    walk = walks.walk_of(
        [
            ("a.py", "A.f"),
            ("a.py", "A.f.<locals>.<listcomp>"),
            ("a.py", "A.f.<locals>.g"),
            ("b.py", "h"),
        ]
    )
    assert walk.functions == {("a.py", "A.f"), ("a.py", "A.f.g"), ("b.py", "h")}
    assert walk.classes == {("a.py", "A")}
    assert walk.modules == {"a.py", "b.py"}
    beyond = walk.beyond(walks.walk_of([("a.py", "A.f")]))
    assert beyond.functions == {("a.py", "A.f.g"), ("b.py", "h")}
    assert beyond.classes == set()
    assert beyond.modules == {"b.py"}


def test_a_kill_enters_code_that_a_calm_run_does_not(walks: ModuleType) -> None:
    killed = walks.walk_of_kill(True)
    calm = walks.walk_of_kill(False)
    assert calm.modules
    assert killed.beyond(calm).functions
