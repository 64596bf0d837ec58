"""``g-core plugins check``: imports a plugin and says what is wrong with it.

That is done in a process of its own, so that a broken plugin hurts nobody. This module, called with
the plugin's name, is that process; its last line of output is its ``Report`` as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec.inspect
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gcore_core.config import catalog
from gcore_core.config.interpreters import Interpreter, open_interpreter, without_paths_of_this
from gcore_core.config.plugins import Plugins, Provided
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.factories import import_attribute, reference_to
from gcore_core.contract.providers import VenvProvider
from gcore_core.contract.traits import Traits, near_misses
from gcore_core.kits.commands import print_plugins
from gcore_testing.plugin_commands import CHECK, action_parser
from gcore_testing.plugin_commands.descriptions import default_traits, find
from gcore_testing.plugin_commands.unwritten import optional_methods, unwritten

TIMEOUT_S = 120.0


def run(words: Sequence[str]) -> int:
    """Checks one plugin, or all without a name; returns 3 when something is wrong, else 0."""
    parser = action_parser("check", CHECK)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a plugin, or a file; default: all")
    args = parser.parse_args(words)
    name = args.name
    interpreter = open_interpreter(args.python, where="--python") if args.python else None
    if name is None:
        path = interpreter.path if interpreter else None
        rows = check_all(catalog.scan(path).plugins, interpreter)
        print_plugins(rows, as_json=args.json)
        return 3 if any(row.state in ("broken", "clash", "incompatible") for row in rows) else 0
    report = check_one(name, interpreter)
    if args.json:
        print(json.dumps({"plugin": name, **dataclasses.asdict(report)}, indent=2))
    else:
        for problem in report.problems:
            print(problem)
        for note in report.notes:
            print(f"note: {note}")
        if not report.problems:
            print(f"plugin {name!r}: nothing wrong found")
    return 3 if report.problems else 0


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
    python = interpreter.python if interpreter else sys.executable
    command = [python, "-m", __name__, name]
    with tempfile.TemporaryDirectory(prefix="g-core-check-") as folder:
        if python == sys.executable:
            environment = dict(os.environ)
        else:
            # An engine's interpreter lacks this package, and must find nothing else of this one's.
            package = sys.modules[__name__.partition(".")[0]]
            Path(folder, package.__name__).symlink_to(package.__path__[0])
            environment = {**without_paths_of_this(os.environ), "PYTHONPATH": folder}
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
