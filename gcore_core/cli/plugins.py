"""``g-core plugins``: lists what is installed, from metadata alone, or loads one plugin and shows what it offers."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gcore_core import catalog

if TYPE_CHECKING:
    from gcore_core.plugins import Plugins


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=["list", "show"], default="list", help="default: list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the plugin to show")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = "examples:\n  g-core plugins\n  g-core plugins list --json\n  g-core plugins show core"


def run(args: argparse.Namespace) -> int:
    if args.action == "show" or args.name:
        return _show(args.name, args.json)
    return _list(args.json)


def _list(as_json: bool) -> int:
    rows = catalog.scan().plugins
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return 0
    from gcore_core.cli.table import print_table

    cells = [
        [row.name, row.state, row.distribution, row.version, "; ".join(filter(None, (row.reason, *row.notes)))]
        for row in rows
    ]
    print_table(["plugin", "state", "distribution", "version", "remarks"], cells)
    return 0


def _show(name: str | None, as_json: bool) -> int:
    from gcore_core.errors import ConfigError
    from gcore_core.plugins import Plugins

    if not name:
        raise ConfigError("which plugin?", where="g-core plugins show", todo="g-core plugins show NAME")
    plugin = catalog.scan().get(name, where="g-core plugins show")
    plugins = Plugins()
    plugins.load(plugin)
    if as_json:
        print(json.dumps(dataclasses.asdict(plugin) | {"provides": list(_described(plugins, name))}, indent=2))
        return 0
    print(f"{name} ({plugin.owner}, {plugin.module})")
    for item in _described(plugins, name):
        print(f"\n{item['kind']} {item['name']}: {item['summary']}")
        for label in ("factory", "capabilities", "needs"):
            if item[label]:
                value = item[label]
                print(f"  {label}: {', '.join(value) if isinstance(value, list) else value}")
        for setting in _settings(item):
            print(f"  config.{setting}")
    return 0


def _described(plugins: Plugins, name: str) -> Iterator[dict[str, object]]:
    for item in plugins.provided_by(name):
        config = item.spec.config
        settings = dataclasses.fields(config) if config is not None else ()
        yield {
            "kind": item.kind,
            "name": item.reference,
            "summary": item.spec.summary,
            "factory": item.spec.factory,
            "capabilities": sorted(item.spec.capabilities),
            "needs": list(item.spec.needs),
            "config": {setting.name: f"{_type(setting)}{_default(setting)}" for setting in settings},
        }


def _settings(item: dict[str, object]) -> Iterator[str]:
    config = item["config"]
    if isinstance(config, dict):
        yield from (f"{name}: {text}" for name, text in config.items())


def _type(setting: dataclasses.Field[object]) -> str:
    return setting.type if isinstance(setting.type, str) else getattr(setting.type, "__name__", str(setting.type))


def _default(setting: dataclasses.Field[object]) -> str:
    if setting.default is not dataclasses.MISSING:
        return f" = {setting.default!r}"
    if setting.default_factory is not dataclasses.MISSING:
        return f" = {setting.default_factory()!r}"
    return " (must be given)"
