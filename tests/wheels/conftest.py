"""The wheels of all distributions, built once."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.support.wheels import build_wheels


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that they lie in; workers of pytest-xdist share it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "wheels"
    with (shared / "wheels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if not folder.exists():
            build_wheels(tmp_path_factory.mktemp("built")).rename(folder)
    return folder
