"""Roles in interpreters of their own: two environments that hold different versions of one
dependency.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from gcore_testing import fake
from gcore_testing.installed import InstalledPlugins, Wheel

from gcore_core import __version__

REPOSITORY = Path(__file__).parents[2]

PLUGIN = """
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_testing.fake import FakeGeneratorConfig, FakeTrainerConfig

@dataclass(frozen=True, kw_only=True)
class Config(FakeGeneratorConfig):
    def traits(self):
        return Traits(receives_weights=True, fingerprints=True)

@hookimpl
def gcore_trainers():
    yield p.TrainerProvider(
        summary="-", factory="gcore_telling_engine:Trainer", config=FakeTrainerConfig, needs=("gcore-dummy>=1",)
    )

@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(
        summary="-", factory="gcore_telling_engine:Generator", config=Config,
        needs=("gcore-dummy>=1",)
    )
"""  # noqa: E501

ENGINE = """
import sys
BEFORE = sorted(sys.modules)

import json
from importlib.metadata import version
from pathlib import Path

import gcore_dummy
from gcore_testing import fake

def tell(context):
    told = {
        "dummy": gcore_dummy.VERSION, "installed": version("gcore-dummy"), "python": sys.executable, "before": BEFORE,
        "path": [entry for entry in sys.path if entry],
    }
    Path(context.directory, f"{context.role}.json").write_text(json.dumps(told))

class Trainer(fake.FakeTrainer):
    def __init__(self, config, context):
        tell(context)
        super().__init__(config, context)

class Generator(fake.FakeGenerator):
    def __init__(self, config, context):
        tell(context)
        super().__init__(config, context)
"""  # noqa: E501

JOB = {
    "run": {"name": "apart", "steps": 2},
    "controller": {"config": {"prompts": 4}},
    "data": {"use": "fake"},
    "advantage": {"use": "fake"},
    "objective": {"use": "fake"},
    "roles": {"policy": {"use": "telling"}, "rollout": {"use": "telling"}},
    "rewards": {"letters": {"use": "fake"}},
    "local": [fake.__file__],
}


@dataclass(frozen=True)
class Place:
    """Where a job runs: ``here`` is what the supervisor's interpreter has besides, a and b are the
    roles' own.
    """

    directory: Path
    here: InstalledPlugins
    a: Path
    b: Path

    def g_core(self, verb: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        job = {
            **JOB,
            "roles": {
                "policy": {"use": "telling", "python": str(self.a)},
                "rollout": {"use": "telling", "python": str(self.b)},
            },
        }
        (self.directory / "job.yaml").write_text(json.dumps(job))
        path = os.pathsep.join((str(self.here.directory), str(REPOSITORY)))
        with tempfile.TemporaryDirectory(
            prefix="gc-", dir="/tmp"
        ) as sockets:  # socket paths must be short
            inline = "launcher.use=core/inline" in overrides
            place = [] if inline else [f"launcher.config.socket_dir={sockets}"]
            return subprocess.run(
                [sys.executable, "-m", "gcore_core", verb, "job.yaml", *place, *overrides],
                cwd=self.directory,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=120,
            )

    def told(self, role: str) -> dict[str, object]:
        return dict(json.loads((self.directory / f"runs/apart/001/{role}.json").read_text()))


def environment(root: Path, dummy: str, plugin: str = "0.1.0") -> Path:
    """A real virtual environment. Its light dependencies are this interpreter's, by a .pth file, so
    that it is made in a fraction of a second; the core's metadata, the plugin and its dependency
    are its own.
    """
    venv.create(root, symlinks=True)
    (site,) = root.glob("lib/python3*/site-packages")
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    ours = [REPOSITORY, REPOSITORY / "plugins/gcore-testing"]  # which has the fakes
    (site / "shared.pth").write_text("\n".join([*map(str, ours), *sorted(libraries)]) + "\n")
    installed = InstalledPlugins(site)
    installed.add(
        "core",
        wheel=Wheel(distribution="gcore-core", version=__version__, module="core_of_the_test"),
    )
    installed.add(
        "telling", PLUGIN, Wheel(version=plugin), files={"gcore_telling_engine.py": ENGINE}
    )
    add_dummy(site, dummy)
    return root / "bin" / "python"


def add_dummy(site: Path, version: str) -> None:
    info = site / f"gcore_dummy-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: gcore-dummy\nVersion: {version}\n"
    )
    (site / "gcore_dummy.py").write_text(f"VERSION = {version!r}\n")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    here = InstalledPlugins(tmp_path / "here")
    here.add("telling", PLUGIN)  # light: its engine and the dependency are not here
    return Place(
        tmp_path, here, environment(tmp_path / "a", "1.0"), environment(tmp_path / "b", "2.0")
    )


def test_each_role_sees_the_version_in_its_own_environment(place: Place) -> None:
    done = place.g_core("run")
    assert done.returncode == 0, done.stdout + done.stderr
    policy, rollout = place.told("policy"), place.told("rollout")
    assert (policy["dummy"], policy["installed"], policy["python"]) == ("1.0", "1.0", str(place.a))
    assert (rollout["dummy"], rollout["installed"], rollout["python"]) == (
        "2.0",
        "2.0",
        str(place.b),
    )
    for told in (policy, rollout):
        assert str(place.here.directory) not in told["path"], (
            "this interpreter's modules are not given to another"
        )


def test_a_worker_imports_only_the_light_core_before_its_factory(place: Place) -> None:
    assert place.g_core("run").returncode == 0
    before = place.told("rollout")["before"]
    assert isinstance(before, list)
    foreign = {name.partition(".")[0] for name in before} - set(sys.stdlib_module_names)
    # What carries messages and columns, and nothing of what configures a job or of an engine.
    carries = {"msgspec", "numpy", "typing_extensions", "xxhash"}
    assert {name for name in foreign if name[0] != "_"} <= carries | {
        "gcore_core",
        "gcore_telling_engine",
    }
    assert not {
        "gcore_core.config.plugins",
        "gcore_core.config.plan",
        "gcore_core.config.catalog",
        "gcore_core.contract.hookspecs",
    } & set(before)


@pytest.mark.parametrize("verb", ["check", "run"])
def test_a_plugin_of_another_version_is_named_with_both_interpreters_before_anything_starts(
    place: Place, tmp_path: Path, verb: str
) -> None:
    other = environment(tmp_path / "other", "2.0", plugin="0.2.0")
    done = place.g_core(verb, f"roles.rollout.python={other}")
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        f"roles.rollout.python: {other} has gcore-telling 0.2.0, but this process has 0.1.0.",
        f"  this process: {sys.executable}",
        f"  {other} -m pip install gcore-telling==0.1.0",
    ]
    assert not (tmp_path / "runs").exists()


def test_an_engine_that_is_missing_in_a_roles_interpreter_is_named_with_the_command(
    place: Place, tmp_path: Path
) -> None:
    for info in tmp_path.glob("b/lib/python3*/site-packages/gcore_dummy-*"):
        shutil.rmtree(info)
    done = place.g_core("run")
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        f"roles.rollout.use: gcore-telling 0.1.0 needs gcore-dummy>=1 in {place.b}, found none.",
        f"  install it there: {place.b} -m pip install 'gcore-dummy>=1'",
    ]


def test_an_interpreter_whose_workers_have_other_versions_is_caught_by_the_handshake(
    place: Place, tmp_path: Path
) -> None:
    """It finds 0.1.0 when it is asked, as `python -c`; the worker that is started then, 0.2.0."""
    (site,) = tmp_path.glob("b/lib/python3*/site-packages")
    hidden = InstalledPlugins(tmp_path / "hidden")
    hidden.add("telling", PLUGIN, Wheel(version="0.2.0"), files={"gcore_telling_engine.py": ENGINE})
    (site / "hidden.pth").write_text(
        f"import sys; '-c' in sys.argv or sys.path.insert(0, {str(hidden.directory)!r})\n"
    )
    done = place.g_core("run")
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr.splitlines() == [
        "rollout.0: its gcore-telling is 0.2.0, the supervisor's is 0.1.0.",
        f"  0.2.0 in {place.b}",
        f"  0.1.0 in {sys.executable}",
        f"  install the same: {place.b} -m pip install gcore-telling==0.1.0",
    ]
    assert not (tmp_path / "runs/apart/001/rollout.json").exists(), (
        "it ended before it imported its factory"
    )


def test_an_interpreter_that_cannot_be_started_is_named_before_anything_starts(
    place: Place, tmp_path: Path
) -> None:
    place.b.unlink()
    write_program(place.b, "#!/no/such/shell\n")
    done = place.g_core("run")
    assert done.returncode == 2, done.stdout + done.stderr
    assert (
        f"roles.rollout.python: {place.b} cannot be started: No such file or directory."
        in done.stderr
    )
    assert not (tmp_path / "runs").exists()


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_an_interpreter_that_is_gone_when_its_worker_is_to_start_is_named(place: Place) -> None:
    place.b.rename(place.b.with_name("real"))
    write_program(place.b, '#!/bin/sh\nrm "$0"\nexec "$(dirname "$0")/real" "$@"\n')
    done = place.g_core("run")
    assert done.returncode == 5, done.stdout + done.stderr
    assert (
        f"roles.rollout.python: {place.b} cannot be started: No such file or directory."
        in done.stderr
    )


def test_an_interpreter_of_a_role_is_refused_when_all_run_in_one_process(place: Place) -> None:
    done = place.g_core("run", "launcher.use=core/inline")
    assert done.returncode == 2 and "roles.policy.python: " in done.stderr, done.stderr


# -- with pip --------------------------------------------------------------------------------------

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "{name}"
version = "{version}"
dependencies = {requires}
[project.entry-points.gcore]
{entry}
[tool.setuptools]
py-modules = {modules}
"""


def project(root: Path, name: str, version: str, files: dict[str, str], entry: str = "") -> Path:
    root.mkdir()
    requires = '["gcore-core>=0.3,<0.4"]' if entry else "[]"
    modules = json.dumps([file.removesuffix(".py") for file in files])
    text = PROJECT.format(
        name=name, version=version, requires=requires, entry=entry, modules=modules
    )
    (root / "pyproject.toml").write_text(
        text if entry else text.replace("[project.entry-points.gcore]\n", "")
    )
    for file, source in files.items():
        (root / file).write_text(source)
    return root


@pytest.fixture
def by_pip(tmp_path: Path) -> Iterator[Place]:
    """Everything installed by pip, into environments that share nothing with this one."""
    core = tmp_path / "core"
    core.mkdir()
    shutil.copytree(
        REPOSITORY / "gcore_core", core / "gcore_core", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, core)
    kit = tmp_path / "kit"  # which has the fakes
    shutil.copytree(
        REPOSITORY / "plugins/gcore-testing", kit, ignore=shutil.ignore_patterns("__pycache__")
    )
    files = {"gcore_telling.py": PLUGIN, "gcore_telling_engine.py": ENGINE}
    plugin = project(
        tmp_path / "telling", "gcore-telling", "0.1.0", files, 'telling = "gcore_telling"'
    )
    pythons = []
    for name, version in (("a", "1.0"), ("b", "2.0")):
        dummy = project(
            tmp_path / f"dummy-{name}",
            "gcore-dummy",
            version,
            {"gcore_dummy.py": f"VERSION = '{version}'"},
        )
        venv.create(tmp_path / name, with_pip=True, symlinks=True)
        python = tmp_path / name / "bin" / "python"
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run(
            [*install, str(core), str(kit), str(plugin), str(dummy)], check=True, env=clean()
        )
        pythons.append(python)
    here = InstalledPlugins(tmp_path / "here")
    here.add("telling", PLUGIN)
    yield Place(tmp_path, here, *pythons)


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.slow
def test_environments_made_by_pip_hold_different_versions_of_a_dependency(by_pip: Place) -> None:
    done = by_pip.g_core("run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (by_pip.told("policy")["dummy"], by_pip.told("rollout")["dummy"]) == ("1.0", "2.0")
    listed = subprocess.run(
        [by_pip.a, "-m", "gcore_core", "plugins", "list"],
        capture_output=True,
        text=True,
        env=clean(),
    )
    told = subprocess.run(
        [sys.executable, "-m", "gcore_core", "plugins", "list", "--python", str(by_pip.a)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert listed.stdout == told.stdout and "gcore-telling" in told.stdout
