"""An import that fails says what has moved, or which distribution lacks what."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from gcore_testing.installed import InstalledPlugins, Wheel

from gcore_core import cli
from gcore_core.config import catalog
from gcore_core.config.plugins import Plugins
from gcore_core.contract.errors import PluginBroken
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.missing_modules import MOVED

PAGE = "docs/how-to/move-to-0.3.md"
NEEDS = ["gcore-core>=0.3,<0.4", "jinja9>=3,<4", "starlet>=1", 'inspekt-ai>2; extra == "eval"']


def todo(installed: InstalledPlugins, source: str, requires: list[str]) -> str:
    installed.add("mine", source, Wheel(requires=requires))
    with pytest.raises(PluginBroken) as caught:
        Plugins().load(catalog.scan().get("mine", where=""))
    return caught.value.todo


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "from gcore_core.testing.runs import run_recipe",
            f"gcore_core.testing is gcore_testing now: {PAGE}",
        ),
        ("import gcore_sim", f"gcore_sim is gcore_placement.sim now: {PAGE}"),
        ("import gcore_tree.search", f"gcore_tree is gone: {PAGE}"),
        (
            "from gcore_core.kits.launching import make_identity",
            f"what was written for 0.2 is to be rewritten: {PAGE}",
        ),
        (
            "from gcore_core.shells import trainer",
            f"what was written for 0.2 is to be rewritten: {PAGE}",
        ),
    ],
)
def test_what_0_3_has_moved_is_told_where_it_is(
    installed: InstalledPlugins, source: str, said: str
) -> None:
    assert todo(installed, source, NEEDS[:1]) == said


def test_where_it_moved_to_is_to_be_installed(
    installed: InstalledPlugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcore_core.contract.missing_modules.find_installed", lambda name: None)
    said = todo(installed, "import gcore_core.testing", NEEDS[:1])
    assert said.startswith("gcore_core.testing is gcore_testing now: ")
    assert "plugins/gcore-testing; docs" in said


def test_a_distribution_says_all_that_it_lacks(installed: InstalledPlugins) -> None:
    assert todo(installed, "import starlet.routing", NEEDS) == (
        f"gcore-mine lacks jinja9, starlet: {sys.executable} -m pip install 'jinja9>=3,<4' "
        "'starlet>=1'"
    )


def test_what_an_extra_brings_is_asked_for_by_the_extra(installed: InstalledPlugins) -> None:
    said = todo(installed, "import inspekt_ai", [NEEDS[0], NEEDS[3]])
    assert said.startswith("it comes with gcore-mine[eval]: ")
    assert todo(installed, "import other_ai", [NEEDS[0], NEEDS[3]]).startswith(
        "see the whole cause"
    )


def test_a_factory_that_lacks_a_library_says_so(installed: InstalledPlugins) -> None:
    installed.add("mine", "import starlet", Wheel(requires=NEEDS))
    with pytest.raises(PluginBroken, match="gcore-mine lacks jinja9, starlet: "):
        import_attribute("gcore_mine:make")


def test_a_command_that_lacks_a_library_is_no_traceback(
    installed: InstalledPlugins, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "from gcore_core import hookimpl\n"
        "from gcore_core.contract.providers import CommandProvider\n"
        "@hookimpl\ndef gcore_commands():\n"
        "    yield CommandProvider(name='go', summary='Go', factory='gcore_mine:go')\n"
        "def go(words):\n    import starlet\n"
    )
    installed.add("mine", source, Wheel(requires=NEEDS))
    assert cli.main(["mine", "go"]) == 3
    assert capsys.readouterr().err.splitlines()[0] == "No module named 'starlet'."


def test_what_moved_is_there() -> None:
    for module in filter(None, MOVED.values()):
        assert importlib.util.find_spec(module) is not None, module
