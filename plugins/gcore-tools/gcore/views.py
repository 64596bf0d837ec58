"""Finds what shows a run in a notebook: the views that the run's plugins offer."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ConfigError, GcoreError, did_you_mean
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.run_files import read_lock
from gcore_core.kits.commands import Plugins, catalog


class Views:
    """Holds the views of one run, in the order in which its plugins were loaded."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    @cached_property
    def factories(self) -> dict[str, str]:
        """Returns name, such as ``report/curves`` -> reference of its factory."""
        installed = catalog.scan()
        plugins = Plugins()
        for name in read_lock(self._run_dir):
            try:
                plugins.load(installed.get(name, where="plugins"))
            except GcoreError:
                continue  # a file of the project, or gone since: it has no view here
        return {item.reference: item.spec.factory for item in plugins.providers("view")}

    def first(self) -> Any:
        """Returns the first view; None where no plugin offers one, or there is nothing yet."""
        for name in self.factories:
            return self.named(name)
        return None

    def named(self, name: str) -> Any:
        """Returns a view. Raises ConfigError when the run's plugins do not offer it."""
        names = list(self.factories)
        if name not in self.factories:
            raise ConfigError(
                f"the run's plugins offer no view {name!r}{did_you_mean(name, names)}.",
                where=str(self._run_dir),
                why=f"they offer: {', '.join(names) or 'none'}",
                todo="train with plugins: [report], of gcore-report",
                choices=names,
            )
        return import_attribute(self.factories[name])(self._run_dir)
