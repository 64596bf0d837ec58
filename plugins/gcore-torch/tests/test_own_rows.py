"""Ranks read their own rows of a model, and get what they would keep of the whole one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gcore_language.models import load_model
from gcore_language.own_rows import OwnRows
from gcore_language.tiny import CONFIGS, VOCABULARY, save_image_model, save_model
from gcore_testing.runs import run_together
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from tests.support import own_rows_ranks

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def save_experts(directory: Path) -> None:
    """Writes models with five experts, which two or four ranks cannot share evenly."""
    qwen = Qwen3MoeConfig(
        **_SIZES, head_dim=16, num_experts=5, moe_intermediate_size=24, num_experts_per_tok=2
    )
    mixtral = MixtralConfig(**_SIZES, num_local_experts=5, num_experts_per_tok=2)
    for name, config in {"qwen3_moe": qwen, "mixtral": mixtral}.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / name)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("models")
    for family in CONFIGS.keys() - {"llama-head16"}:
        save_model(room / family, family)
    save_image_model(room / "qwen2_vl")
    save_experts(room)
    half = load_model(str(room / "qwen3"), dtype="bfloat16")
    half.save_pretrained(room / "qwen3 in bfloat16", max_shard_size="50KB")
    return room


@pytest.mark.slow
def test_rows_that_ranks_read_are_bit_for_bit_those_of_the_whole_model(
    models: Path, tmp_path: Path
) -> None:
    """Of every tensor and buffer, of policies, adapters and value heads, on 2 and 4 ranks."""
    given = [str(models), str(tmp_path)]
    ranks = range(own_rows_ranks.RANKS)
    run_together([["-m", own_rows_ranks.__name__, str(rank), *given] for rank in ranks])
    for rank in ranks:
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {case: differing for case, differing in found.items() if differing} == {}
        assert len(found) >= 14, f"rank {rank} compared {sorted(found)}"


def test_a_tensor_of_another_shape_is_said_to_be_lacking(models: Path, tmp_path: Path) -> None:
    model = load_model(str(models / "qwen2"), dtype="float32", empty=True)
    assert OwnRows(models / "qwen2").lacks(model) == []
    assert "model.embed_tokens.weight" in OwnRows(models / "llama").lacks(model)
