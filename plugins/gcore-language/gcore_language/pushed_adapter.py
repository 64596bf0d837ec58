"""Keeps the adapter that pushes bring alone where an engine reads it: in a directory.

Engines read an adapter in peft's layout, and add it by their own path: nothing is merged. So a push
is written there, in place of the one before. Light: no torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.records import AdapterFacts, TensorSpec, WeightPlan
from gcore_language.adapter_books import AdapterBooks

#: Numpy's word for the dtypes that an adapter may have.
_FLOATS: Mapping[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


class PushedAdapter:
    """The adapter that the last push brought.

    directory: where the engine reads it, an empty directory of the caller's.
    opened: the facts of the push that has begun, if it brings an adapter.

    files: directory of the model.
    shapes: Hugging Face name -> shape of the model's tensors.
    """

    def __init__(
        self,
        context: WorkerContext,
        files: Path,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        directory: Path,
    ) -> None:
        self.opened: AdapterFacts | None = None
        self.directory = directory
        self._books = AdapterBooks(context.role, files, shapes)
        self._came: dict[str, np.ndarray] = {}

    def begin(self, plan: WeightPlan) -> Mapping[str, tuple[int, ...]] | None:
        """Looks at a plan; returns the shapes of the tensors that it must have.

        None for a plan of whole weights. Raises WeightMismatch for an adapter that does not fit.
        """
        self.opened = plan.adapter
        self._came = {}
        return None if plan.adapter is None else self._books.expected(plan.adapter)

    def load(self, spec: TensorSpec, content: np.ndarray) -> None:
        """Keeps a tensor of the adapter.

        Raises WeightMismatch for a dtype that engines do not read here.
        """
        if spec.dtype not in _FLOATS:
            raise self.mismatch(
                f"tensor {spec.name} is {spec.dtype}, and adapters come in F32 or F16.",
                tensor=spec.name,
            )
        self._came[spec.name] = content.copy().view(_FLOATS[spec.dtype]).reshape(spec.shape)

    def write(self) -> None:
        """Writes what has come, for the engine to read."""
        if self.opened is not None:
            self.write_as(self.opened, self._came)
        self.opened = None
        self._came = {}

    def write_as(self, facts: AdapterFacts, tensors: Mapping[str, np.ndarray]) -> None:
        """Writes an adapter into the directory, over the one that was there."""
        from safetensors.numpy import save_file

        config = {
            "peft_type": "LORA",
            "r": facts.rank,
            "lora_alpha": facts.scale * facts.rank,
            "target_modules": sorted({target.rpartition(".")[2] for target in facts.targets}),
            "bias": "none",
        }
        (self.directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        save_file(contiguous, self.directory / "adapter_model.safetensors")

    def mismatch(
        self,
        what: str,
        *,
        why: str = "",
        todo: str = "Make both roles from one model directory.",
        tensor: str = "",
    ) -> WeightMismatch:
        """Makes the error of a refusal; its ``where`` is the role."""
        return self._books.mismatch(what, why=why, todo=todo, tensor=tensor)

    def close(self) -> None:
        """Removes the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)
