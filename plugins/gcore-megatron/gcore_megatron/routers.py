"""Routers of a mixture of experts on Megatron-Core, which take recorded experts and are watched.

A stage has the layers that it has, and with sequence parallelism a rank has its part of each row.
So every router adds up what its own rows do, and the sums are joined over the ranks of a replica
when they are asked for. ``gcore_language.routing`` and ``gcore_language.router_books`` say what is
computed; here is where Megatron-Core wants it computed.

What a router needs of a micro-batch goes with the micro-batch through Megatron-Core's layers, as
the arguments ``context`` and ``context_mask`` of cross-attention, which these models do not have.
So a layer that is computed again in the backward pass gets what it got before, in whichever order
the stages work on micro-batches.

Rejected: Megatron-Core's ``RouterReplay``. It keeps one list of routers for the process, and one
queue of experts, which hold only where each forward pass is followed by its own backward pass.

Legend of shapes:

    n   places that a rank's router sees, S B
    L   layers with experts, of all stages
    E   experts
    k   experts of a token
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gcore_language.packing import Batch
from gcore_language.ranks import Ranks
from gcore_language.router_books import Scalars, count_choices, metrics_of
from torch import Tensor

from gcore_megatron.library import MoELayer, TopKRouter, TransformerLayer, parallel_state

_SCALARS = 4  # sums of a layer besides those of each expert, see ``Watch``


class ExpertLayer(TransformerLayer):
    """A layer that hands its router what came with the hidden states; it may have no experts."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Runs the layer, with or without experts.

        context: int16[S, B, L, k], the experts that are taken; None: those that routers choose.
        context_mask: float32[S, B], how many records each place serves.
        """
        if isinstance(self.mlp, MoELayer):
            self.mlp.router.begin(options.get("context"), options.get("context_mask"))
        return super().forward(*arguments, **options)


class _AddLoss(torch.autograd.Function):
    """Leaves probabilities as they are, and adds the gradient of a loss that is linear in them."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, uses: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(uses, factors)
        return probabilities.view_as(probabilities)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        uses, factors = ctx.saved_tensors
        return gradient + uses[:, None] * factors, None, None


class Router(TopKRouter):
    """Megatron-Core's router with the rule of transformers, which may take other experts.

    The weights of the chosen experts are their probabilities, in float32, divided by their sum
    where the model normalises them.

    Megatron-Core makes it, so what it belongs to is set afterwards.

    place: which of the L layers it is in.
    normalises: whether the weights of a token's experts add up to 1.
    watch: of the model.
    """

    place: int
    normalises: bool
    watch: Watch
    _replayed: Tensor | None = None
    _uses: Tensor | None = None

    def begin(self, experts: Tensor | None, uses: Tensor | None) -> None:
        """Says which experts the next call takes, see ``ExpertLayer.forward``."""
        self._replayed = None if experts is None else experts[:, :, self.place].flatten(0, 1).long()
        self._uses = None if uses is None else uses.flatten()

    def gating(self, hidden: Tensor) -> Tensor:
        """Returns the logits of a model whose weights have the dtype of its hidden states.

        Megatron-Core's own needs Transformer Engine.
        """
        return F.linear(hidden, self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the weight of each expert for each token, [n, E], and which are taken, bool."""
        logits = logits.view(-1, self.num_experts)
        p = logits.softmax(-1, dtype=torch.float32)
        own = p.topk(self.topk, -1).indices
        taken = own if self._replayed is None else self._replayed
        if self._uses is not None:
            replayed = self._replayed is not None
            p = self.watch.see(self.place, p, own, taken, self._uses, replayed=replayed)
        weights = p.gather(1, taken)
        if self.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        nothing = torch.zeros_like(logits)
        scattered = nothing.scatter(1, taken, weights.to(logits.dtype))
        return scattered, nothing.bool().scatter(1, taken, True)


class Watch:
    """What the routers of one model do on this rank.

    It sums where gradients flow, so that a layer that is computed twice counts once, and log-probs
    do not count.

    layers, experts, top_k: L, E and k.
    counting: whether the choices of passes without gradients are counted too.
    compares: whether the routers' own choices are compared with the record's.
    factors: float32[L, E], gradient of the load-balancing loss by the probability that a router
        gives each expert for a token; None: there is no such loss.
    counts, probabilities: float64[L, E], how often each expert was taken, and the sum of its
        probabilities over tokens.
    scalars: float64[L, 4], sums of entropy, tokens, choices that differ from the record's, and
        choices that were compared.
    """

    def __init__(self, layers: int, experts: int, top_k: int, device: torch.device) -> None:
        self.layers = layers
        self.experts = experts
        self.top_k = top_k
        self.counting = False
        self.compares = False
        self.factors: Tensor | None = None
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Forgets all sums."""
        dtype, device = torch.float64, self._device
        self.counts = torch.zeros(self.layers, self.experts, dtype=dtype, device=device)
        self.probabilities = torch.zeros_like(self.counts)
        self.scalars = torch.zeros(self.layers, _SCALARS, dtype=dtype, device=device)

    def see(
        self, place: int, p: Tensor, own: Tensor, taken: Tensor, uses: Tensor, *, replayed: bool
    ) -> Tensor:
        """Adds what a router does to the sums; returns its probabilities, with the loss's gradient.

        p: float32[n, E].
        own, taken: int64[n, k], what the router chooses, and what it takes.
        uses: float32[n].
        """
        learns = torch.is_grad_enabled()
        if self.counting or learns:
            self.counts[place] += count_choices(taken[:, None], uses, self.experts)[0]
        if not learns:
            return p
        self._sum(place, p.detach(), uses)
        if replayed and self.compares:
            differs = (own.sort(-1).values != taken.sort(-1).values).any(-1)
            self.scalars[place, 2] += (uses * differs).sum()
            self.scalars[place, 3] += uses.sum()
        if self.factors is None:
            return p
        with_loss: Tensor = _AddLoss.apply(p, uses, self.factors[place])
        return with_loss

    def _sum(self, place: int, p: Tensor, uses: Tensor) -> None:
        self.probabilities[place] += (uses[:, None] * p).sum(0)
        self.scalars[place, 0] += (uses * torch.special.entr(p).sum(-1)).sum()
        self.scalars[place, 1] += uses.sum()


class StageBooks:
    """What ``gcore_language.router_books.RouterBooks`` is, of routers on several ranks.

    watch: of this rank's routers.
    ranks: of the trainer; all ranks make the same calls.
    coefficient: of the load-balancing loss; 0 adds none.
    replays: whether records' experts are taken.
    """

    def __init__(self, watch: Watch, ranks: Ranks, coefficient: float, *, replays: bool) -> None:
        self._watch = watch
        self._ranks = ranks
        self._coefficient = coefficient
        self._replays = replays
        self._updates = 0

    @torch.no_grad()
    def begin(self, batches: Sequence[Batch | None], forward: Callable[[], object]) -> None:
        """Fixes the load-balancing loss of an update; all ranks call it before the first pass.

        forward: runs the batches through the policy. It is called where the records do not say
            which experts are taken, one more pass over the update.
        """
        watch = self._watch
        self._updates += 1
        watch.compares = self._updates == 1  # after an update the routers are others
        watch.factors = None
        if not self._coefficient:
            return
        present = [batch for batch in batches if batch is not None]
        unknown = not self._replays or any(batch.routing is None for batch in present)
        if self._ranks.max([float(unknown)])[0]:
            counts = self._choices(forward)
        else:
            counts = torch.zeros_like(watch.counts)
            for batch in present:
                if batch.routing is not None and batch.uses is not None:
                    counts += count_choices(batch.routing.long(), batch.uses, watch.experts)
        tokens = sum(float(batch.uses.sum()) for batch in present if batch.uses is not None)
        *flat, tokens = self._ranks.sum([*counts.flatten().tolist(), tokens])
        if not tokens:
            return
        share = torch.tensor(flat, dtype=torch.float64).view(counts.shape) / (tokens * watch.top_k)
        factors = self._coefficient * watch.experts * share / (tokens * watch.layers)
        watch.factors = factors.float().to(counts.device)

    def _choices(self, forward: Callable[[], object]) -> Tensor:
        """Returns how often each expert is taken in a pass over this replica's micro-batches."""
        watch = self._watch
        before = watch.counts.clone()
        watch.counting = True
        try:
            forward()
        finally:
            watch.counting = False
        counts = watch.counts - before
        watch.counts = before
        return _in_replica(counts)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of a step, over all ranks, and begins the next step.

        Nothing for a step without tokens.
        """
        watch = self._watch
        parts = torch.cat([watch.counts, watch.probabilities, watch.scalars], 1)
        sums = self._ranks.sum(_in_replica(parts).flatten().tolist())
        watch.clear()
        self._updates = 0
        whole = torch.tensor(sums, dtype=torch.float64).view(parts.shape)
        counts, probabilities, scalars = whole.split([watch.experts, watch.experts, _SCALARS], 1)
        entropy, seen, differ, compared = scalars.sum(0).tolist()
        return metrics_of(
            counts,
            probabilities,
            watch.top_k,
            Scalars(entropy=entropy, seen=seen / watch.layers, differ=differ, compared=compared),
        )


def _in_replica(sums: Tensor) -> Tensor:
    """Returns the sums over the ranks of this replica, each of which saw something else."""
    joined = sums.clone()
    dist.all_reduce(joined, group=parallel_state.get_model_parallel_group())
    return joined


def install(model: Any, places: Sequence[int], normalises: bool, watch: Watch) -> None:
    """Tells the routers of a stage what they belong to.

    places: of the stage's layers with experts, in order.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router, place in zip(routers, places, strict=True):
        router.place = place
        router.normalises = normalises
        router.watch = watch
