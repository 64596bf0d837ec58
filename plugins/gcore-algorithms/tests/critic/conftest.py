from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.language_models import save_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen2")
    save_model(directory, "qwen2")
    return directory
