"""What goes into an environment, which interpreter ``env:NAME`` means, and what the doctor
finds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gcore_core import __version__, cli
from gcore_core.cli import env_doctor
from gcore_core.cli.env_recipe import Recipe, Wish, recipe
from gcore_core.config import checks, environments
from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.testing.installed import InstalledPlugins, Wheel

PLUGIN = """
from gcore_core import hookimpl
from gcore_core.contract import providers as p

@hookimpl
def gcore_environments():
    yield p.EnvironmentProvider(
        name="cpu", summary="-", engine="toy-engine", requirements="gcore_toy_pins:cpu.txt", beside=("gcore-losses",)
    )
    yield p.EnvironmentProvider(name="cuda", summary="-", engine="toy-engine", extras=("engine",))
"""  # noqa: E501


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("G_CORE_ENVS", str(tmp_path / "envs"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "envs"


@pytest.fixture
def toy(installed: InstalledPlugins) -> InstalledPlugins:
    """A plugin that describes two environments; it requires gcore-shared, which requires a
    distribution of others'.
    """
    requires = ["gcore-core>=0.2,<0.3", "gcore-shared>=0.1", "toy-engine; extra == 'engine'"]
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


def write_record(root: Path, name: str, **more: Any) -> Path:
    """An environment whose interpreter is there and fails when it is started."""
    (root / name / "bin").mkdir(parents=True)
    (root / name / "bin" / "python").write_text("#!/bin/sh\necho broken >&2; exit 9\n")
    (root / name / "bin" / "python").chmod(0o755)
    site = root / name / f"lib/python3.{sys.version_info.minor}/site-packages"
    site.mkdir(parents=True)
    (root / name / "pyvenv.cfg").write_text("version = 3.11.7\n")
    told = {
        "plugin": "toy",
        "flavour": "cpu",
        "python": sys.executable,
        "with": [],
        "complete": True,
        **more,
    }
    (root / name / environments.RECORD).write_text(json.dumps(told))
    return site


# -- what goes in ----------------------------------------------------------------------------------


def test_the_core_the_plugin_and_what_they_require_of_ours_go_in_in_the_versions_that_are_here(
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
def test_what_was_not_installed_from_an_index_comes_from_where_it_came_from(
    toy: InstalledPlugins, direct: dict[str, Any], expected: tuple[str, ...]
) -> None:
    came_from(toy, "gcore-toy", **direct)
    assert words(recipe(Wish(plugin="toy", flavour="cuda"), where=""))["gcore-toy"] == expected


def test_objectives_go_in_beside_a_trainer_only_where_they_are_installed(
    toy: InstalledPlugins,
) -> None:
    assert "gcore-losses" not in words(recipe(Wish(plugin="toy"), where=""))
    toy.add("losses")
    assert "gcore-losses" in words(recipe(Wish(plugin="toy"), where=""))
    assert "gcore-losses" not in words(recipe(Wish(plugin="toy", flavour="cuda"), where="")), (
        "not said of that one"
    )


def test_more_goes_in_by_the_name_of_a_plugin_or_of_a_distribution(toy: InstalledPlugins) -> None:
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
    with pytest.raises(ConfigError, match="'two' has no environment 'cuda'"):
        recipe(Wish(plugin="two"), where="")
    toy.add("one", only[: only.index("    yield p.EnvironmentProvider(name=")])
    assert recipe(Wish(plugin="one"), where="").spec.name == "tpu"


@pytest.mark.parametrize("change", ["pins", "version", "extra", "interpreter", "flavour"])
def test_the_digest_changes_with_what_makes_another_environment(
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


def test_a_flavour_is_named_as_any_provider(toy: InstalledPlugins) -> None:
    toy.add("bad", PLUGIN.replace('name="cpu"', 'name="A B"'))
    with pytest.raises(ContractError, match="name 'A B' is not lower case"):
        recipe(Wish(plugin="bad"), where="")


@pytest.mark.parametrize(
    "requirements", ["gcore_toy_pins:gpu.txt", "no_such_package:cpu.txt", "cpu.txt"]
)
def test_pins_that_are_not_there_are_named(
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
    assert "environment bad/cpu: there is no " in capsys.readouterr().out


# -- env:NAME --------------------------------------------------------------------------------------


def test_a_name_in_a_job_is_the_interpreter_of_that_environment(
    root: Path, job, installed: InstalledPlugins
) -> None:  # type: ignore[no-untyped-def]
    plan = load_plan(job(), ["roles.rollout.python=env:toy"])
    assert plan.config["roles"]["rollout"]["python"] == str(root / "toy/bin/python")
    with pytest.raises(
        ConfigError, match=r"roles\.rollout\.python: there is no environment 'toy'"
    ) as missing:
        checks.interpreters(plan.settings, plan.provided, plan.source)
    assert "g-core env create toy" in missing.value.todo
    site = InstalledPlugins(write_record(root, "toy"))
    site.add("core", wheel=Wheel(distribution="gcore-core", version=__version__, requires=()))
    site.add("fake")
    checks.interpreters(plan.settings, plan.provided, plan.source)


def test_one_with_other_versions_is_to_be_made_anew(
    root: Path, job, installed: InstalledPlugins
) -> None:  # type: ignore[no-untyped-def]
    plan = load_plan(job(), ["roles.rollout.python=env:mine"])
    site = InstalledPlugins(write_record(root, "mine"))
    site.add("core", wheel=Wheel(distribution="gcore-core", version="0.0.9", requires=()))
    with pytest.raises(ConfigError, match="make it anew: g-core env create toy --name mine"):
        checks.interpreters(plan.settings, plan.provided, plan.source)


def test_one_that_is_half_made_is_refused_and_one_of_the_users_own_is_not(root: Path) -> None:
    from gcore_core.config.interpreters import open_environment

    write_record(root, "half", complete=False)
    write_record(root, "own")
    (root / "own" / environments.RECORD).unlink()
    with pytest.raises(ConfigError, match="--python: environment 'half' is half made"):
        open_environment("env:half", where="--python")
    assert open_environment("env:own", where="--python").path


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a", "a b"])
def test_what_cannot_be_a_name_is_refused_where_it_stands(
    name: str, job, installed: InstalledPlugins
) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"roles\.rollout\.python: .* cannot name an environment"):
        load_plan(job(), [f"roles.rollout.python='env:{name}'"])


def test_they_are_where_the_user_keeps_data_unless_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("G_CORE_ENVS")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert environments.root() == Path("/data/g-core/envs")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert environments.root() == Path.home() / ".local/share/g-core/envs"
    monkeypatch.setenv("G_CORE_ENVS", "here/../envs")
    assert environments.root() == Path.cwd() / "envs"


# -- create, refused; list -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["create"], "for which plugin"),
        (["list", "toy"], "takes no name, but 'toy' is given"),
        (["create", "tyo"], "no plugin named 'tyo'"),
        (["create", "fake"], "does not say what an environment for it needs"),
        (["create", "toy", "--flavour", "cdua"], r"did you mean 'cuda'\?"),
        (
            ["create", "toy", "--python", "/no/python"],
            "--python: there is no interpreter /no/python",
        ),
        (["create", "toy", "--name", "a/b"], "--name: 'a/b' cannot name an environment"),
        (["create", "fake", "--name", "made"], "environment 'made' is one of plugin 'toy'"),
        (["create", "toy", "--name", "made", "--dir", "elsewhere"], "environment 'made' is in "),
        (
            ["create", "toy", "--dir", "."],
            "holds files that g-core did not write; nothing was done",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_is_written(
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
    assert cli.main(["env", *words]) in (2, 3)
    assert re.search(message, capsys.readouterr().err)
    assert written(toy.directory) == before and [path.name for path in root.iterdir()] == ["made"]


def written(directory: Path) -> list[Path]:
    """What lies there, but for the bytecode that an import leaves."""
    return sorted(path for path in directory.rglob("*") if "__pycache__" not in path.parts)


def test_the_list_tells_each_state(
    toy: InstalledPlugins, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["env"]) == 0
    assert "no environments" in capsys.readouterr().out
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
    assert cli.main(["env", "list"]) == 0
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
    assert cli.main(["env", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["ready", "half made", "stale", "stale", "stale"]
    assert rows[0]["python"] == str(root / "a/bin/python") and rows[0]["bytes"] == 2_300_000_000


# -- doctor ----------------------------------------------------------------------------------------


def findings(capsys: pytest.CaptureFixture[str], code: int) -> Iterator[tuple[str, dict[str, Any]]]:
    capsys.readouterr()
    assert cli.main(["env", "doctor", "--json"]) == code
    for row in json.loads(capsys.readouterr().out):
        assert row["ok"] == (not row["mend"])
        yield row["what"], row


def test_the_doctor_names_what_mends_each_environment(
    toy: InstalledPlugins, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = recipe(Wish(plugin="toy"), where="").digest()
    write_record(
        root, "broken", digest=digest, versions={"gcore-core": __version__}, engine="toy-engine"
    )
    write_record(root, "half", complete=False)
    found = dict(findings(capsys, 2))
    assert found["environment half"]["mend"] == "g-core env create toy --name half"
    assert found["environment broken"]["told"].endswith("cannot import gcore_core: broken.")
    assert found["environment broken"]["mend"] == "g-core env create toy --name broken --fresh"
    assert cli.main(["env", "doctor"]) == 2
    assert (
        "FAULT  environment half: half made\n       g-core env create toy --name half\n"
        in capsys.readouterr().out
    )


def test_an_environment_for_cuda_needs_a_driver(
    toy: InstalledPlugins,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(env_doctor, "DRIVER", root / "no-driver")
    assert dict(findings(capsys, 0))["driver"]["ok"]
    write_record(root, "toy", flavour="cuda", complete=False)
    assert dict(findings(capsys, 2))["driver"]["mend"] == "g-core env create toy --cpu"


def test_a_driver_that_gives_no_answer_is_a_fault(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(env_doctor, "DRIVER", tmp_path)
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
    for name in ("SHARED_MEMORY_BYTES", "RUN_BYTES", "ENVIRONMENT_BYTES"):
        monkeypatch.setattr(env_doctor, name, 1 << 60)
    faults = {what for what, row in findings(capsys, 2) if not row["ok"]}
    shared = {"shared memory"} if env_doctor.SHARED_MEMORY.is_dir() else set()
    assert faults == {"disk for runs", "disk for environments"} | shared


def test_a_process_that_may_open_few_files_or_has_too_long_a_temporary_path_is_told(
    tmp_path: Path,
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    script = f"ulimit -S -n 200; exec {sys.executable} -m gcore_core env doctor --json"
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "TMPDIR": str(long)},
        capture_output=True,
        text=True,
    )
    found = {row["what"]: row for row in json.loads(done.stdout)}
    assert (
        done.returncode == 2 and found["open files"]["mend"] == f"ulimit -n {env_doctor.OPEN_FILES}"
    )
    assert found["sockets"]["mend"] == "export TMPDIR=/tmp"
