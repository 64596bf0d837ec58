"""G-Core from Python: ``gcore.train``, ``gcore.job``, ``gcore.run``, ``gcore.load``.

A call becomes a job, the same YAML that ``g-core run`` takes, and the job runs in processes of its
own. What a notebook defines travels as source text in files beside that YAML, never pickled.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore.calls import job as job
    from gcore.calls import load as load
    from gcore.calls import run as run
    from gcore.calls import train as train

__all__ = ["job", "load", "run", "train"]


def __getattr__(name: str) -> Any:
    """The calls are imported when they are first used: the process of a run needs none of them."""
    if name in __all__:
        return getattr(importlib.import_module("gcore.calls"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
