"""Makes a model besides a role's own, by a function of the user, for backends that need one."""

from __future__ import annotations

from gcore_core.run.make_model import make_model, models_cache

__all__ = ["make_model", "models_cache"]
