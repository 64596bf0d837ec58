"""Every command that installs something of this project works where nothing is published."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import made_pages

ROOT = Path(__file__).parents[2]
PROJECTS = {
    "gcore-core": ROOT,
    **{file.parent.name: file.parent for file in sorted(ROOT.glob("plugins/*/pyproject.toml"))},
}
PAGES = [
    ROOT / "README.md",
    *made_pages.committed(),
    *sorted((ROOT / "plugins").glob("*/README.md")),
    *sorted((ROOT / "contrib").glob("*/README.md")),
    *sorted((ROOT / "recipes").rglob("*.yaml")),
]
#: A page that shows what pip is told, and not what a reader types.
SHOWN = {"docs/how-to/venvs.md"}
COMMAND = re.compile(r"pip install ([^`\n]*(?:\n {2,}'[^`\n]*)?)")
#: What ``roles``, ``rewards`` and ``data`` of a recipe need beyond their plugin.
EXTRAS = {
    "data/hub": "gcore-data[hub]",
    "environments/reasoning": "gcore-environments[reasoning]",
    "rewards/math": "gcore-rewards[math]",
}


def facts(project: Path) -> dict[str, Any]:
    return dict(tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"])


def set_up() -> set[str]:
    """The distributions of README's set-up."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    return {"gcore-core", *re.findall(r"^-e plugins/(\S+)", text, re.M)}


def commands() -> Iterator[Any]:
    """Every command of a page that installs something of this project."""
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        text = page.read_text(encoding="utf-8")
        for found in COMMAND.finditer(text):
            if "gcore" in found[1] and name not in SHOWN:
                line = text.count("\n", 0, found.start()) + 1
                yield pytest.param(found[1], id=f"{name}:{line}")


@pytest.mark.parametrize("command", list(commands()))
def test_a_command_installs_from_the_checkout_and_names_all_that_pip_would_not_find(
    command: str,
) -> None:
    words = command.partition("&&")[0].partition("#")[0].replace("'", "").split()
    if any(word.endswith((".whl", "[math]")) and "wheels/" in word for word in words):
        return  # by its file
    given = [word for before, word in zip(words, words[1:], strict=False) if before == "-e"]
    named = {Path(word.partition("[")[0]).name or "gcore-core" for word in given}
    assert not [word for word in words if word.startswith("gcore")], "by its name, on an index"
    for word in given:
        path, _, extras = word.partition("[")
        project = facts(ROOT / path)
        for extra in filter(None, extras.rstrip("]").split(",")):
            assert extra in project.get("optional-dependencies", {}), word
        for line in project["dependencies"]:
            name = re.split(r"[^\w-]", line, maxsplit=1)[0]
            if name.startswith("gcore-"):
                assert name in named | set_up(), f"{word} needs {name}"


def needed(recipe: Path) -> set[str]:
    """What a recipe needs beyond README's set-up: distributions, with their extras."""
    owners = {
        plugin: name
        for name, project in PROJECTS.items()
        for plugin in facts(project).get("entry-points", {}).get("gcore", {})
    }
    found: set[str] = set()
    for key, value in settings(yaml.safe_load(recipe.read_text(encoding="utf-8"))):
        if key == "use":
            found.add(EXTRAS.get(value, owners[value.partition("/")[0]]))
        elif key == "plugins":
            found.add(owners[value])
        elif key == "python" and value.startswith("venv:"):
            found.add("gcore-tools")
    plain = {name.partition("[")[0] for name in found if "[" in name}
    return {name for name in found if name not in set_up() | plain}


def settings(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of every setting of a job; those in a list have the key of the list."""
    if isinstance(node, str):
        yield key, node
    for name, value in node.items() if isinstance(node, dict) else ():
        yield from settings(value, str(name))
    for value in node if isinstance(node, list) else ():
        yield from settings(value, key)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda p: p.stem)
def test_a_recipe_and_its_page_say_what_it_needs_besides_the_set_up(recipe: Path) -> None:
    head = re.match(r"(?:#.*\n)+", recipe.read_text(encoding="utf-8"))
    assert head is not None
    said = re.search(r"^#   needs (.*)$", head[0], re.M)
    listed = set(re.findall(r"gcore-[\w-]+(?:\[\w+\])?", said[1] if said else ""))
    with_extras = {name.partition("[")[0] for name in listed}
    assert needed(recipe) - listed - with_extras == set(), "the line '#   needs ...' of the recipe"
    page = re.search(r"docs/recipes/\w+\.md", head[0])
    if page is not None:
        text = (ROOT / page[0]).read_text(encoding="utf-8")
        installed = set(re.findall(r"-e '?plugins/(gcore-[\w-]+(?:\[\w+\])?)", text))
        assert listed - installed == set(), page[0]


def test_one_page_says_that_nothing_is_published() -> None:
    text = (ROOT / "docs/how-to/install.md").read_text(encoding="utf-8")
    assert "Nothing of G-Core is published" in text
