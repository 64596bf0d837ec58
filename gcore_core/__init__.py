"""G-Core trains language, image-text and diffusion policies by reinforcement learning. See
docs/explanation/design.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pluggy

    hookimpl: pluggy.HookimplMarker

__version__ = "0.2.0"

__all__ = ["__version__", "hookimpl"]


def __getattr__(name: str) -> Any:
    """``hookimpl`` is made on first use, so that ``g-core --help`` does not import pluggy."""
    if name == "hookimpl":
        import pluggy

        return pluggy.HookimplMarker("gcore")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
