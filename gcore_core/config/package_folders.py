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
    """Returns the folder of a name in a plugin's package; None where it has none."""
    spec = find_spec(plugin.module.partition(".")[0])
    # A plugin that is a single module has no folders.
    places = (
        [Path(place, name) for place in (spec.submodule_search_locations or ())] if spec else []
    )
    return next((place for place in places if place.is_dir()), None)


def package_folders(name: str) -> Iterator[tuple[str, Path]]:
    """Yields (plugin, folder) of every plugin that may be used and brings such a folder.

    Where several plugins share a package, the first one has it.
    """
    seen = set()
    for plugin in catalog.scan().plugins:
        folder = package_folder(plugin, name) if plugin.state in _USABLE else None
        if folder is not None and folder not in seen:
            seen.add(folder)
            yield plugin.name, folder
