"""What another interpreter has installed, read from its files alone: that interpreter is never
started.

A role may name its own ``python:``. Whether its workers can start there is said before anything
starts.
"""

from __future__ import annotations

import os
import re
import shlex
import site
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from gcore_core import __version__
from gcore_core.config import venvs
from gcore_core.contract.errors import ConfigError, GcoreError, PluginIncompatible

_CORE_DISTRIBUTION = "gcore-core"


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """The distributions that one interpreter finds. ``path`` is None for the running one."""

    python: str
    path: tuple[str, ...] | None = None

    def version(self, distribution: str) -> str | None:
        """The version it has of a distribution, or None."""
        found = (
            distributions(name=distribution)
            if self.path is None
            else distributions(name=distribution, path=list(self.path))
        )
        return next((item.version for item in found), None)

    def unmet(self, needs: Sequence[str]) -> list[tuple[str, str | None]]:
        """(requirement, version found or None) of every requirement (PEP 508) that does not hold
        there.
        """
        from packaging.requirements import Requirement

        found = []
        for need in needs:
            requirement = Requirement(need)
            if requirement.marker is not None and not requirement.marker.evaluate():
                continue
            version = self.version(requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                found.append((need, version))
        return found


def open_interpreter(python: str | None, *, where: str) -> Interpreter:
    """The environment of an interpreter given by its path or as ``venv:NAME``, or the running one.

    Raises ConfigError, with the config key ``where``, when there is no such interpreter.
    """
    if not python:
        return Interpreter(python=sys.executable)
    python = venvs.resolve(python, where=where)
    program, shown = Path(python), shlex.quote(python)
    venvs.require_made(program, where=where)
    root = shlex.quote(str(program.parent.parent))
    todo = f"make it: python3 -m venv {root} && {shown} -m pip install gcore-core=={__version__}"
    if not program.exists():
        raise ConfigError(
            f"there is no interpreter {python}.", where=where, todo=todo, python=python
        )
    if not program.is_file() or not os.access(program, os.X_OK):
        raise ConfigError(
            f"{python} is not an executable file.",
            where=where,
            todo="name the interpreter itself: .../bin/python",
        )
    found: dict[str, str] = {}
    for folder in _search_path(program):
        found.setdefault(os.path.realpath(folder), folder)  # lib64 is often a link to lib
    path = tuple(found.values())
    if not path:
        raise ConfigError(
            f"{python} has no site-packages.",
            where=where,
            why="looked beside it for pyvenv.cfg, and for ../lib/python3.*/site-packages",
            todo=todo,
        )
    return Interpreter(python=python, path=path)


def differences(
    interpreter: Interpreter, plugins: Mapping[str, str], *, where: str
) -> Iterator[GcoreError]:
    """What another environment has in another version than this one, or not at all: gcore-core,
    then the plugins.

    plugins: distribution -> version here.
    """
    if interpreter.path is None:
        return
    wanted = {_CORE_DISTRIBUTION: __version__, **plugins}
    if interpreter.version(_CORE_DISTRIBUTION) is None:  # not made for this: everything is missing
        yield PluginIncompatible(
            f"{interpreter.python} has no {_CORE_DISTRIBUTION}.",
            where=where,
            todo=_remedy(interpreter, [f"{name}=={wanted[name]}" for name in wanted]),
            python=interpreter.python,
            distribution=_CORE_DISTRIBUTION,
        )
        return
    for distribution, version in wanted.items():
        have = interpreter.version(distribution)
        if have == version:
            continue
        found = (
            f"no {distribution}"
            if have is None
            else f"{distribution} {have}, but this is {version}"
        )
        yield PluginIncompatible(
            f"{interpreter.python} has {found}.",
            where=where,
            why=f"this: {sys.executable}" if have is not None else "",
            todo=_remedy(interpreter, [f"{distribution}=={version}"]),
            python=interpreter.python,
            distribution=distribution,
        )


def unmet_needs(
    interpreter: Interpreter, owner: str, needs: Sequence[str], *, where: str
) -> Iterator[GcoreError]:
    """What a provider's engine requires and the environment does not have; ``owner`` is "gcore-vllm
    1.3.0".
    """
    for need, have in interpreter.unmet(needs):
        yield PluginIncompatible(
            f"{owner} needs {need} in {interpreter.python}, found {have or 'none'}.",
            where=where,
            todo=(
                f"install it there: {shlex.quote(interpreter.python)} -m pip install "
                f"{shlex.quote(need)}"
            ),
            python=interpreter.python,
            need=need,
        )


def _remedy(interpreter: Interpreter, requirements: list[str]) -> str:
    if venvs.record(own := Path(interpreter.python).parent.parent):
        return f"make it anew: {venvs.command(own)}"
    return shlex.join([interpreter.python, "-m", "pip", "install", *requirements])


def _search_path(program: Path) -> Iterator[str]:
    """Directories in the interpreter's order: its own site-packages, what its .pth files add, the
    base's.
    """
    for root in (program.parent.parent, program.parent):
        if settings := _settings(root / "pyvenv.cfg"):
            version = settings.get("version") or settings.get("version_info", "")
            yield from _with_pth_files(_site_packages(root, version))
            if (
                settings.get("include-system-site-packages", "").lower() == "true"
                and "home" in settings
            ):
                yield from _search_path(Path(settings["home"]) / program.name)
            return
    real = program.resolve()
    named = re.search(r"3\.\d+", real.name)
    yield from _with_pth_files(_site_packages(real.parent.parent, named[0] if named else ""))
    if site.ENABLE_USER_SITE and named:
        yield from _with_pth_files(_site_packages(Path(site.getuserbase()), named[0]))


def _settings(file: Path) -> dict[str, str]:
    """The keys of a pyvenv.cfg; empty when there is none."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines)
    return {key.strip().lower(): value.strip() for key, equals, value in pairs if equals}


def _site_packages(root: Path, version: str) -> Iterator[Path]:
    """Existing package directories below a prefix; ``version`` ("3.11.7", or empty) picks among
    several.
    """
    found = re.match(r"3\.\d+", version)
    python = f"python{found[0]}" if found else "python3.*"
    folders = (f"lib/{python}/site-packages", f"lib64/{python}/site-packages")
    of_debian = (f"local/lib/{python}/dist-packages", "lib/python3/dist-packages")
    for pattern in (*folders, *of_debian):
        yield from sorted(root.glob(pattern))


def _with_pth_files(folders: Iterable[Path]) -> Iterator[str]:
    """Each folder, then the directories that its .pth files name. An editable install with a finder
    needs no line: its metadata lies in the folder itself.
    """
    for folder in folders:
        yield str(folder)
        for file in sorted(folder.glob("*.pth")):
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.strip() and not line.startswith(("#", "import ", "import\t")):
                    added = folder / line.strip()
                    if added.is_dir():
                        yield str(added)
