"""Gives vLLM the adapters of pushes, which it adds by its own path: nothing is merged.

vLLM reads an adapter from a directory, in peft's layout. So a push is written to one in shared
memory, and vLLM loads it in place of the one before, under the same number: samples that run go on
with it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gcore_language.adapter_books import AdapterBooks, tensor_names

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import AdapterFacts, TensorSpec, WeightPlan

_SHARED_MEMORY = Path("/dev/shm")
#: Numpy's word for the dtypes that an adapter may have.
_FLOATS: Mapping[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


class PushedAdapter:
    """The adapter that the last push brought; before the first push one that changes nothing.

    directory: where vLLM reads it.
    opened: the facts of the push that has begun, if it brings an adapter.

    files: directory of the model.
    shapes: Hugging Face name -> shape of the model's tensors.
    """

    def __init__(
        self, context: WorkerContext, files: Path, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.opened: AdapterFacts | None = None
        self._books = AdapterBooks(context.role, files, shapes)
        self._came: dict[str, np.ndarray] = {}
        self._is_base = True
        parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        self.directory = Path(tempfile.mkdtemp(prefix="vllm_gcore_", dir=parent))
        self._write_nothing(shapes)

    def request(self, *, in_place: bool = False) -> Any:
        """Returns what names it in a request to vLLM.

        in_place: vLLM reads the directory anew.
        """
        from vllm.lora.request import LoRARequest

        return LoRARequest("adapter", 1, str(self.directory), load_inplace=in_place)

    def begin(self, plan: WeightPlan) -> Mapping[str, tuple[int, ...]] | None:
        """Looks at a plan; returns the shapes of the tensors that it must have.

        None for a plan of whole weights. Raises WeightMismatch for an adapter that does not fit,
        and for any after whole weights: vLLM does not have the base any more.
        """
        self.opened = plan.adapter
        self._came = {}
        if plan.adapter is None:
            self._is_base = False
            return None
        if not self._is_base:
            raise self._books.mismatch(
                "an adapter comes after whole weights, and the base is gone.",
                todo="Push whole weights: roles.policy.config.lora.push: merged.",
            )
        return self._books.expected(plan.adapter)

    def load(self, spec: TensorSpec, content: np.ndarray) -> None:
        """Keeps a tensor of the adapter. Raises WeightMismatch for a dtype that vLLM lacks."""
        if spec.dtype not in _FLOATS:
            raise self._books.mismatch(
                f"tensor {spec.name} is {spec.dtype}, and adapters come in F32 or F16.",
                tensor=spec.name,
            )
        self._came[spec.name] = content.copy().view(_FLOATS[spec.dtype]).reshape(spec.shape)

    def write(self) -> None:
        """Writes what has come, for vLLM to read."""
        if self.opened is not None:
            self._write(self.opened, self._came)
        self.opened = None
        self._came = {}

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
        self._write(AdapterFacts(1, 1.0, [target], ""), zeros)

    def _write(self, facts: AdapterFacts, tensors: Mapping[str, np.ndarray]) -> None:
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

    def close(self) -> None:
        """Removes the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)
