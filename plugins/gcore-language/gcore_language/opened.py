"""Opens exported weights for a person: ``run.policy()`` in Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ConfigError

_CONFIG = "config.json"


def open_policy(directory: Path) -> Any:
    """Returns the transformers model of a directory in Hugging Face layout, in evaluation mode.

    It has the dtype of its files and is on the CPU. The tokenizer lies beside it.
    Raises ConfigError where transformers is missing, DataError where it cannot read the directory.
    """
    try:
        from gcore_language.models import load_model
    except ImportError as error:
        raise ConfigError(
            f"it needs {error.name}, which is not installed.",
            where="run.policy()",
            why=f"the weights are in {directory}",
            todo="pip install 'gcore-language[models]'",
        ) from error
    config = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return load_model(str(directory), dtype=dtype, images=True)
