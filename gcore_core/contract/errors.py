"""Defines every error that G-Core raises on purpose.

    GcoreError                       exit code 1
    ├── ConfigError (ValueError)     2   the YAML, an override or a value in it is wrong
    │   ├── RunExists                    an explicit run directory already holds a run
    │   └── PlacementError               the roles do not fit on the devices
    ├── PluginError                  3
    │   ├── PluginNotFound (LookupError)
    │   ├── PluginClash                  two distributions share one plugin name
    │   ├── PluginBroken (ImportError)
    │   ├── PluginIncompatible
    │   └── ContractError                a plugin breaks the contract it signed
    ├── DataError (ValueError)       4   a dataset or a model directory is missing, empty or malformed
    ├── WorkerError (RuntimeError)   5   something failed in another process
    │   ├── WorkerDied
    │   ├── WeightsBehind                a sample needs newer weights than its generator has
    │   ├── WeightsGone                  a sample needs weights that nobody can give any more
    │   └── DeadlineExceeded (TimeoutError)
    ├── TrainingError                6
    │   ├── NonFiniteLoss
    │   ├── WeightMismatch               generator and trainer disagree about the weights
    │   └── RecordMismatch               a record is not what was sampled, or not where it belongs
    ├── AddressError (OSError)       7   a port is taken, a socket path is too long, a bind is unsafe
    └── CheckpointError              8   a checkpoint cannot be written, or none is whole

An error says what, where, why and what to do, in at most six lines, the most useful first. The
parts stay attributes, so that tools and tests do not parse text.
"""  # noqa: E501

from __future__ import annotations

from typing import Any


class GcoreError(Exception):
    """Says what went wrong, where, why and what to do; all errors of G-Core derive from it.

    where: a config key, a file or a process.
    why: the cause; it may have several lines.
    todo: one action that the reader can take.
    facts: plain values for tools (role, rank, choices, ...); they are not printed.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, where: str = "", why: str = "", todo: str = "", **facts: Any
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.todo = todo
        self.facts = facts

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        lines = [head]
        for part in (self.why, self.todo):
            lines += [f"  {line}" for line in part.splitlines() if line.strip()]
        return "\n".join(lines[:6])

    def sentence(self) -> str:
        """Returns all that it says on one line, without a full stop, for lists of problems."""
        parts = [f"{self.where}: {self.what}".removeprefix(": "), self.why, self.todo]
        return "; ".join(" ".join(part.rstrip(".").split()) for part in parts if part)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.where, self.why, self.todo, self.facts)


class ConfigError(GcoreError, ValueError):
    exit_code = 2


class RunExists(ConfigError):
    pass


class PlacementError(ConfigError):
    pass


class PluginError(GcoreError):
    exit_code = 3


class PluginNotFound(PluginError, LookupError):
    pass


class PluginClash(PluginError):
    pass


class PluginBroken(PluginError, ImportError):
    pass


class PluginIncompatible(PluginError):
    pass


class ContractError(PluginError):
    pass


class DataError(GcoreError, ValueError):
    exit_code = 4


class WorkerError(GcoreError, RuntimeError):
    """Reports a failure in another process; ``facts`` carry role, rank and the remote traceback."""

    exit_code = 5


class WorkerDied(WorkerError):
    pass


class WeightsBehind(WorkerError):
    pass


class WeightsGone(WorkerError):
    pass


class DeadlineExceeded(WorkerError, TimeoutError):
    pass


class TrainingError(GcoreError):
    exit_code = 6


class NonFiniteLoss(TrainingError):
    pass


class WeightMismatch(TrainingError):
    pass


class RecordMismatch(TrainingError):
    pass


class AddressError(GcoreError, OSError):
    exit_code = 7


class CheckpointError(GcoreError):
    exit_code = 8


def _rebuild(
    kind: type[GcoreError],
    what: str,
    where: str,
    why: str,
    todo: str,
    facts: dict[str, Any],
) -> GcoreError:
    return kind(what, where=where, why=why, todo=todo, **facts)


def error_types() -> dict[str, type[GcoreError]]:
    """Returns name -> class for the whole tree; the wire carries names, never classes."""
    types: dict[str, type[GcoreError]] = {"GcoreError": GcoreError}
    queue: list[type[GcoreError]] = [GcoreError]
    while queue:
        for child in queue.pop().__subclasses__():
            if child.__name__ not in types and child.__module__.startswith("gcore_core"):
                types[child.__name__] = child
                queue.append(child)
    return types


def did_you_mean(word: str, choices: list[str]) -> str:
    """Returns `` (did you mean 'x'?)`` with the choice nearest to the word; "" if none is near."""
    import difflib

    close = difflib.get_close_matches(word, choices, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
