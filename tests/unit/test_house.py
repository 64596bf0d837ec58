"""benchmarks/house.py counts what it says: each count is held against a text with known ones."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from gcore_core.contract.factories import import_file

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TEXT = '''"""A module.

Its docstring is no code.
"""

# one comment of its own line
x = 1  # none of its own line
a, b = x, 2
c, d = a
'''


@pytest.fixture(scope="module")
def house() -> ModuleType:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(BENCHMARKS)  # it imports report.py, which lies beside it
        return import_file(BENCHMARKS / "house.py")


def test_lines_comments_and_tuple_assignments_are_counted(
    house: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "text.py"
    file.write_text(TEXT)
    counts = house.read_text([file])
    assert counts.code == 3
    assert counts.own_line_comments == 1
    assert counts.assignments == 3
    assert counts.tuple_assignments == 1, "unpacking one value is no such assignment"


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
