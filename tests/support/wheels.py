"""Wheels of all distributions, built beside the checkout, and a venv that has nothing but them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

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


def build_wheels(work: Path) -> list[Path]:
    """Builds the wheel of each project from a copy: building in the checkout would leave files.

    Calls the build backend as pip does, without pip's other processes.
    """
    folder = work / "wheels"
    folder.mkdir()
    for project in projects():
        source = work / "sources" / project.name
        source.mkdir(parents=True)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            if (project / name).exists():
                shutil.copy(project / name, source)
        for package in project.glob("gcore_*/__init__.py"):
            shutil.copytree(package.parent, source / package.parent.name, ignore=LEFT_OUT)
        subprocess.run(
            [sys.executable, "-c", BUILD, str(folder)],
            cwd=source,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return sorted(folder.glob("*.whl"))


def make_venv(root: Path, wheels: Iterable[Path]) -> Path:
    """A venv with these wheels, and with what else is installed here, but nothing of ours.

    Returns its folder of programs.
    """
    venv.create(root, symlinks=True)
    (site,) = root.glob("lib/python3*/site-packages")
    pip("--python", str(root), "install", "--no-deps", "--no-index", *map(str, wheels))
    others = root / "others"
    others.mkdir()
    for entry in third_party():
        if not (others / entry.name).exists():
            (others / entry.name).symlink_to(entry)
    (site / "others.pth").write_text(f"{others}\n")
    return root / "bin"


def third_party() -> list[Path]:
    """What is installed here, without what is ours and what would find the checkout."""
    return [
        entry
        for folder in map(Path, sys.path)
        if folder.name == "site-packages"
        for entry in folder.iterdir()
        if not entry.name.startswith(("gcore", "__editable__", "__pycache__"))
        and entry.suffix != ".pth"
    ]


def run_outside(program: Path, *words: str, directory: Path) -> str:
    """Runs a program of such a venv where nothing of the checkout is in reach; its output.

    Fails with the output when the exit code is not 0.
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
    assert done.returncode == 0, f"{program.name} {' '.join(words)}:\n{done.stdout}"
    return done.stdout


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *words], check=True)
