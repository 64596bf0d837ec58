"""Another interpreter is asked where it looks for modules; what lies there is read."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from gcore_testing.installed import InstalledPlugins, Wheel, empty_venv

from gcore_core import __version__, cli
from gcore_core.config import catalog, interpreters
from gcore_core.config.interpreters import differences, open_interpreter, unmet_needs
from gcore_core.contract.errors import ConfigError, PluginIncompatible

SITE = f"lib/python3.{sys.version_info.minor}/site-packages"


@pytest.fixture
def other(tmp_path: Path) -> InstalledPlugins:
    """The site-packages of a virtual environment without pip."""
    return empty_venv(tmp_path / "other")


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
    python = python_of(empty_venv(tmp_path / "env"))
    code = "import sys; print('\\n'.join(sys.path))"
    shown = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert list(open_interpreter(python, where="").path or ()) == shown.stdout.split()
    assert any(path.endswith("site-packages") for path in shown.stdout.split())


def test_paths_of_this_process_are_not_attributed_to_another_interpreter(
    other: InstalledPlugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with InstalledPlugins(tmp_path / "here") as here:
        here.add("mine", files={"json.py": "raise RuntimeError('imported from this directory')"})
        monkeypatch.chdir(here.directory)
        monkeypatch.setenv("PYTHONPATH", str(here.directory))
        assert rows(python_of(other)) == {}


def test_listing_another_interpreter_shows_only_its_own_plugins(
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


def test_paths_added_by_pth_files_are_seen_as_by_the_interpreter_itself(
    other: InstalledPlugins, tmp_path: Path
) -> None:
    editable = InstalledPlugins(tmp_path / "source")
    editable.add("mine", wheel=Wheel(egg_info=True))
    added = InstalledPlugins(tmp_path / "added")
    added.add("theirs")
    (other.directory / "a.pth").write_text(
        f"# a comment\nimport sys; sys.path.append({str(added.directory)!r})\n/nowhere\n"
        f"{editable.directory}\n"
    )
    assert rows(python_of(other)) == {"mine": "ok", "theirs": "ok"}


def test_an_editable_install_beside_its_stale_egg_info_is_one_plugin(
    other: InstalledPlugins, tmp_path: Path
) -> None:
    editable = InstalledPlugins(tmp_path / "source")
    editable.add("mine", wheel=Wheel(version="0.1", egg_info=True))
    other.add("mine", wheel=Wheel(version="0.2"))
    (other.directory / "a.pth").write_text(f"{editable.directory}\n")
    (row,) = catalog.scan(open_interpreter(python_of(other), where="").path).plugins
    assert (row.state, row.version, len(row.notes)) == ("ok", "0.2", 1)


def test_a_venv_with_system_site_packages_has_those_plugins_too(
    other: InstalledPlugins, tmp_path: Path
) -> None:
    base = copy_of_base(tmp_path / "base")
    InstalledPlugins(base / SITE).add("shared")
    settings = Path(python_of(other)).parents[1] / "pyvenv.cfg"
    settings.write_text(f"home = {base / 'bin'}\ninclude-system-site-packages = true\n")
    other.add("own")
    assert rows(python_of(other)) == {"own": "ok", "shared": "ok"}


def copy_of_base(root: Path) -> Path:
    """A prefix with this Python's standard library, by links, and site-packages of its own."""
    library = root / Path(SITE).parent
    library.mkdir(parents=True)
    for path in Path(sysconfig.get_path("stdlib")).iterdir():
        if path.name not in ("site-packages", "dist-packages"):
            (library / path.name).symlink_to(path)
    (root / SITE).mkdir()
    (root / "bin").mkdir()
    return root


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no interpreter"),
        (lambda path: path.write_text("#!/bin/sh\n"), "is not an executable file"),
        (lambda path: path.mkdir(), "is not an executable file"),
        (lambda path: program(path, ""), "cannot be started: Exec format error"),
        (lambda path: program(path, "#!/no/such/shell\n"), "cannot be started: No such file"),
        (lambda path: program(path, "#!/bin/sh\nexit 9\n"), "cannot be started: exit code 9"),
        (lambda path: program(path, "#!/bin/sh\necho no >&2; exit 1\n"), "cannot be started: no"),
        (lambda path: program(path, "#!/bin/sh\n"), "cannot be started: it does not answer as"),
        (lambda path: program(path, "#!/bin/sh\necho 7\n"), "cannot be started: it does not"),
    ],
)
def test_a_path_that_is_no_interpreter_is_refused(tmp_path: Path, make, message: str) -> None:  # type: ignore[no-untyped-def]
    python = tmp_path / "env" / "python"
    python.parent.mkdir()
    make(python)
    with pytest.raises(ConfigError, match=rf"roles.rollout.python: .*{message}") as caught:
        open_interpreter(str(python), where="roles.rollout.python")
    assert str(python) in caught.value.what and len(str(caught.value).splitlines()) <= 6


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_an_interpreter_that_gives_no_answer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "python", "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(interpreters, "_ANSWER_WITHIN_S", 0.2)
    with pytest.raises(ConfigError, match="cannot be started: no answer within 0 s"):
        open_interpreter(str(tmp_path / "python"), where="--python")


def test_a_job_starts_each_interpreter_once(
    installed: InstalledPlugins, other: InstalledPlugins, job
) -> None:  # type: ignore[no-untyped-def]
    add_core(other)
    other.add("fake")
    python = Path(python_of(other))
    python.rename(python.with_name("real"))
    program(python, f'#!/bin/sh\necho . >>{python}.starts\nexec {python.with_name("real")} "$@"\n')
    own = [f"roles.{role}.python={python}" for role in ("policy", "rollout")]
    assert cli.main(["check", str(job()), *own]) == 0
    assert Path(f"{python}.starts").read_text() == ".\n"


def told(other: InstalledPlugins, plugins: dict[str, str], needs: list[str]) -> list[str]:
    interpreter = open_interpreter(python_of(other), where="")
    errors = [
        *differences(interpreter, plugins, where="roles.rollout.python"),
        *unmet_needs(interpreter, "gcore-vllm 1.0", needs, where="roles.rollout.use"),
    ]
    assert all(isinstance(error, PluginIncompatible) for error in errors)
    return [error.what.replace(python_of(other), "PYTHON") for error in errors]


def test_every_difference_and_every_unmet_need_is_reported(other: InstalledPlugins) -> None:
    add_core(other, "0.0.9")
    other.add("vllm", wheel=Wheel(version="1.1"))
    other.add("engine", wheel=Wheel(distribution="engine", version="0.2"))
    needs = ["engine>=0.3", "vllm>=0.30", "absent; python_version < '3'", "gcore_vllm>=1"]
    assert told(other, {"gcore-vllm": "1.0", "gcore-more": "2"}, needs) == [
        f"PYTHON has gcore-core 0.0.9, but this process has {__version__}.",
        "PYTHON has gcore-vllm 1.1, but this process has 1.0.",
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


#: What gcore-beside offers: what workers of some roles build beside their backends.
BESIDE = """
from gcore_core import hookimpl
from gcore_core.contract import providers as p

@hookimpl
def gcore_datasets():
    yield p.DatasetProvider(summary="rows", factory="gcore_fake_engine:make")

@hookimpl
def gcore_objectives():
    yield p.ObjectiveProvider(summary="loss", factory="gcore_fake_engine:make")
"""


@pytest.mark.parametrize(
    ("settings", "is_missing"),
    [
        (["roles.rollout.python=other/bin/python", "data.use=beside"], True),
        (["roles.policy.python=other/bin/python", "objective.use=beside"], True),
        (["roles.policy.python=other/bin/python", "data.use=beside"], False),
    ],
    ids=["a rollout opens it", "a policy trains by it", "a policy does not open it"],
)
def test_a_role_needs_the_plugins_of_what_its_workers_build_and_no_others(
    settings: list[str],
    is_missing: bool,
    installed: InstalledPlugins,
    other: InstalledPlugins,
    job,
    capsys: pytest.CaptureFixture[str],
) -> None:  # type: ignore[no-untyped-def]
    installed.add("beside", BESIDE)
    add_core(other)
    other.add("fake")
    assert cli.main(["check", str(job("")), *settings]) == (3 if is_missing else 0)
    said = capsys.readouterr().err
    assert (f"{python_of(other)} has no gcore-beside." in said) == is_missing, said


def test_an_engine_is_not_missed_here_where_its_own_interpreter_is_missing(
    installed: InstalledPlugins, job, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    source = (installed.directory / "gcore_fake.py").read_text()
    needing = source.replace(
        'GeneratorProvider(summary="samples", factory',
        'GeneratorProvider(summary="samples", needs=("no-such-engine>=3",), factory',
    )
    assert needing != source
    (installed.directory / "gcore_fake.py").write_text(needing)
    assert cli.main(["check", str(job()), "roles.rollout.python=/no/bin/python"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("roles.rollout.python: there is no interpreter /no/bin/python.")
    assert "no-such-engine" not in said


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
