"""``g-core shrink`` does without gcore-nodes, but for several nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gcore_testing.plugin_commands.check import inspect_plugin
from gcore_tools import shrink as plugin
from gcore_tools.shrink import without_nodes
from gcore_tools.shrink.commands import shrink

from gcore_core.config.interpreters import Interpreter
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.installing import install_command

TO_INSTALL = install_command("gcore-tools[nodes]")
RECIPES = Path(__file__).parents[4] / "recipes"


@pytest.fixture(autouse=True)
def nothing_serves_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has gcore-nodes look as if it were not installed."""
    find = without_nodes.importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "gcore_nodes", None)
    monkeypatch.setattr(
        without_nodes.importlib.util,
        "find_spec",
        lambda name, package=None: None if name == "gcore_nodes" else find(name, package),
    )


def test_several_nodes_are_refused_with_what_to_install(tmp_path: Path) -> None:
    to = tmp_path / "small.yaml"
    with pytest.raises(ConfigError, match="comes? with gcore-nodes, which is not installed") as no:
        shrink([str(RECIPES / "quickstart.yaml"), "-o", str(to), "--nodes", "2"])
    assert (no.value.where, no.value.todo) == ("--nodes 2", TO_INSTALL)
    assert not to.exists()


def test_the_plugin_is_not_broken_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher is not imported then, and a check of all plugins finds nothing wrong."""
    (launcher,) = plugin.gcore_launchers()
    assert [need.partition(">")[0] for need in launcher.needs] == ["gcore-nodes"]
    monkeypatch.setattr(Interpreter, "unmet", lambda self, needs: [(need, None) for need in needs])
    report = inspect_plugin("shrink")
    assert not report.problems
    assert "it needs gcore-nodes>=0.3,<0.4 (found none)" in report.notes[0]


def test_a_job_with_such_nodes_is_refused_with_what_to_install() -> None:
    (launcher,) = plugin.gcore_launchers()
    assert launcher.config is not None
    with pytest.raises(ConfigError) as refused:
        launcher.config(nodes=2, devices=1)
    assert (refused.value.where, refused.value.todo) == ("launcher.use", TO_INSTALL)
