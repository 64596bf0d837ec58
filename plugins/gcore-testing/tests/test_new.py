"""``g-core new``: what it writes, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gcore_testing.installed import InstalledPlugins, Wheel
from gcore_testing.scaffold import writing

from gcore_core import cli
from gcore_core.config import catalog


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[InstalledPlugins]:
    """A plugin without templates, and whatever a test adds."""
    with InstalledPlugins(tmp_path / "site") as plugins:
        plugins.add("brush")
        yield plugins


def test_new_writes_a_distribution_and_names_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "by-length", "--kind", "balancer"]) == 0
    told = capsys.readouterr().out
    assert sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()
    ) == [
        "gcore-by-length/README.md",
        "gcore-by-length/gcore_by_length/__init__.py",
        "gcore-by-length/gcore_by_length/balance.py",
        "gcore-by-length/gcore_by_length/config.py",
        "gcore-by-length/pyproject.toml",
        "gcore-by-length/tests/test_contract.py",
    ]
    assert (
        "gcore-by-length/gcore_by_length/balance.py:22: FILL IN:" in told
        and "pip install -e" in told
    )
    written = (tmp_path / "gcore-by-length/gcore_by_length/balance.py").read_text()
    assert "class ByLengthBalancer:" in written and "$" not in written


def test_new_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert cli.main(["new", "fresh", "--kind", "reward", "--to", str(tmp_path)]) == 2
    assert "README.md exists; nothing was written." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ["Bad Name", "--kind", "reward"],
            2,
            "is lower case words joined by dashes, not 'Bad Name'",
        ),
        (
            ["x", "--kind", "balncer"],
            2,
            "there is no template for 'balncer' (did you mean 'balancer'?).",
        ),
        (["x", "--kind", "shared"], 2, "there is no template for 'shared'"),
        (["x", "--kind", "../balancer"], 3, "no plugin named '..' is installed"),
        (["x"], 2, "the kind of the plugin is missing; add --kind KIND."),
        (["core", "--kind", "reward"], 3, "a plugin named 'core' is installed"),
        (["x", "--kind", "brush/thing"], 2, "there is no template for 'brush/thing'"),
    ],
)
def test_new_refuses_invalid_names_and_kinds(
    installed: InstalledPlugins,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    assert cli.main(["new", *words, "--to", str(tmp_path / "new")]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_templates_of_a_plugin_are_used_without_importing_it(
    installed: InstalledPlugins, tmp_path: Path
) -> None:
    files = {
        "gcore_studio/__init__.py": "raise RuntimeError('imported')",
        "gcore_studio/templates/painter/module/paint.py.tmpl": "class ${Class}Painter:\n    pass\n",
    }
    installed.add("studio", files=files)
    (installed.directory / "gcore_studio.py").unlink()
    written = writing.write("oil", "studio/painter", tmp_path / "new")
    assert (
        written.directory / "gcore_oil" / "paint.py"
    ).read_text() == "class OilPainter:\n    pass\n"
    assert (written.directory / "pyproject.toml").exists()
    with pytest.raises(Exception, match="no template for 'studio/pianter'.*'studio/painter'"):
        writing.write("oil", "studio/pianter", tmp_path / "other")
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match="file/new.* cannot be written: Not a directory"):
        writing.write("oil", "studio/painter", tmp_path / "file" / "new")


def test_help_names_exactly_the_kinds_of_templates() -> None:
    from gcore_testing.scaffold.command import KINDS

    assert writing.kinds() == sorted(KINDS.split(", "))


def test_a_new_plugin_accepts_the_present_core_version(tmp_path: Path) -> None:
    import tomllib

    writing.write("fresh", "reward", tmp_path / "new")
    project = tomllib.loads((tmp_path / "new" / "pyproject.toml").read_text())["project"]
    with InstalledPlugins(tmp_path / "site") as installed:
        installed.add("fresh", wheel=Wheel(requires=project["dependencies"]))
        assert {row.name: row.state for row in catalog.scan().plugins}["fresh"] == "ok"
