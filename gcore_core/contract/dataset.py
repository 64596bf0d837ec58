"""What the core calls on a source of prompts."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from gcore_core.contract.records import Prompt


@runtime_checkable
class Dataset(Protocol):
    """Rows of prompts. Opened in every worker that reads it and in the supervisor, never in a
    controller.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Prompt: ...
