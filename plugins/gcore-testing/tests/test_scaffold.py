"""What ``g-core new`` writes fails its contract until the marked lines are filled in, and
passes it then.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from gcore_testing.installed import InstalledPlugins, Wheel
from gcore_testing.scaffold import writing

from tests.support.pages import copy_core
from tests.support.scaffolds import ANSWERS, WITH_TORCH, fill_in

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def written(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Path, dict[str, str]]]:
    """A new plugin, installed by its metadata alone: (directory, environment)."""
    directory = writing.write("scaffolded", request.param, tmp_path / "gcore-scaffolded").directory
    project = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    site = InstalledPlugins(tmp_path / "site")
    site.add("scaffolded", wheel=Wheel(requires=project["dependencies"]))
    (site.directory / "gcore_scaffolded.py").unlink()
    path = os.pathsep.join((str(site.directory), str(directory), str(REPOSITORY)))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        # These tests need none, and those that are installed here take as long as the tests do.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    yield directory, environment


def run_tests(
    directory: Path, environment: dict[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("written", sorted(ANSWERS), indirect=True)
def test_a_new_plugin_fails_its_contract_until_it_is_filled_in(
    written: tuple[Path, dict[str, str]], request: pytest.FixtureRequest
) -> None:
    directory, environment = written
    before = run_tests(directory, environment, "-x", "-k", "not TestPlugin")
    assert before.returncode == 1 and "NotImplementedError" in before.stdout, before.stdout
    checked = [sys.executable, "-m", "gcore_core", "plugins", "check", "scaffolded"]
    found = subprocess.run(
        checked, env=environment, cwd=directory, stdout=subprocess.PIPE, text=True
    )
    assert found.returncode == 3
    assert "raises NotImplementedError; write what it is to do." in found.stdout
    assert found.stdout.count(f"{directory}/gcore_scaffolded/") == len(found.stdout.splitlines())
    fill_in(directory, ANSWERS[request.node.callspec.params["written"]])
    # The model of the fake engine is none that torch can train; the test below has one.
    after = run_tests(directory, environment, "-k", "not TestWithTorch")
    assert after.returncode == 0, after.stdout
    assert subprocess.run(checked, env=environment, cwd=directory).returncode == 0


@pytest.mark.parametrize("written", ["generator"], indirect=True)
def test_a_new_generator_is_compared_with_a_trainer_on_torch(
    written: tuple[Path, dict[str, str]],
) -> None:
    """Log-probs that are wrong by a little fail, though the engine claims nothing but a push."""
    pytest.importorskip("gcore_torch")
    pytest.importorskip("torch")
    directory, environment = written
    fill_in(directory, WITH_TORCH)
    right = run_tests(directory, environment, "-k", "TestWithTorch")
    assert re.search(r"^3 passed.* 3 not claimed", right.stdout, flags=re.MULTILINE), right.stdout
    (engine,) = directory.glob("gcore_scaffolded/engine.py")
    engine.write_text(
        engine.read_text().replace(
            "return self._engine.step()",
            """ended = self._engine.step()
        for record in ended:
            record.columns["logp"] = record.columns["logp"] - np.float32(0.01)
        return ended""",
        )
    )
    wrong = run_tests(directory, environment, "-k", "TestWithTorch")
    assert re.search(r"^2 failed", wrong.stdout, flags=re.MULTILINE), wrong.stdout


@pytest.mark.parametrize("written", ["generator"], indirect=True)
def test_a_new_generator_says_why_it_is_not_compared_without_torch(
    written: tuple[Path, dict[str, str]],
) -> None:
    directory, environment = written
    hide = """
        import importlib.util
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name: None if name == "gcore_torch" else find_spec(name)
        """
    (directory / "conftest.py").write_text(textwrap.dedent(hide))
    skipped = run_tests(directory, environment, "-rs", "-k", "TestWithTorch")
    assert skipped.returncode == 0
    assert "no trainer to compare with: install gcore-torch" in skipped.stdout


def test_every_kind_of_template_is_filled_in_by_these_tests() -> None:
    assert sorted(ANSWERS) == writing.kinds()


@pytest.mark.parametrize("kind", writing.kinds())
def test_a_new_plugin_has_the_style_of_the_project(kind: str, tmp_path: Path) -> None:
    directory = writing.write("scaffolded", kind, tmp_path / "new").directory
    for words in (["format", "--check"], ["check", "--select", "E,F,B,UP"]):
        command = [
            sys.executable,
            "-m",
            "ruff",
            *words,
            "--isolated",
            "--line-length",
            "120",
            str(directory),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_pip_installs_a_new_plugin_into_a_fresh_environment(tmp_path: Path) -> None:
    copy_core(tmp_path / "g-core")
    copies = [tmp_path / "g-core", tmp_path / "g-core" / "plugins" / "gcore-testing"]
    venv.create(tmp_path / "env", with_pip=True, symlinks=True)
    programs = tmp_path / "env" / "bin"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [programs / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *copies], check=True, env=clean)
    new = [programs / "g-core", "new", "scaffolded", "--kind", "balancer"]
    subprocess.run(new, check=True, env=clean, cwd=tmp_path)
    directory = tmp_path / "gcore-scaffolded"
    subprocess.run([*pip, "-e", f"{directory}[test]"], check=True, env=clean)
    tests = [programs / "python", "-m", "pytest", "-q", directory]
    assert subprocess.run(tests, env=clean, cwd=directory).returncode == 1
    fill_in(directory, ANSWERS["balancer"])
    assert subprocess.run(tests, env=clean, cwd=directory).returncode == 0
    listed = subprocess.run(
        [programs / "g-core", "plugins"], env=clean, capture_output=True, text=True, check=True
    )
    assert re.search(
        r"^scaffolded +ok +gcore-scaffolded +0.1.0$", listed.stdout, flags=re.MULTILINE
    )
