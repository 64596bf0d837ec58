"""LoRA adapters as peft saves them, and models that they were merged into."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gcore_core.contract.records import TensorSpec
from gcore_core.testing.safetensors_files import read_safetensors, write_safetensors

ALPHA = 8.0


def spec_of(name: str, array: np.ndarray) -> tuple[TensorSpec, np.ndarray]:
    flat = np.ascontiguousarray(array, np.float32)
    return TensorSpec(name, "F32", array.shape, flat.nbytes), flat.reshape(-1).view(np.uint8)


@pytest.fixture(scope="session")
def save_adapter() -> Callable[..., Path]:
    """Saves a random adapter for the attention and feed-forward matrices of a model."""

    def save(directory: Path, model: Path, rank: int = 4, **config: object) -> Path:
        directory.mkdir(exist_ok=True)
        random = np.random.default_rng(0)
        tensors = []
        for spec, _ in read_safetensors(model / "model.safetensors"):
            if spec.name.endswith("_proj.weight"):
                name, (outputs, inputs) = (
                    f"base_model.model.{spec.name.removesuffix('.weight')}",
                    spec.shape,
                )
                tensors.append(
                    spec_of(f"{name}.lora_A.weight", 0.2 * random.standard_normal((rank, inputs)))
                )
                tensors.append(
                    spec_of(f"{name}.lora_B.weight", 0.2 * random.standard_normal((outputs, rank)))
                )
        write_safetensors(directory / "adapter_model.safetensors", tensors)
        targets = sorted({spec.name.split(".")[-3] for spec, _ in tensors})
        found = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": ALPHA,
            "target_modules": targets,
            **config,
        }
        (directory / "adapter_config.json").write_text(json.dumps(found))
        return directory

    return save


@pytest.fixture(scope="session")
def merge() -> Callable[[Path, Path, Path], Path]:
    """Saves a model whose matrices are those of ``model`` plus alpha / rank * B A."""

    def save(directory: Path, model: Path, adapter: Path) -> Path:
        shutil.copytree(model, directory)
        halves = {
            spec.name.removeprefix("base_model.model."): flat.view(np.float32).reshape(spec.shape)
            for spec, flat in read_safetensors(adapter / "adapter_model.safetensors")
        }
        merged = []
        for spec, flat in read_safetensors(model / "model.safetensors"):
            weight, name = (
                flat.view(np.float32).reshape(spec.shape),
                spec.name.removesuffix(".weight"),
            )
            if f"{name}.lora_A.weight" in halves:
                a, b = halves[f"{name}.lora_A.weight"], halves[f"{name}.lora_B.weight"]
                weight = weight + ALPHA / len(a) * b @ a
            merged.append(spec_of(spec.name, weight))
        write_safetensors(directory / "model.safetensors", merged)
        return directory

    return save
