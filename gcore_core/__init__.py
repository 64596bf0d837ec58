"""G-Core trains language, image-text and diffusion policies by reinforcement learning. See
docs/explanation/design.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pluggy

    hookimpl: pluggy.HookimplMarker

__version__ = "0.3.0"

__all__ = ["__version__", "hookimpl"]

#: What a Python session called here until 0.2.
_CALLS = ("job", "load", "train")


def __getattr__(name: str) -> Any:
    """``hookimpl`` is made on first use, so that ``g-core --help`` does not import pluggy."""
    if name == "hookimpl":
        import pluggy

        return pluggy.HookimplMarker("gcore")
    if name in _CALLS:
        # No AttributeError: `from gcore_core import train` would drop its text.
        raise ImportError(
            f"gcore_core.{name} is gcore.{name} now, of gcore-tools; where that is not installed, "
            "`g-core doctor` says how to install it",
            name=__name__,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
