"""What another interpreter has is read from its files; it is never started."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from gcore_core import __version__, cli
from gcore_core.config import catalog
from gcore_core.config.interpreters import differences, open_interpreter, unmet_needs
from gcore_core.contract.errors import ConfigError, PluginIncompatible
from gcore_core.testing.installed import InstalledPlugins, Wheel

SITE = f"lib/python3.{sys.version_info.minor}/site-packages"


@pytest.fixture
def other(tmp_path: Path) -> InstalledPlugins:
    """The site-packages of a fabricated environment whose interpreter fails when it is started."""
    root = tmp_path / "other"
    (root / SITE).mkdir(parents=True)
    (root / "bin").mkdir()
    python = root / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 99\n")
    python.chmod(0o755)
    (root / "pyvenv.cfg").write_text(
        f"home = {Path(sys.base_prefix) / 'bin'}\nversion = 3.{sys.version_info.minor}.1\n"
        "include-system-site-packages = false\n"
    )
    return InstalledPlugins(root / SITE)


def python_of(other: InstalledPlugins) -> str:
    return str(other.directory.parents[2] / "bin" / "python")


def add_core(other: InstalledPlugins, version: str = __version__) -> None:
    other.add(
        "core",
        wheel=Wheel(
            distribution="gcore-core",
            version=version,
            module="gcore_core.builtin.hooks",
            requires=(),
        ),
    )


def rows(python: str) -> dict[str, str]:
    path = open_interpreter(python, where="--python").path
    return {row.name: row.state for row in catalog.scan(path).plugins}


def test_a_real_virtual_environment_is_listed_as_it_lists_itself(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    code = (
        "import sys; print('\\n'.join(path for path in sys.path if path.endswith('site-packages')))"
    )
    shown = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert list(open_interpreter(str(python), where="").path or ()) == shown.stdout.split()


def test_the_list_of_another_interpreter_does_not_start_it(
    other: InstalledPlugins, capsys: pytest.CaptureFixture[str]
) -> None:
    add_core(other)
    other.add("vllm", wheel=Wheel(version="1.3"))
    other.add("old", wheel=Wheel(requires=["gcore-core<0.1"]))
    assert cli.main(["plugins", "list", "--python", python_of(other)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in shown[1:]] == [
        ["core", "ok", "gcore-core", __version__],
        ["old", "incompatible", "gcore-old", "0.1.0"],
        ["vllm", "ok", "gcore-vllm", "1.3"],
    ]


def test_an_empty_environment_has_no_plugins(
    other: InstalledPlugins, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plugins", "list", "--python", python_of(other)]) == 0
    assert capsys.readouterr().out == "no plugins\n"


def test_directories_that_pth_files_name_are_seen_and_lines_that_run_code_are_not_run(
    other: InstalledPlugins, tmp_path: Path
) -> None:
    editable = InstalledPlugins(tmp_path / "source")
    editable.add("mine", wheel=Wheel(egg_info=True))
    (other.directory / "a.pth").write_text(
        f"# a comment\nimport sys; sys.exit(1)\n/nowhere\n{editable.directory}\n"
    )
    assert rows(python_of(other)) == {"mine": "ok"}


def test_an_editable_install_beside_its_stale_egg_info_is_one_plugin(
    other: InstalledPlugins, tmp_path: Path
) -> None:
    editable = InstalledPlugins(tmp_path / "source")
    editable.add("mine", wheel=Wheel(version="0.1", egg_info=True))
    other.add("mine", wheel=Wheel(version="0.2"))
    (other.directory / "a.pth").write_text(f"{editable.directory}\n")
    (row,) = catalog.scan(open_interpreter(python_of(other), where="").path).plugins
    assert (row.state, row.version, len(row.notes)) == ("ok", "0.2", 1)


def test_one_that_includes_the_systems_packages_has_those_too(
    other: InstalledPlugins, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    (base / "bin").mkdir(parents=True)
    InstalledPlugins(base / SITE).add("shared")
    settings = Path(python_of(other)).parents[1] / "pyvenv.cfg"
    settings.write_text(f"home = {base / 'bin'}\ninclude-system-site-packages = true\n")
    other.add("own")
    assert rows(python_of(other)) == {"own": "ok", "shared": "ok"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no interpreter"),
        (lambda path: path.write_text("#!/bin/sh\n"), "is not an executable file"),
        (lambda path: path.mkdir(), "is not an executable file"),
        (lambda path: (path.write_text(""), path.chmod(0o755)), "has no site-packages"),
    ],
)
def test_what_is_no_interpreter_is_refused_by_its_path(tmp_path: Path, make, message: str) -> None:  # type: ignore[no-untyped-def]
    program = tmp_path / "env" / "python"
    program.parent.mkdir()
    make(program)
    with pytest.raises(ConfigError, match=rf"roles.rollout.python: .*{message}") as caught:
        open_interpreter(str(program), where="roles.rollout.python")
    assert str(program) in caught.value.what and len(str(caught.value).splitlines()) <= 6


def told(other: InstalledPlugins, plugins: dict[str, str], needs: list[str]) -> list[str]:
    environment = open_interpreter(python_of(other), where="")
    errors = [
        *differences(environment, plugins, where="roles.rollout.python"),
        *unmet_needs(environment, "gcore-vllm 1.0", needs, where="roles.rollout.use"),
    ]
    assert all(isinstance(error, PluginIncompatible) for error in errors)
    return [error.what.replace(python_of(other), "PYTHON") for error in errors]


def test_every_difference_and_every_unmet_need_is_told(other: InstalledPlugins) -> None:
    add_core(other, "0.0.9")
    other.add("vllm", wheel=Wheel(version="1.1"))
    other.add("engine", wheel=Wheel(distribution="engine", version="0.2"))
    needs = ["engine>=0.3", "vllm>=0.30", "absent; python_version < '3'", "gcore_vllm>=1"]
    assert told(other, {"gcore-vllm": "1.0", "gcore-more": "2"}, needs) == [
        f"PYTHON has gcore-core 0.0.9, but this is {__version__}.",
        "PYTHON has gcore-vllm 1.1, but this is 1.0.",
        "PYTHON has no gcore-more.",
        "gcore-vllm 1.0 needs engine>=0.3 in PYTHON, found 0.2.",
        "gcore-vllm 1.0 needs vllm>=0.30 in PYTHON, found none.",
    ]


def test_an_environment_that_has_everything_is_fine(other: InstalledPlugins) -> None:
    add_core(other)
    other.add("vllm", wheel=Wheel(version="1.0"))
    assert told(other, {"gcore-vllm": "1.0"}, ["gcore-vllm>=1.0"]) == []


def test_a_jobs_problems_with_interpreters_are_found_before_anything_starts(
    installed: InstalledPlugins, other: InstalledPlugins, job, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    del installed
    assert cli.main(["check", str(job()), "roles.rollout.python=other/bin/python"]) == 3
    assert f"roles.rollout.python: {python_of(other)} has no gcore-core." in capsys.readouterr().err
    add_core(other)
    assert cli.main(["check", str(job()), "roles.rollout.python=other/bin/python"]) == 3
    assert f"roles.rollout.python: {python_of(other)} has no gcore-fake." in capsys.readouterr().err
    other.add("fake")
    assert cli.main(["check", str(job()), "roles.rollout.python=other/bin/python"]) == 0
    assert (
        cli.main(["check", str(job()), "roles.rollout.python=/no/a", "roles.policy.python=/no/b"])
        == 2
    )
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].endswith("2 problems") and "/no/b" in shown[1] and "/no/a" in shown[2]
    assert cli.main(["config", str(job()), "roles.rollout.python=/no/a"]) == 0, (
        "printing needs no interpreter"
    )


def test_an_engine_that_is_missing_here_is_named_with_the_command_that_installs_it(
    installed: InstalledPlugins, job, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    source = (installed.directory / "gcore_fake.py").read_text()
    needing = source.replace(
        'name="length", summary=', 'name="length", needs=("no-such-engine>=3",), summary='
    )
    (installed.directory / "gcore_fake.py").write_text(needing)
    assert cli.main(["check", str(job())]) == 3
    assert capsys.readouterr().err.splitlines() == [
        (
            f"rewards.length.use: gcore-fake 0.1.0 needs no-such-engine>=3 in {sys.executable}, "
            "found none."
        ),
        f"  install it there: {sys.executable} -m pip install 'no-such-engine>=3'",
    ]
