"""Keeps the books of a mixture of experts in training: its load-balancing loss and its metrics.

The loss of a layer (Switch Transformer: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6;
GShard: Lepikhin et al. 2020, arXiv:2006.16668, algorithm 1), for k experts of a token:

    loss = E sum_i f_i P_i
    f_i = share of the T k choices that are expert i     no gradient
    P_i = mean of the router's probability p_i over the T tokens

It is 1 where all experts are chosen equally often. T counts the tokens of an update's records that
go through the model, over all micro-batches and ranks, and no padding (the global batch of Qiu et
al. 2025, arXiv:2501.11873). So f is known before the first backward pass, the loss is linear in p,
and its gradient does not depend on how records are packed or dealt to ranks.

Legend of shapes: N places of a forward pass, L layers with experts, E experts, k experts of a
token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gcore_language.packing import Batch, counts_of
from gcore_language.ranks import Ranks
from gcore_language.routing import Routers


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """Sums over the tokens and layers of a step.

    entropy: of the routers' probabilities.
    seen: how many tokens there were; each counts once, and not once a layer.
    differ, compared: choices, one for each token and layer, that are not the record's, and those
        that were compared with it.
    """

    entropy: float
    seen: float
    differ: float
    compared: float


class RouterBooks:
    """The routers of a policy in training.

    routers: of the policy.
    ranks: of the trainer; all ranks make the same calls.
    coefficient: of the load-balancing loss; 0 adds none.
    """

    def __init__(self, routers: Routers, ranks: Ranks, coefficient: float) -> None:
        self._routers = routers
        self._ranks = ranks
        self._coefficient = coefficient
        self._share = torch.zeros(0)  # f of the update, float32[L, E]
        self._tokens = 0.0  # T of the update
        self._clear()

    def _clear(self) -> None:
        shape = (self._routers.layers, self._routers.experts)
        self._updates = 0
        self._counts = torch.zeros(shape, dtype=torch.float64)  # choices of each expert
        self._probabilities = torch.zeros(shape, dtype=torch.float64)  # sums over tokens
        self._entropy = 0.0  # sum over tokens and layers
        self._seen = 0.0  # tokens
        self._differ = 0.0  # choices, one for each token and layer, that are not the record's
        self._compared = 0.0  # choices that were compared

    # -- the loss ----------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(
        self, batches: Sequence[Batch | None], forward: Callable[[Batch | None], object]
    ) -> None:
        """Counts the choices of an update, f and T; all ranks call it before the first pass.

        forward: runs a batch through the policy. It is called where the records do not say which
            experts are taken, one more pass over the update.
        """
        self._updates += 1
        if not self._coefficient:
            return
        routers = self._routers
        unknown = not routers.replays or any(b is not None and b.routing is None for b in batches)
        unknown = bool(self._ranks.max([float(unknown)])[0])
        counts = torch.zeros(routers.layers, routers.experts, dtype=torch.float64)
        tokens = 0.0
        for batch in batches:
            if unknown:
                forward(batch)
            if batch is not None:
                taken = routers.taken() if unknown or batch.routing is None else batch.routing
                counts += count_choices(taken.long(), _uses(batch), routers.experts).cpu()
                tokens += float(_uses(batch).sum())
        *flat, self._tokens = self._ranks.sum([*counts.flatten().tolist(), tokens])
        choices = max(1.0, self._tokens * routers.top_k)
        self._share = torch.tensor(flat).view(counts.shape) / choices

    def loss(self, batch: Batch) -> Tensor | float:
        """Returns a micro-batch's part of the update's loss, times the coefficient.

        It is of the latest forward pass, and has gradient. Notes the metrics of the pass.
        """
        routers = self._routers
        layers = [layer for layer in routers.logits if layer is not None]
        uses = _uses(batch)
        sums = torch.stack(
            [(uses[:, None] * layer.softmax(-1, dtype=torch.float32)).sum(0) for layer in layers]
        )
        self._observe(batch, layers, sums.detach())
        routers.forget()
        if not self._coefficient or not self._tokens:
            return 0.0
        mean = sums / self._tokens
        share = self._share.to(mean)
        return self._coefficient * routers.experts * (share * mean).sum(-1).mean()

    # -- metrics -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _observe(self, batch: Batch, layers: Sequence[Tensor], sums: Tensor) -> None:
        """Adds what the latest forward pass did.

        layers: of each layer the logits [N, E].
        sums: float32[L, E], the probabilities summed over tokens.
        """
        uses = _uses(batch)
        self._counts += count_choices(self._routers.taken(), uses, self._routers.experts).cpu()
        self._probabilities += sums.double().cpu()
        self._seen += float(uses.sum())
        for layer in layers:
            logp = layer.float().log_softmax(-1)
            self._entropy -= float((uses * (logp.exp() * logp).sum(-1)).sum())
        if batch.routing is None or self._updates > 1:
            return  # after an update the routers are others
        own = self._routers.own().sort(-1).values
        recorded = batch.routing.long().sort(-1).values
        differs = (own != recorded).any(-1)
        self._differ += float((uses[:, None] * differs).sum())
        self._compared += float(uses.sum()) * self._routers.layers

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of a step, over all ranks, and begins the next step.

        Nothing for a step without tokens.
        """
        shape = self._counts.shape
        scalars = [self._entropy, self._seen, self._differ, self._compared]
        numbers = self._ranks.sum(
            [*self._counts.flatten().tolist(), *self._probabilities.flatten().tolist(), *scalars]
        )
        self._clear()
        entropy, seen, differ, compared = numbers[-4:]
        counts, probabilities = torch.tensor(numbers[:-4], dtype=torch.float64).view(2, *shape)
        return metrics_of(
            counts,
            probabilities,
            self._routers.top_k,
            Scalars(entropy=entropy, seen=seen, differ=differ, compared=compared),
        )


def count_choices(taken: Tensor, uses: Tensor, experts: int) -> Tensor:
    """Returns how often each expert was taken, float64[L, E].

    taken: int64[N, L, k].
    uses: float32[N], how often each place counts.
    """
    layers = taken.shape[1]
    number = taken + experts * torch.arange(layers, device=taken.device)[:, None]
    weights = uses.double()[:, None, None].expand(number.shape)
    counts = counts_of(number.flatten(), layers * experts, weights.flatten())
    return counts.view(layers, experts)


def metrics_of(
    counts: Tensor, probabilities: Tensor, top_k: int, scalars: Scalars
) -> dict[str, float]:
    """Returns the metrics of a step; none for a step without tokens.

    counts, probabilities: float64[L, E], how often each expert was taken, and the sum of its
        probabilities over tokens.
    """
    layers, experts = counts.shape
    if not scalars.seen:
        return {}
    share = counts / (scalars.seen * top_k)
    balance = experts * (share * probabilities / scalars.seen).sum(-1).mean()
    found = {
        "router_busiest_share": float(share.max()),
        "router_entropy": scalars.entropy / (scalars.seen * layers),
        "router_aux_loss": float(balance),
    }
    if scalars.compared:
        found["router_differ_share"] = scalars.differ / scalars.compared
    return found


def _uses(batch: Batch) -> Tensor:
    """Returns how many records each place of a batch serves, float32[N]."""
    if batch.uses is None:
        raise RuntimeError("a flat batch does not go through experts")
    return batch.uses
