"""``g-core plugins``: lists, shows and checks plugins.

list: what is installed; reads metadata alone.
show: what one plugin offers; imports it.
check: whether a plugin works; imports it in a process of its own, so that a broken one hurts
    nobody. ``python -m gcore_core.cli.plugins NAME`` is that process; its last line of output is
    its ``Report`` as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gcore_core.config import catalog

if TYPE_CHECKING:
    from gcore_core.config.interpreters import Interpreter
    from gcore_core.config.plugins import Provided

TIMEOUT_S = 120.0
#: What a list does not know; aside, so that a reader of the table gets the table.
_NOT_IMPORTED = (
    "no plugin was imported: a state is what metadata says; to try them: g-core plugins check"
)
_EPILOG = """\
actions:
  list         every plugin with its state; --python: of another interpreter
  show NAME    providers, traits, settings, engine requirements
  check [NAME] import it, in a process of its own, and say what is wrong; without NAME: every plugin

to begin a plugin: g-core new

examples:
  g-core plugins
  g-core plugins list --json --python envs/vllm/bin/python
  g-core plugins show core
  g-core plugins check torch
"""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = ["list", "show", "check"]
    parser.add_argument(
        "action", nargs="?", type=_action, choices=actions, default="list", help="default: list"
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a plugin, or a project's own file (mine.py)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="the interpreter that is meant; default: this one",
    )
    parser.epilog = _EPILOG


def _action(word: str) -> str:
    """Returns the word; ``new`` is a verb by itself, where one may well look for it here."""
    if word == "new":
        raise argparse.ArgumentTypeError("to begin a plugin: g-core new")
    return word


def run(args: argparse.Namespace) -> int:
    if args.action == "list" and not args.name:
        interpreter = _interpreter(args.python)
        path = interpreter.path if interpreter else None
        code = _list(catalog.scan(path).plugins, args.json)
        if not args.json:
            sys.stdout.flush()  # if nobody reads the table, nobody needs the remark
            print(_NOT_IMPORTED, file=sys.stderr)
        return code
    if args.action == "check":
        return _check(args.name, args.python, args.json)
    from gcore_core.contract.errors import ConfigError

    if args.action == "list":
        raise ConfigError(
            f"no such action: {args.name!r}.", todo=f"g-core plugins show {args.name}"
        )
    if not args.name:
        where = f"g-core plugins {args.action}"
        raise ConfigError("the name of a plugin is missing.", where=where, todo=f"{where} NAME")
    return _show(args.name, args.python, args.json)


def _interpreter(python: str | None) -> Interpreter | None:
    """Opens the interpreter that ``--python`` names, if it is given."""
    if python is None:
        return None
    from gcore_core.config.interpreters import open_interpreter

    return open_interpreter(python, where="--python")


def _list(rows: Sequence[catalog.Installed], as_json: bool) -> int:
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return 0
    if not rows:
        print("no plugins")
        return 0
    from gcore_core.cli import print_table

    cells = [
        [
            row.name,
            row.state,
            row.distribution,
            row.version,
            "; ".join(filter(None, (row.reason, *row.notes))),
        ]
        for row in rows
    ]
    print_table(["plugin", "state", "distribution", "version", "remarks"], cells)
    return 0


def _check(name: str | None, python: str | None, as_json: bool) -> int:
    """Checks one plugin, or all without a name; returns 3 when something is wrong, else 0."""
    interpreter = _interpreter(python)
    if name is None:
        path = interpreter.path if interpreter else None
        rows = check_all(catalog.scan(path).plugins, interpreter)
        _list(rows, as_json)
        return 3 if any(row.state in ("broken", "clash", "incompatible") for row in rows) else 0
    report = check_one(name, interpreter)
    if as_json:
        print(json.dumps({"plugin": name, **dataclasses.asdict(report)}, indent=2))
    else:
        for problem in report.problems:
            print(problem)
        for note in report.notes:
            print(f"note: {note}")
        if not report.problems:
            print(f"plugin {name!r}: nothing wrong found")
    return 3 if report.problems else 0


def _show(name: str, python: str | None, as_json: bool) -> int:
    from gcore_core.config.interpreters import open_interpreter
    from gcore_core.config.plugin_description import described, find, text
    from gcore_core.config.plugins import Plugins

    interpreter = open_interpreter(python, where="--python")
    plugin = find(name, where="g-core plugins show")
    plugins = Plugins()
    plugins.load(plugin)
    providers = [described(item, interpreter) for item in plugins.provided_by(plugin.name)]
    if as_json:
        print(json.dumps(dataclasses.asdict(plugin) | {"provides": providers}, indent=2))
        return 0
    print(f"{plugin.name} ({plugin.owner}, {plugin.module})")
    for item in providers:
        print("\n" + "\n".join(text(item)))
    return 0


# -- checking --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Report:
    """Holds what a check of one plugin found.

    problems: what must be put right.
    notes: what could not be checked, and why.
    """

    problems: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def check_one(name: str, interpreter: Interpreter | None = None) -> Report:
    """Checks one plugin in a fresh process of an interpreter; by default of this one."""
    import subprocess

    from gcore_core.config.interpreters import without_paths_of_this

    python = interpreter.python if interpreter else sys.executable
    if python == sys.executable:
        environment = dict(os.environ)
    else:
        environment = without_paths_of_this(os.environ)
    command = [python, "-m", "gcore_core.cli.plugins", name]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Report([f"plugin {name!r} was not imported within {TIMEOUT_S:.0f} s."])
    try:
        return Report(**json.loads(process.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        last = (process.stderr.strip() or "no output").splitlines()[-1]
        problem = (
            f"plugin {name!r} ended the process that imported it "
            f"(exit code {process.returncode}): {last}"
        )
        return Report([problem])


def check_all(
    rows: Sequence[catalog.Installed], interpreter: Interpreter | None = None
) -> list[catalog.Installed]:
    """Checks all plugins; returns the same rows.

    One that fails gets the state "broken" and its first problem as reason.
    """
    from concurrent.futures import ThreadPoolExecutor

    usable = [
        row.name for row in rows if row.state in ("ok", "undeclared") and row.name != catalog.CORE
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(pool.map(lambda name: check_one(name, interpreter), usable))
    reasons = {
        name: report.problems[0].splitlines()[0]
        for name, report in zip(usable, reports, strict=True)
        if report.problems
    }
    return [
        dataclasses.replace(row, state="broken", reason=reasons[row.name])
        if row.name in reasons
        else row
        for row in rows
    ]


def inspect_plugin(name: str) -> Report:
    """Imports the plugin in this process and checks everything that it provides.

    Its provider hooks are called, its config classes are tried and its factories are imported.
    """
    from gcore_core.config.plugin_description import default_traits, find
    from gcore_core.config.plugins import Plugins
    from gcore_core.config.unwritten import optional_methods, unwritten
    from gcore_core.contract.errors import GcoreError
    from gcore_core.contract.traits import Traits

    report = Report()
    plugins = Plugins()
    modules_before = set(sys.modules)
    try:
        plugin = find(name, where="")
        plugins.load(plugin)
    except GcoreError as error:
        return Report([str(error)])
    heavy = sorted({*catalog.HEAVY, "diffusers"} & (set(sys.modules) - modules_before))
    if heavy:
        report.problems.append(
            f"plugin {name!r}: importing {plugin.module} imports {', '.join(heavy)}, which every "
            "job then pays for.\n"
            "  import it in the module that a factory names, or inside a function"
        )
    places = list(unwritten(f"{plugin.module}:"))
    for item in plugins.provided_by(plugin.name):
        _check_provider(item, report)
        traits = default_traits(item.spec.config) or Traits()
        report.problems += [
            f"{item.kind} {item.reference}: {text}." for text in traits.misplaced(item.kind)
        ]
        places += unwritten(item.spec.factory, optional_methods(item.kind, traits))
    report.problems += [
        f"{place} raises NotImplementedError; write what it is to do."
        for place in dict.fromkeys(places)
    ]
    return report


def _check_provider(item: Provided, report: Report) -> None:
    """Adds to the report what is wrong with one provider."""
    from gcore_core.config.interpreters import open_interpreter
    from gcore_core.contract.errors import GcoreError
    from gcore_core.contract.factories import import_attribute
    from gcore_core.contract.providers import VenvProvider
    from gcore_core.contract.traits import near_misses

    what = f"{item.kind} {item.reference}"
    config = item.spec.config
    if config is not None:
        problem = _config_problem(config)
        if problem:
            report.problems.append(f"{what}: its config class {config.__qualname__} {problem}")
        for miss in near_misses(config):
            report.problems.append(f"{what}: its config class {config.__qualname__}: {miss}")
    if isinstance(item.spec, VenvProvider):
        try:
            item.spec.requirements_file(what)
        except GcoreError as error:
            report.problems.append(str(error))
        return
    if not item.spec.factory:  # a role is data, nothing is made of it
        return
    unmet = open_interpreter(None, where="").unmet(item.spec.needs)
    if unmet:
        needs = ", ".join(f"{need} (found {version or 'none'})" for need, version in unmet)
        report.notes.append(f"{what}: {item.spec.factory} was not imported, it needs {needs}")
        return
    try:
        if not callable(import_attribute(item.spec.factory)):
            report.problems.append(f"{what}: its factory {item.spec.factory!r} cannot be called.")
    except GcoreError as error:
        report.problems.append(f"{what}: {error}")


def _config_problem(config: type) -> str:
    """Returns why a job could not be configured with this dataclass; "" when it could."""
    import msgspec.inspect
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from gcore_core.contract.errors import GcoreError
    from gcore_core.contract.factories import reference_to

    try:
        OmegaConf.structured(config)
        reference_to(config)
        msgspec.inspect.type_info(config)
    except (OmegaConfBaseException, TypeError, ValueError, GcoreError) as error:
        return f"cannot be a schema: {str(error).splitlines()[0]}"
    return ""


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # what the plugin prints must not mix with the report
    try:
        report = inspect_plugin(sys.argv[1])
    except Exception as error:  # isolation point: whatever a plugin raises is a finding
        report = Report([f"plugin {sys.argv[1]!r}: {type(error).__name__}: {error}"])
    print(json.dumps(dataclasses.asdict(report)), file=answers, flush=True)


if __name__ == "__main__":
    main()
