"""Environments of other packages: their settings, and what is said where a package is missing.

The packages themselves are met in ``peers``.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import Any

import gcore_environments
import pytest
from gcore_environments import adapter_settings as settings
from gcore_environments.hosts import Hosts, HostSettings
from gcore_environments.numbered_rows import Numbers, NumbersConfig
from gcore_testing import DatasetContract
from omegaconf import OmegaConf

from gcore_core.contract.errors import ConfigError

ADAPTERS = Path(gcore_environments.__file__).parent / "adapters"
CONFIGS: list[Any] = [
    settings.GymnasiumConfig(id="FrozenLake-v1", template="{state}"),
    settings.TextArenaConfig(game="TicTacToe-v0", players=2),
    settings.ReasoningConfig(task="chain_sum"),
    settings.AviaryConfig(cls="dummy"),
    settings.McpConfig(command=["python", "server.py"]),
    settings.McpConfig(commands=[["one"], ["two", "words"]]),
    settings.OpenEnvConfig(cls="a:B", action="a:C"),
    settings.OpenEnvConfig(base_url="http://127.0.0.1:1"),
]


class TestNumbers(DatasetContract):
    provider = "environments/numbers"

    @pytest.fixture
    def dataset(self) -> Any:
        return self.build(rows=5, begin=40)


def names_of(config: Any) -> str:
    return type(config).__name__


@pytest.mark.parametrize("config", CONFIGS, ids=names_of)
def test_settings_name_a_class_that_takes_them(config: Any) -> None:
    """The class is read, not imported: its package is not installed here."""
    place, words = config.made()
    module, _, name = place.partition(":")
    file = ADAPTERS / f"{module.removeprefix('gcore_environments.adapters.')}.py"
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    (cls,) = [node for node in classes if node.name == name]
    (init,) = [node for node in cls.body if getattr(node, "name", "") == "__init__"]
    assert isinstance(init, ast.FunctionDef)
    taken = [argument.arg for argument in init.args.args[1:]]
    assert set(words) == set(taken)


@pytest.mark.parametrize("config", CONFIGS, ids=names_of)
def test_settings_are_a_schema_of_jobs(config: Any) -> None:
    written = {one.name: getattr(config, one.name) for one in fields(config)}
    read = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(type(config)), written))
    assert read == config


@pytest.mark.parametrize("file", sorted(ADAPTERS.glob("[!_]*.py")), ids=lambda file: file.stem)
def test_an_adapter_imports_the_words_alone_of_the_project(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    own = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("gcore")
    }
    assert own == {"gcore_environments"}


def test_a_package_that_is_missing_is_named_with_its_interpreter() -> None:
    if importlib.util.find_spec("aviary"):
        pytest.skip("fhaviary is installed here")
    place, words = settings.AviaryConfig(cls="dummy").made()
    hosts = Hosts(HostSettings(environment=place, config=words))
    try:
        _, message = hosts.replies.get(timeout=60)
    finally:
        hosts.close()
    assert message["lost"]
    assert "the distribution fhaviary is missing" in message["error"]
    assert "install it for /" in message["error"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: settings.McpConfig(), "either command or commands"),
        (lambda: settings.McpConfig(command=["a"], commands=[["b"]]), "either command or commands"),
        (lambda: settings.McpConfig(commands=[["a"], []]), "either command or commands"),
        (lambda: settings.McpConfig(command=["a"], tool_s=0), "must be above 0, is 0"),
        (lambda: settings.OpenEnvConfig(), "either cls or base_url"),
        (lambda: settings.OpenEnvConfig(cls="a:B", base_url="http://x"), "either cls or base_url"),
        (lambda: settings.OpenEnvConfig(cls="a:B"), "cls is 'a:B' and action is ''"),
        (lambda: settings.TextArenaConfig(game="x", players=0), "must be at least 1, is 0"),
        (lambda: settings.ReasoningConfig(task="x", size=0), "must be at least 1, is 0"),
        (lambda: settings.GymnasiumConfig(id="x", template="", turns=0), "must be at least 1"),
        (lambda: NumbersConfig(rows=0), "must be at least 1, is 0"),
        (lambda: NumbersConfig(rows=1, begin=-1), "must not be negative, is -1"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_rows_are_numbered_from_begin_on() -> None:
    rows = Numbers(NumbersConfig(rows=3, begin=40))
    assert len(rows) == 3
    assert [rows[n].fields for n in range(3)] == [{"number": 40}, {"number": 41}, {"number": 42}]
    assert [rows[n].row for n in range(3)] == [0, 1, 2]
