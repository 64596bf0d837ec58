"""What ``g-core doctor`` says of a machine, and what a shell is told of the command."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import pytest
from gcore_testing.installed import InstalledPlugins, Wheel
from gcore_tools import completion, doctor

from gcore_core import cli

BROKEN = "import jinja9\n"
HALF = (
    "from gcore_core import hookimpl\nfrom gcore_core.contract import providers as p\n"
    "@hookimpl\ndef gcore_filters():\n"
    "    yield p.FilterProvider(summary='-', factory='a:b', needs=('no-such-engine>=2',))\n"
    "@hookimpl\ndef gcore_commands():\n"
    "    yield p.CommandProvider(name='greet', summary='-', factory='a:b')\n"
)


@pytest.fixture
def told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    """What it says where one plugin is broken and another one has no engine."""
    with InstalledPlugins(tmp_path / "site") as installed:
        installed.add("broken", BROKEN)
        installed.add("half", HALF)
        assert cli.main(["doctor", "--json"]) == 1
    return {finding["about"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_a_plugin_that_does_not_load_is_a_problem_with_its_cause(
    told: dict[str, dict[str, str]],
) -> None:
    finding = told["plugin broken"]
    assert finding["state"] == doctor.PROBLEM
    assert "jinja9" in finding["what"] and "g-core plugins check broken" in finding["todo"]


def test_distributions_of_0_2_that_are_left_are_to_be_uninstalled_in_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with InstalledPlugins(tmp_path / "site") as installed:
        installed.add("old", wheel=Wheel(distribution="gcore-critic"))
        installed.add("older", wheel=Wheel(distribution="gcore-tree"))
        assert cli.main(["doctor", "--json"]) == 1
    findings = {finding["about"]: finding for finding in json.loads(capsys.readouterr().out)}
    finding = findings["distributions of 0.2"]
    assert finding["state"] == doctor.PROBLEM
    assert finding["todo"].endswith("-m pip uninstall -y gcore-critic gcore-tree")
    assert {"plugin old", "plugin older"}.isdisjoint(findings), "told once"


def test_an_engine_that_is_missing_is_a_note_with_the_command_that_installs_it(
    told: dict[str, dict[str, str]],
) -> None:
    finding = told["engine of half"]
    assert finding["state"] == doctor.NOTE
    assert "-m pip install 'no-such-engine>=2'" in finding["todo"]


def test_every_problem_and_note_says_what_to_do(told: dict[str, dict[str, str]]) -> None:
    assert [about for about, f in told.items() if f["state"] != doctor.OK and not f["todo"]] == []


def test_few_open_files_and_long_paths_of_sockets_are_seen() -> None:
    assert doctor.open_files(1024).state == doctor.NOTE
    assert doctor.open_files(65536).state == doctor.OK
    assert doctor.sockets("/tmp").state == doctor.OK
    assert doctor.sockets("/scratch/" + "x" * 80).state == doctor.PROBLEM


def test_a_cache_that_cannot_be_written_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("G_CORE_CACHE", str(tmp_path / "cache"))
    assert doctor.cache("cache", "G_CORE_CACHE", Path("~")).state != doctor.PROBLEM
    monkeypatch.setenv("G_CORE_CACHE", str(tmp_path / ("a" * 300)))  # the system refuses to look
    assert doctor.cache("cache", "G_CORE_CACHE", Path("~")).state != doctor.PROBLEM
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)  # root may write all
    finding = doctor.cache("cache", "G_CORE_CACHE", Path("~"))
    assert (finding.state, finding.todo) == (
        doctor.PROBLEM,
        "set G_CORE_CACHE to a directory that can",
    )


def test_the_shell_completes_every_verb_its_options_and_plugins_commands(tmp_path: Path) -> None:
    with InstalledPlugins(tmp_path / "site") as installed:
        installed.add("half", HALF)
        parser = completion.whole_parser({"bash": "_files"})
    (verbs,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    assert set(cli.VERBS) <= set(verbs.choices)
    assert "--json" in verbs.choices["doctor"].format_help()
    assert "--report" in verbs.choices["conformance"].format_help()
    assert "greet" in verbs.choices["half"].format_help()


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_script_of_a_shell_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "conformance" in script and "no-plugins" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
