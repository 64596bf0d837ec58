"""Finds the files that plugins bring in folders of their packages: jobs, recipes, templates.

No plugin is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from gcore_core.config import catalog

_USABLE = ("ok", "undeclared")


def package_folder(plugin: catalog.Installed, name: str) -> Path | None:
    """Returns the folder of a name in a plugin's package; None where it has none.

    Several plugins may share a distribution, each with a package of its own in that of the
    distribution: the plugin's own comes first. A folder of modules is none of files.
    """
    top, *inner = plugin.module.split(".")
    spec = find_spec(top)
    # A plugin that is a single module has no folders.
    roots = (spec.submodule_search_locations or ()) if spec else ()
    packages = [Path(root, *inner[:depth]) for root in roots for depth in range(len(inner), -1, -1)]
    places = [package / name for package in packages]
    return next((p for p in places if p.is_dir() and not (p / "__init__.py").exists()), None)


def package_folders(name: str) -> Iterator[tuple[str, Path]]:
    """Yields (plugin, folder) of every plugin that may be used and brings such a folder.

    Where several plugins share a folder, the first one has it.
    """
    seen = set()
    for plugin in catalog.scan().plugins:
        folder = package_folder(plugin, name) if plugin.state in _USABLE else None
        if folder is not None and folder not in seen:
            seen.add(folder)
            yield plugin.name, folder
