"""The contract of a dataset: rows that know their number, the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import pytest

from gcore_core.contract.factories import FactorySpec, reference_to
from gcore_core.contract.records import Prompt
from gcore_core.workers.row_digest import prompt_digest
from gcore_testing.contracts.base import Contract

_OPENING_S = 120


class DatasetContract(Contract):
    """To test a dataset, override ``provider``.

    If it needs a file, override ``config`` or the fixture ``dataset`` too, and open it there with
    ``build``. A fixture that opens it by itself overrides ``factory`` as well.
    """

    kind: ClassVar[str] = "dataset"

    @pytest.fixture
    def dataset(self) -> Any:
        return self.build()

    def build(self, *args: Any, **changes: Any) -> Any:
        self._settings = {**self.config, **changes}  # for another process, which opens the same
        return super().build(*args, **changes)

    def factory(self) -> FactorySpec:
        """Names what opens the dataset, for another process."""
        if self.provider is None:
            self.not_claimed("a second opening: neither provider nor factory() says how")
        spec = self.description()
        config_class = "" if spec.config is None else reference_to(spec.config)
        settings: dict[str, Any] = getattr(self, "_settings", dict(self.config))
        return FactorySpec(spec.factory, config_class, settings)

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

    def test_a_row_is_the_same_in_another_process(self, dataset: Any) -> None:
        """A generator and a scorer each open the dataset; an answer's reward is of its own row."""
        rows = self._rows(dataset)
        there = _digests_of_another_process(self.factory(), rows)
        for row, digest in zip(rows, there, strict=True):
            assert prompt_digest(dataset[row]) == digest, (
                f"row {row} is another one in a second process: {dataset[row]}. Does a shuffle "
                "lack a seed, or does an order depend on a set, a directory or the clock?"
            )

    def test_there_is_nothing_after_the_last_row(self, dataset: Any) -> None:
        with pytest.raises(IndexError):
            dataset[len(dataset)]


def _digests_of_another_process(spec: FactorySpec, rows: Sequence[int]) -> list[int]:
    """Opens the dataset in a fresh interpreter, whose strings have other hashes; returns the
    digests of these rows there.
    """
    request = msgspec.json.encode([spec, rows], enc_hook=str)
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "gcore_testing.second_opening"],
        input=request,
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
        timeout=_OPENING_S,
    )
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    return [int(digest) for digest in json.loads(done.stdout.splitlines()[-1])]
