"""Checks what another interpreter has installed.

A role may name its own ``python:``. Whether its workers can start there is checked before anything
starts: the interpreter prints where it looks for modules, and the metadata there is read.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from gcore_core import __version__
from gcore_core.config import venvs
from gcore_core.contract.errors import ConfigError, GcoreError, PluginIncompatible
from gcore_core.contract.installing import install_command

_CORE_DISTRIBUTION = "gcore-core"
#: The program that the other interpreter runs to print its search path. With -c, the first entry is
#: empty and stands for the current directory. It has nothing to do with what is installed, and a
#: json.py in it must not be imported, so it is removed before json is.
_QUESTION = """
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import json
print(json.dumps(sys.path))
"""
#: A start takes some 20 ms, but the first one from a network's disk takes far longer.
_ANSWER_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """Describes a Python interpreter, and where it looks for modules.

    python: path of its program.
    path: its ``sys.path``; None for the running interpreter.
    """

    python: str
    path: tuple[str, ...] | None = None

    def version(self, distribution: str) -> str | None:
        """Returns the version that it has of a distribution, or None."""
        candidates = (
            distributions(name=distribution)
            if self.path is None
            else distributions(name=distribution, path=list(self.path))
        )
        return next((item.version for item in candidates), None)

    def unmet(self, needs: Sequence[str]) -> list[tuple[str, str | None]]:
        """Returns the requirements (PEP 508) that this interpreter does not meet.

        Each comes with the version that is installed, or None. Markers are evaluated for the
        running interpreter, not for this one.
        """
        from packaging.requirements import Requirement

        unmet_needs = []
        for need in needs:
            requirement = Requirement(need)
            if requirement.marker is not None and not requirement.marker.evaluate():
                continue
            version = self.version(requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                unmet_needs.append((need, version))
        return unmet_needs


def open_interpreter(python: str | None, *, where: str) -> Interpreter:
    """Returns the interpreter at a path or of ``venv:NAME``; the running one when none is given.

    Another interpreter is started for a moment. Raises ConfigError, with the config key ``where``,
    when it does not exist or cannot be started.
    """
    if not python:
        return Interpreter(python=sys.executable)
    python = venvs.resolve(python, where=where)
    program = Path(python)
    venvs.require_made(program, where=where)
    if not program.exists():
        root = shlex.quote(str(program.parent.parent))
        install = install_command(f"gcore-core=={__version__}", python=python)
        raise ConfigError(
            f"there is no interpreter {python}.",
            where=where,
            todo=f"make it: python3 -m venv {root} && {install}",
            python=python,
        )
    if not program.is_file() or not os.access(program, os.X_OK):
        raise ConfigError(
            f"{python} is not an executable file.",
            where=where,
            todo="name the interpreter itself: .../bin/python",
        )
    return Interpreter(python=python, path=_search_path(python, where=where))


def without_paths_of_this(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables for another interpreter.

    It must not find this interpreter's modules, so those variables that lead to them are left out.
    """
    return {k: v for k, v in environment.items() if k not in ("PYTHONPATH", "PYTHONHOME")}


def _search_path(python: str, *, where: str) -> tuple[str, ...]:
    """Returns ``sys.path`` of another interpreter, as a worker there would see it."""
    try:
        completed = subprocess.run(
            [python, "-c", _QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=without_paths_of_this(os.environ),
            timeout=_ANSWER_WITHIN_S,
        )
    except OSError as error:
        raise _cannot_start(python, error.strerror or str(error), where) from error
    except subprocess.TimeoutExpired as error:
        reason = f"no answer within {_ANSWER_WITHIN_S:.0f} s"
        raise _cannot_start(python, reason, where) from error
    if completed.returncode != 0:
        reason = (completed.stderr.strip() or f"exit code {completed.returncode}").splitlines()[-1]
        raise _cannot_start(python, reason, where)
    try:
        # What runs when any interpreter starts may print too, so the answer is the last line.
        return tuple(str(folder) for folder in json.loads(completed.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError) as error:
        raise _cannot_start(python, "it does not answer as Python would", where) from error


def _cannot_start(python: str, reason: str, where: str) -> ConfigError:
    return ConfigError(
        f"{python} cannot be started: {reason.rstrip('.')}.",
        where=where,
        todo=f"check it by hand: {shlex.quote(python)} -m gcore_core --version",
        python=python,
    )


def differences(
    interpreter: Interpreter, plugins: Mapping[str, str], *, where: str
) -> Iterator[GcoreError]:
    """Yields an error for each distribution that another interpreter lacks or has otherwise.

    gcore-core comes first, then the plugins. When gcore-core is missing there, that is the only
    error. The running interpreter never differs from itself.

    plugins: distribution -> version in the running interpreter.
    """
    if interpreter.path is None:
        return
    versions = {_CORE_DISTRIBUTION: __version__, **plugins}
    if interpreter.version(_CORE_DISTRIBUTION) is None:  # not made for this: everything is missing
        yield PluginIncompatible(
            f"{interpreter.python} has no {_CORE_DISTRIBUTION}.",
            where=where,
            todo=_remedy(interpreter, [f"{name}=={versions[name]}" for name in versions]),
            python=interpreter.python,
            distribution=_CORE_DISTRIBUTION,
        )
        return
    lacking = [name for name in versions if interpreter.version(name) is None]
    for distribution, version in versions.items():
        have = interpreter.version(distribution)
        if have == version:
            continue
        difference = (
            f"no {distribution}"
            if have is None
            else f"{distribution} {have}, but this process has {version}"
        )
        yield PluginIncompatible(
            f"{interpreter.python} has {difference}.",
            where=where,
            why=f"this process: {sys.executable}" if have is not None else "",
            todo=_remedy(interpreter, [f"{distribution}=={version}"], lacking),
            python=interpreter.python,
            distribution=distribution,
        )


def unmet_needs(
    interpreter: Interpreter, owner: str, needs: Sequence[str], *, where: str
) -> Iterator[GcoreError]:
    """Yields an error for each requirement of a provider that the interpreter does not meet.

    owner: distribution and version, such as "gcore-vllm 1.3.0".
    """
    for need, have in interpreter.unmet(needs):
        yield PluginIncompatible(
            f"{owner} needs {need} in {interpreter.python}, found {have or 'none'}.",
            where=where,
            todo=f"install it there: {_install(need, interpreter.python)}",
            python=interpreter.python,
            need=need,
        )


def _install(need: str, python: str) -> str:
    """Returns the command that installs a requirement into an interpreter."""
    if need.startswith("gcore-"):
        return install_command(need, python=python)
    return shlex.join([python, "-m", "pip", "install", need])


def _remedy(interpreter: Interpreter, requirements: list[str], lacking: Sequence[str] = ()) -> str:
    """Returns the command that installs the requirements, or makes a recorded venv again.

    lacking: every distribution that the job needs there and the interpreter does not have.
    """
    if venvs.record(venv := Path(interpreter.python).parent.parent):
        return f"make it anew: {venvs.command(venv, lacking)}"
    return install_command(*requirements, python=interpreter.python)
