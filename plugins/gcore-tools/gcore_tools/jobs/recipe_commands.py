"""The plugin ``recipes``: ``g-core recipes`` lists the recipes, ``g-core recipes copy`` copies one.

They are the files of the folder ``recipes`` of a checkout, which wheels take in.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract.errors import ConfigError, did_you_mean
from gcore_core.contract.providers import CommandProvider
from gcore_core.kits.commands import yaml12

RECIPES = Path(__file__).with_name("recipes")


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        summary="every recipe with what it is, in one line",
        factory="gcore_tools.jobs.recipe_commands:show",
    )
    yield CommandProvider(
        name="copy",
        summary="copy a recipe, with the files that it needs, to run and to change it",
        factory="gcore_tools.jobs.recipe_commands:copy",
    )


def show(words: Sequence[str]) -> int:
    """Prints the name of each recipe and the first line of its file."""
    parser = argparse.ArgumentParser(
        prog="g-core recipes",
        description="List the recipes: jobs of small models of their own, and of real models.",
        epilog="to copy one: g-core recipes copy NAME",
    )
    parser.parse_args(words)
    files = recipes()
    width = max(map(len, files))
    for name, file in files.items():
        first = file.read_text(encoding="utf-8").partition("\n")[0]
        print(f"{name:{width}}  {first.removeprefix('# ').partition(' docs/')[0]}")
    return 0


def copy(words: Sequence[str]) -> int:
    """Copies a recipe; a file that is there and differs is left as it is, and nothing is copied."""
    parser = argparse.ArgumentParser(
        prog="g-core recipes copy",
        description="Copy a recipe with its files, to run it and to change it.",
    )
    parser.add_argument("name", metavar="NAME", help="of a recipe, as g-core recipes lists it")
    parser.add_argument(
        "directory", metavar="DIR", nargs="?", type=Path, default=Path("recipes"), help="recipes"
    )
    args = parser.parse_args(words)
    job = _recipe(args.name)
    files = {file: args.directory / file.relative_to(RECIPES) for file in files_of(job)}
    changed = [
        str(to)
        for file, to in files.items()
        if to.exists() and to.read_bytes() != file.read_bytes()
    ]
    if changed:
        raise ConfigError(
            "it is there and is another; nothing was copied.",
            where=changed[0],
            todo=f"copy to another directory: g-core recipes copy {args.name} DIR",
        )
    for file, to in files.items():
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to)
    print(f"{len(files)} files; next: g-core run {files[job]}")
    return 0


def recipes() -> dict[str, Path]:
    """Returns name -> file of every recipe: ``quickstart``, ``chain/sft``."""
    files = {
        file.relative_to(RECIPES).with_suffix("").as_posix(): file
        for pattern in ("*.yaml", "*/*.yaml")
        for file in RECIPES.glob(pattern)
    }
    return dict(sorted(files.items()))


def files_of(job: Path) -> list[Path]:
    """Returns a recipe and the files that it needs: all of its folder, and of those it names.

    A file of code may import others that lie there. The folder of all recipes is left out.
    """
    values = _texts(yaml12.load(job.read_text(encoding="utf-8")))
    named = [(job.parent / value).resolve() for value in values if "." in value]
    root = RECIPES.resolve()
    folders = {file.parent for file in named if file.is_file() and file.is_relative_to(root)}
    folders.add(job.parent.resolve())
    inside = [RECIPES / folder.relative_to(root) for folder in folders if folder != root]
    needed = {job, *(file for folder in inside for file in folder.iterdir() if file.is_file())}
    return sorted(needed)


def _texts(node: Any) -> Iterator[str]:
    """Yields every text of a YAML tree."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value)


def _recipe(name: str) -> Path:
    """Returns the file of a recipe. Raises ConfigError where there is none of that name."""
    files = recipes()
    known = name.removesuffix(".yaml").removeprefix("recipes/")
    if known not in files:
        raise ConfigError(
            f"there is no recipe {name!r}{did_you_mean(known, list(files))}.",
            where="g-core recipes copy",
            todo="list: g-core recipes",
            choices=list(files),
        )
    return files[known]
