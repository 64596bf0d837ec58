"""The plugin ``tree``: a sampling program that searches for answers step by step."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import SamplerProvider
from gcore_tree.config import TreeConfig


@hookimpl
def gcore_samplers() -> Iterable[SamplerProvider]:
    yield SamplerProvider(
        summary="answers that grow in steps, of which the best are continued",
        factory="gcore_tree.search:TreeSearch",
        config=TreeConfig,
        capabilities=frozenset({"continues"}),
    )
