"""For backends that need a model besides their role's: one that a function of the user makes."""

from __future__ import annotations

from gcore_core.run.make_model import make_model

__all__ = ["make_model"]
