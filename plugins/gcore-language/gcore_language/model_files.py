"""Looks at a model directory in Hugging Face layout without loading it: whether it is whole, and
which tensors it holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError, GcoreError
from gcore_core.contract.records import TensorSpec
from gcore_core.contract.weights_hash import WeightsHash
from gcore_language.lora_settings import CONFIG_FILE as ADAPTER_CONFIG
from gcore_language.model_places import directory_here, is_hub_name, is_offline
from gcore_language.prompts import first_lines

#: Buffers that old checkpoints hold and no engine reads.
_COMPUTED = ".rotary_emb.inv_freq"
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
#: What transformers and diffusers call the file of a whole model, without its ending.
_STEMS = ("model", "diffusion_pytorch_model")
#: Endings of files with weights that are not read -> why.
_NOT_READ = {
    (".bin", ".pt", ".pth"): "can run code when read",
    (".gguf",): "holds weights for llama.cpp, most often quantised",
}
_SHOWN = 4
_POINTER = b"version https://git-lfs"
#: Numbers of a config that are read here, so that they must be numbers.
_COUNTS = ("vocab_size", "max_position_embeddings")
#: Dtypes of safetensors in which several bits of a weight's number are left out.
_PACKED = ("I8", "U8", "F8_", "F6_", "F4")
#: What quantisers call the tensors that they put in a weight's place.
_OF_QUANTISERS = frozenset(
    {"qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_inv", "absmax"}
)
#: Attention masks, which GPT-2's files hold as bytes under these names.
_MASKS = frozenset({"bias", "masked_bias"})


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a model directory, by its file's header.

    file: where it lies.
    shape: its shape.
    dtype: as safetensors names it: "F32", "BF16", ...
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


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


def open_model_files(
    context: WorkerContext, path: str = "", *, quantised: bool = False
) -> ModelFiles:
    """Looks at the role's ``model.path``, or at another path.

    path: a directory or a name on the hub; "" for ``model.path``.
    quantised: whether its weights may be quantised.

    Raises ConfigError without a path, and DataError for a directory that is missing, damaged or no
    model.
    """
    revision = None if path else context.model.get("revision")
    path = path or str(context.model.get("path") or "")
    if not path:
        raise ConfigError("no model directory is given.", where=f"roles.{context.role}.model.path")
    directory = Path(path) if Path(path).is_dir() else _download(path, revision)
    return read_model_files(directory, quantised=quantised)


def read_model_files(directory: Path, *, quantised: bool = False) -> ModelFiles:
    """Looks at a model directory; see ``open_model_files``."""
    config = read_config(directory)
    text = config.get("text_config", config)
    tensors = tensors_in(directory)
    names = sorted({tensor.file.name for tensor in tensors.values()})
    if not (directory / _INDEX).is_file() and names != [_WHOLE]:
        raise _half_written(directory, f"It has neither {_WHOLE} nor {_INDEX}, only {names[:2]}.")
    if not quantised:
        refuse_quantised(directory, config, tensors)
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    dropped = {
        name for name in tensors if name.endswith(_COMPUTED) or (tied and name == "lm_head.weight")
    }
    return ModelFiles(
        directory=directory,
        config=text,
        shapes={name: one.shape for name, one in tensors.items() if name not in dropped},
    )


def read_config(directory: Path) -> dict[str, Any]:
    """Reads a model's config.json.

    Raises DataError where there is none, where it is no mapping, or where the directory holds an
    adapter: transformers would add it to the model where peft is installed, and else leave it out.
    """
    file = directory / "config.json"
    adapter = directory / ADAPTER_CONFIG
    if adapter.is_file():
        raise DataError(
            "this is an adapter and no model."
            if not file.is_file()
            else "the directory holds a model and an adapter of it.",
            where=str(directory),
            why=f"It has {ADAPTER_CONFIG}.",
            todo="Merge the adapter into its base (peft's model.merge_and_unload()) and save that; "
            "or give the base as model.path and the adapter's own directory as lora.path.",
        )
    if not file.is_file():
        raise DataError(
            "model directory has no config.json.", where=str(directory), todo="Correct model.path."
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or not isinstance(config.get("text_config", config), dict):
            raise ValueError("it is no mapping, or its text_config is none")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError("model config is not JSON.", where=str(file), why=str(error)) from error
    text = config.get("text_config", config)
    for name in _COUNTS:
        if name in text and (type(text[name]) is not int or text[name] < 1):
            raise DataError(
                f"{name} is {text[name]!r}, which is no number above 0.", where=str(file)
            )
    if other := config.get("transformers_weights"):
        raise DataError(
            f"config.json names {other!r} as the file of the weights (transformers_weights).",
            where=str(file),
            why="transformers would read that one, and engines others.",
            todo=f"Leave the key out, and name the file {_WHOLE}.",
        )
    return config


def is_quantised(directory: Path) -> bool:
    """Returns whether a model's weights are quantised. Raises DataError where it is no model."""
    return bool(_why_quantised(read_config(directory), tensors_in(directory)))


def refuse_quantised(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> None:
    """Raises DataError for weights that are quantised, by the config or by the files' headers."""
    if why := _why_quantised(config, tensors):
        raise DataError(
            "the weights are quantised, and quantised weights cannot be trained or compared.",
            where=str(directory),
            why=why,
            todo="Take the model that was quantised: its name lacks an ending such as -AWQ, -GPTQ, "
            "-FP8 or -bnb-4bit.",
        )


def _why_quantised(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> str:
    """Returns what says that weights are quantised; "" where nothing does."""
    for part in (config, config.get("text_config", {})):
        for key in ("quantization_config", "compression_config"):
            if part.get(key) is not None:
                method = part[key].get("quant_method") if isinstance(part[key], dict) else ""
                return f"config.json has {key}" + (f" ({method})." if method else ".")
    for name, one in tensors.items():
        last = name.rpartition(".")[2]
        if last in _OF_QUANTISERS or (one.dtype.startswith(_PACKED) and last not in _MASKS):
            return f"{name} is {one.dtype} in {one.file.name}, and config.json says nothing of it."
    return ""


def shapes_in(directory: Path) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of every tensor of a model directory, from the headers.

    Raises DataError for a directory that is damaged or has no safetensors.
    """
    return {name: tensor.shape for name, tensor in tensors_in(directory).items()}


def tensors_in(directory: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of a model directory by its name, from the headers.

    Raises DataError for a directory that is damaged or has no safetensors.
    """
    tensors: dict[str, StoredTensor] = {}
    for part in _parts(directory):
        for name, tensor in _tensors(part):
            if name in tensors:
                raise _half_written(
                    directory, f"{tensors[name].file.name} and {part.name} both have {name}."
                )
            tensors[name] = tensor
    return tensors


def weights_sha256(directory: Path) -> str:
    """Returns the hash that names a model directory's weights, as ``g-core hash`` prints it.

    A core hashes some 1.7 GB/s. Raises DataError for a directory that is damaged.
    """
    weights = WeightsHash()
    for part in _parts(directory):
        for _ in _tensors(part):
            pass  # the header is whole, and its tensors fill the file
        # read and not mapped: all pages of a mapping count as this process's
        with part.open("rb") as stream:
            first = 8 + int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(first - 8))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                start, end = entry["data_offsets"]
                spec = TensorSpec(name, entry["dtype"], tuple(entry["shape"]), end - start)
                stream.seek(first + start)
                weights.add(spec, memoryview(stream.read(end - start)))
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
        raise DataError(
            "model is no directory here, and cannot be fetched from the hub.",
            where=path,
            why="\n".join(first),
            todo="Correct the name, or see that the hub is reached; or download the model "
            "elsewhere and set model.path to its directory.",
        ) from error


def _parts(directory: Path) -> list[Path]:
    """Returns the safetensors files: those that the index names, or else the whole model's, or else
    all.

    Raises DataError when there is none, or the index does not fit the directory.
    """
    for stem in _STEMS:
        whole = directory / f"{stem}.safetensors"
        index = directory / f"{stem}.safetensors.index.json"
        if index.is_file():
            parts = _indexed(index)
            if whole.is_file() and whole not in parts:
                raise DataError(
                    "the directory has two sets of weights.",
                    where=str(directory),
                    why=f"{whole.name} is not among the files that {index.name} names: one library "
                    "reads the one, another the others.",
                    todo="Remove what is old.",
                )
            return parts
        if whole.is_file():
            return [whole]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        why = [
            f"It has {', '.join(sorted(path.name for path in others)[:_SHOWN])}, which {what}."
            for ends, what in _NOT_READ.items()
            if (others := [path for end in ends for path in directory.glob(f"*{end}")])
        ]
        raise DataError(
            "model directory has no weights in safetensors.",
            where=str(directory),
            why="\n".join(why),
            todo=(
                "Convert them: model.save_pretrained(directory) of transformers writes safetensors."
            ),
        )
    return files


def _indexed(index: Path) -> list[Path]:
    """Returns the files that an index names. Raises DataError where one of them is missing."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _half_written(index, f"the index is not readable: {error}") from error
    for name in names:
        # a path could lead out of the directory
        if not isinstance(name, str) or Path(name).name != name:
            raise _half_written(
                index, f"the index names {str(name)[:80]!r}, which is no file's name."
            )
        if not (index.parent / name).is_file():
            raise _half_written(index.parent, f"{index.name} names {name}, which is missing.")
    if not names:
        raise _half_written(index, "the index names no file.")
    return [index.parent / name for name in names]


def _tensors(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yields each tensor with its name, from the header.

    Raises DataError when the header is damaged, or the tensors do not fill the file exactly.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                part = opened.get_slice(name)
                yield (
                    name,
                    StoredTensor(
                        file=file, shape=tuple(part.get_shape()), dtype=str(part.get_dtype())
                    ),
                )
    except (OSError, SafetensorError) as error:
        if _is_pointer(file):
            raise DataError(
                "the weights are not here: this is a pointer of git LFS.",
                where=str(file),
                todo="Get the file itself: git lfs pull, in the directory that was cloned.",
            ) from error
        raise _half_written(file, f"its header is not readable: {error}") from error


def _is_pointer(file: Path) -> bool:
    """Returns whether a file is what git leaves in its place without LFS."""
    try:
        with file.open("rb") as stream:
            return stream.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


@contextmanager
def told_as(
    what: str, directory: Path, explain: Callable[[Exception], str] = lambda _: ""
) -> Iterator[None]:
    """Turns what a library raises that opens a model's files into a DataError.

    what: what is opened.
    explain: returns why, where it can say that better than the error; else "".
    """
    try:
        yield
    except GcoreError:
        raise
    except Exception as error:  # isolation point: which one it raises, the files decide
        why = explain(error) or first_lines(error)
        if not isinstance(error, (OSError, ValueError, RuntimeError)):
            why = f"{type(error).__name__}: {why}"  # a KeyError says its key alone
        raise DataError(
            f"transformers cannot load the {what}.",
            where=str(directory),
            why=why,
            todo="Copy the whole model again, with the config.json that belongs to it.",
        ) from error


def _half_written(where: Path, why: str) -> DataError:
    return DataError(
        "model directory is damaged or half written.",
        where=str(where),
        why=why,
        todo="Copy it again.",
    )
