from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from gcore_testing.installed import InstalledPlugins, Wheel
from packaging.requirements import Requirement

from gcore_core import __version__
from gcore_core.config import catalog
from gcore_core.config.homes import GONE, home_of
from gcore_core.contract.errors import ConfigError, PluginClash, PluginIncompatible, PluginNotFound
from gcore_core.contract.installing import install_command

ROOT = Path(__file__).parents[3]


def one(name: str) -> catalog.Installed:
    (row,) = [row for row in catalog.scan().plugins if row.name == name]
    return row


def test_core_is_listed_whether_installed_or_not() -> None:
    assert one("core") == catalog.Installed(
        name="core",
        distribution="gcore-core",
        version=__version__,
        module="gcore_core.builtin.hooks",
    )


def test_a_plugin_is_listed_without_being_imported(installed: InstalledPlugins) -> None:
    installed.add("broken", "raise RuntimeError('imported')")
    assert one("broken").state == "ok"
    assert "gcore_broken" not in sys.modules


def test_two_distributions_with_one_plugin_name_are_a_clash_that_names_both(
    installed: InstalledPlugins,
) -> None:
    installed.add("vllm", wheel=Wheel(version="1.3.0"))
    installed.add(
        "vllm", wheel=Wheel(distribution="gcore-vllm-fork", version="0.1", module="gcore_fork")
    )
    rows = [row for row in catalog.scan().plugins if row.name == "vllm"]
    assert [(row.state, row.reason) for row in rows] == [
        ("clash", "also provided by gcore-vllm-fork 0.1"),
        ("clash", "also provided by gcore-vllm 1.3.0"),
    ]
    with pytest.raises(PluginClash) as caught:
        catalog.scan().get("vllm", where="roles.rollout.use")
    assert str(caught.value) == (
        "roles.rollout.use: plugin 'vllm' is provided by 2 distributions: gcore-vllm 1.3.0 and "
        "gcore-vllm-fork 0.1.\n"
        "  uninstall all but one; a name cannot be shared"
    )


def test_a_distribution_of_0_2_that_is_left_over_is_to_be_uninstalled(
    installed: InstalledPlugins,
) -> None:
    installed.add("sim", wheel=Wheel(distribution="gcore-sim"))
    installed.add("sim", wheel=Wheel(distribution="gcore-placement", module="gcore_placement_sim"))
    with pytest.raises(PluginClash, match="pip uninstall -y gcore-sim$"):
        catalog.scan().get("sim", where="roles.rollout.use")


@pytest.mark.parametrize(
    ("plugin", "in_its_place"),
    [
        ("museum", "run it in a checkout of the project: python -m tests.museum run"),
        ("critic", install_command("gcore-algorithms")),
    ],
)
def test_a_plugin_of_a_distribution_that_is_gone_says_what_to_do(
    tmp_path: Path, plugin: str, in_its_place: str
) -> None:
    old = ["gcore-core>=0.2,<0.3"]
    InstalledPlugins(tmp_path).add(plugin, wheel=Wheel(version="0.2.0", requires=old))
    with pytest.raises(PluginIncompatible) as caught:
        catalog.scan([str(tmp_path)]).get(plugin, where="plugins")
    assert str(caught.value).splitlines() == [
        f"plugins: plugin '{plugin}' is of gcore-{plugin} 0.2.0, which 0.3 no longer has.",
        f"  {sys.executable} -m pip uninstall -y gcore-{plugin}",
        f"  {in_its_place}",
    ]


def test_every_plugin_of_the_project_is_known_by_what_installs_it() -> None:
    brought = {}
    for file in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        for plugin in project.get("entry-points", {}).get("gcore", {}):
            brought[plugin] = file.parent.name
    assert {plugin: home_of(plugin).partition("[")[0] for plugin in brought} == brought
    assert not {file.parent.name for file in (ROOT / "plugins").glob("*/pyproject.toml")} & {*GONE}


def test_no_plugin_may_be_named_core(installed: InstalledPlugins) -> None:
    installed.add("core", wheel=Wheel(distribution="gcore-evil", module="gcore_evil"))
    with pytest.raises(PluginClash, match="gcore-core .* and gcore-evil"):
        catalog.scan().get("core", where="")


@pytest.mark.parametrize(
    "requires",
    [
        "gcore-core<0.1",
        "gcore_core (<0.1)",
        "gcore-core>=1.2,<2",
        "gcore-core~=0.0.1",
        "gcore-core==99",
        "Gcore.Core!=0.3.0",
    ],
)
def test_a_requirement_that_does_not_admit_this_core_is_incompatible(
    installed: InstalledPlugins, requires: str
) -> None:
    installed.add("old", wheel=Wheel(requires=["numpy", requires]))
    assert one("old").state == "incompatible"
    with pytest.raises(
        PluginIncompatible, match=rf"plugin 'old' \(gcore-old 0.1.0\) needs .*this is {__version__}"
    ):
        catalog.scan().get("old", where="data.use")


@pytest.mark.parametrize(
    "requires",
    [
        "gcore-core",
        "gcore-core>=0.3,<0.4",
        "gcore-core ~=0.3.0",
        "gcore-core[tls]>=0.3",
        "gcore-core==0.3.*",
    ],
)
def test_a_requirement_that_admits_this_core_is_ok(
    installed: InstalledPlugins, requires: str
) -> None:
    installed.add("fresh", wheel=Wheel(requires=[requires]))
    assert one("fresh").state == "ok"


def test_requirements_of_new_plugins_are_known_to_admit_this_core(
    installed: InstalledPlugins,
) -> None:
    known = catalog._known_to_admit(__version__)
    assert len(known) == 2
    for number, requirement in enumerate(known):
        assert Requirement(requirement).specifier.contains(__version__)
        installed.add(f"new{number}", wheel=Wheel(requires=[requirement]))
        assert (one(f"new{number}").state, one(f"new{number}").requires) == ("ok", requirement)
    assert not catalog._known_to_admit("0.3.0rc1"), "a pre-release is below its release"


def test_a_malformed_requirement_makes_a_plugin_undeclared(installed: InstalledPlugins) -> None:
    installed.add("odd", wheel=Wheel(requires=["gcore-core>=zero"]))
    row = one("odd")
    assert (row.state, row.reason) == (
        "undeclared",
        "its requirement 'gcore-core>=zero' cannot be read",
    )


def test_a_requirement_for_another_environment_makes_a_plugin_undeclared(
    installed: InstalledPlugins,
) -> None:
    installed.add("odd", wheel=Wheel(requires=["gcore-core<0.1; python_version < '3'"]))
    assert one("odd").state == "undeclared"


def test_a_plugin_without_a_requirement_is_undeclared_but_usable(
    installed: InstalledPlugins,
) -> None:
    installed.add("loose", wheel=Wheel(requires=["numpy"]))
    assert one("loose").state == "undeclared"
    assert catalog.scan().get("loose", where="").name == "loose"


def test_an_editable_install_beside_stale_egg_info_is_one_plugin_with_a_note(
    installed: InstalledPlugins, tmp_path: Path
) -> None:
    installed.add("twice", wheel=Wheel(version="0.2"))
    with InstalledPlugins(tmp_path / "stale") as stale:
        stale.add("twice", wheel=Wheel(distribution="gcore_twice", version="0.1", egg_info=True))
        row = one("twice")
        assert (row.version, row.state) == ("0.1", "ok"), "the first on sys.path counts"
        assert row.notes == (f"a second copy, 0.2 in {tmp_path / 'site'}, is ignored",)


def test_one_directory_twice_on_the_path_is_no_second_copy(
    installed: InstalledPlugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed.directory))
    assert one("fake").notes == ()


def test_plugins_off_leaves_only_core(
    installed: InstalledPlugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("G_CORE_PLUGINS", "off")
    assert {
        row.name: row.state for row in catalog.scan().plugins if row.name in ("core", "fake")
    } == {
        "core": "ok",
        "fake": "disabled",
    }
    with pytest.raises(PluginNotFound, match="'fake' is disabled: G_CORE_PLUGINS=off"):
        catalog.scan().get("fake", where="")


def test_another_environment_is_listed_by_its_path_against_its_own_core(tmp_path: Path) -> None:
    other = InstalledPlugins(tmp_path / "other")
    other.add(
        "core",
        wheel=Wheel(distribution="gcore-core", version="2.0", module="gcore_core.builtin.hooks"),
    )
    other.add("vllm", wheel=Wheel(requires=["gcore-core>=2"]))
    rows = catalog.scan([str(other.directory)]).plugins
    assert [(row.name, row.version, row.state) for row in rows] == [
        ("core", "2.0", "ok"),
        ("vllm", "0.1.0", "ok"),
    ]


def test_error_for_an_unknown_plugin_lists_installed_plugins(installed: InstalledPlugins) -> None:
    with pytest.raises(PluginNotFound) as caught:
        catalog.scan().get("fkae", where="roles.rollout.use")
    lines = str(caught.value).splitlines()
    assert lines[0] == "roles.rollout.use: no plugin named 'fkae' is installed."
    assert "fake" in lines[1] and lines[1].endswith("(did you mean 'fake'?)")
    assert lines[2] == "  no distribution of G-Core brings 'fkae'; list: g-core plugins"


def test_a_pin_is_checked_before_any_import(installed: InstalledPlugins) -> None:
    assert catalog.scan().get("fake", where="plugins.fake", pin=">=0.1").name == "fake"
    with pytest.raises(
        PluginIncompatible, match="asks for fake>=2, but gcore-fake 0.1.0 is installed"
    ):
        catalog.scan().get("fake", where="plugins.fake", pin=">=2")
    with pytest.raises(ConfigError, match="'newest' is not a version specifier"):
        catalog.scan().get("fake", where="plugins.fake", pin="newest")


def test_a_scan_imports_no_plugin_and_nothing_heavy(installed: InstalledPlugins) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from gcore_core.config import catalog\n"
        "assert 'fake' in catalog.scan().names()\n"
        "print(sorted({'pluggy', 'omegaconf', 'msgspec', 'numpy', 'packaging', 'gcore_fake'} & "
        "set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, str(installed.directory)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "[]\n"


def test_a_module_made_by_a_test_does_not_hide_a_real_one(tmp_path: Path) -> None:
    import colorsys  # any module of the standard library that nobody else has imported

    with InstalledPlugins(tmp_path / "site") as path:
        path.add("mine", files={"colorsys.py": "", "gcore_own_part.py": ""})
        importlib.import_module("gcore_own_part")
    assert sys.modules["colorsys"] is colorsys
    assert "gcore_own_part" not in sys.modules
