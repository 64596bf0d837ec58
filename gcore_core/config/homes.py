"""Says which distribution brings a plugin, and which distributions others have taken in."""

from __future__ import annotations

import shlex
import sys

from gcore_core.contract.installing import find_installed
from gcore_core.contract.missing_modules import MOVED

#: Name of a plugin of this project -> what to install for it, where that is not ``gcore-<name>``.
HOMES = {
    "balance": "gcore-placement",
    "checkpoint": "gcore-tools",
    "completion": "gcore-tools[completion]",
    "conformance": "gcore-testing",
    "critic": "gcore-algorithms",
    "demo": "gcore-tools",
    "diff": "gcore-report",
    "doctor": "gcore-tools",
    "eval": "gcore-report[eval]",
    "export": "gcore-tools",
    "genrm": "gcore-rewards",
    "hash": "gcore-tools",
    "human": "gcore-rewards[human]",
    "jobs": "gcore-tools[jobs]",
    "logs": "gcore-report",
    "new": "gcore-testing",
    "offline": "gcore-algorithms",
    "plan": "gcore-tools",
    "plugins": "gcore-testing",
    "ray": "gcore-nodes",
    "recipes": "gcore-tools",
    "shrink": "gcore-tools",
    "sim": "gcore-placement[sim]",
    "simulate": "gcore-placement",
    "teacher": "gcore-algorithms",
    "trace": "gcore-report",
    "trackers": "gcore-report",
    "venv": "gcore-tools",
    "watch": "gcore-report",
}
#: What follows ``gcore-`` in distributions that bring no plugin of their own name.
NO_PLUGINS = ("language", "testing", "tools")
#: Distributions of 0.2 that 0.3 no longer has. One that is still installed provides a plugin twice.
GONE = tuple(old.replace("_", "-") for old in MOVED if "." not in old)


def home_of(plugin: str) -> str:
    """Returns what to install for a plugin: a distribution, with its extras."""
    return HOMES.get(plugin, f"gcore-{plugin}")


def leftovers() -> list[str]:
    """Returns the distributions of 0.2 that are still installed and that 0.3 no longer has."""
    return [name for name in GONE if find_installed(name) is not None]


def uninstall_command(names: list[str]) -> str:
    """Returns the command that removes distributions from this interpreter."""
    return shlex.join([sys.executable, "-m", "pip", "uninstall", "-y", *names])
