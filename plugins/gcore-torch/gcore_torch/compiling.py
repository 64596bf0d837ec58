"""Has torch.compile make kernels for functions and modules whose rows vary in number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., object])

#: The backend of torch.compile.
BACKEND = "inductor"


def compiled(function: Function) -> Function:
    """Returns a function that is compiled when it is first called."""
    made: Function = torch.compile(function, dynamic=True, backend=BACKEND)
    return made


def compile_layers(model: nn.Module, kinds: set[str]) -> None:
    """Has the forward pass of each module of some classes compiled when it first runs.

    kinds: names of the classes.
    """
    for module in model.modules():
        if type(module).__name__ in kinds:
            module.compile(dynamic=True, backend=BACKEND)
