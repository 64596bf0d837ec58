"""Checks whether a plugin works, in a process of its own, so that a broken one hurts nobody.

``python -m gcore_core.config.plugin_checks NAME`` is that process; its last line of output is its
``Report`` as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from gcore_core.config.catalog import CORE, Installed
from gcore_core.config.interpreters import (
    Interpreter,
    open_interpreter,
    without_paths_of_this,
)
from gcore_core.contract.errors import GcoreError

if TYPE_CHECKING:
    from gcore_core.config.plugins import Provided

TIMEOUT_S = 120.0
#: What a plugin's root must not import: describing itself has to stay cheap.
HEAVY = (
    "torch",
    "transformers",
    "vllm",
    "sglang",
    "deepspeed",
    "megatron",
    "ray",
    "tensorflow",
    "jax",
    "diffusers",
)


@dataclass
class Report:
    """What a check of one plugin found.

    problems: what must be put right.
    notes: what could not be checked, and why.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_one(name: str, interpreter: Interpreter | None = None) -> Report:
    """Checks one plugin in a fresh process of an interpreter; by default of this one."""
    python = interpreter.python if interpreter else sys.executable
    if python == sys.executable:
        environment = dict(os.environ)
    else:
        environment = without_paths_of_this(os.environ)
    command = [python, "-m", "gcore_core.config.plugin_checks", name]
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


def check_all(rows: Sequence[Installed], interpreter: Interpreter | None = None) -> list[Installed]:
    """The same rows; one that fails gets the state "broken" and its first problem as reason."""
    usable = [row.name for row in rows if row.state in ("ok", "undeclared") and row.name != CORE]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(pool.map(lambda name: check_one(name, interpreter), usable))
    reasons = {
        name: report.problems[0].splitlines()[0]
        for name, report in zip(usable, reports, strict=True)
        if report.problems
    }
    return [
        replace(row, state="broken", reason=reasons[row.name]) if row.name in reasons else row
        for row in rows
    ]


def inspect_plugin(name: str) -> Report:
    """Imports the plugin in this process and checks everything that it provides.

    Its provider hooks are called, its config classes are tried and its factories are imported.
    """
    from gcore_core.config.plugin_description import find
    from gcore_core.config.plugins import Plugins

    report = Report()
    plugins = Plugins()
    modules_before = set(sys.modules)
    try:
        plugin = find(name, where="")
        plugins.load(plugin)
    except GcoreError as error:
        return Report([str(error)])
    heavy = sorted(set(HEAVY) & (set(sys.modules) - modules_before))
    if heavy:
        report.problems.append(
            f"plugin {name!r}: importing {plugin.module} imports {', '.join(heavy)}, which every "
            "job then pays for.\n"
            "  import it in the module that a factory names, or inside a function"
        )
    for item in plugins.provided_by(plugin.name):
        _check_provider(item, report)
    return report


def _check_provider(item: Provided, report: Report) -> None:
    """Adds to the report what is wrong with one provider."""
    from gcore_core.contract.abilities import near_misses
    from gcore_core.contract.factories import import_attribute
    from gcore_core.contract.providers import VenvProvider

    what = f"{item.kind} {item.reference}"
    config = item.spec.config
    if config is not None:
        problem = _config_problem(config)
        if problem:
            report.problems.append(f"{what}: its config class {config.__qualname__} {problem}")
        for miss in near_misses(item.kind, config):
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
    """Why a job could not be configured with this dataclass; empty when it could."""
    import msgspec.inspect
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

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
    print(json.dumps(asdict(report)), file=answers, flush=True)


if __name__ == "__main__":
    main()
