"""``g-core <plugin> <command> ...``: commands that a plugin brings. One named ``default`` is what
``g-core <plugin>`` does with words that name no other.
"""

from __future__ import annotations

from gcore_core.cli import VERBS
from gcore_core.config import catalog
from gcore_core.contract.errors import ConfigError, PluginNotFound, did_you_mean
from gcore_core.contract.factories import import_attribute


def run(name: str, words: list[str]) -> int:
    """Loads the plugin ``name`` alone and runs its command ``words[0]`` with the remaining
    words.
    """
    installed = catalog.scan()
    if name not in installed.names():
        choices = [*VERBS, *installed.names()]
        raise PluginNotFound(
            (
                f"g-core: {name!r} is neither a verb nor an installed "
                f"plugin{did_you_mean(name, choices)}."
            ),
            why=f"verbs: {', '.join(VERBS)}",
            todo="g-core --help      list of plugins: g-core plugins",
            choices=choices,
        )
    from gcore_core.config.plugins import Plugins

    plugins = Plugins()
    plugins.load(installed.get(name, where=""))
    commands = {item.spec.name: item.spec for item in plugins.providers("command")}
    if words and words[0] in commands:
        return int(import_attribute(commands[words[0]].factory)(words[1:]) or 0)
    if "default" in commands:
        return int(import_attribute(commands["default"].factory)(words) or 0)
    if words and words[0] in ("-h", "--help") and commands:
        for spec in commands.values():
            print(f"g-core {name} {spec.name:<12} {spec.summary}")
        return 0
    offered = "\n".join(f"g-core {name} {spec.name}: {spec.summary}" for spec in commands.values())
    what = (
        f"has no command {words[0]!r}{did_you_mean(words[0], list(commands))}"
        if words
        else "needs a command"
    )
    if not commands:
        what = "brings no commands"
    raise ConfigError(f"plugin {name!r} {what}.", why=offered, choices=list(commands))
