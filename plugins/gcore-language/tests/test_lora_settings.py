"""What ``g-core check`` says of adapters before a process starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gcore_language.lora_settings import LoraSettings, choose_targets, problems
from gcore_language.tiny import save_model

from gcore_core.contract.errors import ConfigError, DataError

WHERE = "roles.policy.config.lora"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_model(directory, "llama")
    return directory


def told(model: Path | str, **lora: Any) -> list[str]:
    role = {"config": {"lora": lora}, "model": {"path": str(model)}}
    return list(problems(role, WHERE))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rank": -1}, "lora.rank: must not be negative"),
        ({"rank": 2, "alpha": 0}, "lora.alpha: must be above 0"),
        ({"rank": 2, "dropout": 0.1}, "lora.dropout: .*other log-probs each time"),
        ({"rank": 2, "load_in_4bit": True}, "lora.load_in_4bit: .*bitsandbytes"),
        ({"rank": 2, "targets": []}, "lora.targets: must be auto or a list"),
        ({"rank": 2, "targets": "q_proj"}, "lora.targets: must be auto or a list"),
        ({"rank": 2, "targets": [3]}, "lora.targets: must be auto or a list"),
        ({"rank": 2, "targets": ["model.embed_tokens"]}, "is an embedding"),
        ({"rank": 2, "targets": ["lm_head"]}, "is an embedding"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_a_reason(
    setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraSettings(**setting)


def test_check_names_a_target_that_the_models_files_do_not_have(model: Path) -> None:
    assert told(model, rank=2, targets=["q_proj", "layers.1.mlp.down_proj"]) == []
    assert told(model, rank=2) == told(model) == told("no/such/model", rank=2) == []
    (problem,) = told(model, rank=2, targets=["q_porj"])
    assert problem.startswith(f"{WHERE}.targets: the model has no linear layer 'q_porj'")
    assert "did you mean 'q_proj'?" in problem and "down_proj" in problem


def test_a_quantised_base_is_left_to_the_look_at_the_model(model: Path, tmp_path: Path) -> None:
    """It has no matrices by the names of its layers, which is not what is wrong with it."""
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    assert told(tmp_path, rank=2, targets=["q_porj"]) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"use_dora": True}, "It sets use_dora"),
        ({"bias": "all"}, "It sets bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "It sets init_lora_weights"),
        ({"init_lora_weights": "olora"}, "It sets init_lora_weights"),
        ({"alora_invocation_tokens": [1, 2]}, "It sets alora_invocation_tokens"),
        ({"of_a_later_version": {"on": True}}, "It sets of_a_later_version"),
        ({"rank_pattern": {"q_proj": 4}}, "It sets rank_pattern"),
        ({"peft_type": "IA3"}, "peft_type is IA3"),
        ({"r": "many"}, "no adapter in peft's layout"),
        ({"target_modules": ["k_porj"]}, "no linear layer 'k_porj'"),
    ],
)
def test_check_reads_the_adapter_that_is_gone_on_from(
    change: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    found = told(model, path=str(tmp_path))
    assert (message in found[0]) if message else found == []
    if not message:
        (problem,) = told(model, path=str(tmp_path), rank=3)
        assert "the adapter has rank 2" in problem
        (problem,) = told(model, path=str(tmp_path / "nowhere"))
        assert problem == f"{WHERE}.path: there is no directory {tmp_path / 'nowhere'}."


def test_auto_takes_every_linear_layer_but_the_output(model: Path) -> None:
    linear = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "lm_head"]
    assert choose_targets("auto", linear, WHERE) == linear[:2]
    assert choose_targets(["up_proj"], linear, WHERE) == linear[1:2]
    with pytest.raises(ConfigError, match="no linear layer 'proj'"):
        choose_targets(["proj"], linear, WHERE)  # a part of a name is none of its ends


def test_the_base_is_named_as_g_core_hash_names_it(model: Path) -> None:
    """And a single bit of its weights changes the name."""
    from gcore_language.model_files import weights_sha256

    from gcore_core.run.saved_weights import weights_sha256 as of_the_core

    assert weights_sha256(model) == of_the_core(model)
    before = weights_sha256(model)
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert weights_sha256(model) != before
    file.write_bytes(content[:-4])
    with pytest.raises(DataError, match="half written"):
        weights_sha256(model)
