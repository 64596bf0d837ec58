"""The tables at the head of ``contract/records.py``, of forms of a record and of words, are
complete; the glossary has the same words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gcore_core.contract import records

ROOT = Path(__file__).parents[2]
CORE = ROOT / "gcore_core"


def table(first: str) -> list[list[str]]:
    """The rows of a table in the module's docstring, behind its head."""
    paragraphs = (records.__doc__ or "").split("\n\n")
    (found,) = (text for text in paragraphs if re.match(rf" +{first}  ", text))
    return [re.split(r"  +", line.strip()) for line in found.splitlines()[1:]]


def is_form(struct: ast.ClassDef) -> bool:
    """Whether a class has an ordinal and a sample, or a field that begins with both."""
    fields = {
        part.target.id: ast.unparse(part.annotation)
        for part in struct.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    doc = ast.get_docstring(struct) or ""
    return {"ordinal", "sample"} <= fields.keys() or any(
        annotation.startswith("tuple[int, int") and re.search(rf"^{name}: \(?ordinal, s", doc, re.M)
        for name, annotation in fields.items()
    )


def forms_in(source: str) -> list[str]:
    classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return [struct.name for struct in classes if is_form(struct)]


def forms_of_the_core() -> Iterator[tuple[str, str]]:
    for path in sorted(CORE.rglob("*.py")):
        where = path.relative_to(CORE).as_posix()
        for name in forms_in(path.read_text(encoding="utf-8")):
            yield name, where


def test_every_form_of_a_record_is_in_the_table() -> None:
    listed = [(form, where) for form, where, *_ in table("form")]
    # ``Finished`` is named by the request that it holds.
    assert sorted(listed) == sorted([*forms_of_the_core(), ("Finished", "contract/generator.py")])


def test_every_form_says_who_makes_it_and_who_reads_it() -> None:
    assert all(len(row) == 4 for row in table("form"))


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ("ordinal: int\n    sample: int", True),
        ("key: tuple[int, int, int]", True),
        ("ordinal: int", False),
        ("versions: tuple[int, int]", False),
    ],
)
def test_a_form_is_known_by_an_ordinal_and_a_sample(fields: str, found: bool) -> None:
    doc = "key: ordinal, sample, step.\n    versions: first and last."
    source = f'class Some:\n    """Is one.\n\n    {doc}\n    """\n\n    {fields}\n'
    assert forms_in(source) == (["Some"] if found else [])


def test_the_bridge_has_twelve_words_and_the_glossary_has_the_same() -> None:
    bridge = table("here")
    glossary = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (.+) \|$", glossary, re.M)
    assert len(bridge) == 12
    assert [list(row) for row in rows if row[0] != "here"] == bridge
