"""Gives vLLM the adapters of pushes, which it adds by its own path: nothing is merged.

vLLM loads an adapter in place of the one before, under the same number: samples that run go on with
it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gcore_language import pushed_adapter
from gcore_language.adapter_books import tensor_names

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import AdapterFacts, WeightPlan

_SHARED_MEMORY = Path("/dev/shm")


class PushedAdapter(pushed_adapter.PushedAdapter):
    """The adapter that the last push brought; before the first push one that changes nothing."""

    def __init__(
        self, context: WorkerContext, files: Path, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        directory = Path(tempfile.mkdtemp(prefix="vllm_gcore_", dir=parent))
        super().__init__(context, files, shapes, directory=directory)
        self._is_base = True
        self._write_nothing(shapes)

    def request(self, *, in_place: bool = False) -> Any:
        """Returns what names it in a request to vLLM.

        in_place: vLLM reads the directory anew.
        """
        from vllm.lora.request import LoRARequest

        return LoRARequest("adapter", 1, str(self.directory), load_inplace=in_place)

    def begin(self, plan: WeightPlan) -> Mapping[str, tuple[int, ...]] | None:
        """See the base class.

        Raises WeightMismatch also for an adapter after whole weights: vLLM does not have the base
        any more.
        """
        expected = super().begin(plan)
        if expected is None:
            self._is_base = False
        elif not self._is_base:
            raise self.mismatch(
                "an adapter comes after whole weights, and the base is gone.",
                todo="Push whole weights: roles.policy.config.lora.push: merged.",
            )
        return expected

    def _write_nothing(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Writes an adapter of one layer and rank 1 whose product is 0."""
        name, shape = next(
            (name, shape)
            for name, shape in shapes.items()
            if name.endswith("_proj.weight") and len(shape) == 2
        )
        target = name.removesuffix(".weight")
        first, second = tensor_names(target)
        zeros = {
            first: np.zeros((1, shape[1]), np.float32),
            second: np.zeros((shape[0], 1), np.float32),
        }
        self.write_as(AdapterFacts(1, 1.0, [target], ""), zeros)
