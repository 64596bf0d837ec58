"""Some words have no place: those of one kind of model in the core, those of one machine
anywhere.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_DENOISING = re.compile("latent|diffus|timestep", re.IGNORECASE)

#: What would tie the project to the place where it was written.
OF_ONE_PLACE = {
    "a number of an issue": re.compile(
        r"\bissues?\s+#?\d|(?<![\w\"'/&#])#\d{1,5}\b(?!-)", re.IGNORECASE
    ),
    "a path of one machine": re.compile(r"(?<![\w.\-/])/(?:work|root|home/\w+|opt/\w+)\b"),
}
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".ini",
    ".txt",
    ".yaml",
    ".yml",
    ".json",
    ".jsonl",
    ".cfg",
    ".sh",
    "",
}
NOT_OURS = {"build", "dist", "runs", "__pycache__", "LICENSE"}


def project_files() -> Iterator[Path]:
    """Every text file of the project; folders that start with a dot are tools' own, but for .ci."""

    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            hidden = path.name.startswith(".") and path.name != ".ci"
            if hidden or path.name in NOT_OURS or path.name.endswith(".egg-info"):
                continue
            if path.is_dir():
                yield from walk(path)
            elif path.suffix in TEXT:
                yield path

    return walk(ROOT)


def without_prose(source: str) -> str:
    """The code alone: comments and docstrings are gone."""

    def is_prose(node: ast.AST) -> bool:
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)

    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [item for item in body if not is_prose(item)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def test_controllers_mention_no_particular_kind_of_model() -> None:
    texts = {path: path.read_text() for path in (ROOT / "gcore_core/controllers").glob("*.py")}
    assert texts
    assert [
        str(path.relative_to(ROOT)) for path, text in texts.items() if OF_DENOISING.search(text)
    ] == []


def test_code_of_the_core_does_not_name_one_kind_of_model() -> None:
    modules = [
        path for path in (ROOT / "gcore_core").rglob("*.py") if path.parent.name != "cli"
    ]  # its help may
    codes = {path: without_prose(path.read_text()) for path in modules}
    assert [
        str(path.relative_to(ROOT)) for path, code in codes.items() if OF_DENOISING.search(code)
    ] == []


@pytest.mark.parametrize("what", OF_ONE_PLACE)
def test_no_file_of_the_project_mentions(what: str) -> None:
    found = []
    for path in project_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if OF_ONE_PLACE[what].search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


def test_the_search_finds_issue_numbers_and_machine_paths() -> None:
    assert OF_ONE_PLACE["a number of an issue"].search("see " + "#12")
    assert OF_ONE_PLACE["a number of an issue"].search("as in issue" + " 12")
    assert OF_ONE_PLACE["a path of one machine"].search("open('/" + "work/file')")
    assert not OF_ONE_PLACE["a path of one machine"].search(
        "../work/file, https://host/work, tests/root"
    )
