"""Models that are made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gcore_core.contract.factories import import_file
from tests.support.diffusion_models import random_tiny

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def taught_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's model, taught for half as long."""
    pytest.importorskip("sklearn")
    digits = import_file(RECIPES / "digits/digits.py")
    directory = tmp_path_factory.mktemp("taught")
    digits.teach(directory, {"steps": 200}, lambda *_: None)
    torch.set_num_threads(1)
    return directory
