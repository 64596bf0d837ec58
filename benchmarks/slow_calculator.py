"""The calculator of the recipe, which takes its time; ``proved.py`` runs it."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "calculator"))
from calculator import Calculator  # type: ignore[import-not-found]  # noqa: E402

if TYPE_CHECKING:
    from gcore_environments import Observation, Reply

MOST_S = 0.02


class Slow(Calculator):  # type: ignore[misc]
    async def step(self, reply: Reply) -> Observation:
        await asyncio.sleep(MOST_S * random.SystemRandom().random())
        said: Observation = await super().step(reply)
        return said
