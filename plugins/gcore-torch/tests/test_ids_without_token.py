"""Ids that no token has are never sampled, and log-probs stay those that a trainer computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.tiny import VOCABULARY, save_model
from gcore_torch.config import TorchGeneratorConfig
from gcore_torch.generator import TorchGenerator
from gcore_torch.sampling import choose, choose_by_blocks
from transformers import AutoModelForCausalLM

from tests.support import language_models as tiny

WITHOUT = 40


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with more rows than their tokenizer has tokens, those without one often likeliest."""
    directories = {}
    for family in ("llama", "gpt2"):
        directories[family] = tmp_path_factory.mktemp(family)
        save_model(directories[family], family, untold=WITHOUT)
    return directories


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}])
def test_no_sample_has_an_id_without_a_token(
    padded: dict[str, Path], family: str, deterministic: bool, settings: dict[str, Any]
) -> None:
    context = tiny.make_context(padded[family], deterministic=deterministic)
    generator = TorchGenerator(TorchGeneratorConfig(max_new_tokens=12, **settings), context)
    generator.submit(tiny.make_requests(groups=4, samples=4))
    model = AutoModelForCausalLM.from_pretrained(padded[family], dtype=torch.float32)
    for record in tiny.drain(generator):
        assert record.columns["action_ids"].max() < VOCABULARY
        with torch.no_grad():
            logp, _ = tiny.logp_of(model, record)
        np.testing.assert_allclose(record.columns["logp"], logp, atol=5e-5)


def test_the_likeliest_of_those_with_a_token_is_taken(padded: dict[str, Path]) -> None:
    generator = TorchGenerator(TorchGeneratorConfig(), tiny.make_context(padded["llama"]))
    generator.submit(tiny.make_requests(groups=8, samples=1, greedy=True))
    model = AutoModelForCausalLM.from_pretrained(padded["llama"], dtype=torch.float32)
    others = 0
    for record in tiny.drain(generator):
        ids = np.concatenate([record.columns["prompt_ids"], record.columns["action_ids"][:1]])
        with torch.no_grad():
            logits = model(torch.from_numpy(ids[None, :-1].astype(np.int64))).logits[0, -1]
        assert ids[-1] == int(logits[:VOCABULARY].argmax())
        others += int(logits.argmax()) >= VOCABULARY
    assert others, "else the test shows nothing"


@pytest.mark.parametrize("draw", [choose, choose_by_blocks])
def test_what_may_be_drawn_is_drawn_as_often_as_without_the_others(draw: Any) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 12)
    allowed = torch.tensor([True, False] * 6)
    draws = torch.linspace(0, 1, 20001, dtype=torch.float64)[:-1]
    greedy = torch.zeros(20000, dtype=torch.bool)
    tokens, logp, *_ = draw(logits.expand(20000, 12), draws, 1.0, greedy, allowed=allowed)
    shares = torch.bincount(tokens, minlength=12) / 20000
    expected = logits[0].masked_fill(~allowed, -torch.inf).softmax(-1)
    torch.testing.assert_close(shares, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(logp, logits[0].log_softmax(-1)[tokens])


@pytest.mark.parametrize("draw", [choose, choose_by_blocks])
def test_one_that_may_be_drawn_is_drawn_however_unlikely_it_is(draw: Any) -> None:
    logits = torch.tensor([[500.0, -500.0, 500.0]]).expand(4, 3)
    allowed = torch.tensor([False, True, False])
    draws = torch.tensor([0.0, 0.3, 0.9, 1 - 2.0**-53], dtype=torch.float64)
    greedy = torch.tensor([False, False, True, False])
    tokens, *_ = draw(logits, draws, 1.0, greedy, allowed=allowed)
    assert tokens.tolist() == [1] * 4
