"""Log-probs are those of transformers and of the trainer; models of other tokens are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_algorithms.teacher.annotator import FrozenModel
from gcore_algorithms.teacher.config import TOP_IDS, TOP_LOGP, FrozenModelConfig
from gcore_language import tiny as tokenizers
from gcore_language.sequences import rows_of
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.trainer import TorchTrainer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError, GcoreError
from gcore_core.contract.trainer import TrainRecord
from tests.support import language_models as tiny

#: Float32 in another order of additions: another layout, another batch.
ROUNDING = 1e-5
TEACHER = ("teacher_logp", TOP_IDS, TOP_LOGP)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Gives directories of two models of one tokenizer, and of models that do not fit them."""
    root = tmp_path_factory.mktemp("models")
    for name, seed in (("policy", 0), ("teacher", 1)):
        tiny.save_model(root / name, "llama", seed=seed)
    tiny.save_model(root / "gpt2", "gpt2")
    tiny.save_model(root / "other-words", "llama")
    file = root / "other-words" / "tokenizer.json"
    parsed = json.loads(file.read_text())
    words = parsed["model"]["vocab"]
    words["7"], words["8"] = words["8"], words["7"]
    file.write_text(json.dumps(parsed))
    tiny.save_model(root / "broken", "llama")
    weights = load_file(root / "broken" / "model.safetensors")
    weights["lm_head.weight"][5] = 3e38  # finite, but what it is multiplied with is not
    save_file(weights, root / "broken" / "model.safetensors", metadata={"format": "pt"})
    return {path.name: path for path in root.iterdir()}


def frozen(
    models: dict[str, Path],
    name: str = "teacher",
    columns: tuple[str, ...] = ("teacher_logp",),
    deterministic: bool = False,
    **settings: Any,
) -> FrozenModel:
    context = WorkerContext(
        role="reference" if columns == ("ref_logp",) else "teacher",
        model={"path": str(models[name])} if name else {},
        columns=columns,
        policy={"path": str(models["policy"])},
        deterministic=deterministic,
    )
    return FrozenModel(FrozenModelConfig(**settings), context)


def whole_logp(directory: Path, record: TrainRecord) -> torch.Tensor:
    """Returns transformers' log-probs of all tokens at each action, float32[A, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    columns = record.columns
    ids = np.concatenate([columns["prompt_ids"], columns["action_ids"]]).astype(np.int64)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None]).logits[0, len(columns["prompt_ids"]) - 1 : -1]
    return (logits / float(columns["temperature"])).log_softmax(-1)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("teacher", {}),
        ("teacher", {"packing": "shared_prompt"}),
        ("teacher", {"packing": "padded", "budget_tokens": 20}),
        ("teacher", {"rest": "host"}),
        ("gpt2", {}),
    ],
)
def test_columns_are_transformers_log_probs_at_the_records_temperature(
    name: str, settings: dict[str, Any], models: dict[str, Path]
) -> None:
    records = tiny.make_records()
    model = frozen(models, name, TEACHER, top_k=5, **settings)
    for record, columns in zip(records, model.annotate(records), strict=True):
        expected = whole_logp(models[name], record)
        actions = torch.from_numpy(record.columns["action_ids"].astype(np.int64))
        top = expected.topk(5, dim=1)
        taken = expected.gather(1, actions[:, None])[:, 0]
        np.testing.assert_allclose(columns["teacher_logp"], taken, rtol=0, atol=ROUNDING)
        np.testing.assert_allclose(columns[TOP_LOGP], top.values, rtol=0, atol=ROUNDING)
        assert (columns[TOP_IDS] == top.indices.numpy()).all()


def test_a_record_of_two_sequences_is_read_as_two_and_given_one_column(
    models: dict[str, Path],
) -> None:
    (record,) = [one for one in tiny.make_records() if len(one.columns["action_ids"]) > 4][:1]
    columns = record.columns
    split = len(columns["action_ids"]) - 2
    table = np.array([[0, -1, len(columns["prompt_ids"])], [split, 0, 2]], np.int32)
    forked = replace(record, columns={**columns, "sequences": table})
    model = frozen(models, "teacher", TEACHER, top_k=5)
    (whole,) = model.annotate([forked])
    rows = [replace(record, columns=row) for row in rows_of(forked.columns)]
    assert rows[1].columns["prompt_ids"].tolist() == columns["prompt_ids"][:2].tolist()
    expected = np.concatenate([whole_logp(models["teacher"], row).topk(5).values for row in rows])
    np.testing.assert_allclose(whole[TOP_LOGP], expected, rtol=0, atol=ROUNDING)
    assert whole[TOP_IDS].shape == (len(columns["action_ids"]), 5)
    assert whole["teacher_logp"].shape == columns["action_ids"].shape


def trainers_reference(
    models: dict[str, Path], records: list[TrainRecord], deterministic: bool
) -> list[np.ndarray]:
    """Returns float32[A] of each record, as the trainer's own reference gives them."""
    context = tiny.make_context(models["policy"], tiny.Clip(beta=0.1), deterministic=deterministic)
    trainer = TorchTrainer(TorchTrainerConfig(reference=True), context)
    trainer.prepare(records, frozenset())
    assert trainer._prepared is not None
    found: list[np.ndarray] = [np.zeros(0)] * len(records)
    for batch in filter(None, trainer._prepared.all()):
        lengths = [len(records[place].columns["action_ids"]) for place in batch.index]
        parts = np.split(batch.columns["ref_logp"].numpy(), np.cumsum(lengths)[:-1])
        for place, part in zip(batch.index.tolist(), parts, strict=True):
            found[place] = part
    return found


def test_in_a_deterministic_run_the_reference_has_the_bits_of_the_trainers_own(
    models: dict[str, Path],
) -> None:
    """Whatever tiles the trainer packs by, and whichever records one worker gets."""
    records = [
        replace(record, tile=place % 3, minibatch=place % 2)
        for place, record in enumerate(tiny.make_records(6, 4))
    ]
    own = trainers_reference(models, records, deterministic=True)
    model = frozen(models, "", ("ref_logp",), deterministic=True)
    given = [*model.annotate(records[:7]), *model.annotate(records[7:][::-1])[::-1]]
    for columns, expected in zip(given, own, strict=True):
        np.testing.assert_array_equal(columns["ref_logp"], expected)


def test_otherwise_the_reference_is_the_trainers_own_but_for_rounding(
    models: dict[str, Path],
) -> None:
    records = tiny.make_records(6, 4)
    own = trainers_reference(models, records, deterministic=False)
    given = frozen(models, "policy", ("ref_logp",)).annotate(records)
    for columns, expected in zip(given, own, strict=True):
        np.testing.assert_allclose(columns["ref_logp"], expected, rtol=0, atol=ROUNDING)


def test_a_token_that_only_the_policy_embeds_is_named(models: dict[str, Path]) -> None:
    record, other = tiny.make_records(1, 2)
    actions = record.columns["action_ids"].copy()
    actions[-1] = tiny.VOCABULARY
    columns = {**record.columns, "action_ids": actions}
    with pytest.raises(DataError) as caught:
        frozen(models).annotate([other, replace(record, columns=columns)])
    assert "a record has the token 22, and the model embeds 22" in str(caught.value)
    assert "take a teacher that embeds as many tokens as the policy" in str(caught.value).lower()


def test_a_record_without_actions_has_empty_columns(models: dict[str, Path]) -> None:
    (record,) = tiny.make_records(1, 1)
    columns = {**record.columns, "action_ids": np.zeros(0, np.int32)}
    columns |= {"action_mask": np.zeros(0, np.uint8), "logp": np.zeros(0, np.float32)}
    (given,) = frozen(models, "teacher", TEACHER, top_k=3).annotate(
        [replace(record, columns=columns)]
    )
    assert {name: column.shape for name, column in given.items()} == {
        "teacher_logp": (0,),
        TOP_IDS: (0, 3),
        TOP_LOGP: (0, 3),
    }


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        ({"name": "other-words"}, DataError, "2 of the policy's 22 tokens have another id or none"),
        (
            {"name": "other-words", "columns": TEACHER, "top_k": 2},
            DataError,
            "neither log-probs of actions nor likeliest tokens can be compared",
        ),
        (
            {"name": "other-words", "columns": ("ref_logp",)},
            DataError,
            "take a reference of the policy's family",
        ),
        (
            {"columns": TEACHER, "top_k": 23},
            ConfigError,
            "23 likeliest tokens are more than the 22 that both models have",
        ),
        ({"name": ""}, ConfigError, "no model is given"),
    ],
)
def test_a_model_that_does_not_fit_the_policy_is_refused_at_its_start(
    make: dict[str, Any], error: type[GcoreError], message: str, models: dict[str, Path]
) -> None:
    with pytest.raises(error, match=message):
        frozen(models, **make)


def test_tokenizers_of_one_vocabulary_that_split_texts_differently_are_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Such as two that have the same words and other merges."""
    tiny.save_model(tmp_path / "splits", "llama")
    file = tmp_path / "splits" / "tokenizer.json"
    parsed = json.loads(file.read_text())
    parsed["pre_tokenizer"] = {"type": "Whitespace"}
    file.write_text(json.dumps(parsed))
    with pytest.raises(DataError, match="they encode .* differently"):
        frozen({**models, "splits": tmp_path / "splits"}, "splits")


def test_a_teacher_may_know_more_tokens_and_gives_those_of_the_policy(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Its unused tokens keep their probability, so that of the policy's tokens is below 1."""
    torch.manual_seed(0)
    config = tokenizers.CONFIGS["llama"]()
    config.vocab_size = tiny.VOCABULARY + 3
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wide")
    tokenizers.save_tokenizer(tmp_path / "wide", extra=3)
    wide = {**models, "wide": tmp_path / "wide"}
    records = tiny.make_records(2, 2)
    model = frozen(wide, "wide", TEACHER, top_k=tiny.VOCABULARY)
    for columns in model.annotate(records):
        assert columns[TOP_IDS].max() < tiny.VOCABULARY
        assert (np.exp(columns[TOP_LOGP]).sum(1) < 0.99).all()


def test_ids_without_a_token_are_never_among_the_likeliest(tmp_path: Path) -> None:
    """Although both models have them, and the teacher holds them for likely."""
    models = {name: tmp_path / name for name in ("policy", "teacher")}
    for seed, directory in enumerate(models.values()):
        tokenizers.save_model(directory, "llama", seed=seed, untold=20)
    given = frozen(models, "teacher", TEACHER, top_k=5).annotate(tiny.make_records(2, 2))
    for columns in given:
        assert columns[TOP_IDS].max() < tiny.VOCABULARY
        assert (np.exp(columns[TOP_LOGP]).sum(1) < 0.99).all()


@pytest.mark.parametrize("columns", [("teacher_logp",), TEACHER])
def test_log_probs_that_are_not_finite_name_the_model(
    columns: tuple[str, ...], models: dict[str, Path]
) -> None:
    model = frozen(models, "broken", columns, top_k=2)
    with pytest.raises(DataError, match="is not finite") as caught:
        model.annotate(tiny.make_records(1, 1))
    assert str(models["broken"]) in str(caught.value)
