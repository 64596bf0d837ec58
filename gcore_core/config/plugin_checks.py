"""Whether a plugin works: it is imported in a process of its own, so that a broken one hurts
nobody.

``python -m gcore_core.config.plugin_checks NAME`` is that process; its last line of output is what
it found, as JSON.
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
class Found:
    """problems: what must be put right. notes: what could not be looked at, and why."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_one(name: str, interpreter: Interpreter | None = None) -> Found:
    """Looks at one plugin in a fresh process of an interpreter; by default of this one."""
    python = interpreter.python if interpreter else sys.executable
    foreign = python != sys.executable
    environment = without_paths_of_this(os.environ) if foreign else dict(os.environ)
    command = [python, "-m", "gcore_core.config.plugin_checks", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Found([f"plugin {name!r} was not imported within {TIMEOUT_S:.0f} s."])
    try:
        return Found(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        return Found(
            [
                (
                    f"plugin {name!r} ended the process that imported it (exit code "
                    f"{done.returncode}): {last}"
                )
            ]
        )


def check_all(rows: Sequence[Installed], interpreter: Interpreter | None = None) -> list[Installed]:
    """The rows, those that fail with the state "broken" and the first reason."""
    usable = [row.name for row in rows if row.state in ("ok", "undeclared") and row.name != CORE]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(
            zip(usable, pool.map(lambda name: check_one(name, interpreter), usable), strict=True)
        )
    wrong = {
        name: item.problems[0].splitlines()[0] for name, item in found.items() if item.problems
    }
    return [
        replace(row, state="broken", reason=wrong[row.name]) if row.name in wrong else row
        for row in rows
    ]


def inspect_plugin(name: str) -> Found:
    """Imports the plugin here, calls its provider hooks, tries its config classes and imports its
    factories.
    """
    from gcore_core.config.plugin_description import find
    from gcore_core.config.plugins import Plugins

    found, plugins = Found(), Plugins()
    before = set(sys.modules)
    try:
        plugin = find(name, where="")
        plugins.load(plugin)
    except GcoreError as error:
        return Found([str(error)])
    heavy = sorted(set(HEAVY) & (set(sys.modules) - before))
    if heavy:
        found.problems.append(
            f"plugin {name!r}: importing {plugin.module} imports {', '.join(heavy)}, which every "
            "job then pays for.\n"
            "  import it in the module that a factory names, or inside a function"
        )
    for item in plugins.provided_by(plugin.name):
        _look_at(item, found)
    return found


def _look_at(item: Provided, found: Found) -> None:
    from gcore_core.contract.abilities import near_misses
    from gcore_core.contract.factories import import_attribute
    from gcore_core.contract.providers import VenvProvider

    what = f"{item.kind} {item.reference}"
    if item.spec.config is not None and (problem := _config_problem(item.spec.config)):
        found.problems.append(f"{what}: its config class {item.spec.config.__qualname__} {problem}")
    if item.spec.config is not None:
        name = item.spec.config.__qualname__
        misses = near_misses(item.kind, item.spec.config)
        found.problems += [f"{what}: its config class {name}: {miss}" for miss in misses]
    if isinstance(item.spec, VenvProvider):
        try:
            item.spec.requirements_file(what)
        except GcoreError as error:
            found.problems.append(str(error))
        return
    if not item.spec.factory:  # a role is data, nothing is made of it
        return
    unmet = open_interpreter(None, where="").unmet(item.spec.needs)
    if unmet:
        needs = ", ".join(f"{need} (found {have or 'none'})" for need, have in unmet)
        found.notes.append(f"{what}: {item.spec.factory} was not imported, it needs {needs}")
        return
    try:
        if not callable(import_attribute(item.spec.factory)):
            found.problems.append(f"{what}: its factory {item.spec.factory!r} cannot be called.")
    except GcoreError as error:
        found.problems.append(f"{what}: {error}")


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
    told, sys.stdout = sys.stdout, sys.stderr  # what the plugin prints is no answer
    try:
        found = inspect_plugin(sys.argv[1])
    except Exception as error:  # isolation point: whatever a plugin does is what we were asked for
        found = Found([f"plugin {sys.argv[1]!r}: {type(error).__name__}: {error}"])
    print(json.dumps(asdict(found)), file=told, flush=True)


if __name__ == "__main__":
    main()
