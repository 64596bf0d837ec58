"""The scalar reward model: transformers' own score of each text alone, whatever is in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gcore_language.tiny import CONFIGS, save_model, save_tokenizer
from gcore_testing import ScorerContract
from gcore_testing.contracts.scorer import scored_record
from gcore_torch.config import TorchRewardConfig
from gcore_torch.reward import TorchReward
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    RobertaConfig,
)

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import ScoredRecord

CONTEXT = WorkerContext(role="scorer")
TEXTS = ["1", "12+34", "", "7*8=56,,,,,,", "9" * 40, "1+1=2", "yn", "3-2-1-0"]


def save_classifier(directory: Path, family: str, *, labels: int = 1, pad: int | None = 0) -> None:
    """Random weights and the tokenizer of single characters."""
    torch.manual_seed(3)
    bert = BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        pad_token_id=0,
    )
    config = bert if family == "bert" else CONFIGS[family]()
    config.num_labels, config.pad_token_id = labels, pad
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0 if family == "bert" else 3.0)
    model.save_pretrained(directory)
    save_tokenizer(directory)


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in ("llama", "qwen2", "gpt2", "bert"):
        found[family] = tmp_path_factory.mktemp(family)
        save_classifier(found[family], family)
    return found


def record(text: str, *, messages: bool = False) -> ScoredRecord:
    turns = [{"role": "user", "content": "12+34="}]
    prompt = Prompt(row=0, messages=turns) if messages else Prompt(row=0, text="12+34=")
    return ScoredRecord(
        ordinal=0, sample=0, prompt=prompt, text=text, status="finished", columns={}
    )


def expected(directory: Path, texts: list[str], **tokenizing: Any) -> list[float]:
    """Transformers' forward of each text alone."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        ids = [torch.tensor([tokenizer(text, **tokenizing).input_ids]) for text in texts]
        return [model(input_ids=row).logits.item() for row in ids]


def make(directory: Path, **config: Any) -> TorchReward:
    return TorchReward(TorchRewardConfig(path=str(directory), **config), CONTEXT)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "bert"])
@pytest.mark.parametrize("budget_tokens", [1, 64, 16384])
def test_scores_match_transformers_one_record_at_a_time(
    classifiers: dict[str, Path], family: str, budget_tokens: int
) -> None:
    """1e-6 relative: other batch shapes add up in another order."""
    scores = make(classifiers[family], budget_tokens=budget_tokens).score(
        [record(text) for text in TEXTS]
    )
    found = [score.value for score in scores]
    assert found == pytest.approx(
        expected(classifiers[family], ["12+34=" + t for t in TEXTS]), rel=1e-6, abs=1e-6
    )
    assert len({round(value, 3) for value in found if value is not None}) == len(TEXTS)


def test_chats_go_through_the_tokenizers_template(classifiers: dict[str, Path]) -> None:
    scores = make(classifiers["llama"]).score([record(text, messages=True) for text in TEXTS])
    texts = [f"<bos>12+34={text}:" for text in TEXTS]  # the tiny tokenizer's template
    wanted = expected(classifiers["llama"], texts, add_special_tokens=False)
    assert [score.value for score in scores] == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("pad", [None, 5])
def test_a_missing_padding_token_does_not_change_scores(tmp_path: Path, pad: int | None) -> None:
    """5 is the character "2", which texts may end with: transformers then takes the token before
    for the last.
    """
    save_classifier(tmp_path, "llama", pad=pad)
    texts = [*TEXTS, "112"]
    found = [score.value for score in make(tmp_path).score([record(text) for text in texts])]
    assert found == pytest.approx(
        expected(tmp_path, ["12+34=" + text for text in texts]), rel=1e-6, abs=1e-6
    )


def test_a_text_that_begins_with_the_first_token_has_it_once(classifiers: dict[str, Path]) -> None:
    """As the policy's prompt has it."""
    prompts = [Prompt(row=0, text=text) for text in ("<bos>1+1=", "1+1=")]
    begun, plain = make(classifiers["llama"]).score(
        [replace(record("2"), prompt=prompt) for prompt in prompts]
    )
    assert begun.value == plain.value is not None


def test_a_record_that_is_too_long_fails_alone_and_is_not_cut(classifiers: dict[str, Path]) -> None:
    reward = make(classifiers["llama"], context_length=12)
    first, second = reward.score([record("1" * 6), record("1")])
    assert (first.value, first.reason) == (None, "13 tokens, and the reward model takes 1 to 12")
    assert second.value is not None
    (long,) = make(classifiers["llama"]).score([record("1" * 122)])
    assert long.reason == "129 tokens, and the reward model takes 1 to 128"


def test_a_model_whose_places_begin_behind_padding_takes_fewer_tokens(tmp_path: Path) -> None:
    """RoBERTa's: of 16 places, padding has the one with its id, and the two below it are unused."""
    config = RobertaConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        pad_token_id=2,
        num_labels=1,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    fits, long = make(tmp_path).score([record("1" * 6), record("1" * 7)])
    assert fits.value is not None
    assert long.reason == "14 tokens, and the reward model takes 1 to 13"


def test_a_score_that_is_not_finite_is_a_failure(classifiers: dict[str, Path]) -> None:
    reward = make(classifiers["llama"])
    token = reward._tokenizer("7").input_ids[-1]
    with torch.no_grad():
        reward._model.get_input_embeddings().weight[token] = float("nan")
    bad, good = reward.score([record("7"), record("8")])
    assert (bad.value, bad.status, bad.reason) == (None, "failed", "the reward model gave nan")
    assert good.value is not None


def test_a_chat_without_a_template_is_a_failure(tmp_path: Path) -> None:
    save_classifier(tmp_path, "llama")
    (tmp_path / "chat_template.jinja").unlink()
    chat, text = make(tmp_path).score([record("1", messages=True), record("1")])
    assert chat.value is None and "no chat template" in chat.reason
    assert chat.reason.startswith("row ")
    assert text.value is not None


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    with pytest.raises(
        DataError,
        match=r"model is no reward model\.\n  It lacks score\.weight, which would be random",
    ):
        make(tmp_path)


def test_a_classifier_with_several_outputs_is_refused(tmp_path: Path) -> None:
    save_classifier(tmp_path, "llama", labels=3)
    with pytest.raises(DataError, match="model has 3 outputs; a scalar reward model has one"):
        make(tmp_path)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="model directory does not exist"):
        make(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"path": ""}, "path: no directory"),
        ({"budget_tokens": 0}, "budget_tokens"),
        ({"context_length": 0}, "context"),
    ],
)
def test_a_bad_setting_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TorchRewardConfig(**{"path": "here", **wrong})


class TestTorchReward(ScorerContract):
    provider = "torch"
    tolerance = 1e-5  # float32; other batch shapes add up in another order

    @pytest.fixture
    def scorer(self, context: WorkerContext, classifiers: dict[str, Path]) -> Iterator[Any]:
        yield self.build(context, path=str(classifiers["llama"]))

    @pytest.fixture
    def unscorable(self) -> ScoredRecord:
        """Longer than the model's positions."""
        return scored_record(99, "1" * 500, {})
