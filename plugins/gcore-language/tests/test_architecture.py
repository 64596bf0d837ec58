"""What a config.json alone says of a model's size."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from gcore_language.architecture import UnknownSizes, architecture_of, read_architecture
from gcore_language.published import PUBLISHED

from tests.support.known_models import KNOWN, KnownModel


@pytest.mark.parametrize("model", KNOWN, ids=lambda model: model.name)
def test_a_known_models_parameters_are_as_many_as_published(model: KnownModel) -> None:
    """To the last one: they are counted, not estimated."""
    assert architecture_of(model.config).parameters == model.parameters


def test_of_a_sparse_model_the_experts_that_compute_a_token_are_active() -> None:
    active = {model.name: architecture_of(model.config).active_parameters for model in KNOWN}
    assert round(active["Mixtral-8x7B"] / 1e9, 1) == 12.9
    assert round(active["Qwen3-235B-A22B"] / 1e9, 1) == 22.2
    assert active["Llama-3.1-8B"] == 8_030_261_248


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_ranks_of_a_trainer_hold_all_parameters_together(ranks: int) -> None:
    model = architecture_of(KNOWN[0].config)
    assert model.parameters <= ranks * model.of_rank(ranks) <= model.parameters * 1.01


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_count_is_that_of_the_model_that_transformers_makes(kind: str, tied: bool) -> None:
    import torch
    from gcore_language.tiny import CONFIGS
    from transformers import AutoModelForCausalLM

    config = CONFIGS[kind]()
    config.tie_word_embeddings = tied
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    plain = json.loads(config.to_json_string(use_diff=False))
    assert architecture_of(plain).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is none of llama"),
        ({"text_config": {}}, "takes images"),
        ({"hidden_size": None}, "hidden_size is None, not a positive number"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ],
)
def test_sizes_that_cannot_be_told_are_unknown_with_a_reason(
    change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnknownSizes, match=reason):
        architecture_of({**KNOWN[0].config, **change})


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "has no config.json"), ("{", "is not JSON"), ("[]", "is no mapping")],
)
def test_a_directory_without_a_whole_config_is_unknown(
    text: str | None, reason: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnknownSizes, match=reason):
        read_architecture({"path": str(tmp_path)})


def test_a_model_that_is_named_on_the_hub_is_read_from_the_hubs_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UnknownSizes, match="neither a directory nor in the hub's cache"):
        read_architecture({"path": "someone/model"})
    repository = tmp_path / "models--someone--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text(json.dumps(KNOWN[0].config))
    assert read_architecture({"path": "someone/model"}).parameters == KNOWN[0].parameters


@pytest.mark.parametrize(
    ("model", "reason"),
    [({}, "no model.path is given"), ({"make": {}}, "the run makes this model first")],
)
def test_a_role_without_a_model_directory_is_unknown(model: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnknownSizes, match=reason):
        read_architecture(model)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_sizes_that_are_known_by_name_make_a_model_of_that_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly where its number of parameters is at hand, else as its name says: 0.6B is 0.60e9."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    if "text_config" in PUBLISHED[name]:
        with pytest.raises(UnknownSizes, match="language part"):
            read_architecture({"path": name})
        return
    model = read_architecture({"path": name})
    exact = {known.name: known.parameters for known in KNOWN}
    own = name.partition("/")[2].removesuffix("-Instruct")
    if own in exact:
        assert model.parameters == exact[own]
    size = re.search(r"-(\d+(?:\.\d+)?)B", own)
    assert size and model.parameters == pytest.approx(float(size[1]) * 1e9, rel=0.1)
