"""Twins: the same type of model and kind of tokenizer, and nothing of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gcore_language.twins import twin_of_generator, twin_of_model, twin_of_reward, twin_of_role

from gcore_core.contract.errors import ConfigError

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    # and what else stands in a file on the hub
    "architectures": ["MixtralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
}


def config_of(model: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((model / "config.json").read_text())
    return config


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B"])
def test_a_twin_loads_and_reads_chats(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    twin = twin_of_model({"path": name}, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(twin)
    tokenizer = AutoTokenizer.from_pretrained(twin)
    assert config_of(twin)["model_type"] == ("qwen3" if "3-" in name else "qwen2")
    assert sum(weight.numel() for weight in model.parameters()) < 200_000
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Où?"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert tokenizer.decode(ids).endswith("Où?<|im_end|>\n<|im_start|>assistant\n")
    assert max(ids) < model.config.vocab_size
    assert twin_of_model({"path": name}, tmp_path) == twin


def test_a_model_of_another_family_keeps_its_experts_and_its_kind_of_tokenizer(
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "config.json").write_text(json.dumps(MIXTRAL))
    twin = twin_of_model({"path": str(tmp_path / "original")}, tmp_path / "twins")
    config = config_of(twin)
    assert config["model_type"] == "mixtral" and config["num_local_experts"] == 4
    assert config["tie_word_embeddings"] is False
    tokenizer = AutoTokenizer.from_pretrained(twin)
    text = "two words, ünï"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "▁" in "".join(tokenizer.convert_ids_to_tokens(tokenizer.encode(text)))


def test_a_reward_model_that_is_not_made_yet_is_like_the_policy(tmp_path: Path) -> None:
    missing = str(tmp_path / "weights")
    node = {"config": {"path": missing}, "like": {"path": "Qwen/Qwen3-0.6B"}}
    changes = twin_of_reward(node, tmp_path / "twins")
    assert config_of(Path(changes["config"]["path"]))["architectures"] == [
        "Qwen3ForSequenceClassification"
    ]
    with pytest.raises(ConfigError, match="there is no twin of"):
        twin_of_reward({"config": {"path": missing}}, tmp_path / "twins")


def test_a_context_as_long_as_the_model_allows_is_a_twin_s_longest(tmp_path: Path) -> None:
    changes = twin_of_role({"config": {"context_length": None}}, tmp_path)
    assert changes == {"config": {"context_length": 2048}}


def test_a_role_is_whole_and_its_answers_are_short(tmp_path: Path) -> None:
    config: dict[str, Any] = {"tensor_parallel": 4, "max_new_tokens": 4096, "temperature": 0.7}
    config |= {"budget_tokens": 9, "sharding": {"tensor": 4}}
    changes = twin_of_role({"config": config}, tmp_path)
    assert changes == {
        "config": {
            "tensor_parallel": 1,
            "sharding": {"replicas": 1, "tensor": 1, "experts": 1},
            "max_new_tokens": 16,
            "budget_tokens": 4096,
        }
    }
    assert twin_of_generator({}, tmp_path)["config"] == {
        "max_new_tokens": 16,
        "context_length": 2048,
    }
