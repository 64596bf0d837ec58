"""The wheels of all distributions, built once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.wheels import build_wheels


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that they lie in."""
    return build_wheels(tmp_path_factory.mktemp("built"))
