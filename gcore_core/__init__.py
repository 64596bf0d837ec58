"""G-Core trains language, image-text and diffusion policies by reinforcement learning. See
docs/explanation/design.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pluggy

    from gcore_core.api.calls import job as job
    from gcore_core.api.calls import load as load
    from gcore_core.api.calls import run as run
    from gcore_core.api.calls import train as train

    hookimpl: pluggy.HookimplMarker

__version__ = "0.2.0"

__all__ = ["__version__", "hookimpl", "job", "load", "run", "train"]

#: What a Python session calls -> the module that has it, imported when it is first used. ``run`` is
#: a package too, which can be called.
_CALLS = {
    "job": "gcore_core.api.calls",
    "load": "gcore_core.api.calls",
    "train": "gcore_core.api.calls",
}


def __getattr__(name: str) -> Any:
    """``hookimpl`` is made on first use, so that ``g-core --help`` does not import pluggy."""
    if name in _CALLS:
        return getattr(importlib.import_module(_CALLS[name]), name)
    if name == "run":
        return importlib.import_module("gcore_core.run")
    if name == "hookimpl":
        import pluggy

        return pluggy.HookimplMarker("gcore")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
