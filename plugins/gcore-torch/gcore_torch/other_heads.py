"""Scores records as if the model's output head were another, to explain an alarm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gcore_language.explain import Score
from torch import Tensor

from gcore_core.contract.columns import Columns

#: Given the head, its input and its logits, returns other logits.
Change = Callable[[Any, Tensor, Tensor], Tensor]


def changed_head(model: Any, score: Score, change: Change) -> Score:
    """Returns a forward pass in which the model's output head gives other logits.

    score: a forward pass of the model as it is.
    """
    head = model.get_output_embeddings()

    def scored(records: Sequence[Columns]) -> Sequence[np.ndarray]:
        handle = head.register_forward_hook(
            lambda module, inputs, logits: change(module, inputs[0], logits)
        )
        try:
            return score(records)
        finally:
            handle.remove()

    return scored


def heads(
    model: Any, device: torch.device, top_k: int, score: Score
) -> list[tuple[str, str, Score]]:
    """Returns (cause, what the generator does then, a forward pass that does so).

    top_k: from how many likeliest tokens the generator samples; 0: from all.
    score: a forward pass of the model as it is.
    """

    def whole(records: Sequence[Columns]) -> Sequence[np.ndarray]:
        with torch.autocast(device.type, torch.bfloat16):
            return score(records)

    tried: list[tuple[str, str, Score]] = []
    if top_k:
        text = f"tells log-probs among the {top_k} likeliest tokens, the trainer among all"
        kept = changed_head(model, score, lambda *given: _likeliest(given[2], top_k))
        tried.append(("told", text, kept))
    if model.get_output_embeddings().weight.dtype == torch.float32:
        text = "computes its output head in bfloat16, the trainer in float32"
        tried.append(("dtype", text, changed_head(model, score, _in_bfloat16)))
        tried.append(("dtype", "computes in bfloat16, the trainer in float32", whole))
    return tried


def _likeliest(logits: Tensor, count: int) -> Tensor:
    least = logits.topk(min(count, logits.shape[-1]), -1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def _in_bfloat16(head: Any, hidden: Tensor, logits: Tensor) -> Tensor:
    low = torch.bfloat16
    bias = None if head.bias is None else head.bias.to(low)
    return F.linear(hidden.to(low), head.weight.to(low), bias).to(logits.dtype)
