"""Runs a job from start to end: prepares it, places and supervises its workers, writes its results.

It leaves a directory with metrics, samples, checkpoints, a summary and weights.

The package can be called: ``gcore.run("job.yaml")`` is ``gcore_core.api.calls.run``. The verb of
the command line, of Python and this package have one name, and an import of any module in here
makes ``gcore_core.run`` the package.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _Called(ModuleType):
    """Is a module that can be called."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        # By name, as folders below the API do not import it.
        return importlib.import_module("gcore_core.api.calls").run(*arguments, **keywords)


sys.modules[__name__].__class__ = _Called
