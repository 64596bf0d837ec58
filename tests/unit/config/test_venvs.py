"""Which interpreter ``venv:NAME`` means, and what is told where there is none."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from gcore_testing.installed import InstalledPlugins, Wheel, empty_venv

from gcore_core import __version__
from gcore_core.config import checks, venvs
from gcore_core.config.interpreters import open_interpreter
from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError, PluginIncompatible
from gcore_core.contract.installing import install_command


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("G_CORE_VENVS", str(tmp_path / "venvs"))
    return tmp_path / "venvs"


def make(root: Path, name: str, **more: Any) -> InstalledPlugins:
    """A venv as `g-core venv create toy` leaves it, but with nothing installed."""
    site = empty_venv(root / name)
    written = {"plugin": "toy", "complete": True, **more}
    (root / name / venvs.RECORD).write_text(json.dumps(written))
    return site


def test_a_name_in_a_job_is_the_interpreter_of_that_venv(
    root: Path, job, installed: InstalledPlugins
) -> None:  # type: ignore[no-untyped-def]
    plan = load_plan(job(), ["roles.rollout.python=venv:toy"])
    assert plan.config["roles"]["rollout"]["python"] == str(root / "toy/bin/python")
    with pytest.raises(
        ConfigError, match=r"roles\.rollout\.python: there is no venv 'toy'"
    ) as missing:
        checks.interpreters(plan.settings, plan.provided, plan.source)
    assert "g-core venv create toy" in missing.value.todo
    site = make(root, "toy")
    site.add("core", wheel=Wheel(distribution="gcore-core", version=__version__, requires=()))
    site.add("fake")
    checks.interpreters(plan.settings, plan.provided, plan.source)


def test_a_venv_with_other_versions_must_be_remade(
    root: Path, job, installed: InstalledPlugins
) -> None:  # type: ignore[no-untyped-def]
    plan = load_plan(job(), ["roles.rollout.python=venv:mine"])
    site = make(root, "mine")
    site.add("core", wheel=Wheel(distribution="gcore-core", version="0.0.9", requires=()))
    with pytest.raises(ConfigError, match="make it anew: g-core venv create toy --name mine"):
        checks.interpreters(plan.settings, plan.provided, plan.source)


def test_a_venv_that_was_made_without_a_plugin_of_the_job_is_made_anew_with_it(
    root: Path, job, installed: InstalledPlugins
) -> None:  # type: ignore[no-untyped-def]
    plan = load_plan(job(), ["roles.rollout.python=venv:mine"])
    site = make(root, "mine")
    record = root / "mine" / venvs.RECORD
    made = {"with": ["gcore-more"], "versions": {"gcore-core": __version__, "gcore-more": "1"}}
    record.write_text(json.dumps({**json.loads(record.read_text()), **made}))
    site.add("core", wheel=Wheel(distribution="gcore-core", version=__version__, requires=()))
    with pytest.raises(PluginIncompatible) as error:
        checks.interpreters(plan.settings, plan.provided, plan.source)
    assert error.value.todo == (
        "make it anew: g-core venv create toy --name mine --with gcore-more --with gcore-fake"
    )


def test_a_half_made_venv_is_refused_and_a_venv_made_by_the_user_is_accepted(root: Path) -> None:
    make(root, "half", complete=False)
    make(root, "own")
    (root / "own" / venvs.RECORD).unlink()
    with pytest.raises(ConfigError, match="--python: venv 'half' is half made"):
        open_interpreter("venv:half", where="--python")
    assert open_interpreter("venv:own", where="--python").path


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a", "a b"])
def test_an_invalid_name_is_refused_with_its_key(
    name: str, job, installed: InstalledPlugins
) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"roles\.rollout\.python: .* cannot name a venv"):
        load_plan(job(), [f"roles.rollout.python='venv:{name}'"])


def test_venvs_are_in_the_user_data_directory_unless_configured_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("G_CORE_VENVS")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert venvs.root() == Path("/data/g-core/venvs")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert venvs.root() == Path.home() / ".local/share/g-core/venvs"
    monkeypatch.setenv("G_CORE_VENVS", "here/../envs")
    assert venvs.root() == Path.cwd() / "envs"


@pytest.mark.parametrize("complete", [True, False])
def test_without_gcore_venv_the_error_says_how_to_install_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    monkeypatch.setattr(venvs, "distributions", without(venvs.MAKER))
    if not complete:
        make(root, "vllm", plugin="vllm", complete=False)
    with pytest.raises(ConfigError) as missing:
        open_interpreter("venv:vllm", where="roles.rollout.python")
    assert missing.value.todo == (
        f"install what makes it: {install_command(venvs.MAKER)}\nthen: g-core venv create vllm"
    )


def without(absent: str) -> Any:
    """Stands for `importlib.metadata.distributions` where one distribution is not installed."""

    def distributions(*, name: str) -> list[importlib.metadata.Distribution]:
        return [] if name == absent else list(importlib.metadata.distributions(name=name))

    return distributions
