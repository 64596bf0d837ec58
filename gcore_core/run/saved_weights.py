"""Checks that a directory of safetensors files is whole, and hashes the weights in it."""

from __future__ import annotations

import hashlib
import json
import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gcore_core.contract.errors import DataError
from gcore_core.contract.records import TensorSpec
from gcore_core.contract.weights_hash import WeightsHash

INDEX = "model.safetensors.index.json"

_THREADS = 4  # hash tensors side by side


def weights_sha256(directory: Path) -> str:
    """Returns the SHA-256 of the weights in a directory of safetensors files.

    What it covers: ``gcore_core.contract.weights_hash``. The files are read once, through the page
    cache, by a few threads; no tensor is copied.

    Raises DataError when there is no such file, or one is damaged.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise DataError(
            "no weights to hash.",
            where=str(directory),
            why="there is no *.safetensors file in it",
            todo="name a directory of weights, such as runs/<name>/<NNN>/weights",
        )
    check_weights(directory)
    tensors = [tensor for file in files for tensor in _tensors(file)]
    weights = WeightsHash()
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = threads.map(lambda tensor: hashlib.sha256(tensor[1]).hexdigest(), tensors)
        for (spec, _), digest in zip(tensors, digests, strict=True):
            weights.add_digest(spec, digest)
    return weights.hexdigest()


def _tensors(file: Path) -> list[tuple[TensorSpec, memoryview]]:
    """Returns the tensors of a safetensors file that was checked, mapped into memory.

    The library gives no view of a tensor whose dtype numpy lacks, so the header is read here:
    eight bytes with its length, then JSON.
    """
    with file.open("rb") as stream:
        content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    first = 8 + int.from_bytes(content[:8], "little")
    tensors = []
    for name, entry in json.loads(bytes(content[8:first])).items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        spec = TensorSpec(name, entry["dtype"], tuple(entry["shape"]), end - start)
        tensors.append((spec, content[first + start : first + end]))
    return tensors


def check_weights(weights: Path) -> None:
    """Raises DataError unless every file is whole and holds the tensors that the index says."""
    files = sorted(weights.rglob("*.safetensors"))
    names_in = {str(file.relative_to(weights)): tensor_names(file) for file in files}
    index = weights / INDEX
    if not index.exists():
        return
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        file_of = [(str(name), str(file)) for name, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(index, f"the index does not parse: {error!r}") from error
    for name, file in file_of:
        if name not in names_in.get(file, ()):
            raise _damaged(index, f"tensor {name!r} is not in {file!r}")


def tensor_names(file: Path) -> set[str]:
    """Returns the names of the tensors in a safetensors file; it reads the header alone.

    Raises DataError unless the tensors fill the file to its last byte.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            return set(opened.keys())
    except SafetensorError as error:
        raise _damaged(file, str(error)) from error


def _damaged(file: Path, why: str) -> DataError:
    return DataError(
        "this file of weights is damaged.",
        where=str(file),
        why=why,
        todo="resume the run to write it again",
    )
