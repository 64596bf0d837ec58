"""Models that are made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_language.tiny import save_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Family -> directories of a policy and of a reference with other weights."""
    directories = {}
    for family in ("llama", "qwen2", "qwen3"):
        directories[family] = tuple(tmp_path_factory.mktemp(f"{family}-{seed}") for seed in (0, 1))
        for seed, directory in enumerate(directories[family]):
            save_model(directory, family, seed)
    return directories
