"""The command ``g-core``: one module per verb, imported when the verb is used.

A verb's module has ``configure(parser)`` and ``run(args) -> int``, the exit code. A word that is
no verb names a plugin, whose commands are run here. At its top this module imports the standard
library only, so that ``g-core --help`` is immediate.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from gcore_core.contract.errors import GcoreError

VERBS = {
    "run": "train as a YAML file says",
    "resume": "go on with a run from its newest checkpoint",
    "check": "resolve and check a YAML file without starting anything",
    "config": "print the resolved configuration, or why a key has its value",
    "plugins": "list plugins; with gcore-testing, show and check them",
}

#: Distribution of this project -> its commands, besides the verbs. The core runs without it,
#: and says what to install where a command is asked for that is not there.
COMMANDS_OF = {
    "gcore-nodes": ("nodes",),
    "gcore-placement": ("placement", "sim", "simulate"),
    "gcore-report": ("diff", "eval", "logs", "report", "trace", "watch"),
    "gcore-rewards": ("human",),
    "gcore-sentinel": ("sentinel",),
    "gcore-testing": ("conformance", "new", "plugins"),
    "gcore-tools": (
        *("checkpoint", "completion", "demo", "doctor", "export", "hash", "plan"),
        *("recipes", "shrink", "venv"),
    ),
}

_NO_PLUGINS = "--no-plugins"
_EXAMPLES = """\
examples:
  g-core run recipes/quickstart.yaml
  g-core run job.yaml run.steps=10 roles.rollout.slots=2
  g-core config job.yaml --why roles.rollout.config.dtype
  g-core plugins
  g-core <plugin> <command>      commands that a plugin brings, such as g-core recipes copy NAME

Exit codes: 0 well, 2 configuration, 3 plugin, 4 data, 5 worker, 6 training, 7 address,
8 checkpoint.
G_CORE_PLUGINS=off does what --no-plugins does; G_CORE_TRACEBACK=1 shows tracebacks.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        from gcore_core.node import inherited

        inherited.open_standard_streams()
        inherited.reset_signals(keep=inherited.OF_THE_USER)
    try:
        code = _dispatch(words, owns_process=argv is None and sys.gettrace() is None)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `g-core plugins | head`
        _discard(sys.stdout)
        return 141
    except Exception as error:
        from gcore_core.contract.errors import GcoreError

        told = error if isinstance(error, GcoreError) else _missing_module(error)
        if told is None or os.environ.get("G_CORE_TRACEBACK") == "1":
            raise
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _discard(sys.stdout)
        try:
            print(told, file=sys.stderr)
        except BrokenPipeError:  # as in `g-core check job.yaml 2>&1 | head -1`
            _discard(sys.stderr)
        return told.exit_code


def _missing_module(error: Exception) -> GcoreError | None:
    """Returns what to say of an import that failed, where it is known what to do."""
    from gcore_core.contract.errors import PluginBroken
    from gcore_core.contract.missing_modules import import_advice

    todo = import_advice(error)
    return PluginBroken(f"{error}.", todo=todo) if todo else None


def _discard(stream: IO[str]) -> None:
    """Discards what the stream still holds and will be given, as nobody reads it.

    Python writes out both streams once more as it ends, and would end with 120 where that fails.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _dispatch(words: list[str], *, owns_process: bool) -> int:
    """Runs the command that the words say.

    owns_process: nobody else's code runs in this process, so a verb may fork it.
    """
    parser = _parser()
    if not words:
        parser.print_help()
        return 2
    if words[0] == _NO_PLUGINS:
        os.environ["G_CORE_PLUGINS"] = "off"  # the processes that are started from here see it too
        return _dispatch(words[1:], owns_process=owns_process)
    verb = words[0]
    arguments = words[1:]
    if verb.startswith("-"):
        parser.parse_args(words)
        return 0
    if verb not in VERBS:
        return run_plugin_command(verb, arguments)
    # Intermixed: options may stand between the file and the overrides.
    args = verb_parser(verb).parse_intermixed_args(arguments)
    args.owns_process = owns_process
    return int(_module(verb).run(args))


def verb_parser(verb: str) -> argparse.ArgumentParser:
    """Returns the parser of one of ``VERBS``."""
    parser = command_parser(verb, VERBS[verb])
    _module(verb).configure(parser)
    return parser


def command_parser(command: str, summary: str) -> argparse.ArgumentParser:
    """Returns a parser of ``g-core <command>`` that takes no arguments yet."""
    return argparse.ArgumentParser(
        prog=f"g-core {command}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _module(verb: str) -> Any:
    import importlib

    return importlib.import_module(f"gcore_core.cli.{verb}")


def _parser() -> argparse.ArgumentParser:
    from gcore_core import __version__

    verbs = "\n".join(f"  {name:<11} {summary}" for name, summary in VERBS.items())
    others = "\n".join(f"  {name:<15} {', '.join(words)}" for name, words in COMMANDS_OF.items())
    parser = argparse.ArgumentParser(
        prog="g-core",
        usage="g-core [--no-plugins] VERB ...",
        description="Reinforcement learning of language, image-text and diffusion policies.\n\n"
        f"verbs (each has its own --help):\n{verbs}\n\n"
        f"commands of other distributions, where these are installed:\n{others}",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(_NO_PLUGINS, action="store_true", help="leave only the built-in plugin")
    parser.add_argument("--version", action="version", version=f"g-core {__version__}")
    return parser


def run_plugin_command(name: str, words: list[str]) -> int:
    """Loads the plugin ``name`` alone and runs its command ``words[0]`` with the other words.

    A command named ``default`` gets all the words when the first one names no command.
    """
    from gcore_core.config import catalog
    from gcore_core.contract.errors import ConfigError, PluginNotFound, did_you_mean
    from gcore_core.contract.factories import import_attribute

    installed = catalog.scan()
    if name not in installed.names():
        _refuse_missing_command(name, words)
        _refuse_missing_plugin(name, {plugin.distribution for plugin in installed.plugins})
        known = [command for commands in COMMANDS_OF.values() for command in commands]
        choices = [*VERBS, *known, *installed.names()]
        suggestion = did_you_mean(name, choices)
        raise PluginNotFound(
            f"g-core: {name!r} is neither a verb nor an installed plugin{suggestion}.",
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
    if not commands:
        problem = "brings no commands"
    elif words:
        problem = f"has no command {words[0]!r}{did_you_mean(words[0], list(commands))}"
    else:
        problem = "needs a command"
    offered = "\n".join(f"g-core {name} {spec.name}: {spec.summary}" for spec in commands.values())
    raise ConfigError(f"plugin {name!r} {problem}.", why=offered, choices=list(commands))


def _refuse_missing_command(name: str, words: list[str]) -> None:
    """Raises PluginNotFound for a command of ``COMMANDS_OF``, whose distribution is not here."""
    from gcore_core.config.homes import home_of
    from gcore_core.contract.errors import PluginNotFound
    from gcore_core.contract.installing import install_command

    for distribution, commands in COMMANDS_OF.items():
        if name in commands:
            # Of a verb it is an action that is missing.
            command = f"{name} {words[0]}" if name in VERBS else name
            raise PluginNotFound(
                f"g-core {command} comes with {distribution}, which is not installed.",
                todo=install_command(home_of(name)),
            )


def _refuse_missing_plugin(name: str, here: Collection[str]) -> None:
    """Raises PluginNotFound for a plugin of this project whose distribution is not here.

    here: the distributions that bring plugins.
    """
    from gcore_core.config.homes import NO_PLUGINS, home_of
    from gcore_core.contract.errors import PluginNotFound
    from gcore_core.contract.installing import install_command, is_offered

    home = home_of(name)
    distribution = home.partition("[")[0]
    if name not in NO_PLUGINS and distribution not in here and is_offered(distribution):
        raise PluginNotFound(
            f"plugin {name!r} comes with {distribution}, which is not installed.",
            todo=install_command(home),
        )


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints left-aligned columns; a column that is empty in all rows is left out.

    Rejected: rich, whose import takes longer than the rest of a listing.
    """
    columns = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [[row[i] for i in columns] for row in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip())


def say_phase(text: str) -> None:
    """Prints what a command does now, besides what it is asked to print."""
    print(f"{text} ...", file=sys.stderr, flush=True)


def write_file(path: Path, text: str, *, option: str) -> None:
    """Writes the file that an option names. Raises ConfigError where that cannot be."""
    from gcore_core.contract.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}.",
            where=option,
            todo="name a file in a directory that is there",
        ) from error
