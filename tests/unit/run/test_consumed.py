"""A run consumes every ordinal once, also over a resume, of the dataset that it began with."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_testing import fake

from gcore_core.contract.errors import DataError, RecordMismatch
from gcore_core.contract.records import Prompt
from gcore_core.run.consumed import FIRST, NEXT, ConsumedOrdinals, check_data


def test_steps_that_follow_each_other_pass() -> None:
    consumed = ConsumedOrdinals()
    consumed.check(0, {})
    for step in (1, 2, 3):
        consumed.check(step, {FIRST: 8.0 * (step - 1), NEXT: 8.0 * step})


@pytest.mark.parametrize(
    ("first", "said"), [(0, "0 to 7 were trained on before"), (16, "8 to 15 were never trained on")]
)
def test_a_step_that_begins_elsewhere_is_refused(first: int, said: str) -> None:
    consumed = ConsumedOrdinals(8)
    with pytest.raises(RecordMismatch, match=f"begins at ordinal {first}") as caught:
        consumed.check(2, {FIRST: float(first), NEXT: first + 8.0})
    assert said in caught.value.why


def test_where_the_place_is_not_known_the_first_step_tells_it() -> None:
    consumed = ConsumedOrdinals(None)
    consumed.check(3, {FIRST: 40.0, NEXT: 48.0})
    assert consumed.next_ordinal == 48


def test_a_run_goes_on_with_its_own_rows_only(tmp_path: Path) -> None:
    class Shifted(fake.FakeDataset):
        def __getitem__(self, row: int) -> Prompt:
            return Prompt(row=row, text=f"row {row + 1}")

    config = fake.FakeDataConfig(rows=40)
    check_data(tmp_path, fake.FakeDataset(config), resumed=False)
    check_data(tmp_path, fake.FakeDataset(config), resumed=True)
    with pytest.raises(DataError, match="row 0 is another one"):
        check_data(tmp_path, Shifted(config), resumed=True)


def test_a_run_without_noted_rows_goes_on(tmp_path: Path) -> None:
    check_data(tmp_path, fake.FakeDataset(fake.FakeDataConfig(rows=3)), resumed=True)
