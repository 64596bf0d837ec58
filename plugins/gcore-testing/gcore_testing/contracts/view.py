"""The contract of a view.

It shows a run by the files that are there, at any moment of the run, and writes none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gcore_core.contract.factories import import_attribute
from gcore_core.contract.run_files import CONFIG, LOGS, METRICS, SAMPLES
from gcore_testing.contracts.base import Contract

#: What IPython looks for in an object that it is to show.
SHOWS = ("_repr_png_", "_repr_svg_", "_repr_html_", "_repr_mimebundle_", "_ipython_display_")


class ViewContract(Contract):
    """To test a view, override ``provider``, or the fixture ``draw``."""

    kind: ClassVar[str] = "view"

    @pytest.fixture
    def draw(self) -> Any:
        """The factory: a function of a run's directory."""
        return import_attribute(self.description().factory)

    def test_a_run_that_has_just_begun_shows_nothing_or_something(
        self, draw: Any, tmp_path: Path
    ) -> None:
        picture = draw(run_of(tmp_path, steps=0))
        assert picture is None or is_shown(picture)

    @pytest.mark.parametrize("steps", [1, 3])
    def test_a_run_with_steps_is_shown(self, draw: Any, tmp_path: Path, steps: int) -> None:
        assert is_shown(draw(run_of(tmp_path, steps=steps)))

    def test_it_writes_nothing(self, draw: Any, tmp_path: Path) -> None:
        """The run writes these files at the same time, in another process."""
        directory = run_of(tmp_path, steps=2)
        before = files_in(directory)
        draw(directory)
        assert files_in(directory) == before


def run_of(directory: Path, *, steps: int) -> Path:
    """Makes the directory of a run that has finished some steps."""
    (directory / SAMPLES).mkdir()
    (directory / LOGS).mkdir()
    (directory / CONFIG).write_text(f"run: {{name: seen, steps: {steps + 2}}}\n", "utf-8")
    rows = [
        {
            "step": step,
            "version": step,
            "time_unix_s": 1.7e9 + step,
            "metrics": {"reward": 0.5, "reward/mine": 0.5, "seconds/train": 0.1} if step else {},
            "evaluation": {} if step % 2 else {"greedy/mine": 0.25},
        }
        for step in range(steps + 1 if steps else 0)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if rows:
        (directory / METRICS).write_text(text, "utf-8")
    return directory


def is_shown(picture: Any) -> bool:
    """Says whether a notebook can show an object as more than its ``repr``."""
    return any(callable(getattr(picture, name, None)) for name in SHOWS)


def files_in(directory: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }
