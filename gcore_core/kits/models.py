"""Makes a model besides a role's own, by a function of the user, for backends that need one.

find_made: the directory of a model that was made before, if it was.
"""

from __future__ import annotations

from gcore_core.run.make_model import find_made, make_model, models_cache

__all__ = ["find_made", "make_model", "models_cache"]
