"""Watches the routers of a mixture of experts, and has them choose what was chosen before.

A router gives each token the k experts of largest probability. Two forward passes of the same
weights round differently, so now and then the k-th and the next expert change places, and the
token's log-prob jumps. Router replay (R3: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning
by Aligning Training and Inference Routers", arXiv:2510.11370) takes the experts from the record.
Their weights are still computed from the router as it is now, so its gradient flows:

    p = softmax(W x)            over all experts
    w_j = p[e_j]                for the record's experts e_1 .. e_k
    w_j = w_j / sum_j w_j       where the model normalises them

Legend of shapes: N places of a forward pass (rows times width, padding included), L layers with
experts, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gcore_core.contract.columns import ROUTING
from gcore_core.contract.errors import ContractError, DataError
from gcore_core.contract.lineage import name_of
from gcore_core.contract.trainer import TrainRecord
from gcore_language.experts import expert_names


def has_experts(config: Any) -> bool:
    """Returns whether a Hugging Face config is that of a mixture of experts that is known here."""
    return expert_names(config) is not None


def routers_of(model: Any) -> list[nn.Module]:
    """Returns the routers of a model of transformers, from the first layer to the last."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


class Routers:
    """The routers of one model, watched in every forward pass.

    experts, top_k, layers: E, k and L.
    replays: whether a forward pass takes the experts of its records, where they have some.
    logits: of the latest pass, for each layer float[N, E], with gradient where there is one.
    chosen: of the latest pass, for each layer int64[N, k]: what the router itself chose.
    """

    def __init__(self, model: Any, *, replays: bool) -> None:
        routers = routers_of(model)
        self.replays = replays
        self.layers = len(routers)
        self.experts = int(routers[0].num_experts)
        self.top_k = int(routers[0].top_k)
        self.logits: list[Tensor | None] = [None] * self.layers
        self.chosen: list[Tensor | None] = [None] * self.layers
        self._replayed: Tensor | None = None
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._routed, layer))

    @staticmethod
    def of(model: Any, *, replays: bool) -> Routers | None:
        """Returns the routers of a model; None where it has no experts."""
        return Routers(model, replays=replays) if has_experts(model.config) else None

    def begin(self, routing: Tensor | None) -> None:
        """Says which experts the next forward pass takes; None: those that its routers choose.

        They hold until the next call: a backward pass that computes layers again needs them too.

        routing: uint8 or int [N, L, k].
        """
        replayed = routing if self.replays else None
        self._replayed = None if replayed is None else replayed.permute(1, 0, 2).long()
        self.forget()

    def forget(self) -> None:
        """Drops what the latest pass left."""
        self.logits = [None] * self.layers
        self.chosen = [None] * self.layers

    def taken(self) -> Tensor:
        """Returns the experts that computed the latest pass, int64[N, L, k]."""
        if self._replayed is not None:
            return self._replayed.permute(1, 0, 2)
        return self.own()

    def own(self) -> Tensor:
        """Returns the experts that the routers chose in the latest pass, int64[N, L, k]."""
        return torch.stack([layer for layer in self.chosen if layer is not None], 1)

    def _routed(self, layer: int, router: Any, inputs: Any, output: Any) -> Any:
        """Keeps what a router computed; returns its output with the replayed experts, if any."""
        logits, scores, chosen = output
        self.logits[layer] = logits
        self.chosen[layer] = chosen
        if self._replayed is None:
            return None
        experts = self._replayed[layer]
        weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
        if getattr(router, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(scores.dtype), experts


def small(experts: Tensor, count: int) -> np.ndarray:
    """Returns expert numbers as a record has them: uint8 up to 256 experts, else uint16."""
    array: np.ndarray = experts.cpu().numpy().astype(np.uint8 if count <= 256 else np.uint16)
    return array


def lay_routing(
    experts: Sequence[np.ndarray | None], places: np.ndarray, *, width: int, device: torch.device
) -> dict[str, Tensor | None]:
    """Returns ``uses`` and ``routing`` of a batch, see ``gcore_language.packing.Batch``.

    Padding gets the experts 0 .. k - 1. It takes part in no log-prob.

    experts: of each record, [T, L, k] of its T fed tokens; None for one without.
    places: int64[sum of T], where each fed token of each record is, record after record.
    width: N.
    Raises ContractError for a record with the experts of another number of tokens.
    """
    uses = np.bincount(places, minlength=width).astype(np.float32)
    laid: Tensor | None = None
    given = [column for column in experts if column is not None]
    if given and len(given) == len(experts):
        together = np.concatenate(given).astype(np.int16)
        if len(together) != len(places):
            raise ContractError(
                f"the column {ROUTING!r} has the experts of {len(together)} tokens, and "
                f"{len(places)} go through the model.",
                where=ROUTING,
                why="A record of P prompt tokens and A actions has those of P + A - 1: its last "
                "action is never read.",
            )
        whole = np.empty((width, *together.shape[1:]), np.int16)
        whole[:] = np.arange(together.shape[2])
        whole[places] = together
        laid = torch.from_numpy(whole).to(device)
    return {"uses": torch.from_numpy(uses).to(device), "routing": laid}


def check_routing(records: Sequence[TrainRecord], role: str) -> None:
    """Raises DataError for a record with actions that does not say which experts computed it."""
    for record in records:
        if len(record.columns.get("action_ids", ())) and ROUTING not in record.columns:
            raise DataError(
                f"record {name_of(record.ordinal, record.sample)} has no column {ROUTING!r}.",
                where=f"roles.{role}.config.router_replay",
                why="Its generator did not say which experts computed its tokens.",
                todo="Set router_replay: auto, or take the generator torch with a mixture of "
                "experts.",
            )
