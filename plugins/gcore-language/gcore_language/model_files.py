"""Looks at a model directory in Hugging Face layout without loading it: whether it is whole, and
which tensors it holds.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.records import TensorSpec
from gcore_core.contract.weights_hash import WeightsHash
from gcore_language.model_places import directory_here, is_hub_name, is_offline

#: Buffers that old checkpoints hold and no engine reads.
_COMPUTED = ".rotary_emb.inv_freq"


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """What a model directory holds.

    directory: the directory.
    config: config of the language model.
    shapes: tensor's name -> shape, without names that are tied to another.
    """

    directory: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @property
    def embedded(self) -> int | None:
        """Number of tokens that the model embeds; None where its config does not say."""
        return self.config.get("vocab_size")


def open_model_files(context: WorkerContext, path: str = "") -> ModelFiles:
    """Looks at the role's ``model.path``, or at another path.

    path: a directory or a name on the hub; "" for ``model.path``.

    Raises ConfigError without a path, and DataError for a directory that is missing or damaged.
    """
    revision = None if path else context.model.get("revision")
    path = path or str(context.model.get("path") or "")
    if not path:
        raise ConfigError("no model directory is given.", where=f"roles.{context.role}.model.path")
    directory = Path(path) if Path(path).is_dir() else _download(path, revision)
    file = directory / "config.json"
    if not file.is_file():
        raise DataError(
            "model directory has no config.json.", where=str(directory), todo="Correct model.path."
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        if not isinstance(text, dict):
            raise ValueError("text_config is no mapping")
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError("model config is not JSON.", where=str(file), why=str(error)) from error
    shapes = shapes_in(directory)
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    dropped = {
        name for name in shapes if name.endswith(_COMPUTED) or (tied and name == "lm_head.weight")
    }
    return ModelFiles(
        directory=directory,
        config=text,
        shapes={n: shape for n, shape in shapes.items() if n not in dropped},
    )


def shapes_in(directory: Path) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of every tensor of a model directory, from the headers.

    Raises DataError for a directory that is damaged or has no safetensors.
    """
    return {name: shape for _, name, shape in tensors_in(directory)}


def tensors_in(directory: Path) -> Iterator[tuple[Path, str, tuple[int, ...]]]:
    """Yields file, name and shape of every tensor of a model directory, from the headers.

    Raises DataError for a directory that is damaged or has no safetensors.
    """
    for part in _parts(directory):
        for name, shape in _tensors(part):
            yield part, name, shape


def weights_sha256(directory: Path) -> str:
    """Returns the hash that names a model directory's weights, as ``g-core hash`` prints it.

    A core hashes some 1.7 GB/s. Raises DataError for a directory that is damaged.
    """
    weights = WeightsHash()
    for part in _parts(directory):
        for _ in _tensors(part):
            pass  # the header is whole, and its tensors fill the file
        with part.open("rb") as stream:
            content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        first = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(bytes(content[8:first])).items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            spec = TensorSpec(name, entry["dtype"], tuple(entry["shape"]), end - start)
            weights.add(spec, content[first + start : first + end])
    return weights.hexdigest()


def _download(path: str, revision: str | None) -> Path:
    """Downloads a model of the hub, unless the hub's cache has it; returns its directory.

    Raises DataError when it cannot be had.
    """
    if not is_hub_name(path):
        raise DataError("model directory does not exist.", where=path, todo="Correct model.path.")
    if is_offline():
        cached = directory_here(path, revision)
        if cached is not None:
            return cached
        raise DataError(
            "model is neither a directory nor reachable.",
            where=path,
            why=(
                "There is no such directory, the hub's cache does not have it, and HF_HUB_OFFLINE "
                "forbids to ask the hub for that name."
            ),
            todo="Download the model and set model.path to its directory.",
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
        return Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[:1]
        raise DataError("model is not on the hub.", where=path, why="\n".join(first)) from error


def _parts(directory: Path) -> list[Path]:
    """Returns the safetensors files: those that the index names, or else all.

    Raises DataError when there is none, or the index does not fit the directory.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _half_written(index, f"the index is not readable: {error}") from error
        for name in names:
            if (
                not isinstance(name, str) or Path(name).name != name
            ):  # a path could lead out of the directory
                raise _half_written(
                    index, f"the index names {str(name)[:80]!r}, which is no file's name."
                )
            if not (directory / name).is_file():
                raise _half_written(directory, f"{index.name} names {name}, which is missing.")
        return [directory / name for name in names]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for path in directory.glob("*.bin"))
        raise DataError(
            "model directory has no weights in safetensors.",
            where=str(directory),
            why=f"It has {', '.join(pickles)}, which can run code when read." if pickles else "",
            todo=(
                "Convert them: model.save_pretrained(directory) of transformers writes safetensors."
            ),
        )
    return files


def _tensors(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of each tensor, from the header.

    Raises DataError when the header is damaged, or the tensors do not fill the file exactly.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                yield name, tuple(opened.get_slice(name).get_shape())
    except SafetensorError as error:
        raise _half_written(file, f"its header is not readable: {error}") from error


def _half_written(where: Path, why: str) -> DataError:
    return DataError(
        "model directory is damaged or half written.",
        where=str(where),
        why=why,
        todo="Copy it again.",
    )
