"""Functions that users wrote, loaded from a Python file by path. They run in workers, never in a
controller.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import ConfigError, DataError, did_you_mean
from gcore_core.contract.local_files import advice, import_file


def load_function(file: Path, name: str) -> Callable[..., Any]:
    """Loads the function ``name`` of a Python file.

    Raises ConfigError when the file or the function is not there or cannot be called, DataError
    with the line when the file fails to import.
    """
    if not file.is_file():
        folder = file.parent
        names = [p.name for p in folder.iterdir() if p.suffix == ".py"] if folder.is_dir() else []
        raise ConfigError(f"no such file{did_you_mean(file.name, names)}", where=str(file))
    try:
        module = import_file(file)
    except (Exception, SystemExit) as error:
        line = line_in(file, error)
        raise DataError(
            f"does not import: {type(error).__name__}: {error}",
            where=f"{file}:{line}" if line else str(file),
            todo=advice(file, error),
        ) from error
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(
            f"has no function {name!r}{did_you_mean(name, functions)}",
            where=str(file),
            why=f"its functions: {', '.join(functions) or 'none'}",
        )
    function: Any = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"{name} is a {type(function).__name__}, not a function", where=str(file))
    return function  # type: ignore[no-any-return]


def line_in(file: Path, error: BaseException) -> int | None:
    """Returns the innermost line of ``file`` in the error's traceback.

    Of a syntax error it is the line that is no Python. Returns None if the file has no part in the
    error.
    """
    path = str(file.resolve())
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.lineno
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == path
    ]
    return lines[-1] if lines else None
