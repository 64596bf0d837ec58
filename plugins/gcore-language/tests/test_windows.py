"""Models whose attention sees near tokens alone get log-probs by layouts that keep the window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.flat import family_supported, has_window
from gcore_language.packing import Sample, micro_batches
from gcore_language.policy import Policy, check_layouts
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

CPU = torch.device("cpu")
WINDOW = 8
SIZES: dict[str, Any] = {
    "vocab_size": 22,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
WINDOWED = {
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma3": Gemma3TextConfig(
        **SIZES, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen2": Qwen2Config(
        **SIZES, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=0
    ),
}
WHOLE = {
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "a window of all": MistralConfig(**SIZES, sliding_window=64),
    "not used": Qwen2Config(**SIZES, sliding_window=WINDOW, use_sliding_window=False),
}


def samples() -> list[Sample]:
    """Two of a prompt that is longer than the window."""
    draw = np.random.default_rng(0)
    prompt = draw.integers(3, 22, 3 * WINDOW).astype(np.int32)
    made = []
    for index in range(2):
        columns: dict[str, np.ndarray] = {
            "action_ids": draw.integers(3, 22, 4).astype(np.int32),
            "action_mask": np.ones(4, np.uint8),
            "logp": np.zeros(4, np.float32),
            "temperature": np.ones((), np.float32),
        }
        made.append(Sample(index=index, ordinal=0, prompt=prompt, columns=columns))
    return made


def opened(config: Any) -> Policy:
    torch.manual_seed(0)
    policy = Policy(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    check_layouts(policy, CPU, may_flat=True, tolerance=1e-4)
    return policy


@pytest.mark.parametrize("name", WINDOWED)
def test_every_layout_gives_the_logprobs_of_a_record_alone(name: str) -> None:
    policy = opened(WINDOWED[name])
    given = samples()
    for layout in policy.layouts:
        (batch,) = micro_batches(given, layout, 10**9, CPU)
        with torch.no_grad():
            logp = policy(batch)[0].view(2, -1)
        for place, index in enumerate(batch.index.tolist()):
            ids = np.concatenate([given[index].prompt, given[index].columns["action_ids"]])
            tokens = torch.from_numpy(ids).long()[None]
            with torch.no_grad():
                whole = policy.model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
            alone = whole[-5:-1].gather(1, tokens[0, -4:, None])[:, 0]
            assert (logp[place] - alone).abs().max() < 1e-4, layout


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_that_sees_all_shares_prompts(name: str) -> None:
    assert not has_window(WHOLE[name])
    assert "shared" in opened(WHOLE[name]).layouts


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_change_with_the_length_are_the_models_own(kind: str) -> None:
    more = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8} if kind == "longrope" else {}
    rope = {"rope_theta": 1e4, "rope_type": kind, "factor": 4.0, **more}
    rope |= {"original_max_position_embeddings": 16} if more else {}
    assert not family_supported(LlamaConfig(**SIZES, rope_parameters=rope))
    assert family_supported(LlamaConfig(**SIZES))
