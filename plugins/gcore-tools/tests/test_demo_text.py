"""What ``g-core demo`` prints of its recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_tools.demo import command as demo


def test_a_recipe_in_the_working_directory_is_shown_as_one_would_type_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = Path("recipes/quickstart.yaml")
    assert demo._from_here(Path.cwd() / recipe) == recipe
    assert demo._from_here(recipe) == recipe
    elsewhere = tmp_path.parent / "job.yaml"
    assert demo._from_here(elsewhere) == elsewhere
