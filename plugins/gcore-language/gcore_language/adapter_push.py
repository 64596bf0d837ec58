"""Pushes of an adapter alone: what a trainer sends, and what a generator puts on its base.

The contract's side of it is ``WeightPlan.adapter`` and ``SendsAdapter``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from gcore_core.contract.records import AdapterFacts, TensorSpec, WeightPlan
from gcore_language.adapter_books import AdapterBooks, tensor_names, weight_name
from gcore_language.lora import Adapters, merged
from gcore_language.ranks import Ranks
from gcore_language.weights import from_bytes, to_bytes


class AdapterEngine(Protocol):
    """An engine that can train an adapter."""

    ranks: Ranks

    @property
    def adapters(self) -> Adapters | None:
        """What it trains; None where it trains the weights themselves."""

    def adapter_specs(self) -> list[TensorSpec]:
        """Returns a spec of every tensor of the adapter, A then B of each target."""

    def whole_adapter(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Yields them, each whole until the next one is asked for; all ranks iterate."""


class PushesAdapter:
    """A trainer with the trait ``adapters``.

    See ``gcore_core.contract.trainer.SendsAdapter``.
    """

    _engine: AdapterEngine

    def adapter_facts(self) -> AdapterFacts | None:
        adapters = self._engine.adapters
        return adapters.facts() if adapters is not None and adapters.push_alone else None

    def adapter_specs(self) -> list[TensorSpec]:
        return self._engine.adapter_specs()

    def export_adapter(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        for spec, tensor in self._engine.whole_adapter():
            yield spec, to_bytes(tensor) if self._engine.ranks.rank == 0 else np.empty(0, np.uint8)


# -- at a generator --------------------------------------------------------------------------------


class AdapterInbox:
    """Puts the adapters of pushes on the weights of a generator.

    Each is merged into the base again, so that many pushes drift no further than one. The base is
    read from the model's files at each such push, and held no longer.

    role: the generator's, for errors.
    directory: the model's.
    tensors: Hugging Face name -> tensor of the weights that sample; they are written in place.
    reload: opens the model's files once more and returns such tensors.
    """

    def __init__(
        self,
        role: str,
        directory: Path,
        tensors: Mapping[str, Tensor],
        reload: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._books = AdapterBooks(role, directory, shapes)
        self._tensors = tensors
        self._reload = reload
        self._facts: AdapterFacts | None = None  # of the open push
        self._came: dict[str, Tensor] = {}
        self._held: dict[str, tuple[int, int]] = {}  # tensor -> its digest, its target's merged one

    def begin(self, plan: WeightPlan) -> Mapping[str, tuple[int, ...]] | None:
        """Looks at a plan; returns the shapes of the tensors that it must have.

        None for a plan of whole weights. Raises WeightMismatch for an adapter of another base, or
        of modules that this model does not have.
        """
        self._facts = facts = plan.adapter
        self._came = {}
        return None if facts is None else self._books.expected(facts)

    @property
    def opened(self) -> bool:
        """Whether the open push is of an adapter."""
        return self._facts is not None

    def load(self, spec: TensorSpec, content: np.ndarray) -> None:
        """Keeps a tensor of the adapter."""
        self._came[spec.name] = from_bytes(spec, content)

    @torch.no_grad()
    def commit(self) -> None:
        """Writes base and adapter into the weights; does nothing after a push of whole weights."""
        facts = self._facts
        self._facts = None
        self._held = {}
        if facts is None:
            return
        base = self._reload()
        targets = {f"{target}.weight": target for target in facts.targets}
        for name, weight in self._tensors.items():
            if name not in targets:  # a push of whole weights or another adapter has changed it
                weight.copy_(base[name])
                continue
            names = tensor_names(targets[name])
            halves = [self._came[half] for half in names]
            on_device = [half.to(weight.device) for half in halves]
            weight.copy_(merged(base[name].to(weight.device), on_device, facts.scale))
            digest = _digest(weight)
            for half, tensor in zip(names, halves, strict=True):
                self._held[half] = _digest(tensor), digest
        self._came = {}

    def fingerprint(self) -> dict[str, int]:
        """Returns the digests of the adapter's tensors that are in the weights now.

        One whose matrix was changed since has another digest.
        """
        now: dict[str, int] = {}
        for name in self._held:
            weight = weight_name(name)
            if weight not in now:
                now[weight] = _digest(self._tensors[weight])
        return {
            # equal to ``digest`` as long as the matrix is as it was merged
            name: digest ^ merged_digest ^ now[weight_name(name)]
            for name, (digest, merged_digest) in self._held.items()
        }


def _digest(tensor: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(to_bytes(tensor).data)
