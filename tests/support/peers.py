"""Interpreters with packages that lie outside this project, for tests that hold us against them.

The variable G_CORE_PEERS names a folder that has one virtual environment for each:

    python -m venv $G_CORE_PEERS/openai && $G_CORE_PEERS/openai/bin/pip install openai==2.54.0
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

FOLDER = "G_CORE_PEERS"


def interpreter(name: str, packages: str) -> Path:
    """That of one of the environments; without it the test is skipped."""
    folder = os.environ.get(FOLDER, "")
    python = Path(folder) / name / "bin" / "python"
    if not folder or not python.is_file():
        pytest.skip(f"needs {packages} in a virtual environment {name} below ${FOLDER}")
    return python


def run(python: Path, script: Path, *arguments: str, **variables: str) -> str:
    """What a script prints; it must end well."""
    done = subprocess.run(
        [str(python), str(script), *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
