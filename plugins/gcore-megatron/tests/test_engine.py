"""One rank in this process, with the real library."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_megatron.config import MegatronTrainerConfig
from gcore_testing.safetensors_files import read_safetensors

from gcore_core.contract.errors import DataError
from tests.support import language_models as tiny
from tests.support import megatron_trainers as tools

pytestmark = pytest.mark.engine

OBJECTIVES = [
    ("PpoClip", {"kl": {"coefficient": 0.1}, "entropy_coefficient": 0.01}),
    ("Gspo", {"clip_low": 0.05, "clip_high": 0.05}),
    ("Cispo", {}),
]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def engine(request: pytest.FixtureRequest, models: dict[str, tuple[Path, Path]]) -> Iterator[Any]:
    from gcore_megatron.engine import MegatronEngine

    model, reference = models[request.param]
    objective = tools.make_objective(*OBJECTIVES[0])
    opened = MegatronEngine(
        MegatronTrainerConfig(**tools.SETTINGS, reference_path=str(reference)),
        tiny.make_context(model, objective),
    )
    opened.plain = tools.Plain(model, reference, tools.SETTINGS, objective)
    yield opened
    opened.close()


def batches_of(records: list[Any], layout: Any, budget: int) -> list[Any]:
    from gcore_language.packing import Sample, micro_batches

    samples = [
        Sample(index=i, ordinal=r.ordinal, prompt=r.columns["prompt_ids"], columns=r.columns)
        for i, r in enumerate(records)
    ]
    return list(micro_batches(samples, layout, budget, torch.device("cpu")))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective[0])
@pytest.mark.parametrize(
    ("layout", "budget"), [("padded", 10**6), ("padded", 1), ("shared", 10**6), ("shared", 40)]
)
def test_an_objective_matches_value_and_gradient_of_a_plain_forward(
    engine: Any, objective: tuple[str, Any], layout: str, budget: int
) -> None:
    """Whole and split batches, to 1e-5 of the normalised loss and of each tensor's largest
    gradient.
    """
    from gcore_megatron import convert

    loss_of = tools.make_objective(*objective)
    records = tiny.make_records(samples=3)
    advantages = np.random.default_rng(0).standard_normal(len(records))
    old = [
        -np.random.default_rng(i).uniform(1, 3, len(r.columns["action_ids"]))
        for i, r in enumerate(records)
    ]

    def columns_for(batch_: Any) -> dict[str, Any]:
        columns = tiny.columns_of([records[i] for i in batch_], advantages[batch_])
        columns["old_logp"] = torch.from_numpy(
            np.concatenate([old[i] for i in batch_]).astype(np.float32)
        )
        columns["ref_logp"] = columns["old_logp"] - 0.1
        return columns

    plain = engine.plain.policy
    everything = np.arange(len(records))
    parts = [tiny.logp_of(plain, record) for record in records]
    current = {
        "logp": torch.cat([p[0] for p in parts]),
        "entropy": torch.cat([p[1] for p in parts]),
    }
    loss, weight, _ = loss_of.loss(columns_for(everything), current)
    plain.zero_grad()
    (loss / weight).backward()

    losses: list[float] = []

    def part_of_loss(batch: Any, logp: Any, entropies: Any) -> Any:
        part, _, _ = loss_of.loss(columns_for(batch.index), {"logp": logp, "entropy": entropies})
        losses.append(float(part.detach()))
        return part / weight

    engine.accumulate([*batches_of(records, layout, budget), None], part_of_loss, "gradient")
    gradients = {name: parameter.main_grad for name, parameter in engine._parameters.items()}
    like = next(iter(gradients.values()))
    grads = {
        piece.name: whole
        for piece, whole in convert.gather(engine._pieces, gradients.__getitem__, like)
    }
    assert sum(losses) / float(weight) == pytest.approx(float(loss / weight), abs=1e-5)
    for name, parameter in plain.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(
            grads[name], parameter.grad, atol=1e-5 * max(scale, 1), rtol=1e-5, msg=name
        )
    engine.discard()


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_reference_weights_are_swapped_in_and_out(engine: Any, layout: str) -> None:
    """Log-probs of both models to 1e-5; the policy's weights come back bit by bit."""
    records = tiny.make_records(samples=3)
    batches = batches_of(records, layout, 64)
    before = [array.tobytes() for _, array in engine.export_weights()]
    for model, plain in (("policy", engine.plain.policy), ("reference", engine.plain.reference)):
        logps = engine.logprobs([None, *batches], model)
        assert logps[0] is None
        with torch.no_grad():
            for batch, logp in zip(batches, logps[1:], strict=True):
                expected = torch.cat([tiny.logp_of(plain, records[i])[0] for i in batch.index])
                torch.testing.assert_close(logp, expected, atol=1e-5, rtol=1e-5)
    assert [array.tobytes() for _, array in engine.export_weights()] == before


def test_exported_weights_equal_those_of_the_model(engine: Any) -> None:
    expected = dict(engine.plain.policy.named_parameters())
    assert [spec.name for spec in engine.weight_specs()] == [
        spec.name for spec, _ in engine.export_weights()
    ]
    assert {spec.name for spec in engine.weight_specs()} == set(expected)
    for spec, array in engine.export_weights():
        assert array.tobytes() == expected[spec.name].detach().numpy().tobytes(), spec.name


def test_chunks_of_the_output_layer_do_not_change_results(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = batches_of(tiny.make_records(samples=3), "padded", 10**6)
    norms = []
    for actions in (10**6, 7):
        monkeypatch.setattr(engine, "_chunk_actions", actions)
        engine.accumulate(
            batches, lambda _, logp, entropies: (logp * logp + entropies).sum(), "gradient"
        )
        norms.append(engine.update(0.0, 0.0))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_a_non_finite_gradient_leaves_the_weights_unchanged(engine: Any) -> None:
    before = [array.tobytes() for _, array in engine.export_weights()]
    engine.accumulate(
        batches_of(tiny.make_records(samples=3), "padded", 64),
        lambda *arguments: arguments[1].sum() * np.inf,
        "metric",
    )
    assert not np.isfinite(engine.update(1.0, 1.0))
    assert [array.tobytes() for _, array in engine.export_weights()] == before


def test_weights_are_written_in_files_of_bounded_size(engine: Any, tmp_path: Path) -> None:
    from gcore_megatron.pretrained import write_pretrained

    specs = engine.weight_specs()
    write_pretrained(
        tmp_path,
        specs,
        engine._gathered(),
        writes=True,
        file_bytes=max(spec.nbytes for spec in specs),
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    stored = {
        spec.name: bytes(array)
        for file in sorted(tmp_path.glob("*.safetensors"))
        for spec, array in read_safetensors(file)
    }
    assert stored == {spec.name: array.tobytes() for spec, array in engine.export_weights()}


def test_bfloat16_trains_on_float32_weights(models: dict[str, tuple[Path, Path]]) -> None:
    """Exports are bfloat16; log-probs within 5e-2 of float32's; small updates add up, as they would
    not in bfloat16.
    """
    from gcore_megatron.engine import MegatronEngine

    model, reference = models["qwen2"]
    objective = tools.make_objective(*OBJECTIVES[2])
    settings = {**tools.SETTINGS, "dtype": "bfloat16", "weight_decay": 0.0, "eps": 1e-8}
    engine = MegatronEngine(MegatronTrainerConfig(**settings), tiny.make_context(model, objective))
    try:
        assert {spec.dtype for spec in engine.weight_specs()} == {"BF16"}
        records = tiny.make_records(samples=3)
        batches = batches_of(records, "padded", 10**6)
        plain = tools.Plain(model, reference, tools.SETTINGS, objective).policy
        (logp,) = engine.logprobs(batches, "policy")
        expected = torch.cat([tiny.logp_of(plain, records[i])[0] for i in batches[0].index])
        assert float((logp - expected).abs().mean()) < 5e-2
        first = engine.logprobs(batches, "policy")[0].sum()
        for _ in range(20):
            engine.accumulate(batches, lambda _, logp, __: -logp.sum() / 100, "metric")
            engine.update(2e-4, 1.0)
        assert engine.logprobs(batches, "policy")[0].sum() > first + 1
    finally:
        engine.close()


SCALED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "llama3", **SCALED}},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}},
        {"model_type": "mistral", "sliding_window": None, "rms_norm_eps": 0.1},
    ],
    ids=["llama3", "linear", "mistral"],
)
def test_log_probs_match_transformers(
    models: dict[str, tuple[Path, Path]], tmp_path: Path, changes: dict[str, Any]
) -> None:
    """For scaled rotary embeddings and another family too; what was changed matters."""
    from gcore_megatron.engine import MegatronEngine

    directory = tools.changed(models["llama"][0], tmp_path, **changes)
    objective = tools.make_objective("Cispo", {})
    engine = MegatronEngine(MegatronTrainerConfig(), tiny.make_context(directory, objective))
    try:
        records = tiny.make_records(samples=3)
        (batch,) = batches_of(records, "padded", 10**6)
        plain = tools.Plain(directory, models["llama"][0], tools.SETTINGS, objective)
        with torch.no_grad():
            expected, unchanged = (
                torch.cat([tiny.logp_of(model, records[i])[0] for i in batch.index])
                for model in (plain.policy, plain.reference)
            )
        (logp,) = engine.logprobs([batch], "policy")
        torch.testing.assert_close(logp, expected, atol=1e-5, rtol=1e-5)
        assert float((logp - unchanged).abs().max()) > 1e-3
    finally:
        engine.close()


@pytest.mark.parametrize("shared", [True, False], ids=["distributed optimizer", "whole optimizer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_tensors_hold_float32_weights_and_moments_bit_by_bit(
    models: dict[str, tuple[Path, Path]], tmp_path: Path, dtype: str, shared: bool
) -> None:
    """What goes on from them makes the same update; what has not had an update has no moments to
    save.
    """
    from gcore_language.state_files import MOMENTS, load_parts
    from gcore_megatron.engine import MegatronEngine

    settings = {
        **tools.SETTINGS,
        "dtype": dtype,
        "distributed_optimizer": shared,
        "checkpoint": "whole",
    }
    context = tiny.make_context(models["qwen2"][0], tools.make_objective("Cispo", {}))
    engine = MegatronEngine(MegatronTrainerConfig(**settings), context)
    shapes = {spec.name: spec.shape for spec in engine.weight_specs()}
    batches = batches_of(tiny.make_records(samples=3), "padded", 10**6)

    def update() -> dict[str, bytes]:
        engine.accumulate(batches, lambda _, logp, entropies: -logp.sum() / 10, "metric")
        engine.update(1e-2, 1.0)
        return saved("state")

    def saved(name: str) -> dict[str, bytes]:
        engine.save(tmp_path / name, {"updates": 1})
        return {
            f"{part}/{tensor}": t.numpy().tobytes()
            for part, tensor, t in load_parts(tmp_path / name, shapes)
        }

    try:
        start = saved("start")
        assert start.keys() == {f"weight/{name}" for name in shapes}
        first = update()
        assert first.keys() == {
            f"{part}/{name}" for part in ("weight", *MOMENTS) for name in shapes
        }
        (tmp_path / "state").rename(tmp_path / "first")
        second = update()
        assert engine.load(tmp_path / "first") == {"updates": 1}
        assert saved("again") == first
        assert update() == second
        engine.load(tmp_path / "start")
        assert saved("again at the start") == start
        assert update() == first
    finally:
        engine.close()


def test_a_state_of_another_format_is_refused(engine: Any, tmp_path: Path) -> None:
    from gcore_language.state_files import write_numbers

    write_numbers(tmp_path, {}, "universal")
    with pytest.raises(DataError, match="in the format universal, which this trainer cannot load"):
        engine.load(tmp_path)


def test_a_half_written_state_is_refused(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"state\.json: trainer state cannot be read"):
        engine.load(tmp_path)


def test_the_state_of_another_model_is_refused(
    engine: Any, models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    from gcore_megatron.engine import MegatronEngine

    engine.save(tmp_path, {"updates": 3})
    assert engine.load(tmp_path) == {"updates": 3}
    family = "llama" if engine.hidden_size == 128 else "qwen2"
    other = MegatronEngine(
        MegatronTrainerConfig(),
        tiny.make_context(models[family][0], tools.make_objective("Cispo", {})),
    )
    try:
        with pytest.raises(
            DataError, match="(?s)trainer state is damaged or of another model.*shape mismatch"
        ):
            other.load(tmp_path)
    finally:
        other.close()


def test_a_closed_engine_leaves_no_thread(models: dict[str, tuple[Path, Path]]) -> None:
    """Threads of process groups poll; those of many closed engines would take a core."""
    from gcore_megatron.engine import MegatronEngine

    counts = []
    for _ in range(3):
        opened = MegatronEngine(
            MegatronTrainerConfig(**tools.SETTINGS),
            tiny.make_context(models["llama"][0], tools.make_objective(*OBJECTIVES[0])),
        )
        opened.close()
        opened.close()  # a second time does no harm
        del opened
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    # the first may leave threads of libraries that are made once
    assert counts[1] == counts[2] == counts[0]
