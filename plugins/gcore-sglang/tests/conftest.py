"""Servers are started once for all tests of a file: each takes half a minute to come up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gcore_core.contract.context import WorkerContext

if TYPE_CHECKING:
    from gcore_sglang.engine import SglangGenerator

#: Settings that go with each sample, so that a server need not be started anew for them.
_OF_A_SAMPLE = ("max_new_tokens", "temperature", "top_p", "top_k")


@pytest.fixture(scope="module", autouse=True)
def _gate() -> Iterator[None]:
    """Starts all servers with a gate, which is open unless a test holds its generator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gcore_sglang.server.CHILD", "gcore_sglang.stepwise")
        yield


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models that differ in their weights only, and one with ids that have no token."""
    from gcore_language.tiny import save_model

    found = {}
    for seed, name in enumerate(("llama", "llama-other")):
        found[name] = tmp_path_factory.mktemp(name)
        save_model(found[name], "llama", seed=seed)
    found["padded"] = tmp_path_factory.mktemp("padded")
    save_model(found["padded"], "llama", untold=42)
    return found


@pytest.fixture(scope="module")
def opened(
    directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., SglangGenerator]]:
    """Makes a generator with these settings, on a server that it may share with the tests
    before.
    """
    from gcore_sglang.config import SglangGeneratorConfig
    from gcore_sglang.engine import SglangGenerator

    made: dict[str, SglangGenerator] = {}

    def make(model: str = "llama", **settings: Any) -> SglangGenerator:
        of_a_sample = {name: settings.pop(name) for name in _OF_A_SAMPLE if name in settings}
        key = repr((model, sorted(settings.items())))
        if key not in made:
            config = SglangGeneratorConfig(max_batch=64, **settings)
            directory = str(tmp_path_factory.mktemp("logs"))
            context = WorkerContext(
                role="rollout", model={"path": str(directories[model])}, directory=directory
            )
            made[key] = SglangGenerator(config, context)
        generator = made[key]
        fresh = SglangGeneratorConfig(
            **{"max_new_tokens": 12, "max_batch": 64, **settings, **of_a_sample}
        )
        generator._config = dataclasses.replace(fresh)
        return generator

    yield make
    for generator in made.values():
        generator.close()
