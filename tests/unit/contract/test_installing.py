"""Errors say how a distribution is installed from where the core was."""

from __future__ import annotations

import json
import subprocess
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gcore_core
from gcore_core import cli
from gcore_core.config import catalog
from gcore_core.config.homes import NO_PLUGINS
from gcore_core.config.plan import read_plan
from gcore_core.contract import installing
from gcore_core.contract.errors import PluginNotFound
from gcore_core.contract.installing import install_command, install_words, is_offered

ROOT = Path(__file__).parents[3]
PYTHON = "/envs/a/bin/python"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Takes name -> what pip wrote about its install, or None; nothing else is installed then."""
    monkeypatch.setattr(installing, "__file__", str(tmp_path / "site/gcore_core/contract/x.py"))

    def install(**direct_urls: dict[str, Any] | None) -> Path:
        texts = {
            name.replace("_", "-"): None if direct_url is None else json.dumps(direct_url)
            for name, direct_url in direct_urls.items()
        }

        def distributions(name: str) -> list[Any]:
            found = SimpleNamespace(read_text=lambda file: texts[name])
            return [found] if name in texts else []

        monkeypatch.setattr(installing, "distributions", distributions)
        return tmp_path

    return install


def lay(folder: Path, *names: str, requires: tuple[str, ...] = ()) -> None:
    """Writes a checkout with plugins of these names, which require others."""
    for name in names:
        (folder / "plugins" / name).mkdir(parents=True)
        text = f"[project]\ndependencies = {json.dumps(list(requires))}\n"
        (folder / "plugins" / name / "pyproject.toml").write_text(text)


def test_a_distribution_of_this_checkout_is_installed_from_its_folder() -> None:
    extras = install_command("gcore-rewards[math]", "gcore-core[loopback]", python=PYTHON)
    projects = f"-e '{ROOT}/plugins/gcore-rewards[math]' -e '{ROOT}[loopback]'"
    assert extras == f"{PYTHON} -m pip install {projects}"
    pinned = install_command("gcore-vllm==1.3.0", python=PYTHON)
    assert pinned == f"{PYTHON} -m pip install -e {ROOT}/plugins/gcore-vllm"


def test_what_pip_would_not_find_comes_with_it(place: Any, tmp_path: Path) -> None:
    """pip looks for what a folder requires on its index, where nothing of this project is."""
    lay(tmp_path, "gcore-language", requires=("numpy>=2", "gcore-core>=0.3"))
    lay(tmp_path, "gcore-torch", requires=("gcore-core>=0.3", "gcore-language>=0.3", "numpy>=2"))
    core = {"url": f"file://{tmp_path}", "dir_info": {"editable": True}}
    folders = [f"-e {tmp_path}/plugins/{name}" for name in ("gcore-language", "gcore-torch")]
    place(gcore_core=core)
    command = install_command("gcore-torch", python=PYTHON)
    assert command == f"{PYTHON} -m pip install {' '.join(folders)}"
    place(gcore_core=core, gcore_language=None)
    assert install_command("gcore-torch", python=PYTHON) == f"{PYTHON} -m pip install {folders[1]}"


def test_a_checkout_that_was_installed_as_a_copy_is_found_too(place: Any, tmp_path: Path) -> None:
    lay(tmp_path / "my code", "gcore-tools")
    place(gcore_core={"url": f"file://{tmp_path}/my%20code", "dir_info": {}})
    command = f"{PYTHON} -m pip install -e '{tmp_path}/my code/plugins/gcore-tools'"
    assert install_command("gcore-tools", python=PYTHON) == command


def test_a_wheel_is_taken_from_the_folder_in_which_the_cores_lay(
    place: Any, tmp_path: Path
) -> None:
    wheel = tmp_path / "gcore_rewards-0.3.0-py3-none-any.whl"
    wheel.touch()
    place(gcore_core={"url": f"file://{tmp_path}/gcore_core-0.3.0.whl", "archive_info": {}})
    command = f"{PYTHON} -m pip install --find-links {tmp_path} '{wheel}[math]'"
    assert install_command("gcore-rewards[math]", python=PYTHON) == command
    assert is_offered("gcore-rewards") and not is_offered("gcore-vllm")


def test_what_an_extra_of_a_wheel_requires_comes_with_it(place: Any, tmp_path: Path) -> None:
    """Also where the distribution itself is installed, from a wheel that pip is told of alone."""
    core = {"url": f"file://{tmp_path}/gcore_core-0.3.0.whl", "archive_info": {}}
    report = tmp_path / "gcore_report-0.3.0-py3-none-any.whl"
    rewards = tmp_path / "gcore_rewards-0.3.0-py3-none-any.whl"
    for wheel, requires in (
        (report, ["gcore-core>=0.3"]),
        (
            rewards,
            ["gcore-core>=0.3", "gcore-report>=0.3; extra == 'human'", "sympy; extra == 'math'"],
        ),
    ):
        with zipfile.ZipFile(wheel, "w") as archive:
            name = wheel.name.partition("-")[0]
            text = "".join(f"Requires-Dist: {line}\n" for line in requires)
            archive.writestr(f"{name}-0.3.0.dist-info/METADATA", f"Name: {name}\n{text}")
    direct = {"url": f"file://{rewards}", "archive_info": {}}
    place(gcore_core=core, gcore_rewards=direct)
    pip = f"{PYTHON} -m pip install"
    of_report = f"--find-links {tmp_path} {report}"
    human = install_command("gcore-rewards[human]", python=PYTHON)
    assert human == f"{pip} {of_report} 'gcore-rewards[human] @ file://{rewards}'"
    maths = install_command("gcore-rewards[math]", python=PYTHON)
    assert maths == f"{pip} 'gcore-rewards[math] @ file://{rewards}'"
    place(gcore_core=core, gcore_rewards=direct, gcore_report=None)
    human = install_command("gcore-rewards[human]", python=PYTHON)
    assert human == f"{pip} 'gcore-rewards[human] @ file://{rewards}'"


def test_nothing_is_named_twice(place: Any, tmp_path: Path) -> None:
    """Two that require the same, or one that two ways lead to."""
    lay(tmp_path, "gcore-c")
    lay(tmp_path, "gcore-b", requires=("gcore-c",))
    lay(tmp_path, "gcore-a", requires=("gcore-b", "gcore-c"))
    place(gcore_core={"url": f"file://{tmp_path}", "dir_info": {"editable": True}})
    folders = [f"-e {tmp_path}/plugins/gcore-{name}" for name in "cba"]
    command = f"{PYTHON} -m pip install {' '.join(folders)}"
    for names in (["gcore-a"], ["gcore-b", "gcore-a", "gcore-c"]):
        assert install_command(*names, python=PYTHON) == command


@pytest.mark.parametrize("core", [{}, {"gcore_core": None}])
def test_a_core_that_was_installed_by_its_name_leaves_the_folder_to_the_reader(
    place: Any, core: Any
) -> None:
    place(**core)
    command = f"{PYTHON} -m pip install --find-links WHEELS gcore-tools"
    assert install_command("gcore-tools", python=PYTHON) == command


def test_what_is_installed_here_is_installed_elsewhere_in_the_same_way(place: Any) -> None:
    place(
        gcore_mine={"url": "file:///a/mine", "dir_info": {"editable": True}},
        gcore_ours={"url": "https://a/b.git", "vcs_info": {"vcs": "git", "commit_id": "c0"}},
        gcore_core={"url": "file:///wheels/gcore_core.whl", "archive_info": {}},
    )
    assert install_words("gcore-mine", ("x",), "==1") == ("-e", "/a/mine[x]")
    assert install_words("gcore-ours") == ("gcore-ours @ git+https://a/b.git@c0",)
    assert install_words("gcore-core") == ("gcore-core @ file:///wheels/gcore_core.whl",)


@pytest.mark.parametrize("core", [None, {"url": "file:///code", "dir_info": {}}])
def test_what_is_not_of_this_project_comes_from_the_index(place: Any, core: Any) -> None:
    place(gcore_core=core)
    assert install_command("pandas>=2", python=PYTHON) == f"{PYTHON} -m pip install 'pandas>=2'"


def test_a_plugin_that_lies_in_the_checkout_is_offered_where_it_is_named() -> None:
    with pytest.raises(PluginNotFound) as caught:
        catalog.Catalog([], "0.3.0", disabled=False).get("vllm", where="roles.rollout.use")
    assert caught.value.todo == f"to add it: {install_command('gcore-vllm')}"


def test_all_plugins_that_a_job_lacks_are_named_at_once() -> None:
    core = catalog._Found(plugin=catalog.scan().get("core", where=""), requires=None)
    alone = catalog.Catalog([core], "0.3.0", disabled=False)
    with pytest.raises(PluginNotFound) as caught:
        read_plan(ROOT / "recipes/quickstart.yaml", ["balance.use=powr"], alone)
    assert str(caught.value).splitlines() == [
        "plugins.report, advantage.use, balance.use, roles.policy.use: no plugins named 'report', "
        "'algorithms', 'powr', 'torch' are installed.",
        "  installed: core",
        f"  to add them: {install_command('gcore-report', 'gcore-algorithms', 'gcore-torch')}",
        "  no distribution of G-Core brings 'powr'; list: g-core plugins",
    ]


@pytest.mark.parametrize("name", NO_PLUGINS)
def test_nothing_is_to_be_installed_that_brings_no_such_plugin(name: str) -> None:
    """A distribution of that name is of the project, and has other plugins or none."""
    text = (ROOT / f"plugins/gcore-{name}/pyproject.toml").read_text(encoding="utf-8")
    plugins = tomllib.loads(text)["project"].get("entry-points", {}).get("gcore", {})
    assert name not in plugins
    for installed in (catalog.scan(), catalog.scan([])):
        with pytest.raises(PluginNotFound) as caught:
            installed.get(name, where="roles.policy.use")
        said = f"gcore-{name} brings no plugin {name!r}; list: g-core plugins"
        assert caught.value.todo == said


def test_nothing_is_to_be_installed_that_is_installed() -> None:
    """Such as one whose metadata is of a time before it had the plugin."""
    old = catalog.Installed(name="diff", distribution="gcore-report", version="0.3.0", module="m")
    rows = [catalog._Found(plugin=old, requires=None, clashes=())]
    with pytest.raises(PluginNotFound) as caught:
        catalog.Catalog(rows, "0.3.0", disabled=False).get("trace", where="plugins")
    assert caught.value.todo == "gcore-report brings no plugin 'trace'; list: g-core plugins"


@pytest.mark.parametrize("name", ["job", "load", "train"])
def test_what_a_python_session_called_here_says_where_it_is(name: str) -> None:
    """Both as an attribute and imported by its name; Python gives its own text for the latter."""
    said = f"gcore_core.{name} is gcore.{name} now, .* `g-core doctor` says how to install it"
    assert "doctor" in cli.COMMANDS_OF["gcore-tools"]
    with pytest.raises(ImportError, match=said):
        getattr(gcore_core, name)
    with pytest.raises(ImportError, match=said):
        exec(f"from gcore_core import {name}", {})
    assert not hasattr(gcore_core, "trainn")


def test_every_distribution_that_an_error_names_is_one_of_the_project() -> None:
    """Each call in the code names a project, and extras that it has."""
    command = ["git", "grep", "-hoE", r"install_command\(f?\"gcore[^\"]*\"", "--", "*.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for line in found.splitlines():
        requirement = line.split('"')[1].partition("=")[0]
        if "{" in requirement or "tests" in requirement:
            continue
        name, _, extra = requirement.partition("[")
        project = ROOT if name == "gcore-core" else ROOT / "plugins" / name
        text = (project / "pyproject.toml").read_text(encoding="utf-8")
        assert not extra or f"\n{extra.rstrip(']')} = [" in text, requirement
