"""AdamW never moves a weight further than its bound, whatever the gradients are."""

from __future__ import annotations

import pytest
import torch
from gcore_language.update_checks import adamw_bound


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.95, 0.9), (0.0, 0.0), (0.0, 0.9)])
def test_no_gradients_move_a_weight_further_than_the_bound(betas: tuple[float, float]) -> None:
    """Gradients that grow as the bound's proof says come near it, others stay below."""
    updates = 60
    first, second = betas
    growth = second / first if first else 1.0
    grown = torch.tensor([growth**i for i in range(updates)], dtype=torch.float64)
    drawn = torch.randn(updates, 1000, dtype=torch.float64).exp()
    for gradients in (grown[:, None], drawn, torch.ones(updates, 1, dtype=torch.float64)):
        weight = torch.nn.Parameter(torch.zeros(gradients.shape[1], dtype=torch.float64))
        optimizer = torch.optim.AdamW([weight], lr=1.0, betas=betas, eps=1e-300, weight_decay=0.0)
        for update, gradient in enumerate(gradients, 1):
            before = weight.detach().clone()
            weight.grad = gradient.clone()
            optimizer.step()
            moved = float((weight.detach() - before).abs().max())
            assert moved <= adamw_bound(betas, update) * (1 + 1e-9)


def test_the_bound_is_reached() -> None:
    """By gradients that grow by b2 / b1 from update to update."""
    updates, betas = 40, (0.9, 0.999)
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=1.0, betas=betas, eps=1e-300, weight_decay=0.0)
    moved = 0.0
    for update in range(updates):
        before = weight.item()
        weight.grad = torch.tensor([(betas[1] / betas[0]) ** update], dtype=torch.float64)
        optimizer.step()
        moved = abs(weight.item() - before)
    assert moved == pytest.approx(adamw_bound(betas, updates), rel=1e-6)
