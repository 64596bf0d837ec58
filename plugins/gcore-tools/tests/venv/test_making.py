"""``g-core venv create`` with real interpreters and a real pip, which gets everything from wheels
made here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gcore_testing.installed import InstalledPlugins, Wheel

from gcore_core import __version__
from gcore_core.config import venvs

pytestmark = pytest.mark.rest

REPOSITORY = Path(__file__).parents[4]

PLUGIN = """
from gcore_core import hookimpl
from gcore_core.contract import providers as p

@hookimpl
def gcore_venvs():
    yield p.VenvProvider(
        name="cpu", summary="-", engine="toy-engine", requirements="gcore_toy_pins:cpu.txt",
        no_deps=True, remove=("toy-ballast",),
    )
"""

#: An interpreter whose ``-m venv`` copies a venv instead of making one. With TOY_BLOCK, a
#: directory, it says there that it has begun and waits.
FAST = """#!/bin/sh
if [ "$2" = venv ]; then
    echo "$3" >>{directory}/made
    cp -a {template}/. "$3"
    if [ -n "$TOY_BLOCK" ]; then echo begun >"$TOY_BLOCK/begun"; read go <"$TOY_BLOCK/go"; fi
    exit 0
fi
exec {python} "$@"
"""


def wheel(
    directory: Path, name: str, version: str = "1.0", requires: str = "", module: str = ""
) -> Path:
    """A wheel with one module; pip needs no index and no build for it."""
    stem = name.replace("-", "_")
    file, info = directory / f"{stem}-{version}-py3-none-any.whl", f"{stem}-{version}.dist-info"
    texts = {
        f"{module or stem}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    texts[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*texts, f"{info}/RECORD"])
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in texts.items():
            archive.writestr(path, text)
    return file


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment as this interpreter makes it."""
    directory = tmp_path_factory.mktemp("template") / "env"
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    return directory


@dataclass
class Place:
    """A plugin ``toy``, installed here with the core from wheels, and an engine that lies beside
    them.
    """

    directory: Path
    here: InstalledPlugins = field(init=False)

    def __post_init__(self) -> None:
        self.here = InstalledPlugins(self.directory / "here")
        core = Wheel(
            distribution="gcore-core",
            version=__version__,
            module="gcore_core.builtin.hooks",
            requires=(),
        )
        pins = {
            "gcore_toy_pins/__init__.py": "",
            "gcore_toy_pins/cpu.txt": self.pins("toy-engine", "toy-ballast"),
        }
        self.here.add("toy", PLUGIN, files=pins)
        self.here.add("core", wheel=core)
        (
            self.here.directory / "gcore_core.builtin.hooks.py"
        ).unlink()  # the one of the repository is imported
        for name, version in (("gcore-core", __version__), ("gcore-toy", "0.1.0")):
            url = wheel(self.directory, name, version).as_uri()
            (info,) = self.here.directory.glob(f"{name.replace('-', '_')}-*.dist-info")
            (info / "direct_url.json").write_text(json.dumps({"url": url, "archive_info": {}}))

    def pins(self, *names: str) -> str:
        """Needs something that nobody has: only pip's --no-deps installs it."""
        files = [
            wheel(self.directory, name, requires="Requires-Dist: absent-anywhere\n")
            for name in names
        ]
        return "".join(
            f"{name} @ {file.as_uri()}\n" for name, file in zip(names, files, strict=True)
        )

    @property
    def venv(self) -> Path:
        return self.directory / "venvs" / "toy"

    def environment(self, **more: str) -> dict[str, str]:
        paths = os.pathsep.join([str(self.here.directory), str(REPOSITORY)])
        own = {"PYTHONPATH": paths, "G_CORE_VENVS": str(self.venv.parent), "PIP_NO_INDEX": "1"}
        return {**os.environ, **own, **more}

    def start(self, *words: str, **more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gcore_core", "venv", *words]
        return subprocess.Popen(
            command,
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def g_core(self, *words: str, code: int = 0) -> str:
        """What it prints: its error, if there is one, else its output."""
        process = self.start(*words)
        out, error = process.communicate()
        assert process.returncode == code, out + error
        return error or out

    def states(self) -> dict[str, str]:
        return {row["name"]: row["state"] for row in json.loads(self.g_core("list", "--json"))}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@dataclass
class Blocked:
    """A process that makes a venv and has got as far as venv."""

    process: subprocess.Popen[str]
    directory: Path

    def release(self) -> None:
        (self.directory / "go").write_text("go\n")


@pytest.fixture
def fast(place: Place, template: Path) -> str:
    """An interpreter with which venvs are made at once."""
    file = place.directory / "python"
    file.write_text(
        FAST.format(directory=place.directory, template=template, python=sys.executable)
    )
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def blocked(place: Place, fast: str) -> Iterator[Blocked]:
    for name in ("begun", "go"):
        os.mkfifo(place.directory / name)
    process = place.start("create", "toy", "--python", fast, TOY_BLOCK=str(place.directory))
    assert (place.directory / "begun").read_text() == "begun\n"
    yield Blocked(process, place.directory)
    process.kill()
    process.communicate()


def test_an_environment_is_made_once_with_its_pins_and_the_installed_versions(place: Place) -> None:
    shown = place.g_core("create", "toy")
    assert (
        "pip install --no-deps -r cpu.txt" in shown
        and "made in " in shown
        and "python: venv:toy" in shown
    )
    python = place.venv / "bin" / "python"
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True
    )
    have = {row["name"]: row["version"] for row in json.loads(listed.stdout)}
    assert have.keys() - {"pip", "setuptools"} == {"gcore-core", "gcore-toy", "toy-engine"}
    inode = place.venv.stat().st_ino
    assert "is ready: toy-engine 1.0" in place.g_core("create", "toy")
    assert place.venv.stat().st_ino == inode and place.states() == {"toy": "ready"}
    (row,) = json.loads(place.g_core("list", "--json"))
    assert (
        row["engine"] == "toy-engine 1.0"
        and row["bytes"] > 1_000_000
        and row["python"] == str(python)
    )
    found = {row["what"]: row for row in json.loads(place.g_core("doctor", "--json"))}
    assert found["venv toy"] == {
        "what": "venv toy",
        "told": f"cpu, toy-engine 1.0, gcore-core {__version__}",
        "mend": "",
        "ok": True,
    }
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "toy-engine"], check=True)
    found = {row["what"]: row for row in json.loads(place.g_core("doctor", "--json", code=2))}
    assert found["venv toy"]["told"] == "toy-engine is missing, 1.0 was installed"


def test_a_failing_pip_is_quoted_and_the_next_try_starts_over(place: Place, fast: str) -> None:
    pins = place.here.directory / "gcore_toy_pins" / "cpu.txt"
    good = pins.read_text()
    pins.write_text("no-such-engine==9\n")
    error = place.g_core("create", "toy", "--python", fast, code=3).splitlines()
    assert error[0] == f"{place.venv}: `pip install --no-deps -r cpu.txt` failed with exit code 1."
    assert "No matching distribution found for no-such-engine==9" in error[2]
    assert error[-1] == f"  all of its output: {place.venv / 'g-core-pip.log'}"
    assert place.states() == {"toy": "half made"}
    pins.write_text(good)
    assert "made in" in place.g_core("create", "toy")
    assert json.loads((place.venv / venvs.RECORD).read_text())["python"] == fast, (
        "what it had been asked for"
    )


def test_changed_pins_make_an_environment_stale_and_it_is_remade(place: Place, fast: str) -> None:
    place.g_core("create", "toy", "--python", fast)
    pins = place.here.directory / "gcore_toy_pins" / "cpu.txt"
    pins.write_text(pins.read_text() + "# tested again\n")
    (place.venv / "left").touch()
    assert place.states() == {"toy": "stale"}
    assert "made in" in place.g_core("create", "toy")
    assert place.states() == {"toy": "ready"} and not (place.venv / "left").exists()


def test_an_environment_somewhere_else_is_found_by_its_name(place: Place, fast: str) -> None:
    elsewhere = place.directory / "elsewhere"
    place.g_core("create", "toy", "--python", fast, "--name", "far", "--dir", str(elsewhere))
    assert (elsewhere / venvs.RECORD).exists() and place.states() == {"far": "ready"}
    assert "is ready" in place.g_core("create", "toy", "--name", "far")
    assert "venv 'far' is in" in place.g_core(
        "create", "toy", "--name", "far", "--dir", "/elsewhere", code=2
    )


def test_two_concurrent_commands_make_one_environment(
    place: Place, fast: str, blocked: Blocked
) -> None:
    other = place.start("create", "toy", "--python", fast)
    assert other.stdout is not None
    assert other.stdout.readline().startswith("toy (cpu)")
    assert other.stdout.readline() == f"waiting for another process that makes {place.venv}\n"
    assert place.states() == {"toy": "being made"}
    blocked.release()
    assert "made in" in blocked.process.communicate()[0]
    assert "is ready" in other.communicate()[0]
    assert (blocked.process.returncode, other.returncode) == (0, 0)
    assert (place.directory / "made").read_text().splitlines() == [str(place.venv)]


def test_a_killed_creation_is_redone_after_its_processes_have_ended(
    place: Place, fast: str, blocked: Blocked
) -> None:
    blocked.process.kill()
    blocked.process.wait()
    assert place.states() == {"toy": "being made"}, "the venv that it started still writes there"
    after = place.start("create", "toy")
    assert after.stdout is not None
    assert after.stdout.readline().startswith("toy (cpu)")
    assert after.stdout.readline().startswith("waiting for another process")
    blocked.release()
    assert "made in" in after.communicate()[0] and after.returncode == 0
    assert place.states() == {"toy": "ready"}
    assert len((place.directory / "made").read_text().splitlines()) == 2
