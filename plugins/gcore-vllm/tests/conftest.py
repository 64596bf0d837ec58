"""LoRA adapters as peft saves them, and models that they were merged into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gcore_language import adapter_testing

ALPHA = adapter_testing.ALPHA


@pytest.fixture(scope="session")
def save_adapter() -> Callable[..., Path]:
    """Saves a random adapter for the attention and feed-forward matrices of a model."""
    return adapter_testing.save_adapter


@pytest.fixture(scope="session")
def merge() -> Callable[[Path, Path, Path], Path]:
    """Saves a model whose matrices are those of ``model`` plus alpha / rank * B A."""
    return adapter_testing.merge_adapter
