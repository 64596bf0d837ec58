"""What a deterministic run promises of the trainer: see docs/explanation/same-hash.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.alignment import align
from gcore_language.models import load_model
from gcore_language.packing import Sample, steady_batches
from gcore_language.policy import Policy, check_layouts
from gcore_language.weights import spec_of
from gcore_testing.contracts.weights import perturbed, push
from gcore_testing.runs import run_together
from gcore_testing.safetensors_files import Tensors
from gcore_torch.config import TorchGeneratorConfig
from gcore_torch.generator import TorchGenerator
from gcore_torch.steady_decoder import columns_of

from gcore_core.contract.columns import action_versions
from gcore_core.contract.errors import ContractError
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.records import Prompt
from gcore_core.contract.trainer import TrainRecord
from tests.support import exact_ranks
from tests.support.language_models import drain, make_context, make_requests

pytestmark = pytest.mark.rest

#: float32 sums in another order, carried through eight Adam updates.
TOLERANCE = 2e-5
CPU = torch.device("cpu")


def numbers_of(ranks: int, model: Path, work: Path) -> dict[str, Any]:
    """Returns what ``exact_ranks`` wrote, by packing."""
    work.mkdir(parents=True)
    given = [str(ranks), str(model), str(work)]
    run_together([["-m", exact_ranks.__name__, str(rank), *given] for rank in range(ranks)])
    numbers: dict[str, Any] = json.loads((work / "numbers.json").read_text())
    return numbers


def test_weights_and_metrics_have_the_same_bits_on_one_two_and_four_ranks(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    model = model_dirs["qwen2"]
    two, four = (numbers_of(ranks, model, tmp_path / str(ranks)) for ranks in (2, 4))
    for packing in exact_ranks.PACKINGS:
        one = exact_ranks.run(0, 1, packing, model, tmp_path / "1" / packing)
        assert one["sha256"] == two[packing]["sha256"] == four[packing]["sha256"]
        assert one["metrics"] == two[packing]["metrics"] == four[packing]["metrics"]


@pytest.mark.parametrize("packing", exact_ranks.PACKINGS)
def test_exact_sums_give_what_plain_ones_give_to_rounding(
    packing: exact_ranks.Packing, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """Both with eps as large as gradients: else Adam makes whole steps of what should be zero."""
    weights, metrics = [], []
    for deterministic in (True, False):
        work = tmp_path / str(deterministic)
        trainer = exact_ranks.make_trainer(
            model_dirs["qwen2"], packing, work, 0, 1, deterministic=deterministic, eps=1e-3
        )
        metrics.append([exact_ranks.train(trainer, step, 0, 1) for step in range(2)])
        weights.append({s.name: a.copy().view(np.float32) for s, a in trainer.export_weights()})
        trainer.close()
    for name, values in weights[0].items():
        np.testing.assert_allclose(values, weights[1][name], atol=TOLERANCE, err_msg=name)
    for exact, plain in zip(*metrics, strict=True):
        assert exact == pytest.approx(plain, rel=1e-4, abs=1e-6)


def test_a_record_has_the_same_log_probs_whichever_tiles_are_beside_its_own(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    trainer = exact_ranks.make_trainer(model_dirs["qwen2"], "auto", tmp_path, 0, 1)
    records = exact_ranks.tiled(exact_ranks.make_records(groups=6, seed=0, minibatches=2))

    def scalars_of(tiles: set[int]) -> dict[tuple[int, int], float]:
        chosen = [record for record in records if record.tile in tiles]
        rows = trainer.prepare(chosen, frozenset({"kl_k2"}))
        return {(r.ordinal, r.sample): row["kl_k2"] for r, row in zip(chosen, rows, strict=True)}

    exact_ranks.train(trainer, 0, 0, 1)  # so that policy and reference differ
    together = scalars_of({0, 1, 2})
    apart = scalars_of({0}) | scalars_of({1}) | scalars_of({2})
    assert together == apart
    assert any(together.values())
    trainer.close()


@pytest.mark.parametrize(
    "lengths",
    [
        [(150, 10), (10, 150)],
        [(80, 80), (20, 30)],
        [(200, 100), (40, 420), (260, 40), (20, 30)],  # longer than a flat row may be
        [(290, 10), (290, 12), (290, 200)],
    ],
)
def test_a_record_has_the_same_log_probs_beside_longer_prompts_and_answers(
    lengths: list[tuple[int, int]], model_dirs: dict[str, Path]
) -> None:
    """(prompt, actions) of each record. A row of all keys would be summed in several blocks."""
    model = load_model(str(model_dirs["llama"]), dtype="float32")
    align(model)
    policy = Policy(model)
    check_layouts(policy, CPU, may_flat=True, tolerance=1e-3)
    draw = np.random.default_rng(0)
    records = [
        Sample(
            index=place,
            ordinal=place,
            prompt=draw.integers(0, 16, prompt).astype(np.int32),
            columns=columns_of(draw.integers(0, 16, actions).astype(np.int32)),
        )
        for place, (prompt, actions) in enumerate(lengths)
    ]

    def logprobs(samples: list[Sample]) -> list[float]:
        with torch.no_grad():
            parts = [
                (int(batch.index[0]), policy(batch)[0].tolist())
                for batch in steady_batches(samples, policy.layouts, 16384, CPU)
            ]
        return [value for _, part in sorted(parts) for value in part]

    assert logprobs(records) == [value for record in records for value in logprobs([record])]


def sampled(model: Path, requests: list[SampleRequest], **config: Any) -> dict[Any, Any]:
    """Returns tokens and log-probs of each sample, by (ordinal, sample)."""
    context = make_context(model, role="rollout", deterministic=True)
    settings = TorchGeneratorConfig(max_new_tokens=12, temperature=0.8, **config)
    generator = TorchGenerator(settings, context)
    generator.submit(requests)
    finished = drain(generator)
    generator.close()
    return {
        (f.request.ordinal, f.request.sample): (
            f.columns["action_ids"].tolist(),
            f.columns["logp"].tolist(),
        )
        for f in finished
    }


@pytest.mark.parametrize("decoder", ["fused", "transformers"])
def test_a_sample_has_the_same_bits_in_any_company(
    decoder: str, model_dirs: dict[str, Path]
) -> None:
    """Prompts of four lengths: alone, some together, and all together, in either order."""
    model = model_dirs["llama"]
    requests = make_requests(groups=4, samples=4)
    together = sampled(model, requests, decoder=decoder)
    assert len(together) == 16
    assert sampled(model, requests[::-1], decoder=decoder, max_batch=5) == together
    for some in (requests[:1], requests[6:9], requests[8:]):
        keys = [(request.ordinal, request.sample) for request in some]
        assert sampled(model, some, decoder=decoder) == {key: together[key] for key in keys}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_short_records_are_decoded_with_the_bits_of_the_forward_pass(
    family: str, model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need no scores afterwards, and are those that a decoder with scores gives."""
    model = model_dirs[family]
    requests = [*make_requests(groups=4, samples=4), *make_requests(1, 2, first=9, greedy=True)]
    expected = sampled(model, requests, decoder="transformers")

    def refuse(*_: object) -> None:
        raise AssertionError("scored")

    monkeypatch.setattr("gcore_torch.steady.SteadyScorer.rescore", refuse)
    monkeypatch.setattr("gcore_torch.steady.SteadyScorer.next_logits", refuse)
    assert sampled(model, requests) == expected


def test_a_decoder_with_other_bits_than_the_forward_pass_is_not_taken_for_exact(
    model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one query for each product, which libraries compute by another kernel."""
    requests = make_requests(groups=4, samples=4)
    expected = sampled(model_dirs["llama"], requests)
    monkeypatch.setattr("gcore_torch.steady_decoder._LEAST_QUERIES", 1)
    context = make_context(model_dirs["llama"], role="rollout", deterministic=True)
    generator = TorchGenerator(TorchGeneratorConfig(max_new_tokens=12), context)
    if generator._exact is not None:
        pytest.skip("this machine's library has the same bits for one query")
    assert sampled(model_dirs["llama"], requests) == expected


def test_tokens_near_an_edge_are_drawn_from_the_forward_pass(
    model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every token taken for one near an edge, samples are the same: so both draw alike."""
    requests = make_requests(groups=2, samples=2)
    expected = sampled(model_dirs["llama"], requests, decoder="transformers")
    monkeypatch.setattr("gcore_torch.generator.NEAR", 2.0)
    assert sampled(model_dirs["llama"], requests, decoder="transformers") == expected


def test_a_decoder_that_is_far_off_ends_a_deterministic_run(
    model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcore_torch.steady.NEAR", 0.0)
    with pytest.raises(ContractError, match="away from the model's"):
        sampled(model_dirs["llama"], make_requests(), decoder="transformers")


def long_and_short_requests() -> list[SampleRequest]:
    """Two samples of each prompt; records of some 300, 220 and 20 tokens."""
    return [
        SampleRequest(
            ordinal=ordinal,
            sample=sample,
            seed=100 * ordinal + sample,
            prompt=Prompt(row=ordinal, text=("12+34+56+78" * 40)[:length]),
        )
        for ordinal, length in enumerate((290, 210, 9))
        for sample in range(2)
    ]


def test_a_long_sample_has_the_same_bits_in_any_company_and_in_training(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dirs["llama"], model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    requests = long_and_short_requests()
    together = sampled(model, requests)
    for request in requests:
        key = request.ordinal, request.sample
        assert sampled(model, [request]) == {key: together[key]}
    generator = TorchGenerator(
        TorchGeneratorConfig(max_new_tokens=12, temperature=0.8),
        make_context(model, role="rollout", deterministic=True),
    )
    generator.submit(requests)
    finished = drain(generator)
    generator.close()
    assert max(f.columns["prompt_ids"].size for f in finished) > 256
    for tiles in (1, 3):
        trainer = exact_ranks.make_trainer(model, "auto", tmp_path / str(tiles), 0, 1)
        records = [
            TrainRecord(
                ordinal=f.request.ordinal,
                sample=f.request.sample,
                minibatch=0,
                columns=f.columns,
                tile=f.request.ordinal % tiles,
            )
            for f in finished
        ]
        trainer.prepare(records, frozenset())
        metrics = trainer.train(0, np.ones(len(records)), 1, 1)
        trainer.close()
        assert metrics["logprob_gap_max"] == 0.0


@pytest.mark.parametrize("packing", exact_ranks.PACKINGS)
def test_generator_and_trainer_have_the_same_log_probs_to_the_last_bit(
    packing: exact_ranks.Packing, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """Where the trainer packs as it likes; padded where it must, it is only near."""
    model = model_dirs["llama"]
    context = make_context(model, role="rollout", deterministic=True)
    generator = TorchGenerator(TorchGeneratorConfig(max_new_tokens=12, temperature=0.8), context)
    generator.submit(make_requests(groups=6, samples=4))
    records = [
        TrainRecord(
            ordinal=f.request.ordinal,
            sample=f.request.sample,
            minibatch=0,
            columns=f.columns,
            tile=f.request.ordinal // 2,
        )
        for f in drain(generator)
    ]
    trainer = exact_ranks.make_trainer(model, packing, tmp_path, 0, 1)
    trainer.prepare(records, frozenset())
    metrics = trainer.train(0, np.ones(len(records)), 1, 1)
    trainer.close()
    if packing == "auto":
        assert metrics["logprob_gap_max"] == 0.0
    else:
        assert 0 < metrics["logprob_gap_max"] < 1e-4


def test_a_gradient_too_large_for_exact_sums_ends_the_run(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    trainer = exact_ranks.make_trainer(model_dirs["qwen2"], "auto", tmp_path, 0, 1)
    records = exact_ranks.tiled(exact_ranks.make_records(groups=2, seed=0))
    trainer.prepare(records, frozenset())
    with pytest.raises(exact_ranks.NonFiniteLoss, match="gradient norm nan"):
        trainer.train(0, np.full(len(records), 1e12), 1, 1)
    trainer.close()


# -- samples that pushes cut -----------------------------------------------------------------------

#: Steps of the engine under each of three versions of the weights.
CUTS = (3, 4)
Bits = dict[tuple[int, int], dict[str, bytes]]


def open_steady(model: Path, **config: Any) -> tuple[TorchGenerator, list[Tensors]]:
    """Returns a generator of a deterministic run, and the weights of versions 0, 1 and 2."""
    settings = TorchGeneratorConfig(max_new_tokens=12, temperature=0.8, **config)
    generator = TorchGenerator(settings, make_context(model, role="rollout", deterministic=True))
    first = [
        (spec_of(name, tensor), tensor.detach().numpy().reshape(-1).view(np.uint8).copy())
        for name, tensor in generator._tensors.items()
    ]
    second = perturbed(first, 0.1)
    return generator, [first, second, perturbed(second, 0.1)]


def bits_of(record: Any) -> dict[str, bytes]:
    return {name: column.tobytes() for name, column in record.columns.items()}


def cut_by_pushes(model: Path, requests: list[SampleRequest], **config: Any) -> Any:
    """Returns the records of samples that run on through two pushes, by (ordinal, sample)."""
    generator, weights = open_steady(model, **config)
    generator.submit(requests)
    finished = []
    for version, steps in enumerate(CUTS, 1):
        finished += [record for _ in range(steps) for record in generator.step()]
        push(generator, weights[version], version)
    finished += drain(generator)
    generator.close()
    return {(f.request.ordinal, f.request.sample): f for f in finished}


def action_versions_of(record: Any) -> list[int]:
    versions = action_versions(record.columns, record.columns["logp"].size, record.versions[0])
    return sorted({*versions.tolist()})


@pytest.mark.parametrize("decoder", ["fused", "transformers"])
@pytest.mark.parametrize("length", ["short", "long"])
def test_a_sample_that_pushes_cut_has_the_same_bits_in_any_company(
    decoder: str, length: str, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    model = model_dirs["llama"]
    requests = make_requests(groups=4, samples=4)
    if length == "long":
        model = tmp_path / "model"
        shutil.copytree(model_dirs["llama"], model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
        requests = long_and_short_requests()
    records = cut_by_pushes(model, requests, decoder=decoder)
    assert {len(action_versions_of(record)) for record in records.values()} >= {3}
    expected = {key: bits_of(record) for key, record in records.items()}
    alone = {
        key: bits_of(record)
        for request in requests
        for key, record in cut_by_pushes(model, [request], decoder=decoder).items()
    }
    assert alone == expected
