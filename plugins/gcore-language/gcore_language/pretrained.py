"""Opens models of transformers so that their weights are what the files say.

Where files and architecture differ, transformers fills in random numbers, or leaves tensors out,
and writes a table into its log. Here that is a DataError, as are weights that are quantised or not
finite. ``g-core check`` asks the same of the files' headers alone, by ``open_pretrained`` with
``empty``.
"""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gcore_core.contract.errors import DataError
from gcore_language.end_ids import refuse_unreadable
from gcore_language.image_requests import name_in_checkpoint
from gcore_language.images import takes_images
from gcore_language.lean import import_lean, import_whole
from gcore_language.model_files import (
    StoredTensor,
    is_quantised,
    read_config,
    read_model_files,
    tensors_in,
    told_as,
)

#: Where transformers puts a model's parameters when it is to read none of them.
_NOWHERE = {"": "meta"}
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Ends of names of what a model computes when it is made; old files hold it, too.
_COMPUTED = (".rotary_emb.inv_freq", ".masked_bias", ".position_ids")
#: How many names an error shows of each kind.
_SHOWN = 3
#: What a tensor's name has in it where peft has named it.
_OF_PEFT = re.compile(r"^base_model\.model\.|\.lora_|\.base_layer\.")
#: The block of a layer's experts, an expert's number, and one of its tensors.
_OF_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


@dataclass(frozen=True, kw_only=True)
class Opening:
    """As what a model is opened.

    kind: class of transformers, or one of its Auto classes.
    what: what an error calls it.
    head: names of tensors that are made where the files lack them.
    headless: what an error says, and what to do, where the files have all layers and lack another
        head. Where it is set, they may be of another task: what lies outside of the layers, such as
        the output embedding of a language model, is not read.
    """

    kind: str
    what: str = "model"
    head: frozenset[str] = frozenset()
    headless: tuple[str, str] | None = None


LANGUAGE = Opening(kind="AutoModelForCausalLM")
IMAGE_TEXT = Opening(kind="AutoModelForImageTextToText")
#: A causal language model, or a reward model, with one output.
VALUES = Opening(
    kind="AutoModelForSequenceClassification",
    head=frozenset({"score.weight"}),
    headless=(
        "the model cannot have a value head.",
        "take a causal language model such as Llama, Mistral, Qwen or GPT-2",
    ),
)
CLASSIFIER = Opening(
    kind="AutoModelForSequenceClassification",
    what="reward model",
    headless=(
        "model is no reward model.",
        "Take a model that was trained as a sequence classifier with one output.",
    ),
)
CLIP = Opening(kind="CLIPModel", what="preference model")


def read_hf_config(directory: Path, *, trust_remote_code: bool = False, what: str = "model") -> Any:
    """Returns transformers' config of a model directory.

    Raises DataError for a directory that is no model or damaged, and for quantised weights.
    """
    read_model_files(directory)
    import_lean()
    from transformers import AutoConfig

    with told_as(what, directory):
        return AutoConfig.from_pretrained(str(directory), trust_remote_code=trust_remote_code)


def language_opening(config: Any, *, images: bool) -> Opening:
    """Returns as what a language model is opened.

    images: whether it may be an image-text model.
    """
    return IMAGE_TEXT if images and takes_images(config) else LANGUAGE


def open_pretrained(
    directory: Path,
    opening: Opening,
    *,
    config: Any = None,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "auto",
    trust_remote_code: bool = False,
    empty: bool = False,
) -> tuple[Any, frozenset[str]]:
    """Opens a model on the CPU; returns it with those names of ``opening.head`` that are random.

    config: of ``read_hf_config``, where it was changed.
    empty: whether to read the headers alone: the parameters are on the meta device, and so are the
        buffers. Then the numbers of weights are not looked at.

    Raises DataError where the directory is no such model or damaged, where its weights are
    quantised, where the files lack tensors of the architecture, have others, or have them in other
    shapes, and where a weight is not finite.
    """
    if config is None:
        config = read_hf_config(directory, trust_remote_code=trust_remote_code, what=opening.what)
    refuse_unreadable(directory)
    tensors = tensors_in(directory)
    _refuse_too_many_layers(config, tensors, directory)
    arguments = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": None if attn_implementation == "auto" else attn_implementation,
    }
    with told_as(opening.what, directory, lambda error: _odd_expert(error, tensors)):
        kind = getattr(importlib.import_module("transformers"), opening.kind)
        if empty:
            model, info = _open_empty(kind, directory, tensors, arguments, trust_remote_code)
        else:
            model, info = kind.from_pretrained(
                str(directory),
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **arguments,
            )
    differences = Differences.of(info, opening, model)
    differences.refuse(directory)
    _tie(model, directory)
    if not empty:
        refuse_not_finite(model.named_parameters(), directory)
    return model, opening.head & set(info["missing_keys"])


def check_for_engine(directory: Path, *, trust_remote_code: bool = False) -> None:
    """Looks at a language model that an engine is going to load, which tells nothing of its own.

    Each weight is read once. Nothing is said of weights that are quantised, which some engines can
    load, and of an architecture that transformers does not know.

    Raises DataError as ``open_pretrained`` does.
    """
    import_whole()
    if not may_compare(directory):
        return
    config = read_hf_config(directory, trust_remote_code=trust_remote_code)
    opening = language_opening(config, images=True)
    open_pretrained(
        directory, opening, config=config, trust_remote_code=trust_remote_code, empty=True
    )
    refuse_not_finite_files(directory)


def may_compare(directory: Path) -> bool:
    """Returns whether transformers knows the architecture of a model that an engine loads, and its
    weights are numbers.
    """
    import_lean()
    from transformers import CONFIG_MAPPING

    config = read_config(directory)
    known = config.get("model_type") in CONFIG_MAPPING or "auto_map" in config
    return known and not is_quantised(directory)


def refuse_not_finite(weights: Iterable[tuple[str, Tensor]], where: Path) -> None:
    """Raises DataError for the first weight with a NaN or an infinity, with its name.

    It reads each weight once, some 10 GB a second on a core, and makes no copy.
    """
    for name, weight in weights:
        # a sum is finite only where all parts are; it may overflow where they are, too
        if not weight.is_floating_point() or bool(weight.detach().sum().isfinite()):
            continue
        wrong = ~weight.detach().isfinite()
        if not wrong.any():
            continue
        first = wrong.flatten().nonzero()[0].item()
        todo = (
            "Make the model again: a merge or a training run that overflowed leaves such weights."
        )
        if weight.dtype == torch.float16 and not weight.detach().isnan().any():
            todo = f"Set dtype: bfloat16 or float32: float16 ends at 65504. Or: {todo}"
        raise DataError(
            f"{name} is not finite.",
            where=str(where),
            why=f"{int(wrong.sum())} of its {weight.numel()} numbers are NaN or infinite in "
            f"{str(weight.dtype).removeprefix('torch.')}; the first is number {first}.",
            todo=todo,
        )


def refuse_not_finite_files(directory: Path) -> None:
    """Raises DataError as ``refuse_not_finite`` does, for a model that another library loads.

    The files are mapped, and read as fast as the disk gives them.
    """
    refuse_not_finite(_stored(tensors_in(directory)), directory)


def _stored(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of floating point numbers, file by file."""
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name, one in tensors.items():
        if one.dtype in _DTYPES:
            by_file[one.file].append(name)
    for file, names in by_file.items():
        with safe_open(file, "pt") as opened:
            for name in names:
                yield name, opened.get_tensor(name)


# -- what differs ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How the tensors of a model's files differ from those of its architecture.

    missing: names of tensors that the files lack.
    unused: names of tensors of the files that no layer takes.
    reshaped: (name, shape in the files, shape by the config).
    headless: see ``Opening``; None where layers are missing too.
    """

    missing: Collection[str] = ()
    unused: Collection[str] = ()
    reshaped: Collection[tuple[str, Collection[int], Collection[int]]] = ()
    headless: tuple[str, str] | None = None

    @classmethod
    def of(cls, info: Mapping[str, Any], opening: Opening, model: Any) -> Differences:
        """Returns what is wrong by a loading info of transformers, of a model that is opened so."""
        missing = set(info["missing_keys"]) - opening.head
        unused = {name for name in info["unexpected_keys"] if not name.endswith(_COMPUTED)}
        layers = f"{model.base_model_prefix}."
        headless = opening.headless
        if any(name.startswith(layers) for name in missing):
            headless = None  # and the unused tensors may say why
        elif headless is not None:
            unused = {name for name in unused if name.startswith(layers)}
        return cls(
            missing=sorted(missing),
            unused=sorted(unused),
            reshaped=sorted(
                (name, tuple(stored), tuple(wanted))
                for name, stored, wanted in info["mismatched_keys"]
            ),
            headless=headless,
        )

    def refuse(self, directory: Path) -> None:
        """Raises DataError unless there is no difference."""
        where = str(directory)
        if self.missing and self.headless is not None:
            what, todo = self.headless
            why = f"It lacks {_some(self.missing)}, which would be random."
            raise DataError(what, where=where, why=why, todo=todo)
        if self.missing or self.unused or self.reshaped:
            why = "\n".join(self._why())
            raise DataError(self._what(), where=where, why=why, todo=self._todo())

    def _what(self) -> str:
        if self.missing:
            return f"the files lack {_count(self.missing)} of the model, which would be random."
        if self.reshaped:
            return f"the files have {_count(self.reshaped)} in another shape than the model."
        return f"the files have {_count(self.unused)} that no layer of the model takes."

    def _why(self) -> Iterator[str]:
        if self.missing:
            yield f"Missing: {_some(self.missing)}."
        if self.reshaped:
            yield (
                "Shapes: "
                + _some(
                    f"{name} is {list(stored)} in the files and {list(wanted)} by config.json"
                    for name, stored, wanted in self.reshaped
                )
                + "."
            )
        if self.unused:
            yield f"Not used: {_some(self.unused)}."

    def _todo(self) -> str:
        if any(map(_OF_PEFT.search, self.unused)):
            return (
                "These names are peft's: merge the adapter first (model.merge_and_unload()), and "
                "save the result."
            )
        if prefix := self._prefix():
            return f"Save the tensors without the beginning {prefix!r} of their names."
        if list(self.missing) == ["lm_head.weight"]:
            return (
                "If the model's output embedding is its input embedding, set tie_word_embeddings: "
                "true in config.json; else copy the whole model again."
            )
        if self.missing or self.reshaped:
            return "Copy the whole model again, with the config.json that belongs to it."
        return "Take the config.json that belongs to the files, or remove what is no part of it."

    def _prefix(self) -> str:
        """Returns what the files put before the names of the model's tensors; "" for nothing."""
        for name in self.missing:
            for other in self.unused:
                if other.endswith(f".{name}"):
                    return other.removesuffix(name)
        return ""


def _count(things: Collection[Any]) -> str:
    return f"{len(things)} tensor{'s' * (len(things) != 1)}"


def _some(names: Iterable[str]) -> str:
    """Joins the first names of many."""
    all_names = list(names)
    more = len(all_names) - _SHOWN
    return ", ".join(all_names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _refuse_too_many_layers(
    config: Any, tensors: Mapping[str, StoredTensor], directory: Path
) -> None:
    """Raises DataError for a config with more layers than there are tensors.

    Such a model would take long to make, only to find that its tensors are missing.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(tensors):
        raise DataError(
            f"config.json says {layers} layers, and the files have {_count(tensors)}.",
            where=str(directory),
            todo="Copy the whole model again, with the config.json that belongs to it.",
        )


def _tie(model: Any, directory: Path) -> None:
    """Raises DataError where the config ties the embeddings, and the files have two that differ.

    transformers would train them as two, and engines sample with one. Without weights it leaves
    them apart; where they are equal they are tied here.
    """
    if not getattr(model.config, "tie_word_embeddings", False) or not model._tied_weights_keys:
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return
    names = {id(tensor): name for name, tensor in model.named_parameters(remove_duplicate=False)}
    one, other = names[id(embedding.weight)], names[id(head.weight)]
    if not head.weight.is_meta:  # transformers has compared them
        raise _two_embeddings(directory, one, other)
    refuse_two_embeddings(directory, one, other)
    model.tie_weights()


def refuse_two_embeddings(directory: Path, one: str, other: str) -> None:
    """Raises DataError where the files have two tensors of which the config makes one.

    one, other: their names in the model.
    """
    tensors = tensors_in(directory)
    values = []
    for name in (one, other):
        # in the files a name may be an older one, or lack its first part
        names = (name, name_in_checkpoint(name), name.partition(".")[2])
        stored = next((each for each in names if each in tensors), None)
        if stored is None:
            return
        with safe_open(tensors[stored].file, "pt") as opened:
            values.append(opened.get_tensor(stored))
    if not torch.equal(values[0], values[1]):
        raise _two_embeddings(directory, one, other)


def _two_embeddings(directory: Path, one: str, other: str) -> DataError:
    return DataError(
        "config.json says that input and output embedding are one, and the files have two.",
        where=str(directory),
        why=f"{one} and {other} differ.",
        todo="Set tie_word_embeddings: false in config.json.",
    )


# -- how transformers is called --------------------------------------------------------------------


def _open_empty(
    kind: Any,
    directory: Path,
    tensors: Mapping[str, StoredTensor],
    arguments: dict[str, Any],
    trust_remote_code: bool,
) -> tuple[Any, Mapping[str, Any]]:
    """Opens a model by the headers of its files; returns it and transformers' loading info."""
    from transformers import GenerationConfig

    config = arguments.pop("config")
    if hasattr(kind, "from_config"):
        # an Auto class wants a path beside a config; so it is asked for the class alone
        with torch.device("meta"):
            blank = kind.from_config(
                config, dtype=arguments["dtype"], trust_remote_code=trust_remote_code
            )
        kind, config = type(blank), blank.config
    headers = {
        name: torch.empty(one.shape, dtype=_DTYPES.get(one.dtype, torch.float32), device="meta")
        for name, one in tensors.items()
    }
    generation = None
    if (directory / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(str(directory))
    with _device_map_allowed():
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=headers,
            generation_config=generation,
            device_map=_NOWHERE,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **arguments,
        )
    model.config.name_or_path = str(directory)
    return model, info


@contextmanager
def _device_map_allowed() -> Iterator[None]:
    """Lets transformers open a model on the meta device without accelerate.

    It asks for that library before it takes any ``device_map``, and uses it for several devices
    alone.
    """
    from transformers.integrations import accelerate

    if accelerate.is_accelerate_available():
        yield
        return
    is_available = accelerate.is_accelerate_available
    accelerate.is_accelerate_available = lambda: True
    try:
        yield
    finally:
        accelerate.is_accelerate_available = is_available


def _odd_expert(error: Exception, tensors: Mapping[str, StoredTensor]) -> str:
    """Returns which tensor of an expert the files lack, or have in another shape than those of its
    neighbours; "" where all are alike, or the error is of another kind.

    transformers puts such tensors together, and fails without a name.
    """
    if "conversion" not in str(error):
        return ""
    kinds: dict[tuple[str, str], dict[str, StoredTensor]] = defaultdict(dict)
    blocks: dict[str, set[str]] = defaultdict(set)
    for name, one in tensors.items():
        if match := _OF_EXPERT.fullmatch(name):
            block, number, rest = match.groups()
            kinds[block, rest][number] = one
            blocks[block].add(number)
    for (block, rest), members in kinds.items():
        if lacking := blocks[block] - members.keys():
            return f"The files lack {block}{min(lacking, key=int)}{rest}."
        shapes = [one.shape for one in members.values()]
        usual = max(set(shapes), key=shapes.count)
        for number, one in members.items():
            if one.shape != usual:
                name = f"{block}{number}{rest}"
                return f"{name} has shape {list(one.shape)}, and its neighbours {list(usual)}."
    return ""
