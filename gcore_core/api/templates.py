"""Finds the job that an algorithm's name stands for.

A plugin brings such jobs as files ``jobs/<name>.yaml`` in its package, as it brings templates of
plugins (``gcore_core.config.scaffold``). They lack the model, the rows and the rewards, which a
Python call gives. No plugin is imported to find one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gcore_core.config import yaml12
from gcore_core.config.homes import home_of
from gcore_core.config.package_folders import package_folders
from gcore_core.contract.errors import ConfigError, did_you_mean
from gcore_core.contract.installing import install_command

FOLDER = "jobs"


def template(algorithm: str) -> dict[str, Any]:
    """Returns the job of an algorithm, as its YAML holds it.

    algorithm: the name of a template, ``grpo``, or ``<plugin>/<name>`` where several have it.
    Raises ConfigError when no plugin, or more than one, has a template of that name.
    """
    files = {f"{plugin}/{file.stem}": file for plugin, file in _files()}
    plugin, _, name = algorithm.rpartition("/")
    matching = [key for key in files if key.rpartition("/")[2] == name and plugin in key]
    if plugin:
        matching = [key for key in matching if key == algorithm]
    if len(matching) == 1:
        return dict(yaml12.load(files[matching[0]].read_text(encoding="utf-8")))
    names = sorted({key.rpartition("/")[2] for key in files})
    if matching:
        raise ConfigError(
            f"several plugins have a job named {name!r}.",
            where="algorithm",
            todo=f"say which: {', '.join(matching)}",
            choices=matching,
        )
    raise ConfigError(
        f"there is no job to begin with for {algorithm!r}{did_you_mean(name, names)}.",
        where="algorithm",
        why=f"installed: {', '.join(names) or 'none'}",
        todo=install_command(home_of("jobs"))
        if not names
        else "write a job of your own and run it: gcore.run(FILE)",
        choices=names,
    )


def _files() -> Iterator[tuple[str, Path]]:
    """Yields (plugin, file) of every template that is installed."""
    for plugin, folder in package_folders(FOLDER):
        for file in sorted(folder.glob("*.yaml")):
            yield plugin, file
