"""Draws tokens from logits.

The randomness depends on a sample's seed and the position alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gcore_torch.replay import Pool, Replay, rows_of_graph

#: Tokens of a block of ``choose_by_blocks``.
_BLOCK = 512
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
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws a token for each row by the inverse of the cdf.

    Returns (tokens int64[B], log-probs float32[B], margins float64[B]). A margin is how far the
    cdf may be off without another token being drawn; of greedy rows, how far a logit may. Log-probs
    are those of the softmax over all tokens, even when top_p, top_k or ``allowed`` narrows the
    choice, because a trainer computes the same.

    logits: [B, V].
    uniform: float64[B], numbers in [0, 1).
    temperature: divides the logits; 0 makes all rows greedy.
    greedy: bool[B], rows that take the likeliest token, with its log-prob at temperature 1; None
        for no row.
    allowed: bool[V], tokens that may be drawn; None for all.
    """
    logits, greedy = _scaled(logits, temperature, greedy)
    logp = logits.log_softmax(-1)
    logits, weights = _only(allowed, logits, logp)
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


def _scaled(
    logits: Tensor, temperature: float, greedy: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns logits float32[B, V] at the temperature, and the rows that take the likeliest."""
    logits = logits.float()
    if temperature == 0:
        return logits, torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    if temperature == 1:
        return logits, greedy
    if greedy is None:
        return logits * (1 / temperature), greedy
    return logits * torch.where(greedy, 1.0, 1 / temperature)[:, None], greedy


def _only(allowed: Tensor | None, logits: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits and probabilities [B, V] of the tokens that may be drawn; others have -inf
    and 0.

    allowed: bool[V]; None for all tokens.
    logp: of all tokens.
    """
    if allowed is None:
        return logits, logp.exp()
    logits = logits.masked_fill(~allowed, -torch.inf)
    return logits, logits.softmax(-1)  # of the allowed alone: they never sum up to 0


def choose_by_blocks(
    logits: Tensor,
    uniform: Tensor,
    temperature: float,
    greedy: Tensor,
    *,
    top_p: float = 1.0,
    top_k: int = 0,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws tokens as ``choose`` does, for GPUs; returns (tokens int64[B], log-probs float32[B]).

    A GPU adds up one row of a large vocabulary slowly, since a block of its threads does it alone.
    So the block of tokens is chosen first, by the blocks' sums, then the token in it. Sums are
    rounded in another order than those of ``choose``: a number that lies at an edge may draw the
    neighbour.
    """
    rows, vocabulary = logits.shape
    logits, rows_greedy = _scaled(logits, temperature, greedy)
    logp = logits.log_softmax(-1)
    logits, weights = _only(allowed, logits, logp)
    if top_p < 1 or top_k > 0:
        weights = _narrow(weights, top_p, top_k)
    blocks = F.pad(weights, (0, -vocabulary % _BLOCK)).view(rows, -1, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    threshold = uniform[:, None] * ends[:, -1:]
    last = sums.shape[1] - 1
    chosen = torch.searchsorted(ends, threshold, right=True).clamp_(max=last)
    block = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)
    before = F.pad(ends[:, :-1], (1, 0))
    inner = block.cumsum(-1, dtype=torch.float64) + before.gather(1, chosen)
    within = torch.searchsorted(inner, threshold, right=True)
    # rounding may leave the threshold behind the block's end: its last token of any weight is drawn
    places = torch.arange(_BLOCK, device=logits.device)
    likely = torch.where(block > 0, places, 0).amax(-1, keepdim=True)
    tokens = chosen * _BLOCK + torch.minimum(within, likely)
    if rows_greedy is not None:
        tokens = torch.where(rows_greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    return tokens.squeeze(1), logp.gather(1, tokens).squeeze(1)


class GraphSampler:
    """Draws tokens by ``choose_by_blocks``, in one replay of a CUDA graph for each number of rows.

    capacity: most rows.
    vocabulary: logits of a row.
    dtype: of the logits.
    allowed: bool[V], tokens that may be drawn; None for all.
    """

    def __init__(
        self,
        capacity: int,
        vocabulary: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        allowed: Tensor | None = None,
    ) -> None:
        self._capacity = capacity
        self._vocabulary = vocabulary
        self._dtype = dtype
        self._device = device
        self._temperature = temperature
        self._narrowed: dict[str, Any] = {"top_p": top_p, "top_k": top_k, "allowed": allowed}
        self._pool = Pool(device)
        self._graphs: dict[int, Replay[Tensor]] = {}

    @torch.no_grad()
    def __call__(
        self, logits: Tensor, uniform: np.ndarray, greedy: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens int64[B], log-probs float64[B]); arguments are those of ``choose``."""
        rows = len(logits)
        # of a single row torch adds up in an order that changes from call to call
        width = max(2, rows_of_graph(rows, self._capacity))
        graph = self._graphs.get(width)
        if graph is None:
            graph = self._graphs[width] = Replay(self._inputs(width), self._draw, self._pool)
        numbers = np.zeros((2, width))
        numbers[0, :rows], numbers[1, :rows] = uniform, greedy
        graph.inputs["logits"][:rows].copy_(logits)
        graph.inputs["numbers"].copy_(torch.from_numpy(numbers))
        drawn = graph.run().cpu().numpy()
        return drawn[0, :rows].astype(np.int64), drawn[1, :rows]

    def release(self) -> None:
        """Frees the graphs and their memory."""
        self._graphs = {}
        self._pool = Pool(self._device)

    def _inputs(self, rows: int) -> dict[str, Tensor]:
        """Returns what is read: logits [R, V]; numbers float64[2, R]: one of each row in [0, 1),
        and whether it is greedy.
        """
        shape = (rows, self._vocabulary)
        return {
            "logits": torch.zeros(shape, dtype=self._dtype, device=self._device),
            "numbers": torch.zeros((2, rows), dtype=torch.float64, device=self._device),
        }

    def _draw(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns float64[2, R]: tokens and log-probs, so that one copy brings both to the host."""
        uniform, greedy = inputs["numbers"].unbind()
        is_strict = torch.are_deterministic_algorithms_enabled()
        only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
        # torch refuses every cumsum on a GPU then; of several rows at once it repeats
        torch.use_deterministic_algorithms(False)
        try:
            tokens, logp = choose_by_blocks(
                inputs["logits"], uniform, self._temperature, greedy > 0, **self._narrowed
            )
        finally:
            torch.use_deterministic_algorithms(is_strict, warn_only=only_warns)
        return torch.stack([tokens.double(), logp.double()])


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
