"""Draws tokens from logits.

The randomness depends on a sample's seed and the position alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Applies the finalizer of splitmix64 (Steele, Lea, Flood 2014) to each uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns one number in [0, 1) for each row, float64.

    seeds: uint64, the samples' seeds.
    positions: number of each action in its completion.
    """
    hashed = _mix(_mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choose(
    logits: Tensor,
    uniform: Tensor,
    temperature: float,
    greedy: Tensor | None,
    *,
    top_p: float = 1.0,
    top_k: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws a token for each row by the inverse of the cdf.

    Returns (tokens int64[B], log-probs float32[B], margins float64[B]). A margin is how far the
    cdf may be off without another token being drawn; of greedy rows, how far a logit may. Log-probs
    are those of the softmax over all tokens, even when top_p or top_k narrows the choice, because a
    trainer computes the same.

    logits: [B, V].
    uniform: float64[B], numbers in [0, 1).
    temperature: divides the logits; 0 makes all rows greedy.
    greedy: bool[B], rows that take the likeliest token, with its log-prob at temperature 1; None
        for no row.
    """
    logits = logits.float()
    if temperature == 0:
        greedy = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    elif temperature != 1:
        scale = (
            1 / temperature
            if greedy is None
            else torch.where(greedy, 1.0, 1 / temperature)[:, None]
        )
        logits = logits * scale
    logp = logits.log_softmax(-1)
    weights = logp.exp()
    if top_p < 1 or top_k > 0:
        weights = _narrow(weights, top_p, top_k)
    cdf = weights.cumsum(-1, dtype=torch.float64)
    # searchsorted(right=True) returns the first token whose cdf exceeds the threshold, so it never
    # returns a token of weight 0
    threshold = uniform[:, None] * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, threshold, right=True).clamp_(max=logits.shape[1] - 1)
    margins = _distances(cdf, threshold, tokens)
    if greedy is not None:
        best = logits.topk(min(2, logits.shape[1]))
        tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
        margins = torch.where(greedy, best.values[:, 0] - best.values[:, -1], margins)
    return tokens.squeeze(1), logp.gather(1, tokens).squeeze(1), margins


def _distances(cdf: Tensor, threshold: Tensor, tokens: Tensor) -> Tensor:
    """Returns how far each threshold is from the edges that its token shares with others.

    cdf: float64[B, V]. threshold: float64[B, 1]. tokens: int64[B, 1]. Returns float64[B].
    """
    above = cdf.gather(1, tokens) - threshold
    above = above.masked_fill(tokens == cdf.shape[1] - 1, torch.inf)
    below = threshold - cdf.gather(1, (tokens - 1).clamp(min=0))
    below = below.masked_fill(tokens == 0, torch.inf)
    return torch.minimum(above, below).squeeze(1)


def _narrow(weights: Tensor, top_p: float, top_k: int) -> Tensor:
    """Sets the weights of tokens to 0 outside the nucleus and outside the likeliest ``top_k``.

    The nucleus is the smallest set of tokens with at least probability ``top_p`` (Holtzman
    et al. 2020).
    """
    ordered, order = weights.sort(-1, descending=True)
    mass_before = ordered.cumsum(-1) - ordered
    drop = mass_before >= top_p
    if top_k > 0:
        drop[:, top_k:] = True
    drop[:, 0] = False  # the likeliest token always stays
    return torch.zeros_like(weights).scatter_(-1, order, ordered.masked_fill(drop, 0.0))
