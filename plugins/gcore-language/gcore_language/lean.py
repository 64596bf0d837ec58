"""Keeps torch and transformers from importing what nothing here uses.

Each process that opens a model pays for its imports, when it starts and when it starts again.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from types import ModuleType, SimpleNamespace
from typing import Any

_COMPILER = "torch._dynamo"
#: The module of torch's compiler from which transformers takes a name when it is imported.
_MASKS = f"{_COMPILER}._trace_wrapped_higher_order_op"
#: Modules of transformers that import what every model of it needs.
_MODULES = ("transformers.modeling_utils", "transformers.generation.utils")
#: What transformers asks of libraries that it is to import without.
_LEFT_OUT = ("is_sklearn_available", "is_scipy_available", "is_accelerate_available")


def import_lean() -> None:
    """Imports transformers' models without what they import for others, and nothing here uses.

    That is scikit-learn for assisted generation, scipy for losses of object detection, and
    accelerate for a model on several devices. What needs one of them nevertheless is told that it
    is not installed. And torch's compiler is imported when something is compiled.

    Distributed tensors, 0.7 s of the processor, are imported with the rest: libraries such as peft
    name them and rely on transformers to have imported them.

    It comes before anything else of transformers, whose tokenizers and configs import models, too.
    """
    if importlib.util.find_spec("torch") is None:
        return  # then transformers imports little
    from transformers import utils
    from transformers.utils import import_utils

    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = _Compiler()
        sys.modules[_MASKS] = _masks()
    asked = [(module, name) for module in (utils, import_utils) for name in _LEFT_OUT]
    kept = [(*one, getattr(*one)) for one in asked if hasattr(*one)]
    for module, name, _ in kept:
        setattr(module, name, _no)
    try:
        # what a transformers of another version cannot import so, it imports whole when it is used
        with suppress(ImportError, AttributeError, NameError, RuntimeError):
            import_whole()  # once, with the answers of this moment
    finally:
        for module, name, before in kept:
            setattr(module, name, before)
        _remove_masks()


def import_whole() -> None:
    """Imports transformers' models with all that they may need.

    After it ``import_lean`` leaves nothing out of them. It is for processes in which an engine uses
    transformers in its own way.
    """
    for name in _MODULES:
        importlib.import_module(name)


def _no(*_: object) -> bool:
    return False


def _masks() -> Any:
    """Returns what stands for ``_MASKS`` while transformers takes a class from it."""
    return SimpleNamespace(
        TransformGetItemToIndex=lambda: importlib.import_module(_MASKS).TransformGetItemToIndex()
    )


def _remove_masks() -> None:
    if isinstance(sys.modules.get(_MASKS), SimpleNamespace):
        del sys.modules[_MASKS]


class _Compiler(ModuleType):
    """Stands for torch's compiler until something is compiled.

    torch calls it where it makes an optimizer, a tensor without numbers or a checkpoint of
    activations, to say what must not be compiled: that has no meaning as long as nothing is. So it
    is not imported for that, which would take 1.4 s of the processor and 70 MiB. Whatever else is
    asked for is the compiler's own, which is imported then.
    """

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self._allowed: list[Callable[..., Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # who looks at all modules asks for no compiler
        return getattr(self._own(), name)

    def _own(self) -> ModuleType:
        """Returns the compiler itself, which takes this one's place."""
        if self._stands:
            _remove_masks()
            del sys.modules[_COMPILER]
        own = importlib.import_module(_COMPILER)
        while self._allowed:
            own.allow_in_graph(self._allowed.pop())
        return own

    @property
    def _stands(self) -> bool:
        return sys.modules.get(_COMPILER) is self

    def disable(self, function: Any = None, *args: Any, **more: Any) -> Any:
        """Keeps a function from being compiled, if ever anything is."""
        if function is None:
            return lambda function: self.disable(function, *args, **more)
        own = cache(lambda: self._own().disable(function, *args, **more))

        @wraps(function)
        def disabled(*args: Any, **more: Any) -> Any:
            return function(*args, **more) if self._stands else own()(*args, **more)

        return disabled

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Does nothing, as ever outside of what is compiled."""

    def allow_in_graph(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Remembers what the compiler need not look into, until there is one."""
        self._allowed.append(function)
        return function

    def assume_constant_result(self, function: Any) -> Any:
        function._dynamo_marked_constant = True  # as torch does
        return function
