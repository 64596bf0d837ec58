"""Calls a plugin's code, and reports its errors with the provider's name and its line.

The caller of a plugin's algorithm makes a `PluginCode` for it, asks it through ``call`` and
holds the answer against the contract with ``broken``.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from gcore_core.contract.errors import ContractError, GcoreError

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PluginCode:
    """Holds an object that a plugin has made, and what errors say of it.

    kind: "advantage", "filter", ...
    provider: as in ``use``; empty where only the class is known, whose name stands for it.
    where: the key of the job that chose it.
    contract: the class of ``gcore_testing`` that holds it to its contract.
    """

    made: object
    kind: str
    provider: str = ""
    where: str
    contract: str

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function of the plugin and returns what it gives.

        An error that is raised on purpose passes. Any other becomes a ContractError that says where
        it was raised.
        """
        with self._reported():
            return function(*args, **kwargs)

    async def wait(self, answer: Awaitable[T]) -> T:
        """Waits for what a coroutine of the plugin gives; errors as in ``call``."""
        with self._reported():
            return await answer

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except (GcoreError, MemoryError):
            raise
        except Exception as error:  # isolation point: a plugin's code
            if type(error).__name__ == "OutOfMemoryError":
                raise  # an accelerator's, which no import here could name
            what = f"raised {type(error).__name__}: {error}"
            raise self._error(what, f"at {line_of(error, self.made)}") from error

    def broken(self, problem: str, function: Callable[..., object]) -> ContractError:
        """Makes the error for an answer of ``function`` that its contract does not allow."""
        return self._error(problem, f"at {definition_of(function)}")

    def _error(self, problem: str, why: str) -> ContractError:
        provider = self.provider or type(self.made).__qualname__
        return ContractError(
            f"{self.kind} {provider}: {problem}.",
            where=self.where,
            why=why,
            todo=f"ask its author; its contract is gcore_testing.{self.contract}",
            provider=provider,
        )


def line_of(error: BaseException, plugin_object: object) -> str:
    """Returns ``file:line`` of the innermost call in the package of ``plugin_object``.

    If no call lies in that package, it is the innermost call at all.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown line"
    package = _package_of(plugin_object)
    of_package = [frame for frame in frames if package and frame.filename.startswith(package)]
    last = (of_package or list(frames))[-1]
    return f"{last.filename}:{last.lineno}"


def definition_of(function: Callable[..., object]) -> str:
    """Returns ``file:line`` where the function is written."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def short(place: str) -> str:
    """Returns the ``file:line`` without its directories, for texts of limited length."""
    return Path(place).name


def _package_of(plugin_object: object) -> str:
    """Returns what the paths of the plugin's files begin with; empty if that is unknown."""
    module = type(plugin_object).__module__
    top = sys.modules.get(module.partition(".")[0])
    if top is None or not getattr(top, "__file__", None):
        return ""
    file = Path(str(top.__file__))
    return f"{file.parent}/" if file.name == "__init__.py" else str(file)
