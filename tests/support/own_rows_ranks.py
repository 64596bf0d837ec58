"""One of four ranks that compare models whose rows they read with models that are loaded whole.

``python -m tests.support.own_rows_ranks RANK MODELS WORK``, by test_own_rows.py. Of each directory
in MODELS, on two and four of the ranks, each kind of model is opened in both ways and sharded.
A rank writes WORK/RANK.json: for each case what differs; nothing, if all is right.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gcore_language.lora import add_adapters
from gcore_language.lora_settings import LoraSettings
from gcore_language.models import load_model, load_value_model
from gcore_language.own_rows import OwnRows
from gcore_language.packing import Batch, micro_batches
from gcore_language.policy import Policy, _trial_samples
from gcore_language.values import ValueModel
from gcore_language.weights import named_tensors
from gcore_torch.sharding import materialise, shard
from torch.distributed.device_mesh import DeviceMesh

RANKS = 4
#: Kind of model -> the names of MODELS that are opened so; None: all.
KINDS: dict[str, set[str] | None] = {
    "policy": None,
    "adapters": {"qwen2"},
    "adapters in bfloat16": {"qwen3 in bfloat16", "llama"},
    "values": {"gpt2", "llama", "qwen3_moe"},
}
_CPU = torch.device("cpu")


def _open(path: Path, kind: str, *, empty: bool) -> Policy:
    if kind == "values":
        return ValueModel(load_value_model(str(path), std=0.1, seed=3, empty=empty))
    model = load_model(str(path), dtype="float32", images=True, empty=empty)
    if kind.startswith("adapters"):
        lora = LoraSettings(rank=2)
        add_adapters(model, lora, path, "policy", _rounding(kind))
    return Policy(model)


def _rounding(kind: str) -> torch.dtype:
    return torch.bfloat16 if kind.endswith("bfloat16") else torch.float32


def _differences(path: Path, kind: str, mesh: Any) -> list[str]:
    """Returns in what the two models differ on this rank.

    mesh: of the ranks that share them.
    """
    whole = _open(path, kind, empty=False)
    read = _open(path, kind, empty=True)
    rows = OwnRows(path)
    lacking = rows.lacks(read.model)
    if lacking:
        return [f"lacks {lacking}"]
    blocks = set(whole.model._no_split_modules or ())
    for policy in (whole, read):
        shard(policy, mesh, blocks)
    materialise(read, rows, _CPU, _rounding(kind))
    found = [*_of_tensors(whole, read), *_of_buffers(whole, read)]
    if _tied(whole.model) != _tied(read.model):
        found.append("tied")
    if not whole.takes_images:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind.endswith("bfloat16")):
            found += _of_passes(whole, read)
    return found


def _of_tensors(whole: Policy, read: Policy) -> list[str]:
    expected, tensors = named_tensors(whole.model), named_tensors(read.model)
    if expected.keys() != tensors.keys():
        return [f"names {sorted(expected.keys() ^ tensors.keys())}"]
    return [name for name in expected if not _same(expected[name], tensors[name])]


def _of_buffers(whole: Policy, read: Policy) -> list[str]:
    expected, buffers = dict(whole.named_buffers()), dict(read.named_buffers())
    if expected.keys() != buffers.keys():
        return [f"buffers {sorted(expected.keys() ^ buffers.keys())}"]
    return [name for name in expected if not _same(expected[name], buffers[name])]


def _of_passes(whole: Policy, read: Policy) -> list[str]:
    (batch,) = micro_batches(_trial_samples(22), "padded", 10**9, _CPU)
    with torch.no_grad():
        one, other = _result(whole, batch), _result(read, batch)
    return [] if torch.equal(one, other) else ["forward pass"]


def _result(policy: Policy, batch: Batch) -> torch.Tensor:
    found: torch.Tensor = policy(batch)[0]
    return found


def _same(one: Any, other: Any) -> bool:
    if one.requires_grad != other.requires_grad or one.dtype != other.dtype:
        return False
    if hasattr(one, "to_local") != hasattr(other, "to_local") or one.shape != other.shape:
        return False
    if hasattr(one, "to_local"):
        one, other = one.to_local(), other.to_local()
    return bool(torch.equal(one, other))


def _tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def main(rank: int, models: Path, work: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work}/meet", rank=rank, world_size=RANKS)
    meshes: dict[int, Any] = {}
    for count in (2, 4):
        group = dist.new_group(list(range(count)))  # every rank makes every group
        meshes[count] = DeviceMesh.from_group(group, "cpu") if rank < count else None
    found = {}
    for path in sorted(models.iterdir()):
        for kind, names in KINDS.items():
            for count, mesh in meshes.items():
                if rank < count and (names is None or path.name in names):
                    case = f"{path.name}, {kind}, {count} ranks"
                    found[case] = _differences(path, kind, mesh)
    (work / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
    os._exit(0)  # what is asked for is written; a thread of a library may abort a rank that unwinds
