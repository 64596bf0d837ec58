"""``g-core plugins show``: prints what a plugin offers; it imports the plugin."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from gcore_core.config.interpreters import open_interpreter
from gcore_core.config.plugins import Plugins
from gcore_core.contract.errors import ConfigError
from gcore_testing.plugin_commands import SHOW, action_parser
from gcore_testing.plugin_commands.descriptions import described, find, text


def run(words: Sequence[str]) -> int:
    """Prints what a plugin offers, and returns the exit code."""
    parser = action_parser("show", SHOW)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a plugin, or a file")
    args = parser.parse_args(words)
    if not args.name:
        where = "g-core plugins show"
        raise ConfigError("the name of a plugin is missing.", where=where, todo=f"{where} NAME")
    interpreter = open_interpreter(args.python, where="--python")
    plugin = find(args.name, where="g-core plugins show")
    plugins = Plugins()
    plugins.load(plugin)
    providers = [described(item, interpreter) for item in plugins.provided_by(plugin.name)]
    if args.json:
        print(json.dumps(dataclasses.asdict(plugin) | {"provides": providers}, indent=2))
        return 0
    print(f"{plugin.name} ({plugin.owner}, {plugin.module})")
    for item in providers:
        print("\n" + "\n".join(text(item)))
    return 0
