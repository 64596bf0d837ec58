"""What a user may have got wrong is told before vLLM starts; none of these tests needs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gcore_vllm.adapter import open_adapter
from gcore_vllm.config import VllmGeneratorConfig
from gcore_vllm.engine import VllmGenerator

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError, PluginBroken

pytest.importorskip("torch")

SHAPES = {f"model.layers.0.mlp.{name}_proj.weight": (8, 4) for name in ("up", "gate")}


def make(model: Path | str, **settings: object) -> VllmGenerator:
    config = VllmGeneratorConfig(**settings)  # type: ignore[arg-type]
    return VllmGenerator(config, WorkerContext(role="rollout", model={"path": str(model)}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from gcore_language.tiny import save_model

    save_model(tmp_path / "model", "llama")
    return tmp_path / "model"


def test_a_missing_model_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="/no/such/model: model directory does not exist"):
        make("/no/such/model")
    with pytest.raises(DataError, match=r"has no config\.json"):
        make(tmp_path)
    with pytest.raises(
        ConfigError, match=r"roles\.rollout\.model\.path: no model directory is given"
    ):
        make("")


def test_a_half_written_model_is_reported(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        DataError,
        match=r"(?s)model\.safetensors: model directory is damaged.*file not fully covered",
    ):
        make(model)


def test_a_model_without_tokenizer_is_reported(model: Path) -> None:
    for file in model.glob("token*"):
        file.unlink()
    with pytest.raises(DataError, match=f"{model}: transformers cannot load the tokenizer"):
        make(model)


def test_a_tokenizer_of_another_model_is_reported(model: Path) -> None:
    from gcore_language.tiny import VOCABULARY, save_tokenizer

    save_tokenizer(model, extra=3)
    with pytest.raises(
        DataError, match=f"has {VOCABULARY + 3} tokens, but the model embeds only {VOCABULARY}"
    ):
        make(model)


@pytest.mark.parametrize("missing", ["transformers", "vllm"])
def test_a_missing_engine_is_reported(
    missing: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (missing, "vllm.platforms"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        PluginBroken, match=f"(?s)vLLM cannot be imported here.*{missing}.*g-core venv create vllm"
    ):
        make(model)


def test_an_engine_that_fails_to_import_is_reported(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As it does where torchvision is a build for CUDA and torch is not."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    for name in ("vllm", "vllm.platforms"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        PluginBroken, match="(?s)vLLM cannot be imported here.*torchvision::nms does not exist"
    ):
        make(model)


def test_an_incomplete_adapter_is_reported(
    model: Path, tmp_path: Path, save_adapter: Callable[..., Path]
) -> None:
    with pytest.raises(DataError, match="/no/such/adapter: adapter directory does not exist"):
        make(model, lora_path="/no/such/adapter")
    with pytest.raises(DataError, match=r"adapter directory has no adapter_config\.json"):
        make(model, lora_path=str(tmp_path))
    found = save_adapter(tmp_path / "adapter", model)
    file = found / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        DataError, match=r"adapter_model\.safetensors: adapter is damaged or half written"
    ):
        make(model, lora_path=str(found))
    file.unlink()
    with pytest.raises(DataError, match=r"adapter directory has no adapter_model\.safetensors"):
        make(model, lora_path=str(found))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "adapter config is not readable"),
        ('{"r": 8}', "(?s)adapter config is not readable.*peft_type"),
        ('{"peft_type": "LORA", "r": null}', "adapter config is not readable"),
        ('{"peft_type": "LORA", "r": 0}', r"(?s)vLLM does not support this adapter.*ranks \[0\]"),
        ('{"peft_type": "IA3", "r": 8}', "(?s)vLLM does not support this adapter.*peft_type 'IA3'"),
        (
            '{"peft_type": "LORA", "r": 8, "rank_pattern": {"q_proj": 513}}',
            "adapter has rank 513, vLLM takes 512 at",
        ),
    ],
)
def test_an_unsupported_adapter_is_reported(config: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(DataError, match=message):
        open_adapter(str(tmp_path), SHAPES)


def test_an_adapter_of_another_model_is_reported(
    model: Path, tmp_path: Path, save_adapter: Callable[..., Path]
) -> None:
    """vLLM would take one of a smaller model in silence."""
    found = str(save_adapter(tmp_path / "adapter", model))
    whole = {
        f"model.layers.{layer}.{part}_proj.weight": (outputs, inputs)
        for layer in range(2)
        for part, outputs, inputs in (
            *((f"self_attn.{name}", 64, 64) for name in "qkvo"),
            *((f"mlp.{name}", 96, 64) for name in ("gate", "up")),
            ("mlp.down", 64, 96),
        )
    }
    assert open_adapter(found, whole).max_rank == 8
    first_layer = {name: shape for name, shape in whole.items() if "layers.0" in name}
    with pytest.raises(
        DataError, match=r"adapter is for model\.layers\.1\.\w+\.\w+, which the model does not have"
    ):
        open_adapter(found, first_layer)
    wider = whole | {"model.layers.0.mlp.down_proj.weight": (64, 97)}
    with pytest.raises(
        DataError,
        match=r"another model: .*down_proj\.lora_A\.weight has 96 .* where the model has 97",
    ):
        open_adapter(found, wider)


def test_the_largest_rank_of_single_modules_is_the_adapter_rank(
    tmp_path: Path, model: Path, save_adapter: Callable[..., Path]
) -> None:
    found = save_adapter(tmp_path / "adapter", model)
    config = json.loads((found / "adapter_config.json").read_text())
    (found / "adapter_config.json").write_text(
        json.dumps({**config, "rank_pattern": {"q_proj": 65}})
    )
    from gcore_language.model_files import open_model_files

    shapes = open_model_files(WorkerContext(role="rollout", model={"path": str(model)})).shapes
    assert open_adapter(str(found), shapes).max_rank == 128
