"""Log-probs of a large vocabulary are computed in slices of actions, and are the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gcore_language import policy
from gcore_language.policy import Entropy

ACTIONS, WIDTH, WORDS = 37, 8, 50
#: Sums over actions in another order, in float64.
ROUNDING = 1e-10


def _inputs() -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(ACTIONS, WIDTH, generator=draw, dtype=torch.float64)
    weight = torch.randn(WORDS, WIDTH, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, WORDS, (ACTIONS, 3), generator=draw)
    temperature = 0.5 + torch.rand(ACTIONS, generator=draw, dtype=torch.float64)
    return hidden, weight, targets, temperature


def _expected(entropy: Entropy) -> list[Any]:
    """Computes log-probs, entropies and the gradients of a sum of both from all logits at once."""
    hidden, weight, targets, temperature = _inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    logp = ((hidden @ weight.T) / temperature[:, None]).log_softmax(1)
    entropies = -(logp.exp() * logp).sum(1)
    value = logp.gather(1, targets).square().sum()
    if entropy == "gradient":
        value = value + entropies.square().sum()
    value.backward()
    return [logp.gather(1, targets), entropies, hidden.grad, weight.grad]


@pytest.mark.parametrize("entropy", ["none", "metric", "gradient"])
def test_slices_give_the_log_probs_entropies_and_gradients_of_all_logits_at_once(
    entropy: Entropy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more logits than the limit are computed at once."""
    monkeypatch.setattr(policy, "_CHUNK_LOGITS", 16 * WORDS)
    hidden, weight, targets, temperature = _inputs()
    hidden.requires_grad_()
    head = torch.nn.Linear(WIDTH, WORDS, bias=False, dtype=torch.float64)
    head.weight.data.copy_(weight)
    seen = []
    head.register_forward_hook(lambda *given: seen.append(given[-1].numel()))
    batch: Any = SimpleNamespace(temperature=temperature)
    logp, entropies = policy._head_logp(head, hidden, batch, entropy, targets)
    value = logp.square().sum()
    if entropies is not None and entropy == "gradient":
        value = value + entropies.square().sum()
    value.backward()
    expected = _expected(entropy)
    for found, wanted in zip(
        [logp, hidden.grad, head.weight.grad], [expected[0], *expected[2:]], strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=ROUNDING, atol=ROUNDING)
    if entropies is None:
        assert entropy == "none"
    else:
        torch.testing.assert_close(entropies, expected[1], rtol=ROUNDING, atol=ROUNDING)
    assert max(seen) <= 16 * WORDS
    assert len(seen) == 6, "three slices, each of them twice"
