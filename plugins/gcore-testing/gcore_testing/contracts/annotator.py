"""The contract of an annotator: it gives finite columns for every action, from the record alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from gcore_core.contract.annotator import Annotator
from gcore_core.contract.columns import ColumnSpec
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.trainer import TrainRecord
from gcore_testing.contracts.arguments import snapshot, writable
from gcore_testing.contracts.base import Contract, closing
from gcore_testing.contracts.trainer import make_records

Annotated = Sequence[Mapping[str, np.ndarray]]


class AnnotatorContract(Contract):
    """To test an annotator, override ``provider``, or the fixture ``annotator``.

    columns: what the role gives, as in ``RoleProvider.columns``; a wide column with its k.
    vocabulary: actions are drawn from 3..vocabulary-1.
    tolerance: how much a column may differ, absolute, when its record is annotated among others; a
        model's rounding may depend on the batch.
    """

    kind: ClassVar[str] = "annotator"
    tolerance: ClassVar[float] = 1e-5
    vocabulary: ClassVar[int] = 9
    columns: ClassVar[tuple[str | ColumnSpec, ...]] = ("ref_logp",)

    @property
    def specs(self) -> dict[str, ColumnSpec]:
        """Describes the columns, by name."""
        described = (
            ColumnSpec(name=column) if isinstance(column, str) else column
            for column in self.columns
        )
        return {column.name: column for column in described}

    @pytest.fixture
    def annotator_context(self, context: WorkerContext) -> WorkerContext:
        return replace(context, columns=tuple(self.specs))

    @pytest.fixture
    def annotator(self, annotator_context: WorkerContext) -> Iterator[Any]:
        yield from closing(self.build(annotator_context))

    @pytest.fixture
    def records(self) -> list[TrainRecord]:
        """Gives records of different lengths, whose arrays are read-only, as a worker sees them."""
        return make_records(self.vocabulary)

    def test_it_is_an_annotator(self, annotator: Any) -> None:
        assert isinstance(annotator, Annotator), (
            "it lacks a member of gcore_core.contract.annotator.Annotator"
        )
        assert isinstance(annotator.version, int)

    def test_each_record_has_exactly_the_columns_of_the_role(
        self, annotator: Any, records: list[TrainRecord]
    ) -> None:
        answers = annotator.annotate(records)
        assert [set(columns) for columns in answers] == [set(self.specs)] * len(records)

    def test_each_action_has_what_the_column_says(
        self, annotator: Any, records: list[TrainRecord]
    ) -> None:
        """That is one number, or as many as the column is wide, of the column's dtype."""
        answers = annotator.annotate(records)
        for record, columns in zip(records, answers, strict=True):
            shapes = {
                name: (np.dtype(spec.dtype), spec.shape(len(record.columns["action_ids"])))
                for name, spec in self.specs.items()
            }
            given = {name: (column.dtype, column.shape) for name, column in columns.items()}
            assert given == shapes

    def test_every_value_is_finite(self, annotator: Any, records: list[TrainRecord]) -> None:
        """Masked actions have finite values too, because trainers compute with whole columns."""
        for columns in annotator.annotate(records):
            for name, column in columns.items():
                assert np.isfinite(column).all(), name

    def test_the_batch_and_its_order_do_not_matter(
        self, annotator: Any, records: list[TrainRecord]
    ) -> None:
        alone = [annotator.annotate([record])[0] for record in records]
        self._assert_same(annotator.annotate(records), alone)
        self._assert_same(annotator.annotate(records[::-1]), alone[::-1])
        self._assert_same(annotator.annotate(records[1::3]), alone[1::3])

    def test_a_record_may_come_twice(self, annotator: Any, records: list[TrainRecord]) -> None:
        """It is tried within one call, and in a later call, as after a lost message."""
        once = annotator.annotate(records[:2])
        self._assert_same(annotator.annotate([*records[:2], *records[:2]]), [*once, *once])
        self._assert_same(annotator.annotate(records[:2]), once)

    def test_arguments_stay_as_they_are(self, annotator: Any, records: list[TrainRecord]) -> None:
        """It gives columns, and adds none to the records. The records' arrays can be written to."""
        given = writable(records)
        annotator.annotate(given)
        assert snapshot(given) == snapshot(records), "a record was written to"

    def test_no_records_give_no_columns(self, annotator: Any) -> None:
        assert list(annotator.annotate([])) == []

    def test_the_version_stays(self, annotator: Any, records: list[TrainRecord]) -> None:
        """Nothing is pushed to it, so what it holds does not change."""
        before = annotator.version
        annotator.annotate(records)
        assert annotator.version == before

    def _assert_same(self, actual: Annotated, expected: Annotated) -> None:
        assert len(actual) == len(expected)
        for i, (columns, expected_columns) in enumerate(zip(actual, expected, strict=True)):
            assert set(columns) == set(expected_columns)
            for name, column in columns.items():
                np.testing.assert_allclose(
                    column,
                    expected_columns[name],
                    rtol=0,
                    atol=self.tolerance,
                    err_msg=f"record {i}, {name}",
                )
