"""A model that is split over two processes: the real engine against transformers, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from gcore_language.testing import assert_agree, gaps, requests_of, run, tensors_of
from gcore_sglang.config import SglangGeneratorConfig
from gcore_sglang.engine import SglangGenerator
from gcore_testing.contracts.weights import push

from gcore_core.contract.context import WorkerContext

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = ("1+2=", "7", "12+34=", "1+" * 35 + "1=")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models with tied embeddings that differ in their weights only."""
    from gcore_language.tiny import save_model

    found = {}
    for seed, name in enumerate(("qwen2", "qwen2-other")):
        found[name] = tmp_path_factory.mktemp(name)
        save_model(found[name], "qwen2", seed=seed)
    return found


@pytest.fixture(scope="module")
def generator(
    tied: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangGenerator]:
    logs = str(tmp_path_factory.mktemp("logs"))
    config = SglangGeneratorConfig(max_new_tokens=12, temperature=0.7, tensor_parallel=2)
    context = WorkerContext(
        role="rollout", model={"path": str(tied["qwen2"])}, directory=logs, devices=(0, 1)
    )
    made = SglangGenerator(config, context)
    yield made
    made.close()


def test_each_of_two_processes_holds_its_part_of_the_model(generator: SglangGenerator) -> None:
    assert generator._server._process is not None
    server = psutil.Process(generator._server._process.pid)
    names = [" ".join(child.cmdline()) for child in server.children(recursive=True)]
    assert sum("scheduler_TP" in name for name in names) == 2, names


def test_a_split_model_samples_and_takes_pushes_like_an_unsplit_one(
    generator: SglangGenerator, tied: dict[str, Path]
) -> None:
    """Within the band of the unsplit one: sums over two parts are sums in another order."""
    for source in ("qwen2", "qwen2-other", "qwen2"):
        push(generator, tensors_of(tied[source]), generator.version + 1)
        records = run(generator, requests_of(PROMPTS))
        assert_agree(gaps(records, tied[source]))
        scored = generator.logprobs([record.columns for record in records])
        for record, logp in zip(records, scored, strict=True):
            assert abs(record.columns["logp"] - logp).max() < 1e-4
