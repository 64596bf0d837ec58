"""Wheels of all distributions, built beside the checkout, and venvs with what these declare."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    PathDistribution,
    distribution,
)
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
#: a folder `build` of the checkout would bring files that are gone, so it is not copied
LEFT_OUT = shutil.ignore_patterns("__pycache__")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def projects() -> list[Path]:
    """The core and every plugin."""
    return [
        REPOSITORY,
        *(file.parent for file in sorted(REPOSITORY.glob("plugins/*/pyproject.toml"))),
    ]


def build_wheels(work: Path) -> Path:
    """Builds the wheel of each project; returns the folder that they lie in.

    They are built from copies, since building in the checkout would leave files there, and by the
    build backend, as pip calls it.
    """
    folder = work / "wheels"
    folder.mkdir()
    for project in projects():
        source = work / "sources" / project.name
        source.mkdir(parents=True)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            if (project / name).exists():
                shutil.copy(project / name, source)
        for package in project.glob("gcore*/__init__.py"):
            shutil.copytree(package.parent, source / package.parent.name, ignore=LEFT_OUT)
        build_wheel(source, folder)
    return folder


def build_wheel(source: Path, folder: Path) -> Path:
    """Builds the wheel of a project into a folder, as pip does; returns the wheel."""
    folder.mkdir(exist_ok=True)
    before = set(folder.iterdir())
    subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=source,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (built,) = set(folder.iterdir()) - before
    return built


def make_venv(root: Path, wheels: Path, requirements: Iterable[str]) -> Path:
    """A new venv with what ``pip install REQUIREMENTS`` brings; returns its folder of programs.

    What is ours pip installs from the folder of wheels. Of all else there is what the requirements
    and our wheels declare, and what that declares in turn: linked, as it is installed here, so that
    a venv with torch takes two seconds and no network. pip fails where anything lacks.
    """
    wanted = [Requirement(text) for text in requirements]
    venv.create(root, symlinks=True)
    (site,) = root.glob("lib/python3*/site-packages")
    for needed in third_party(wanted, wheels):
        link(needed, site)
    pip = [sys.executable, "-m", "pip", "--isolated", "-q", "--python", str(root), "install"]
    ours = ["--no-index", "--find-links", str(wheels), *map(str, wanted)]
    subprocess.run([*pip, *ours], check=True)
    return root / "bin"


def make_editable(programs: Path, project: Path) -> None:
    """Installs a project, as ``pip install -e`` does, into a venv that has what it needs."""
    _pip(programs, "install", "--no-deps", "--no-build-isolation", "-e", str(project))


def install_wheel(programs: Path, wheel: Path) -> None:
    """Installs a wheel into a venv that has what it needs; pip fails where anything lacks."""
    _pip(programs, "install", str(wheel))


def _pip(programs: Path, command: str, *words: str) -> None:
    pip = [sys.executable, "-m", "pip", "--isolated", "-q", "--python", str(programs / "python")]
    subprocess.run([*pip, command, "--no-index", *words], check=True)


def third_party(requirements: Iterable[Requirement], wheels: Path) -> Iterator[Distribution]:
    """What requirements need that is not ours, in turn; each as it is installed here."""
    seen: set[tuple[str, str]] = set()
    waiting = [(one, "") for one in requirements]
    while waiting:
        requirement, asked_by = waiting.pop()
        name = canonicalize_name(requirement.name)
        is_new = (name, "") not in seen
        extras = [extra for extra in ("", *requirement.extras) if (name, extra) not in seen]
        seen.update((name, extra) for extra in extras)
        if name.startswith("gcore-"):
            facts = metadata_of(wheel_of(name, wheels))
        else:
            facts = installed(name, asked_by)
            if is_new:
                yield facts
        for line in facts.requires or ():
            needed = Requirement(line)
            marker = needed.marker
            if any(marker is None or marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append((needed, name))


def wheel_of(name: str, wheels: Path) -> Path:
    """The wheel of a distribution, or of its package."""
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
    return wheel


def metadata_of(wheel: Path) -> Distribution:
    roots = {path.partition("/")[0] for path in zipfile.ZipFile(wheel).namelist()}
    (folder,) = (root for root in roots if root.endswith(".dist-info"))
    return PathDistribution(zipfile.Path(wheel, f"{folder}/"))


def installed(name: str, asked_by: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError as error:
        raise AssertionError(f"{asked_by or 'a test'} needs {name}: not installed here") from error


def link(needed: Distribution, site: Path) -> None:
    """Links every file of a distribution, one by one: several share some folders."""
    for file in needed.files or ():
        if file.parts[0] != "..":  # a program
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).symlink_to(needed.locate_file(file))


def run_outside(program: Path, *words: str, directory: Path, code: int = 0) -> str:
    """Runs a program of such a venv where nothing of the checkout is in reach; its output.

    Fails with the output when the exit code is another.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTEST", "G_CORE", "VIRTUAL_ENV", "TOX"))
    }
    done = subprocess.run(
        [str(program), *words],
        cwd=directory,
        env={**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == code, f"{program.name} {' '.join(words)}:\n{done.stdout}"
    return done.stdout
