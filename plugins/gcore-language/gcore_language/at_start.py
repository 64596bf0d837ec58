"""Keeps the log-probs that a step computes before its first update, by record."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from gcore_core.contract.trainer import StartLogprobs
from gcore_language.packing import Batch, counts_of


@dataclass(kw_only=True)
class AtStart:
    """Holds each micro-batch's log-probs where they were computed, until the step is over.

    records: how many were prepared.
    """

    records: int = 0
    # of each micro-batch: Batch.index, column record, log-probs, entropies
    _parts: list[tuple[np.ndarray, Tensor, Tensor, Tensor | None]] = field(default_factory=list)

    def add(self, batch: Batch, logp: Tensor, entropy: Tensor | None = None) -> None:
        """Keeps log-probs and entropies of a micro-batch, float32[A], both without gradient.

        The batch itself is not kept, since generators may need its memory.
        """
        self._parts.append((batch.index, batch.columns["record"], logp, entropy))

    def by_record(self) -> list[StartLogprobs | None]:
        """Returns them for each prepared record, in numpy; None for one that has none.

        They come to the host here, once a step, so that nothing waits for the device before.
        """
        found: list[StartLogprobs | None] = [None] * self.records
        for indexes, record, logp, entropy in self._parts:
            counts = counts_of(record, len(indexes))
            ends = np.cumsum(counts.cpu().numpy())[:-1]
            logps = np.split(logp.float().cpu().numpy(), ends)
            entropies = None if entropy is None else np.split(entropy.float().cpu().numpy(), ends)
            for place, index in enumerate(indexes.tolist()):
                found[index] = StartLogprobs(
                    logp=logps[place], entropy=None if entropies is None else entropies[place]
                )
        self._parts = []
        return found
