"""``g-core demo`` where it cannot begin, and which processes it kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from gcore_core.cli import main
from gcore_core.run import demo


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "3"], "--steps: must be at least 4, is 3"),
        (["--kills", "-1"], "--kills: must be at least 0, is -1"),
        (["--recipe", "nowhere.yaml"], "nowhere.yaml: no such file"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_recipes_the_distribution_that_has_them_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "package_folders", lambda name: iter(()))
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "recipes/quickstart.yaml is not here" in error
    assert "gcore-tools has it, and is not installed" in error and "--recipe FILE" in error


def test_a_checkout_is_found_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo.find_recipe(None).samefile(Path(__file__).parents[2] / "recipes" / demo.RECIPE)
