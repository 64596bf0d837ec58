"""Layers that are computed again in the backward pass drop nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gcore_language.models import enable_checkpointing
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

SIZES: dict[str, Any] = {"vocab_size": 22, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, hidden_size=32, intermediate_size=32, attention_dropout=0.5),
        GPT2Config(**SIZES, hidden_size=32, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5),
    ],
    ids=["a number", "modules"],
)
def test_a_model_that_was_trained_with_dropout_computes_the_same_twice(config: Any) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids = torch.arange(22)[None]
    expected = model.eval()(ids).logits
    enable_checkpointing(model)
    assert model.training
    assert torch.equal(model(ids).logits, expected)
