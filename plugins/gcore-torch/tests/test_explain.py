"""A generator names why its log-probs are not the trainer's, by scoring its records again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from gcore_language.explain import Score
from gcore_torch.config import TorchGeneratorConfig
from gcore_torch.generator import TorchGenerator
from gcore_torch.other_heads import changed_head, heads

from gcore_core.contract.columns import Columns
from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.generator import ExplainsGaps
from gcore_core.contract.sentinel import Compared
from gcore_core.runtime.shown_records import opened_record, show_record
from tests.support import language_models as tiny

TOP_K = 5


@pytest.fixture
def generator(model_dirs: dict[str, Path]) -> TorchGenerator:
    config = TorchGeneratorConfig(max_new_tokens=6, temperature=0.7, top_k=TOP_K)
    return TorchGenerator(config, tiny.make_context(model_dirs["llama"]))


def columns_of(records: int = 12) -> list[Columns]:
    draw = np.random.default_rng(0)
    return [
        {
            "prompt_ids": draw.integers(3, 20, 4 + i % 3).astype(np.int32),
            "action_ids": draw.integers(3, 20, 6).astype(np.int32),
            "logp": np.zeros(6, np.float32),
            "action_mask": np.ones(6, np.uint8),
            "temperature": np.array(0.7, np.float32),
        }
        for i in range(records)
    ]


def compared(
    columns: Sequence[Columns],
    rollout: Sequence[np.ndarray],
    trainer: Sequence[np.ndarray],
    version: int = 0,
) -> list[Compared]:
    return [
        Compared(
            ordinal=i,
            sample=0,
            step=0,
            replica=0,
            version=version,
            rollout_logp=rollout[i],
            trainer_logp=trainer[i],
            mask=record["action_mask"].astype(bool),
            prompt_ids=record["prompt_ids"],
            action_ids=record["action_ids"],
            temperature=0.7,
        )
        for i, record in enumerate(columns)
    ]


def told(generator: TorchGenerator, records: list[Compared]) -> tuple[str, str]:
    (finding,) = generator.explain_gaps(records)
    return finding.cause, finding.text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda ids: np.concatenate([ids[:1], ids]), "the first token of prompts twice"),
        (lambda ids: ids[1:], "without their first token"),
        (lambda ids: ids[:-1], "without their last token"),
    ],
)
def test_prompts_that_were_read_otherwise(
    generator: TorchGenerator, change: Callable[[np.ndarray], np.ndarray], text: str
) -> None:
    columns = columns_of()
    read = [{**record, "prompt_ids": change(record["prompt_ids"])} for record in columns]
    records = compared(columns, generator.logprobs(read), generator.logprobs(columns))
    cause, sentence = told(generator, records)
    assert cause == "read" and text in sentence


def test_log_probs_that_were_told_otherwise(generator: TorchGenerator) -> None:
    columns = columns_of()
    right = generator.logprobs(columns)
    cold = [{**record, "temperature": np.ones((), np.float32)} for record in columns]
    cause, text = told(generator, compared(columns, generator.logprobs(cold), right))
    assert cause == "told" and "before the temperature" in text
    generator.submit(tiny.make_requests())
    columns = [finished.columns for finished in tiny.drain(generator)]  # all of the kept tokens
    among_kept = _others(generator)[0][2](columns)
    right = [record["logp"] for record in columns]
    cause, text = told(generator, compared(columns, among_kept, right))
    assert cause == "told" and f"{TOP_K} likeliest" in text


def _others(generator: TorchGenerator) -> list[tuple[str, str, Score]]:
    return heads(generator._model, torch.device("cpu"), TOP_K, generator.logprobs)


def test_a_head_in_bfloat16_and_a_model_in_bfloat16(generator: TorchGenerator) -> None:
    columns = columns_of()
    right = generator.logprobs(columns)
    for text, score in [(text, score) for cause, text, score in _others(generator)][1:]:
        cause, sentence = told(generator, compared(columns, score(columns), right))
        assert cause == "dtype" and text in sentence
    assert all((a == b).all() for a, b in zip(right, generator.logprobs(columns), strict=True))


def test_what_the_decoder_derives_is_compared_with_the_model(generator: TorchGenerator) -> None:
    columns = columns_of()
    right = generator.logprobs(columns)
    other = [logp - 0.5 for logp in right]
    assert generator._decoder.differing() == []
    layer = generator._decoder._layers[0]
    right_matrix = layer.gate_up
    layer.gate_up = right_matrix.flip(0)
    cause, text = told(generator, compared(columns, other, right))
    assert cause == "derived" and "gate_up of layer 0" in text
    layer.gate_up = right_matrix
    generator._decoder._lay(0, 8)
    assert generator._decoder.differing() == []
    generator._decoder._cos = generator._decoder._cos.to(torch.bfloat16).float()
    with pytest.raises(WeightMismatch, match="version 3: the generator samples with tables of "):
        generator._check_tables(3)
    assert "tables of the rotary embedding" in told(generator, compared(columns, other, right))[1]


def test_which_side_is_right_is_told_where_nothing_else_is(generator: TorchGenerator) -> None:
    columns = columns_of()
    right = generator.logprobs(columns)
    draw = np.random.default_rng(1)
    other = [logp + draw.normal(0, 0.3, logp.shape).astype(np.float32) for logp in right]
    cause, text = told(generator, compared(columns, other, right))
    assert cause == "sampling" and "a kernel" in text
    first = [np.concatenate([b[:1], a[1:]]) for a, b in zip(right, other, strict=True)]
    assert "only the first action" in told(generator, compared(columns, first, right))[1]
    assert told(generator, compared(columns, right, other))[0] == "held"


def test_nothing_is_told_without_gaps_or_of_other_weights(generator: TorchGenerator) -> None:
    assert isinstance(generator, ExplainsGaps)
    columns = columns_of()
    right = generator.logprobs(columns)
    assert generator.explain_gaps(compared(columns, right, right)) == []
    other = [logp - 0.5 for logp in right]
    assert generator.explain_gaps(compared(columns, other, right, version=4)) == []
    assert generator.explain_gaps([]) == []


def test_a_record_is_the_same_behind_the_wire() -> None:
    columns = columns_of(1)
    logp = np.array([-1.5, -2, -0.25, -1, -3, -4], np.float32)
    (record,) = compared(columns, [logp], [logp - 1])
    other = opened_record(show_record(record))
    for name in ("rollout_logp", "trainer_logp", "mask", "prompt_ids", "action_ids"):
        mine, its = getattr(record, name), getattr(other, name)
        assert mine.dtype == its.dtype and (mine == its).all()
    assert (other.temperature, other.replica) == (0.7, 0)


@pytest.mark.parametrize("factor", [0.5, 0.99, 1.1])
def test_a_scale_of_logits_is_measured_on_either_side(
    generator: TorchGenerator, factor: float
) -> None:
    columns = columns_of()
    right = generator.logprobs(columns)
    scale = changed_head(generator._model, generator.logprobs, lambda *given: given[2] * factor)
    other = scale(columns)
    cause, text = told(generator, compared(columns, other, right))
    assert cause == "scale" and f"were {factor:.3g} times the trainer's" in text
    cause, text = told(generator, compared(columns, right, other))
    assert cause == "scale" and f"were {1 / factor:.3g} times the trainer's" in text


def test_a_trainer_that_knows_no_temperature_is_named(generator: TorchGenerator) -> None:
    columns = columns_of()
    warm = [{**record, "temperature": np.ones((), np.float32)} for record in columns]
    records = compared(columns, generator.logprobs(columns), generator.logprobs(warm))
    assert "know nothing of the temperature 0.7" in told(generator, records)[1]
