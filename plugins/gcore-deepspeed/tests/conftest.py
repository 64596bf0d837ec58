"""Models that are made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_language.tiny import CONFIGS, save_model


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {}
    for family in CONFIGS:
        directories[family] = tmp_path_factory.mktemp(family)
        save_model(directories[family], family)
    return directories
