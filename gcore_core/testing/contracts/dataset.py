"""The contract of a dataset: rows that know their number, the same in every process."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import pytest

from gcore_core.contract.records import Prompt
from gcore_core.testing.contracts.base import Contract


class DatasetContract(Contract):
    """To test a dataset, override ``provider``.

    If it needs a file, override ``config`` or the fixture ``dataset`` too.
    """

    kind: ClassVar[str] = "dataset"

    @pytest.fixture
    def dataset(self) -> Any:
        return self.build()

    def _rows(self, dataset: Any) -> list[int]:
        """Gives the first row, the last one, and some between."""
        return sorted({0, len(dataset) - 1, *range(0, len(dataset), max(1, len(dataset) // 16))})

    def test_it_has_rows(self, dataset: Any) -> None:
        assert len(dataset) > 0

    def test_a_row_knows_its_number(self, dataset: Any) -> None:
        for row in self._rows(dataset):
            prompt = dataset[row]
            assert isinstance(prompt, Prompt)
            assert prompt.row == row

    def test_a_row_is_either_text_or_messages(self, dataset: Any) -> None:
        for row in self._rows(dataset):
            prompt = dataset[row]
            assert (prompt.text is None) != (prompt.messages is None), f"row {row}"

    def test_a_row_is_the_same_every_time_and_travels(self, dataset: Any) -> None:
        first = {row: msgspec.msgpack.encode(dataset[row]) for row in self._rows(dataset)}
        for row in reversed(self._rows(dataset)):
            assert msgspec.msgpack.encode(dataset[row]) == first[row], f"row {row}"

    def test_there_is_nothing_after_the_last_row(self, dataset: Any) -> None:
        with pytest.raises(IndexError):
            dataset[len(dataset)]
