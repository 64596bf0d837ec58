"""A trainer's state as safetensors of whole tensors and one JSON file; any number of ranks can load it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gcore_core.errors import DataError
from gcore_torch.ranks import Ranks
from gcore_torch.weights import full

#: Most bytes of whole tensors that rank 0 holds before it writes them to a file.
_FILE_BYTES = 2**31
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_state(
    directory: Path, tensors: dict[str, Tensor], optimizer: torch.optim.Optimizer, numbers: dict[str, Any], ranks: Ranks
) -> None:
    """Writes weights, AdamW's moments and ``numbers``; every rank calls it, rank 0 writes."""
    directory.mkdir(parents=True, exist_ok=True)
    held: dict[str, Tensor] = {}
    files = 0
    steps: dict[str, float] = {}

    def write() -> None:
        nonlocal held, files
        if held and ranks.rank == 0:
            save_file(held, directory / f"state-{files:05d}.safetensors")
        held, files = {}, files + 1

    for name, tensor in tensors.items():
        state = optimizer.state.get(tensor, {})
        if state:
            steps[name] = float(state["step"])
        for key, part in (("weight", tensor), *((key, state[key]) for key in _MOMENTS if key in state)):
            whole = full(part).cpu()  # a collective when sharded; one tensor at a time
            if ranks.rank == 0:
                held[f"{key}/{name}"] = whole.contiguous().clone()
            if sum(t.nbytes for t in held.values()) >= _FILE_BYTES:
                write()
    write()
    if ranks.rank == 0:
        (directory / "state.json").write_text(json.dumps({**numbers, "optimizer_steps": steps}))
    ranks.wait()


def load_state(
    directory: Path, tensors: dict[str, Tensor], optimizer: torch.optim.Optimizer, ranks: Ranks
) -> dict[str, Any]:
    """Copies a saved state into ``tensors`` and the optimizer; returns the numbers. Raises DataError."""
    manifest = directory / "state.json"
    try:
        numbers: dict[str, Any] = json.loads(manifest.read_text())
    except (OSError, ValueError) as error:
        raise DataError("trainer state cannot be read.", where=str(manifest), why=str(error)) from error
    steps = numbers.pop("optimizer_steps")
    missing = {"weight/" + name for name in tensors}
    with torch.no_grad():
        for key, whole in _stored(directory):
            kind, _, name = key.partition("/")
            tensor = tensors.get(name)
            if tensor is None or tuple(whole.shape) != tuple(tensor.shape):
                found = "no such tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
                raise DataError(
                    f"trainer state is of another model: {name} has shape {tuple(whole.shape)}, the model {found}.",
                    where=str(directory),
                )
            if kind == "weight":
                tensor.copy_(ranks.like(whole, tensor))
                missing.discard(key)
            else:
                state = optimizer.state[tensor]
                state["step"] = torch.tensor(float(steps[name]), device=tensor.device)
                state[kind] = ranks.like(whole, tensor).clone()
    if missing:
        raise DataError(f"trainer state lacks {min(missing)}.", where=str(directory), why=f"{len(missing)} in all")
    return numbers


def _stored(directory: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(directory.glob("state-*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    yield key, file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise DataError("trainer state cannot be read.", where=str(path), why=str(error)) from error
