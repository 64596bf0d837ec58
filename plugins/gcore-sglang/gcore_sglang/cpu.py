"""Stands in for what SGLang asks for and cannot have on a machine without CUDA.

sgl_kernel     SGLang has a mode for CPUs whose kernels come from a build that no package index has.
               Without them it does the mathematics in torch, but imports their names all the same.
               The stand-in has every name, and calling one says that it is missing
torchvision    SGLang imports it for models that read images. Its builds beside a torch without CUDA
               fail when they are imported, so it must not be installed
processors     of images want torchvision; the tokenizer takes their place (``process_nothing``)
pinned memory  SGLang's adapters ask for it; they get memory as any other (``pin_nothing``)
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn


class _StandIn(ModuleType):
    """Stands for a module: every name is found in it, and what is found raises when called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__: list[str] = []  # a package: its modules may be imported too
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(
                f"{self.__name__}.{name} is not there on a machine without CUDA"
            )

        return missing


class _InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


def stand_in() -> None:
    """Puts the stand-ins where imports find them.

    It must be called before SGLang is imported, in each of its processes.
    """
    from transformers.utils import is_torchvision_available

    # transformers remembers that it is not there, and leaves the stand-in alone
    is_torchvision_available()
    names = ["sgl_kernel"]
    if not is_torchvision_available():
        names += [
            "torchvision",
            "torchvision.io",
            "torchvision.transforms",
            "torchvision.transforms.functional",
        ]
        names += ["torchvision.transforms.v2", "torchvision.transforms.v2.functional"]
    for name in names:
        parent, _, child_name = name.rpartition(".")
        module = sys.modules[name] = _StandIn(name)
        if parent:
            setattr(sys.modules[parent], child_name, module)
    if "torchvision.transforms" in names:
        sys.modules["torchvision.transforms"].InterpolationMode = _InterpolationMode  # type: ignore[attr-defined]


def process_nothing() -> None:
    """Has SGLang use the tokenizer as the processor of a model that takes images.

    SGLang does so by itself for models of text. transformers' processor wants torchvision, and is
    not needed: images come as patches (``gcore_sglang.processors``).
    """
    from sglang.srt.utils import hf_transformers_utils

    def tokenizer(path: str, *_: Any, trust_remote_code: bool = False, **__: Any) -> Any:
        return hf_transformers_utils.get_tokenizer(path, trust_remote_code=trust_remote_code)

    hf_transformers_utils.get_processor = tokenizer


class _Unpinned(ModuleType):
    """Stands for ``torch`` in one module of SGLang: it makes its tensors without pinned memory."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch, name)
        if name not in ("arange", "empty", "tensor", "zeros"):
            return found

        def made(*args: Any, pin_memory: bool = False, **named: Any) -> Any:
            del pin_memory
            return found(*args, **named)

        return made


def pin_nothing() -> None:
    """Has SGLang's adapters do without pinned memory, which only machines with a device have.

    SGLang asks for it by itself, also where its device is the CPU.
    """
    import torch
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    for module in (layers, torch_backend):
        module.torch = _Unpinned()
    torch.Tensor.pin_memory = lambda self, *_: self
