"""Recipes of the checkout are listed and copied wherever the plugin is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from gcore_tools.demo import trainings
from gcore_tools.jobs import recipe_commands
from gcore_tools.jobs.recipe_commands import RECIPES, copy, files_of, recipes, show

from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError
from gcore_core.kits.commands import yaml12

CHECKOUT = Path(__file__).parents[4] / "recipes"


def test_the_recipes_are_those_of_the_checkout_and_not_a_copy() -> None:
    assert RECIPES.is_symlink() and RECIPES.resolve() == CHECKOUT
    assert {file.resolve() for file in recipes().values()} == set(CHECKOUT.rglob("*.yaml"))


def test_every_recipe_is_listed_with_one_line_that_says_what_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert show([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(recipes())
    for line in lines:
        _, said = line.split(maxsplit=1)
        assert said.endswith("."), f"a recipe begins with a comment of whole sentences: {line}"


@pytest.mark.parametrize("name", recipes())
def test_a_copied_recipe_has_every_file_that_it_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert copy([name]) == 0
    job = tmp_path / "recipes" / f"{name}.yaml"
    assert f"g-core run recipes/{name}.yaml" in capsys.readouterr().out
    assert job.read_bytes() == recipes()[name].read_bytes()
    original = CHECKOUT / f"{name}.yaml"
    for value in recipe_commands._texts(yaml12.load(job.read_text())):
        if (original.parent / value).is_file():
            assert (job.parent / value).is_file(), value


@pytest.mark.parametrize("name", ["quickstart", "judge", "digits", "chain/sft"])
def test_a_copy_is_resolved_where_nothing_else_is(name: str, tmp_path: Path) -> None:
    for module in ("gcore_diffusion", "gcore_rewards.genrm", "gcore_algorithms.offline"):
        pytest.importorskip(module)
    copy([name, str(tmp_path / "here")])
    plan = load_plan(tmp_path / "here" / f"{name}.yaml")
    assert str(CHECKOUT) not in str(plan.config)


def test_a_recipe_may_be_copied_again_until_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy(["recipes/quickstart.yaml"])
    copy(["quickstart"])
    changed = tmp_path / "recipes/quickstart/arithmetic.py"
    changed.write_text("# mine\n")
    (tmp_path / "recipes/quickstart.yaml").unlink()
    with pytest.raises(ConfigError, match="it is there and is another; nothing was copied") as said:
        copy(["quickstart"])
    assert "recipes/quickstart/arithmetic.py" in str(said.value)
    assert changed.read_text() == "# mine\n"
    assert not (tmp_path / "recipes/quickstart.yaml").exists()


def test_an_unknown_recipe_is_told_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="no recipe 'quikstart' .did you mean 'quickstart'"):
        copy(["quikstart"])


def test_code_beside_a_recipe_comes_with_it() -> None:
    assert recipes()["quickstart"].with_suffix("") / "arithmetic.py" in files_of(recipes()["judge"])


def test_the_demo_takes_the_recipe_of_the_working_directory_else_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert trainings.find_recipe(None) == RECIPES / "quickstart.yaml"
    copy(["quickstart"])
    assert trainings.find_recipe(None) == tmp_path / "recipes/quickstart.yaml"
    monkeypatch.setattr(trainings, "package_folders", lambda name: [])
    monkeypatch.chdir(tmp_path / "recipes")
    with pytest.raises(ConfigError, match="recipes/quickstart.yaml is not here") as said:
        trainings.find_recipe(None)
    assert "gcore-tools" in str(said.value.todo)
