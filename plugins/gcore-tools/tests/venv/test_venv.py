"""What goes into a venv, what is refused, what the list shows and what the doctor finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gcore_testing.installed import InstalledPlugins, Wheel
from gcore_tools.venv import doctor, making
from gcore_tools.venv.recipe import Recipe, Wish, recipe

from gcore_core import __version__, cli
from gcore_core.config import venvs
from gcore_core.contract.errors import ConfigError, ContractError
from gcore_testing.installed import InstalledPlugins, Wheel

PLUGIN = """
from gcore_core import hookimpl
from gcore_core.contract import providers as p

@hookimpl
def gcore_venvs():
    yield p.VenvProvider(
        name="cpu", summary="-", engine="toy-engine", requirements="gcore_toy_pins:cpu.txt", beside=("gcore-losses",)
    )
    yield p.VenvProvider(name="cuda", summary="-", engine="toy-engine", extras=("engine",))
"""  # noqa: E501


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("G_CORE_VENVS", str(tmp_path / "venvs"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "venvs"


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[InstalledPlugins]:
    """Fabricated distributions on ``sys.path``; the plugin ``fake`` offers nothing."""
    with InstalledPlugins(tmp_path / "site") as plugins:
        plugins.add("fake")
        yield plugins


@pytest.fixture
def toy(installed: InstalledPlugins) -> InstalledPlugins:
    """A plugin that describes two venvs; it requires gcore-shared, which requires a distribution
    of others'.
    """
    requires = ["gcore-core>=0.3,<0.4", "gcore-shared>=0.1", "toy-engine; extra == 'engine'"]
    pins = {"gcore_toy_pins/__init__.py": "", "gcore_toy_pins/cpu.txt": "toy-engine==1.0\n"}
    installed.add("toy", PLUGIN, Wheel(version="1.2", requires=requires), pins)
    installed.add(
        "shared",
        wheel=Wheel(requires=["gcore_core", "numpy", "gcore-absent; python_version < '3'"]),
    )
    return installed


def words(found: Recipe) -> dict[str, tuple[str, ...]]:
    return {
        source.distribution: source.words
        for source in found.sources
        if source.distribution != "gcore-core"
    }


def came_from(installed: InstalledPlugins, name: str, **direct: Any) -> None:
    """Writes what pip writes about an install that was not from an index."""
    (folder,) = installed.directory.glob(f"{name.replace('-', '_')}-*.dist-info")
    (folder / "direct_url.json").write_text(json.dumps(direct))


def write_record(root: Path, name: str, **more: Any) -> None:
    """A venv whose interpreter is there and fails when it is started."""
    (root / name / "bin").mkdir(parents=True)
    (root / name / "bin" / "python").write_text("#!/bin/sh\necho broken >&2; exit 9\n")
    (root / name / "bin" / "python").chmod(0o755)
    written = {
        "plugin": "toy",
        "flavour": "cpu",
        "python": sys.executable,
        "with": [],
        "complete": True,
        **more,
    }
    (root / name / venvs.RECORD).write_text(json.dumps(written))


# -- what goes in ----------------------------------------------------------------------------------


def test_core_plugin_and_our_requirements_are_pinned_to_the_installed_versions(
    toy: InstalledPlugins,
) -> None:
    found = recipe(Wish(plugin="toy"), where="")
    assert [source.distribution for source in found.sources] == [
        "gcore-core",
        "gcore-toy",
        "gcore-shared",
    ]
    assert found.sources[0].version == __version__
    assert words(found) == {
        "gcore-toy": ("gcore-toy==1.2",),
        "gcore-shared": ("gcore-shared==0.1.0",),
    }


@pytest.mark.parametrize(
    ("direct", "expected"),
    [
        ({"url": "file:///a/b%20c", "dir_info": {"editable": True}}, ("-e", "/a/b c[engine]")),
        ({"url": "file:///a/b", "dir_info": {}}, ("gcore-toy[engine] @ file:///a/b",)),
        ({"url": "file:///a.whl", "archive_info": {}}, ("gcore-toy[engine] @ file:///a.whl",)),
        (
            {
                "url": "https://host/a",
                "vcs_info": {"vcs": "git", "commit_id": "f00"},
                "subdirectory": "b",
            },
            ("gcore-toy[engine] @ git+https://host/a@f00#subdirectory=b",),
        ),
    ],
)
def test_a_distribution_without_an_index_is_installed_from_its_source(
    toy: InstalledPlugins, direct: dict[str, Any], expected: tuple[str, ...]
) -> None:
    came_from(toy, "gcore-toy", **direct)
    assert words(recipe(Wish(plugin="toy", flavour="cuda"), where=""))["gcore-toy"] == expected


def test_installed_objectives_are_added_beside_a_trainer(
    toy: InstalledPlugins,
) -> None:
    assert "gcore-losses" not in words(recipe(Wish(plugin="toy"), where=""))
    toy.add("losses")
    assert "gcore-losses" in words(recipe(Wish(plugin="toy"), where=""))
    assert "gcore-losses" not in words(recipe(Wish(plugin="toy", flavour="cuda"), where="")), (
        "not said of that one"
    )


def test_extras_are_named_by_plugin_or_by_distribution(toy: InstalledPlugins) -> None:
    toy.add("more", wheel=Wheel(distribution="acme-more", requires=["gcore-core", "gcore-shared"]))
    for name in ("more", "acme-more"):
        assert "acme-more" in words(recipe(Wish(plugin="toy", extra=(name,)), where=""))
    with pytest.raises(
        ConfigError, match=r"--with: .*'mroe' is installed here \(did you mean 'more'"
    ):
        recipe(Wish(plugin="toy", extra=("mroe",)), where="")


def test_the_flavour_is_that_of_the_machine_or_the_only_one(
    toy: InstalledPlugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recipe(Wish(plugin="toy"), where="").spec.name == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert recipe(Wish(plugin="toy"), where="").spec.name == "cuda"
    only = PLUGIN.replace('name="cuda"', 'name="rocm"').replace('name="cpu"', 'name="tpu"')
    toy.add("two", only)
    with pytest.raises(ConfigError, match="'two' has no venv 'cuda'"):
        recipe(Wish(plugin="two"), where="")
    toy.add("one", only[: only.index("    yield p.VenvProvider(name=")])
    assert recipe(Wish(plugin="one"), where="").spec.name == "tpu"


@pytest.mark.parametrize("change", ["pins", "version", "extra", "interpreter", "flavour"])
def test_the_digest_changes_with_everything_that_defines_the_environment(
    toy: InstalledPlugins, change: str
) -> None:
    def digest(**wish: Any) -> str:
        return recipe(Wish(plugin="toy", **wish), where="").digest()

    before, asked = digest(), {}
    assert before == digest()
    match change:
        case "pins":
            (toy.directory / "gcore_toy_pins/cpu.txt").write_text("toy-engine==1.1\n")
        case "version":
            came_from(toy, "gcore-shared", url="file:///shared.whl", archive_info={})
        case "extra":
            asked = {"extra": ("fake",)}
        case "interpreter":
            asked = {"python": "/usr/bin/other"}
        case "flavour":
            asked = {"flavour": "cuda"}
    assert digest(**asked) != before


def test_a_flavour_is_chosen_by_name_like_a_provider(toy: InstalledPlugins) -> None:
    toy.add("bad", PLUGIN.replace('name="cpu"', 'name="A B"'))
    with pytest.raises(ContractError, match="name 'A B' is not lower case"):
        recipe(Wish(plugin="bad"), where="")


@pytest.mark.parametrize(
    "requirements", ["gcore_toy_pins:gpu.txt", "no_such_package:cpu.txt", "cpu.txt"]
)
def test_missing_files_of_pins_are_named(
    toy: InstalledPlugins,
    requirements: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    toy.add("bad", PLUGIN.replace("gcore_toy_pins:cpu.txt", requirements))
    with pytest.raises(ContractError, match=f"plugin 'bad' .*'{requirements}'"):
        recipe(Wish(plugin="bad"), where="")
    monkeypatch.setenv("PYTHONPATH", str(toy.directory), prepend=os.pathsep)
    assert cli.main(["plugins", "check", "bad"]) == 3 and cli.main(["plugins", "check", "toy"]) == 0
    assert "venv bad/cpu: there is no " in capsys.readouterr().out


# -- create, refused; list -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["create"], "the name of a plugin is missing"),
        (["list", "toy"], "takes no name, but 'toy' is given"),
        (["create", "tyo"], "no plugin named 'tyo'"),
        (["create", "fake"], "does not say what a venv for it needs"),
        (["create", "toy", "--flavour", "cdua"], r"did you mean 'cuda'\?"),
        (
            ["create", "toy", "--python", "/no/python"],
            "--python: there is no interpreter /no/python",
        ),
        (["create", "toy", "--name", "a/b"], "--name: 'a/b' cannot name a venv"),
        (["create", "fake", "--name", "made"], "venv 'made' was made for plugin 'toy'"),
        (["create", "toy", "--name", "made", "--dir", "elsewhere"], "venv 'made' is in "),
        (
            ["create", "toy", "--dir", "."],
            "holds files that g-core did not write; nothing was done",
        ),
    ],
)
def test_an_impossible_environment_is_refused_before_anything_is_written(
    words: list[str],
    message: str,
    toy: InstalledPlugins,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import re

    write_record(root, "made")
    monkeypatch.chdir(toy.directory)
    before = written(toy.directory)
    assert cli.main(["venv", *words]) in (2, 3)
    assert re.search(message, capsys.readouterr().err)
    assert written(toy.directory) == before and [path.name for path in root.iterdir()] == ["made"]


def written(directory: Path) -> list[Path]:
    """What lies there, but for the bytecode that an import leaves."""
    return sorted(path for path in directory.rglob("*") if "__pycache__" not in path.parts)


def test_a_venv_below_a_link_is_made_without_a_link_of_its_own(
    toy: InstalledPlugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a home directory that lies on another disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("G_CORE_VENVS", str(tmp_path / "home" / "venvs"))

    def made(planned: Recipe, directory: Path, *, fresh: bool = False) -> making.ReadyVenv:
        directory.mkdir(parents=True)
        return making.ReadyVenv(directory=directory, record={}, seconds=1.0)

    monkeypatch.setattr(making, "make", made)
    assert cli.main(["venv", "create", "toy"]) == 0
    assert (tmp_path / "disk" / "venvs" / "toy").is_dir()
    assert not (tmp_path / "home" / "venvs" / "toy").is_symlink()


def test_a_venv_that_is_made_anew_keeps_what_was_asked_for(
    toy: InstalledPlugins, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--fresh`` is what the doctor says of a venv whose versions have changed."""
    toy.add("more")
    write_record(root, "made", flavour="cuda", **{"with": ["more"]})
    wishes: list[Wish] = []

    def made(planned: Recipe, directory: Path, *, fresh: bool = False) -> making.ReadyVenv:
        wishes.append(planned.wish)
        return making.ReadyVenv(directory=directory, record={}, seconds=1.0)

    monkeypatch.setattr(making, "make", made)
    assert cli.main(["venv", "create", "toy", "--name", "made", "--fresh"]) == 0
    (wish,) = wishes
    assert (wish.flavour, wish.extra) == ("cuda", ("more",))


def test_what_is_printed_as_json_is_json_alone(
    toy: InstalledPlugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(planned: Recipe, directory: Path, *, fresh: bool = False) -> making.ReadyVenv:
        with making.progress() as reporter:
            reporter.begin("python -m venv")
        return making.ReadyVenv(directory=directory, record={}, seconds=1.0)

    monkeypatch.setattr(making, "make", made)
    assert cli.main(["venv", "create", "toy", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["name"] == "toy"
    assert "python -m venv" in printed.err


def test_the_list_shows_the_state_of_each_environment(
    toy: InstalledPlugins, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["venv"]) == 0
    assert "no venvs" in capsys.readouterr().out
    digest, versions = (
        recipe(Wish(plugin="toy"), where="").digest(),
        {"gcore-core": __version__, "toy-engine": "1.0"},
    )
    known = {"gcore-toy": "1.2", "gcore-shared": "0.1.0", **versions}
    write_record(root, "a", digest=digest, versions=known, engine="toy-engine", bytes=2_300_000_000)
    write_record(root, "b", complete=False)
    write_record(root, "c", digest="", versions={**known, "gcore-toy": "1.1"}, engine="toy-engine")
    write_record(root, "d", digest="", versions=known, engine="toy-engine")
    write_record(root, "e", digest="", versions=known, plugin="gone")
    assert cli.main(["venv", "list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["name", *"abcde"]
    for line, told in zip(
        shown[1:],
        [
            "toy-engine 1.0  2.3 GB  ready",
            "half made",
            "stale      gcore-toy is 1.1 there, 1.2 here",
            "its pins have",
            "no plugin named 'gone' is installed",
        ],
        strict=True,
    ):
        assert told in line
    assert cli.main(["venv", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["ready", "half made", "stale", "stale", "stale"]
    assert rows[0]["python"] == str(root / "a/bin/python") and rows[0]["bytes"] == 2_300_000_000


# -- doctor ----------------------------------------------------------------------------------------


def findings(capsys: pytest.CaptureFixture[str], code: int) -> Iterator[tuple[str, dict[str, Any]]]:
    capsys.readouterr()
    assert cli.main(["venv", "doctor", "--json"]) == code
    for row in json.loads(capsys.readouterr().out):
        assert row["ok"] == (not row["mend"])
        yield row["what"], row


def test_the_doctor_goes_on_where_it_may_not_look(tmp_path: Path) -> None:
    finding = doctor._disk("disk", tmp_path / ("a" * 300), 1, "elsewhere")
    assert finding.mend == "" and finding.told.endswith(str(tmp_path))


def test_the_doctor_names_a_remedy_for_each_environment(
    toy: InstalledPlugins, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = recipe(Wish(plugin="toy"), where="").digest()
    write_record(
        root, "broken", digest=digest, versions={"gcore-core": __version__}, engine="toy-engine"
    )
    write_record(root, "half", complete=False)
    found = dict(findings(capsys, 2))
    assert found["venv half"]["mend"] == "g-core venv create toy --name half"
    assert found["venv broken"]["told"].endswith("cannot import gcore_core: broken.")
    assert found["venv broken"]["mend"] == "g-core venv create toy --name broken --fresh"
    assert cli.main(["venv", "doctor"]) == 2
    assert (
        "FAULT  venv half: half made\n       g-core venv create toy --name half\n"
        in capsys.readouterr().out
    )


def test_the_doctor_looks_at_one_environment_alone_where_it_is_named(
    toy: InstalledPlugins, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(root, "half", complete=False)
    assert cli.main(["venv", "doctor", "half"]) == 2
    assert capsys.readouterr().out == (
        "FAULT  venv half: half made\n       g-core venv create toy --name half\n"
    )
    assert cli.main(["venv", "doctor", "halff"]) == 2
    assert "no venv is named 'halff' (did you mean 'half'?)" in capsys.readouterr().err


def test_an_environment_for_cuda_needs_a_driver(
    toy: InstalledPlugins,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "DRIVER", root / "no-driver")
    assert dict(findings(capsys, 0))["driver"]["ok"]
    write_record(root, "toy", flavour="cuda", complete=False)
    assert dict(findings(capsys, 2))["driver"]["mend"] == "g-core venv create toy --cpu"


def test_a_driver_that_gives_no_answer_is_a_fault(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "DRIVER", tmp_path)
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    smi.write_text("#!/bin/sh\necho 'GPU of ours, 570.1'\n")
    smi.chmod(0o755)
    assert "GPU of ours, 570.1" in dict(findings(capsys, 0))["driver"]["told"]
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML'; exit 9\n")
    assert dict(findings(capsys, 2))["driver"]["told"] == "Failed to initialize NVML"


def test_a_small_shared_memory_and_a_full_disk_are_faults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SHARED_MEMORY_BYTES", "RUN_BYTES", "VENV_BYTES"):
        monkeypatch.setattr(doctor, name, 1 << 60)
    faults = {what for what, row in findings(capsys, 2) if not row["ok"]}
    shared = {"shared memory"} if doctor.SHARED_MEMORY.is_dir() else set()
    assert faults == {"disk for runs", "disk for venvs"} | shared


def test_a_low_file_limit_and_a_long_temporary_path_are_reported(
    tmp_path: Path,
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    script = f"ulimit -S -n 200; exec {sys.executable} -m gcore_core venv doctor --json"
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "TMPDIR": str(long)},
        capture_output=True,
        text=True,
    )
    found = {row["what"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 2 and found["open files"]["mend"] == f"ulimit -n {doctor.OPEN_FILES}"
    assert found["sockets"]["mend"] == "export TMPDIR=/tmp"
