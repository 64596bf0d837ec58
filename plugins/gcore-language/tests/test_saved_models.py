"""A model is saved with all that lay beside it, as it came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gcore_language.models import save_model
from gcore_language.prompts import copy_other_files, load_tokenizer
from gcore_language.tiny import save_model as make_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def saved(source: Path, to: Path, dtype: torch.dtype = torch.float32) -> Path:
    model = AutoModelForCausalLM.from_pretrained(source)
    save_model(model, to, dict(model.state_dict()), dtype)
    copy_other_files(str(source), to, load_tokenizer(str(source), None))
    return to


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_model(tmp_path / "source", "llama")
    return tmp_path / "source"


@pytest.mark.parametrize(
    "says",
    [
        {"temperature": 0.6, "top_p": 0.9},
        {"do_sample": False, "temperature": 0.6},
        {"eos_token_id": [1, 2], "do_sample": True, "top_k": 20},
        {"of_another_library": {"a": 1}},
    ],
)
def test_what_says_how_texts_are_generated_is_saved_as_it_came(
    source: Path, tmp_path: Path, says: dict[str, Any]
) -> None:
    (source / "generation_config.json").write_text(json.dumps(says))
    to = saved(source, tmp_path / "to")
    assert (to / "generation_config.json").read_text() == json.dumps(says)


def test_none_is_saved_where_there_was_none(source: Path, tmp_path: Path) -> None:
    (source / "generation_config.json").unlink(missing_ok=True)
    assert not (saved(source, tmp_path / "to") / "generation_config.json").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_config_names_the_type_of_the_tensors(
    source: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    to = saved(source, tmp_path / "to", dtype)
    assert AutoConfig.from_pretrained(to).dtype == dtype
    assert AutoModelForCausalLM.from_pretrained(to, dtype="auto").dtype == dtype


def test_chat_templates_of_every_name_are_saved(source: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(source)
    again = AutoTokenizer.from_pretrained(saved(source, tmp_path / "to"))
    assert again.chat_template == tokenizer.chat_template


def test_what_belongs_to_the_former_weights_is_left(source: Path, tmp_path: Path) -> None:
    left = ("model.safetensors.index.json", "trainer_state.json", "adapter_config.json", "x.onnx")
    kept = (
        "spm.model",
        "chat_template.json",
        "tekken.json",
        "sentencepiece.bpe.model",
        "encoder.json",
    )
    model = AutoModelForCausalLM.from_pretrained(source)
    for name in (*left, *kept):
        (source / name).write_text("{}")
    to = tmp_path / "to"
    save_model(model, to, dict(model.state_dict()), torch.float32)
    copy_other_files(str(source), to, None)
    assert not any((to / name).exists() for name in left)
    assert all((to / name).read_text() == "{}" for name in kept)
