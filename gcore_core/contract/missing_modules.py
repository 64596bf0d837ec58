"""Says what to do where code does not import: what 0.3 has moved, and what is not installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import TracebackType

from gcore_core.contract.installing import find_installed, install_command

#: Module of 0.2 -> the module of 0.3 that has what it had; "": nothing has.
MOVED = {
    "gcore_balance": "gcore_placement.balance",
    "gcore_context": "gcore_language.context",
    "gcore_core.contract.floats": "gcore_language.floats",
    "gcore_core.contract.json_values": "gcore_language.json_values",
    "gcore_core.kits.answers": "gcore_rewards.answers",
    "gcore_core.kits.loopback": "gcore_report.loopback",
    "gcore_core.kits.machines": "gcore_nodes.machines",
    "gcore_core.kits.number_words": "gcore_rewards.number_words",
    "gcore_core.kits.numbers": "gcore_rewards.numbers",
    "gcore_core.kits.rows": "gcore_language.rows",
    "gcore_core.testing": "gcore_testing",
    "gcore_critic": "gcore_algorithms.critic",
    "gcore_eval": "gcore_report.eval",
    "gcore_genrm": "gcore_rewards.genrm",
    "gcore_human": "gcore_rewards.human",
    "gcore_jobs": "gcore_tools.jobs",
    "gcore_museum": "",
    "gcore_offline": "gcore_algorithms.offline",
    "gcore_queueing": "gcore_placement.queueing",
    "gcore_ray": "gcore_nodes.ray",
    "gcore_core.contract.sampling": "",
    "gcore_refine": "",
    "gcore_shrink": "gcore_tools.shrink",
    "gcore_sim": "gcore_placement.sim",
    "gcore_teacher": "gcore_algorithms.teacher",
    "gcore_trackers": "gcore_report.trackers",
    "gcore_tree": "",
    "gcore_venv": "gcore_tools.venv",
}
_PAGE = "docs/how-to/move-to-0.3.md"
_CORE = "gcore_core"
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']*)["']""")


def import_advice(error: BaseException) -> str:
    """Returns what to do about an error of an import; "": nothing is known."""
    if not isinstance(error, ImportError) or not error.name:
        return ""
    for old, new in MOVED.items():
        if f"{error.name}.".startswith(f"{old}."):
            return _moved(old, new)
    if error.name.partition(".")[0] == _CORE:
        return f"what was written for 0.2 is to be rewritten: {_PAGE}"
    if isinstance(error, ModuleNotFoundError):
        top = error.name.partition(".")[0]
        return next(filter(None, (_lacking(d, top) for d in _importers(error))), "")
    return ""


def _moved(old: str, new: str) -> str:
    if not new:
        return f"{old} is gone: {_PAGE}"
    distribution = _distribution(new)
    here = find_installed(distribution) is not None
    command = "" if here else f"{install_command(distribution)}; "
    return f"{old} is {new} now: {command}{_PAGE}"


def _importers(error: BaseException) -> Iterator[str]:
    """Yields the distributions whose code was importing, the innermost first.

    A package and its distribution have one name, as in this project and its scaffolds.
    """
    modules = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        modules.append(str(trace.tb_frame.f_globals.get("__name__", "")))
        trace = trace.tb_next
    yield from dict.fromkeys(map(_distribution, reversed(modules)))


def _distribution(module: str) -> str:
    """Returns ``gcore-report`` of ``gcore_report.loopback``."""
    return module.partition(".")[0].replace("_", "-")


def _lacking(distribution: str, module: str) -> str:
    """Returns what a distribution requires and is not installed; "": nothing is known.

    module: the one that was missing. An extra counts where it brings a distribution of that name.
    """
    installed = find_installed(distribution)
    requires = (installed.requires if installed else None) or []
    missing = [line for line in requires if not find_installed(_name(line))]
    hard = [line for line in missing if ";" not in line]
    if hard:
        return f"{distribution} lacks {', '.join(map(_name, hard))}: {install_command(*hard)}"
    for line in missing:
        extra = _EXTRA.search(line)
        if extra and _name(line).replace("-", "_") == module:
            command = install_command(f"{distribution}[{extra[1]}]")
            return f"it comes with {distribution}[{extra[1]}]: {command}"
    return ""


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
