"""Defines what the core calls on a source of prompts."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from gcore_core.contract.records import Prompt


@runtime_checkable
class Dataset(Protocol):
    """Gives rows of prompts, the same in every process that opens it.

    It is opened in the supervisor and in every worker that reads prompts, never in a controller.
    There it is called in the main thread, where no event loop runs.
    """

    def __len__(self) -> int:
        """Returns how many rows there are."""

    def __getitem__(self, row: int) -> Prompt:
        """Returns the prompt of a row, 0 to ``len - 1``.

        Raises DataError for a row that is malformed.
        """
