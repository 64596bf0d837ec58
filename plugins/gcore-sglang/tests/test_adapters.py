"""Adapters that pushes bring alone: the real engine against models that they were merged into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gcore_language.adapter_testing import adapter_push, merge_adapter, save_adapter
from gcore_language.testing import assert_agree, drain, gaps, requests_of, run, tensors_of
from gcore_sglang.config import SglangGeneratorConfig
from gcore_sglang.engine import SglangGenerator
from gcore_sglang.stepwise import held
from gcore_testing.contracts.weights import push

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.records import AdapterFacts, WeightPlan

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = ("1+2=", "7", "12+34=", "1+" * 15 + "1=")


@pytest.fixture(scope="module")
def generator(
    directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangGenerator]:
    model, logs = {"path": str(directories["llama"])}, str(tmp_path_factory.mktemp("logs"))
    config = SglangGeneratorConfig(max_new_tokens=64, max_batch=16, lora_rank=8)
    made = SglangGenerator(config, WorkerContext(role="rollout", model=model, directory=logs))
    yield made
    made.close()


def test_pushed_adapters_give_the_log_probs_of_merged_weights(
    generator: SglangGenerator, directories: dict[str, Path], tmp_path: Path
) -> None:
    """Of all samples; those that run during the push go on, and each push replaces the last."""
    model = directories["llama"]
    records = run(generator, requests_of(PROMPTS))
    assert_agree(gaps(records, model))
    before = model
    for version, rank in enumerate((4, 8, 3), 1):
        adapter = save_adapter(tmp_path / f"adapter-{rank}", model, rank)
        plan, tensors = adapter_push(model, adapter, rank, version)
        running = requests_of(PROMPTS, 10)  # more than run at once
        with held(generator):
            generator.submit(running)
            ended = [*generator.step(), *generator.step()]
            generator.begin_weights(plan)
            generator.load_weights(tensors)
            generator.commit_weights(plan)
        later = drain(generator, len(running) - len(ended))
        merged = merge_adapter(tmp_path / f"merged-{rank}", model, adapter)
        both = [record for record in later if record.versions == (version - 1, version)]
        assert both, "no sample went on through the push"
        assert_agree(gaps(both, before, slice(0, 1)))
        assert_agree(gaps(both, merged, slice(-1, None)))
        assert max(len(record.columns["action_ids"]) for record in both) <= 64
        records = run(generator, requests_of(PROMPTS))
        assert {record.versions for record in records} == {(version, version)}
        assert_agree(gaps(records, merged))
        assert gaps(records, model).max() > 0.1  # else the adapter shows nothing
        scored = generator.logprobs([record.columns for record in records])
        for record, logp in zip(records, scored, strict=True):
            assert abs(record.columns["logp"] - logp).max() < 1e-4
        before = merged


def test_what_is_no_adapter_of_this_base_is_refused(
    generator: SglangGenerator, directories: dict[str, Path], tmp_path: Path
) -> None:
    model = directories["llama"]
    version = generator.version + 1
    adapter = save_adapter(tmp_path / "adapter", model, 9)
    plan, _ = adapter_push(model, adapter, 9, version)
    with pytest.raises(WeightMismatch, match=r"(?s)rank 9, and SGLang keeps room for 8"):
        generator.begin_weights(plan)
    assert plan.adapter is not None
    other = AdapterFacts(3, 1.0, plan.adapter.targets, "0" * 64)
    with pytest.raises(WeightMismatch, match="another base"):
        generator.begin_weights(WeightPlan(version, plan.tensors, other))
    with pytest.raises(WeightMismatch, match=r"(?s)whole weights come.*lora_rank: 0"):
        push(generator, tensors_of(model), version)


def test_the_adapters_files_end_with_the_generator(
    directories: dict[str, Path], generator: SglangGenerator
) -> None:
    folder = generator._server.private / "adapter"
    assert folder.is_dir()
    generator.close()
    assert not folder.exists()
