"""Tells a plugin's commands and its check hook what a job and this machine have.

A name is loaded when it is first used, since a check needs few of them and must be quick.

catalog: the module that lists installed plugins without importing them.
Plugins: imports plugins and holds what their hooks gave.
load_plan: reads a job's YAML and overrides, and resolves and checks them.
read_plan: the same, without asking whether what is chosen goes together and can run here.
run_file: runs a job, as ``g-core run`` does.
Plan: what ``load_plan`` returns, for annotations.
trained_roles: the roles of a plan that are trained, the policy last.
open_interpreter, Interpreter: what another interpreter has installed.
without_paths_of_this: environment variables for another interpreter.
venvs: the module that knows where venvs of engines lie.
find_devices: the devices of this machine.
SHARED_MEMORY: the directory of shared memory.
VERBS, verb_parser: the verbs of ``g-core`` itself, and the parser of one.
command_parser: begins the parser of a command, ``g-core <command>``, with its summary.
home_of: what to install for a plugin.
leftovers, uninstall_command: distributions of 0.2 that are still here, and what removes them.
package_folders: finds the folders of one name that plugins bring in their packages.
print_table: prints rows under headings.
print_plugins: prints plugins with their states.
say_phase: prints what a command does now, besides what it is asked to print.
write_file: writes the file that an option names.
flat: dotted key -> value of a tree.
pinned: a path with the run itself for a link ``latest``.
NAME: the names that a reward may have.
read_source: reads a job's YAML and overrides, and resolves and checks nothing.
yaml12: the module that reads and writes YAML by the rules that jobs have.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore_core.cli import VERBS as VERBS
    from gcore_core.cli import command_parser as command_parser
    from gcore_core.cli import print_table as print_table
    from gcore_core.cli import say_phase as say_phase
    from gcore_core.cli import verb_parser as verb_parser
    from gcore_core.cli import write_file as write_file
    from gcore_core.cli.plugins import print_plugins as print_plugins
    from gcore_core.config import catalog as catalog
    from gcore_core.config import venvs as venvs
    from gcore_core.config import yaml12 as yaml12
    from gcore_core.config.catalog import package_folders as package_folders
    from gcore_core.config.homes import home_of as home_of
    from gcore_core.config.homes import leftovers as leftovers
    from gcore_core.config.homes import uninstall_command as uninstall_command
    from gcore_core.config.interpreters import Interpreter as Interpreter
    from gcore_core.config.interpreters import open_interpreter as open_interpreter
    from gcore_core.config.interpreters import without_paths_of_this as without_paths_of_this
    from gcore_core.config.plan import Plan as Plan
    from gcore_core.config.plan import load_plan as load_plan
    from gcore_core.config.plan import read_plan as read_plan
    from gcore_core.config.plan import trained_roles as trained_roles
    from gcore_core.config.plugins import Plugins as Plugins
    from gcore_core.config.schema import NAME as NAME
    from gcore_core.config.yaml_source import flat as flat
    from gcore_core.config.yaml_source import pinned as pinned
    from gcore_core.config.yaml_source import read_source as read_source
    from gcore_core.node.devices import find_devices as find_devices
    from gcore_core.run.start import run_file as run_file
    from gcore_core.runtime.files import SHARED_MEMORY as SHARED_MEMORY

#: name -> the module that has it
_HOMES = {
    "Interpreter": "gcore_core.config.interpreters",
    "NAME": "gcore_core.config.schema",
    "Plan": "gcore_core.config.plan",
    "Plugins": "gcore_core.config.plugins",
    "SHARED_MEMORY": "gcore_core.runtime.files",
    "VERBS": "gcore_core.cli",
    "command_parser": "gcore_core.cli",
    "find_devices": "gcore_core.node.devices",
    "flat": "gcore_core.config.yaml_source",
    "home_of": "gcore_core.config.homes",
    "leftovers": "gcore_core.config.homes",
    "load_plan": "gcore_core.config.plan",
    "open_interpreter": "gcore_core.config.interpreters",
    "package_folders": "gcore_core.config.catalog",
    "pinned": "gcore_core.config.yaml_source",
    "print_plugins": "gcore_core.cli.plugins",
    "print_table": "gcore_core.cli",
    "read_plan": "gcore_core.config.plan",
    "read_source": "gcore_core.config.yaml_source",
    "run_file": "gcore_core.run.start",
    "say_phase": "gcore_core.cli",
    "trained_roles": "gcore_core.config.plan",
    "uninstall_command": "gcore_core.config.homes",
    "verb_parser": "gcore_core.cli",
    "without_paths_of_this": "gcore_core.config.interpreters",
    "write_file": "gcore_core.cli",
}
_MODULES = {name: f"gcore_core.config.{name}" for name in ("catalog", "venvs", "yaml12")}

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
