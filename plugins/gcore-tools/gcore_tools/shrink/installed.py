"""Finds what a job names among the plugins that are installed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.providers import RoleProvider, VenvProvider
from gcore_core.kits.commands import Plugins, catalog, open_interpreter

#: Role -> kind of its backend, of roles that the core knows.
_KINDS = {"policy": "trainer", "rollout": "generator"}


class Installed:
    """The plugins that a job names, loaded when they are first asked for."""

    def __init__(self) -> None:
        self._catalog = catalog.scan()
        self._plugins = Plugins()
        self._loaded: set[str] = set()

    def load(self, plugin: str, where: str) -> None:
        """Loads a plugin. Raises PluginNotFound where it is not installed."""
        if plugin not in self._loaded:
            self._plugins.load(self._catalog.get(plugin, where=where))
            self._loaded.add(plugin)

    def provider(self, kind: str, use: str, where: str) -> Any:
        """Returns the description of what ``use:`` names. Raises where there is none."""
        self.load(use.partition("/")[0], where)
        return self._plugins.resolve(kind, use, where=where).spec

    def kind_of_role(self, name: str, job: Mapping[str, Any]) -> str:
        """Returns the kind of a role's backend."""
        if name in _KINDS:
            return _KINDS[name]
        if any((one or {}).get("role") == name for one in (job.get("rewards") or {}).values()):
            return "generator"
        for plugin in job.get("plugins") or ():
            self.load(str(plugin), "plugins")
        for item in self._plugins.providers("role"):
            if item.spec.name == name and isinstance(item.spec, RoleProvider):
                return item.spec.kind
        raise ConfigError(
            "it is not known what kind of role this is.",
            where=f"roles.{name}",
            todo="name the plugin that brings it under plugins",
        )

    def lacks(self, kind: str, use: str, python: str | None, where: str) -> str:
        """Returns what a role's interpreter lacks of its engine; "" where it has everything."""
        spec = self.provider(kind, use, where)
        try:
            interpreter = open_interpreter(python, where=where)
        except ConfigError:
            return f"there is no {python}"
        unmet = [need for need, _ in interpreter.unmet(spec.needs)]
        if unmet:
            return f"{unmet[0]} is not installed"
        plugin = use.partition("/")[0]
        engines = [
            item.spec.engine
            for item in self._plugins.providers("venv", plugin)
            if isinstance(item.spec, VenvProvider)
        ]
        if engines and not any(interpreter.version(engine) for engine in engines):
            return f"{plugin} is not installed"
        return ""
