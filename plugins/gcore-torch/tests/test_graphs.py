"""What runs by CUDA graphs on a GPU, computed without graphs on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gcore_language.models import load_model
from gcore_torch import compiling
from gcore_torch.decoder import FusedDecoder, make_decoder
from gcore_torch.graph_decoder import GraphDecoder
from gcore_torch.products import Products
from gcore_torch.replay import rows_of_graph
from gcore_torch.sampling import GraphSampler, choose

pytestmark = pytest.mark.rest

FAMILIES = ("llama", "qwen2", "qwen3")
PLAIN = Products(may_pack=False)


def prompts_of(*lengths: int) -> list[np.ndarray]:
    draw = np.random.default_rng(sum(lengths))
    return [draw.integers(3, 20, length) for length in lengths]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_its_logits_are_those_of_the_fused_decoder_while_rows_come_and_go(
    family: str, compile: bool, model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows join behind a shorter and a longer prompt, leave from the middle, and outgrow the
    cache.
    """
    model = load_model(str(model_dirs[family]), dtype="float32")
    monkeypatch.setattr(compiling, "BACKEND", "eager")  # others need a C++ compiler on a CPU
    decoders = [FusedDecoder(model, 40, PLAIN), GraphDecoder(model, 40, PLAIN, compile=compile)]
    tokens = torch.arange(3, 40)

    def alike(logits: list[torch.Tensor]) -> None:
        np.testing.assert_allclose(logits[0].numpy(), logits[1].numpy(), atol=2e-5)

    alike([d.prefill(prompts_of(5, 9, 2), [2, 1, 3]) for d in decoders])
    for _ in range(3):
        alike([d.advance(tokens[:6] % 19) for d in decoders])
    removed = np.array([False, True, False, True, False, False])
    orders = [d.drop(removed).tolist() for d in decoders]
    assert orders[0] == orders[1]
    alike([d.prefill(prompts_of(30, 4), [1, 30]) for d in decoders])
    for _ in range(60):
        alike([d.advance(torch.arange(35) % 19) for d in decoders])
    for decoder in decoders:
        decoder.clear()
    alike([d.prefill(prompts_of(100), [2]) for d in decoders])
    for _ in range(200):  # beyond the columns of the first cache
        alike([d.advance(tokens[:2]) for d in decoders])


def test_a_full_cache_gives_up_unused_columns_before_it_grows(model_dirs: dict[str, Path]) -> None:
    """Rows of at most 120 tokens come and go for ever in a cache of 128 columns."""
    model = load_model(str(model_dirs["llama"]), dtype="float32")
    decoders = [FusedDecoder(model, 4, PLAIN), GraphDecoder(model, 4, PLAIN)]
    for decoder in decoders:
        decoder.prefill(prompts_of(20), [1])
    for turn in range(8):
        for decoder in decoders:
            decoder.prefill(prompts_of(20 + turn), [1])
        for _ in range(40):
            logits = [d.advance(torch.arange(3, 3 + d.rows)) for d in decoders]
            np.testing.assert_allclose(logits[0], logits[1], atol=2e-5)
        for decoder in decoders:
            if decoder.rows == 2:
                decoder.drop(np.array([True, False]))  # the older one
    assert decoders[1]._cache.shape[4] == 128


def test_it_goes_on_after_it_was_released(model_dirs: dict[str, Path]) -> None:
    model = load_model(str(model_dirs["qwen3"]), dtype="float32")
    decoder = make_decoder(model, "auto", 4, 1e-3, PLAIN, GraphDecoder)
    assert isinstance(decoder, GraphDecoder)
    first = decoder.prefill(prompts_of(7), [2]).clone()
    decoder.clear()
    for _ in range(2):
        decoder.release(weights=True)
    assert decoder.cache_bytes == 0
    decoder.take_weights()
    np.testing.assert_array_equal(decoder.prefill(prompts_of(7), [2]), first)


def test_a_graph_serves_few_more_rows_than_asked_and_never_more_than_there_are() -> None:
    for capacity in (1, 3, 40, 256):
        for rows in range(1, capacity + 1):
            width = rows_of_graph(rows, capacity)
            assert rows <= width <= min(capacity, max(2 * rows, 8), rows + 31)


def sampler_of(vocabulary: int, **settings: Any) -> GraphSampler:
    return GraphSampler(
        8,
        vocabulary,
        torch.float32,
        torch.device("cpu"),
        **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, **settings},
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.6}],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [7, 512, 1700])
def test_it_draws_what_is_drawn_without_blocks(vocabulary: int, settings: dict[str, Any]) -> None:
    sampler = sampler_of(vocabulary, **settings)
    torch.manual_seed(vocabulary)
    draw = np.random.default_rng(0)
    kept = {key: settings[key] for key in ("top_p", "top_k") if key in settings}
    for _ in range(40):
        logits = 3 * torch.randn(5, vocabulary)
        uniform = draw.random(5)
        greedy = draw.random(5) < 0.3
        tokens, logp, margins = choose(
            logits,
            torch.from_numpy(uniform),
            settings.get("temperature", 1.0),
            torch.from_numpy(greedy),
            **kept,
        )
        found, found_logp = sampler(logits, uniform, greedy)
        clear = (margins > 1e-6).numpy()  # from an edge; rounding decides for the others
        np.testing.assert_array_equal(found[clear], tokens.numpy()[clear])
        np.testing.assert_allclose(found_logp[clear], logp.numpy()[clear], atol=1e-6)


def test_no_token_of_no_weight_is_drawn_at_an_edge() -> None:
    """All weight lies on the first token of a block that is followed by nothing."""
    sampler = sampler_of(1024, top_k=1)
    logits = torch.zeros(2, 1024)
    logits[0, 511] = logits[1, 512] = 9.0
    for uniform in (0.0, 0.5, np.nextafter(1.0, 0.0)):
        tokens, _ = sampler(logits, np.full(2, uniform), np.zeros(2, np.bool_))
        assert tokens.tolist() == [511, 512]
