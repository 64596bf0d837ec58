"""Ordinary linters judge the code's shape; nothing counts the lines of a file or of a package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("gcore_core", "plugins", "contrib", "recipes", "benchmarks", "tests")
OURS = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if "build" not in path.relative_to(ROOT).parts
)
#: Spelled in two parts, so that this file does not hold what it looks for.
SWITCHED_OFF = re.compile("# fmt" + ": ?(skip|off)")


def test_the_linters_bound_complexity_and_line_length() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]
    assert settings["line-length"] == 100
    assert {"C901", "PLR0912", "PLR0915", "E"} <= set(settings["lint"]["select"])
    assert settings["lint"]["mccabe"]["max-complexity"] == 10


def test_no_file_switches_the_formatter_off() -> None:
    off = [str(path.relative_to(ROOT)) for path in OURS if SWITCHED_OFF.search(path.read_text())]
    assert off == []


def test_the_search_finds_a_formatter_that_is_switched_off() -> None:
    assert SWITCHED_OFF.search("x = [1,2]  # fmt" + ": skip")
    assert SWITCHED_OFF.search("# fmt" + ": off")


def test_no_module_has_a_catch_all_name() -> None:
    drawers = {"utils", "util", "common", "helpers", "helper", "misc"}
    found = [str(path) for path in OURS if drawers & {path.stem, path.parent.name}]
    assert found == []
