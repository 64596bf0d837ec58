"""Mixtures of experts for tests of trainers, and what such a trainer should compute: transformers'
model, one record at a time, with routers that are written anew from the equations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gcore_language import tiny
from gcore_language.routing import routers_of
from transformers import AutoModelForCausalLM

from gcore_core.contract.columns import ROUTING
from gcore_core.contract.trainer import TrainRecord
from tests.support.language_models import logp_of

EXPERTS = 8
TOP_K = 2
#: Layers with experts, in every model here.
LAYERS = 2


def _mixed() -> Any:
    """A Qwen3-MoE of four layers, of which two are dense, whose experts' weights are not divided by
    their sum.
    """
    config = tiny.EXPERT_CONFIGS["qwen3_moe"]()
    config.num_hidden_layers = 4
    config.mlp_only_layers = [0, 2]
    config.norm_topk_prob = False
    return config


def save_models(directory: Path, families: Iterable[str], seed: int = 0) -> dict[str, Path]:
    """Family -> directory of a model; the family "mixed" has dense layers among sparse ones."""
    found = {family: directory / family for family in families}
    with patch.dict(tiny.EXPERT_CONFIGS, mixed=_mixed):
        for family, place in found.items():
            place.mkdir()
            tiny.save_model(place, family, seed)
    return found


def with_random_routing(records: Sequence[TrainRecord], seed: int = 3) -> list[TrainRecord]:
    """Gives records experts that no router would choose; a group's share those of their prompt."""
    made = []
    for record in records:
        columns = record.columns
        prompt = np.random.default_rng([seed, record.ordinal])
        action = np.random.default_rng([seed, record.ordinal, record.sample])
        counts = (prompt, len(columns["prompt_ids"])), (action, len(columns["action_ids"]) - 1)
        experts = [
            draw.permuted(np.tile(np.arange(EXPERTS), (tokens, LAYERS, 1)), axis=-1)[..., :TOP_K]
            for draw, tokens in counts
        ]
        routing = np.concatenate(experts).astype(np.uint8)
        made.append(replace(record, columns={**columns, ROUTING: routing}))
    return made


class ReplayingModel:
    """transformers' model, whose routers take a record's experts, or the likeliest ones.

    logits: of the latest record, float32[T, E] by layer, of its T fed tokens.
    taken: the experts that computed them, int64[T, L, k].
    """

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.logits: list[torch.Tensor] = []
        self.taken = torch.zeros(0)
        self._chosen: list[torch.Tensor] = []
        self._replayed: torch.Tensor | None = None
        for layer, router in enumerate(routers_of(self.model)):
            router.forward = self._router(layer, router)

    def _router(self, layer: int, router: Any) -> Any:
        def forward(hidden: torch.Tensor) -> Any:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
            self.logits.append(logits)
            likeliest = logits.topk(TOP_K, -1).indices
            experts = likeliest if self._replayed is None else self._replayed[:, layer]
            self._chosen.append(experts)
            weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
            weights = torch.stack([row[e] for row, e in zip(weights, experts, strict=True)])
            if getattr(router, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, experts

        return forward

    def logp(self, record: TrainRecord) -> torch.Tensor:
        """Returns the log-probs of a record's actions; sets ``logits`` and ``taken``."""
        self.logits = []
        self._chosen = []
        self._replayed = None
        if ROUTING in record.columns:
            routing = torch.from_numpy(record.columns[ROUTING].astype(np.int64))
            last = torch.arange(TOP_K).expand(1, LAYERS, TOP_K)  # of the last action
            self._replayed = torch.cat([routing, last])
        logp = logp_of(self.model, record)[0]
        fed = len(record.columns["prompt_ids"]) + len(record.columns["action_ids"]) - 1
        self.logits = [layer[:fed] for layer in self.logits]
        self.taken = torch.stack(self._chosen, 1)[:fed]
        return logp


def plain_gradients(
    directory: Path, records: Sequence[TrainRecord], advantages: np.ndarray, coefficient: float
) -> tuple[dict[str, torch.Tensor], float]:
    """Returns the gradients of ``Reinforce`` and the balance, by the checkpoint's names, and the
    balance.
    """
    from gcore_language.experts import cut, expert_names

    reference = ReplayingModel(directory)
    loss = torch.zeros(())
    weight = 0.0
    logits: list[list[torch.Tensor]] = []
    taken: list[torch.Tensor] = []
    for record, advantage in zip(records, advantages, strict=True):
        mask = torch.from_numpy(record.columns["action_mask"].astype(np.float32))
        loss = loss - (float(advantage) * reference.logp(record) * mask).sum()
        weight += float(mask.sum())
        logits.append(reference.logits)
        taken.append(reference.taken)
    balance = torch.zeros(())
    for layer in range(LAYERS):
        mean = torch.cat([of[layer] for of in logits]).softmax(-1).mean(0)
        experts = torch.cat([of[:, layer] for of in taken]).flatten()
        share = torch.bincount(experts, minlength=EXPERTS) / len(experts)
        balance = balance + EXPERTS * (share * mean).sum() / LAYERS
    (loss / weight + coefficient * balance).backward()
    names = expert_names(reference.model.config)
    gradients = {
        own: piece
        for name, parameter in reference.model.named_parameters()
        for own, piece in cut(name, parameter.grad, names)
    }
    return gradients, float(balance.detach())
