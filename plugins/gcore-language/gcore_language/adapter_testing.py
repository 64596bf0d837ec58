"""Helps tests of engines with adapters: random ones as peft saves them, and merged models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from gcore_testing.safetensors_files import Tensors, read_safetensors, write_safetensors

from gcore_core.contract.records import AdapterFacts, TensorSpec, WeightPlan
from gcore_language.adapter_books import PREFIX
from gcore_language.model_files import weights_sha256

ALPHA = 8.0


def spec_of(name: str, array: np.ndarray) -> tuple[TensorSpec, np.ndarray]:
    """Returns a float32 tensor as pushes and files have it."""
    flat = np.ascontiguousarray(array, np.float32)
    return TensorSpec(name, "F32", array.shape, flat.nbytes), flat.reshape(-1).view(np.uint8)


def save_adapter(directory: Path, model: Path, rank: int = 4, **config: object) -> Path:
    """Saves a random adapter for the attention and feed-forward matrices of a model."""
    directory.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    tensors = []
    for spec, _ in read_safetensors(model / "model.safetensors"):
        if spec.name.endswith("_proj.weight"):
            name = f"{PREFIX}{spec.name.removesuffix('.weight')}"
            outputs, inputs = spec.shape
            first = 0.2 * random.standard_normal((rank, inputs))
            second = 0.2 * random.standard_normal((outputs, rank))
            tensors.append(spec_of(f"{name}.lora_A.weight", first))
            tensors.append(spec_of(f"{name}.lora_B.weight", second))
    write_safetensors(directory / "adapter_model.safetensors", tensors)
    found = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": ALPHA,
        "target_modules": sorted({spec.name.split(".")[-3] for spec, _ in tensors}),
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(found), encoding="utf-8")
    return directory


def merge_adapter(directory: Path, model: Path, adapter: Path) -> Path:
    """Saves a model whose matrices are those of ``model`` plus alpha / rank * B A."""
    shutil.copytree(model, directory)
    halves = {
        spec.name.removeprefix(PREFIX): flat.view(np.float32).reshape(spec.shape)
        for spec, flat in read_safetensors(adapter / "adapter_model.safetensors")
    }
    merged = []
    for spec, flat in read_safetensors(model / "model.safetensors"):
        weight: np.ndarray = flat.view(np.float32).reshape(spec.shape)
        name = spec.name.removesuffix(".weight")
        if f"{name}.lora_A.weight" in halves:
            a, b = halves[f"{name}.lora_A.weight"], halves[f"{name}.lora_B.weight"]
            weight = weight + ALPHA / len(a) * b @ a
        merged.append(spec_of(spec.name, weight))
    write_safetensors(directory / "model.safetensors", merged)
    return directory


def adapter_push(model: Path, adapter: Path, rank: int, version: int) -> tuple[WeightPlan, Tensors]:
    """Returns the plan and the tensors of a push that brings the adapter alone."""
    tensors = read_safetensors(adapter / "adapter_model.safetensors")
    tensors = sorted(tensors, key=lambda item: item[0].name)
    targets = [
        spec.name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        for spec, _ in tensors
        if ".lora_A." in spec.name
    ]
    facts = AdapterFacts(rank, ALPHA / rank, targets, weights_sha256(model))
    return WeightPlan(version, [spec for spec, _ in tensors], facts), tensors
