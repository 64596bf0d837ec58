"""The plugin ``refine``: sampling programs that draw, look at rewards and draw again."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_algorithms.refine.config import CritiqueConfig
from gcore_core import hookimpl
from gcore_core.contract.providers import SamplerProvider


@hookimpl
def gcore_samplers() -> Iterable[SamplerProvider]:
    yield SamplerProvider(
        summary="answers from a prompt of an earlier answer and its critique",
        factory="gcore_algorithms.refine.critique:Critique",
        config=CritiqueConfig,
    )
