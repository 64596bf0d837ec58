"""Views with one fault each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from gcore_testing import ViewContract

from gcore_core.contract.run_files import read_metrics


class Picture:
    def _repr_html_(self) -> str:
        return "<p>a run</p>"


class CleanView(ViewContract):
    caught_by: ClassVar[tuple[str, ...]] = ()

    def picture(self, run_dir: Path) -> Any:
        return Picture() if read_metrics(run_dir) else None

    @pytest.fixture
    def draw(self) -> Callable[[Path], Any]:
        return self.picture


class NeedsAStep(CleanView):
    caught_by = ("test_a_run_that_has_just_begun_shows_nothing_or_something",)

    def picture(self, run_dir: Path) -> Any:
        read_metrics(run_dir)[-1]
        return Picture()


class ShowsAnythingThatPrints(CleanView):
    caught_by = ("test_a_run_with_steps_is_shown",)

    def picture(self, run_dir: Path) -> Any:
        return str(read_metrics(run_dir)) if read_metrics(run_dir) else None


class SavesItsPicture(CleanView):
    caught_by = ("test_it_writes_nothing",)

    def picture(self, run_dir: Path) -> Any:
        (run_dir / "picture.html").write_text(Picture()._repr_html_())
        return super().picture(run_dir)
