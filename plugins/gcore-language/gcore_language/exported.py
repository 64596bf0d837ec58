"""Compares the weights that a trainer exports with those that it trains, after an alarm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gcore_core.contract.records import TensorSpec
from gcore_core.contract.sentinel import Finding
from gcore_language.weights import from_bytes, full


@runtime_checkable
class NamesExports(Protocol):
    """An engine that exports its weights under other names than it trains them."""

    def weights_by_export(self) -> Mapping[str, Tensor]:
        """Returns the weights that are trained, by the names and in the parts of the export.

        All ranks look at them in the same order.
        """


#: Bytes leave no doubt: no explanation of log-probs comes before them.
_CERTAIN = 2.0
_NAMED = 3


@torch.no_grad()
def diagnose_export(
    exported: Iterable[tuple[TensorSpec, np.ndarray]],
    weights: Mapping[str, Tensor],
    last_step: float,
) -> list[Finding]:
    """Returns a finding when exported bytes are not the weights; else none. All ranks call it.

    exported: as ``export_weights`` gives it; ranks besides the first have no bytes.
    weights: those that are trained, by name.
    last_step: how far the last update can have moved a weight at most.
    """
    differ: list[str] = []
    furthest = 0.0
    tensors = 0
    for spec, content in exported:
        whole = full(weights[spec.name]) if spec.name in weights else None
        if whole is None or not content.size:
            continue
        tensors += 1
        sent = from_bytes(spec, content).to(whole.device)
        held = whole.to(sent.dtype)
        if not torch.equal(sent, held):
            differ.append(spec.name)
            apart = (sent.float() - held.float()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            furthest = max(furthest, float(apart.max()))
    if not differ:
        return []
    names = ", ".join(differ[:_NAMED])
    more = f" and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
    text = (
        f"the trainer exports other weights than it trains, in {len(differ)} of {tensors} tensors: "
        f"{names}{more}; they are {furthest:.2g} apart"
    )
    if 2 * len(differ) > tensors and furthest <= last_step:
        text += ", no more than one update: they are those of before the last one"
    return [Finding(cause="export", score=_CERTAIN, weight=1.0, text=text)]
