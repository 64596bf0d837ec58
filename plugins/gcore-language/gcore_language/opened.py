"""Opens exported weights for a person: ``run.policy()`` in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.installing import install_command


def open_policy(directory: Path) -> Any:
    """Returns the transformers model of a directory in Hugging Face layout, in evaluation mode.

    It has the dtype of its files and is on the CPU. The tokenizer lies beside it.
    Raises ConfigError where transformers is missing, DataError where it cannot read the directory.
    """
    try:
        from gcore_language.model_files import read_config
        from gcore_language.models import DTYPES, load_model
    except ImportError as error:
        raise ConfigError(
            f"it needs {error.name}, which is not installed.",
            where="run.policy()",
            why=f"the weights are in {directory}",
            todo=install_command("gcore-language[models]"),
        ) from error
    config = read_config(directory)
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise DataError(
            f"dtype is {dtype!r}, which is none of {', '.join(DTYPES)}.",
            where=str(directory / "config.json"),
        )
    return load_model(str(directory), dtype=dtype, images=True)
