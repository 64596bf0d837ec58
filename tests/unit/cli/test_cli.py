from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from gcore_testing.installed import InstalledPlugins

from gcore_core import cli
from gcore_core.config import catalog
from gcore_core.contract.installing import install_command

REPOSITORY = Path(__file__).parents[3]
HEAVY = {"msgspec", "numpy", "omegaconf", "packaging", "pluggy", "rich", "torch"}
Job = Callable[..., Path]


def modules_after(*words: str, path: Path | None = None) -> set[str]:
    """The modules that a fresh interpreter holds after a command."""
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from gcore_core.cli import main\n"
        "try: main(sys.argv[1].split())\n"
        "except SystemExit: pass\n"
        "print('\\n' + ' '.join(sys.modules))"
    )
    run = [sys.executable, "-c", code, " ".join(words), *([str(path)] if path else [])]
    shown = subprocess.run(run, capture_output=True, text=True, check=True)
    return set(shown.stdout.splitlines()[-1].split())


def test_help_imports_the_standard_library_only() -> None:
    for words in (("--help",), ("--version",), *((verb, "--help") for verb in cli.VERBS)):
        imported = {name.partition(".")[0] for name in modules_after(*words)}
        assert not imported & HEAVY, words
        foreign = {
            name
            for name in imported
            if name not in sys.stdlib_module_names and not name.startswith("_")
        }
        # what `site` itself brings: editable-install finders and the like
        assert foreign - {"gcore_core", "sitecustomize"} <= modules_at_start(), words


def modules_at_start() -> set[str]:
    shown = subprocess.run(
        [sys.executable, "-c", "import sys; print(' '.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.partition(".")[0] for name in shown.stdout.split()}


def test_listing_plugins_imports_no_plugin_and_nothing_heavy(installed: InstalledPlugins) -> None:
    installed.add("broken", "raise RuntimeError('imported')")
    for words in (("plugins",), ("plugins", "list", "--json")):
        imported = modules_after(*words, path=installed.directory)
        assert not imported & (HEAVY | {"gcore_fake", "gcore_broken", "gcore_core.config.plugins"})


def test_help_costs_at_most_half_more_than_the_modules_any_such_command_needs() -> None:
    def cpu_s(*words: str) -> float:
        best = float("inf")
        for _ in range(5):
            before = os.times()
            subprocess.run([sys.executable, *words], capture_output=True, check=True)
            after = os.times()
            best = min(
                best,
                after.children_user
                + after.children_system
                - before.children_user
                - before.children_system,
            )
        return best

    floor = cpu_s("-c", "import argparse, importlib.metadata")
    # CPU time, best of five, since wall time on a busy machine says nothing; 20 ms is the
    # resolution of the clock.
    assert cpu_s("-m", "gcore_core", "--help") <= 1.5 * floor + 0.02


def test_help_names_every_verb_and_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0 and "examples:" in shown
    assert all(f"  {verb} " in shown for verb in cli.VERBS)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0 and f"  g-core {verb} " in shown and "example" in shown


def test_without_arguments_help_is_shown_with_the_exit_code_of_wrong_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 2
    assert "verbs" in capsys.readouterr().out


def test_the_list_shows_state_and_remarks(
    installed: InstalledPlugins, capsys: pytest.CaptureFixture[str]
) -> None:
    from gcore_testing.installed import Wheel

    installed.add("old", wheel=Wheel(requires=["gcore-core<0.1"]))
    assert cli.main(["plugins"]) == 0
    told = capsys.readouterr()
    assert "no plugin was imported" in told.err, "ok is said of what was not tried"
    lines = {line.split()[0]: line for line in told.out.splitlines()}
    assert lines["plugin"].split() == ["plugin", "state", "distribution", "version", "remarks"]
    assert (
        "incompatible" in lines["old"] and "needs gcore-core<0.1, but this is 0.3.0" in lines["old"]
    )
    assert cli.main(["plugins", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["fake"]["state"] == "ok" and rows["old"]["state"] == "incompatible"


def test_show_lists_what_a_plugin_offers(
    installed: InstalledPlugins, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plugins", "show", "fake"]) == 0
    shown = capsys.readouterr().out
    assert "generator fake/async: samples" in shown
    assert "  config.tensor_parallel: int = 1" in shown
    assert "  config.path: str (must be given)" in shown
    assert cli.main(["plugins", "show", "fake", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["provides"][0]["kind"] == "generator"


def test_check_shows_the_chosen_providers(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(job())]) == 0
    shown = capsys.readouterr().out
    assert (
        "roles.rollout" in shown and "gcore-fake 0.1.0" in shown and "nothing wrong found" in shown
    )


def test_check_refuses_the_same_placements_as_run(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", str(job()), "placement.sleep_in_training=always"]) == 2
    shown = capsys.readouterr().err
    assert "roles.rollout.use: its backend cannot sleep." in shown
    assert cli.main(["check", str(job()), "cluster.devices=2", "roles.rollout.slots=3"]) == 2
    assert (
        "roles.rollout.slots: wants 3 slots, but the number of devices is 2"
        in capsys.readouterr().err
    )


def test_check_prints_every_problem(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [
        "run.steps=0",
        "controller.shards=0",
        "evaluation.every=-1",
        "evaluation.show=-1",
        "cluster.devices=x",
    ]
    assert (
        cli.main(["check", str(job()), *bad, "roles.policy.slots=0", "roles.rollout.slots=0"]) == 2
    )
    assert len(capsys.readouterr().err.splitlines()) == 1 + 7


def test_config_prints_the_resolved_tree_and_why(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    from omegaconf import OmegaConf

    file = job()
    assert cli.main(["config", str(file), "run.steps=3"]) == 0
    tree = OmegaConf.create(capsys.readouterr().out)
    assert tree.run.steps == 3 and tree.roles.rollout.config.dtype == "float32"
    assert cli.main(["config", str(file), "--why", "run.steps", "run.steps=3"]) == 0, (
        "options may stand in between"
    )
    assert capsys.readouterr().out == "run.steps = 3  # override 'run.steps=3'\n"


def test_an_error_is_its_text_on_stderr_with_the_exit_code_of_its_class(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("G_CORE_TRACEBACK", raising=False)
    assert cli.main(["check", str(job()), "run.stepz=1"]) == 2
    assert capsys.readouterr().err.startswith(
        "run.stepz: there is no such key (did you mean 'steps'?).\n"
    )
    assert cli.main(["check", str(job()), "roles.rollout.use=gone"]) == 3
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("G_CORE_TRACEBACK", "1")
    with pytest.raises(Exception, match="no plugin named 'gone'"):
        cli.main(["check", str(job()), "roles.rollout.use=gone"])


def test_run_passes_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    running = types.ModuleType("gcore_core.run.start")
    running.run_file = lambda path, overrides: seen.append((path, overrides)) or 6  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, running.__name__, running)
    assert cli.main(["run", "job.yaml", "run.steps=1"]) == 6
    assert seen == [(Path("job.yaml"), ["run.steps=1"])]


COMMANDS = """
from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider

@hookimpl
def gcore_commands():
    yield CommandProvider(name="greet", summary="says hello", factory="gcore_tool:greet")

def greet(words):
    print("hello", *words)
    return 4
"""


def test_a_command_of_a_plugin_is_called_by_its_name(
    installed: InstalledPlugins, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.add("tool", COMMANDS)
    assert cli.main(["tool", "greet", "--loud", "you"]) == 4
    assert cli.main(["tool", "--help"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "hello --loud you",
        "g-core tool greet        says hello",
    ]
    assert cli.main(["tool", "gret"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "plugin 'tool' has no command 'gret' (did you mean 'greet'?).",
        "  g-core tool greet: says hello",
    ]
    assert cli.main(["fake", "x"]) == 2
    assert "plugin 'fake' brings no commands." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("distribution", "command"),
    [(name, command) for name, commands in cli.COMMANDS_OF.items() for command in commands],
)
def test_a_command_whose_distribution_is_not_installed_says_what_to_install(
    distribution: str,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = catalog.scan([])
    monkeypatch.setattr(catalog, "scan", lambda: nothing)
    monkeypatch.delitem(cli.VERBS, command, raising=False)
    assert cli.main([command, "--help"]) == 3
    facts, todo = capsys.readouterr().err.splitlines()
    assert facts == f"g-core {command} comes with {distribution}, which is not installed."
    assert "pip install" in todo and distribution in todo


def test_what_imports_a_plugin_to_show_or_check_it_comes_with_gcore_testing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list needs nothing but the core."""
    nothing = catalog.scan([])
    monkeypatch.setattr(catalog, "scan", lambda path=None: nothing)
    assert cli.main(["plugins"]) == 0
    capsys.readouterr()
    assert cli.main(["plugins", "show", "core"]) == 3
    facts, todo = capsys.readouterr().err.splitlines()
    assert facts == "g-core plugins show comes with gcore-testing, which is not installed."
    assert todo.strip() == install_command("gcore-testing")


@pytest.mark.parametrize(
    ("plugin", "distribution"),
    [("trackers", "gcore-report"), ("teacher", "gcore-algorithms"), ("vllm", "gcore-vllm")],
)
def test_a_plugin_without_commands_that_is_not_installed_says_what_to_install(
    plugin: str,
    distribution: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = catalog.scan([])
    monkeypatch.setattr(catalog, "scan", lambda: nothing)
    assert cli.main([plugin]) == 3
    facts, todo = capsys.readouterr().err.splitlines()
    assert facts == f"plugin {plugin!r} comes with {distribution}, which is not installed."
    assert todo.strip() == install_command(distribution)


@pytest.mark.parametrize("distribution", cli.COMMANDS_OF)
def test_a_distribution_brings_the_commands_that_are_said_to_be_its(distribution: str) -> None:
    commands = set(cli.COMMANDS_OF[distribution]) - set(cli.VERBS)
    project = REPOSITORY / "plugins" / distribution / "pyproject.toml"
    facts = tomllib.loads(project.read_text()) if commands else {"project": {}}
    plugins = facts["project"].get("entry-points", {}).get("gcore", {})
    assert commands <= set(plugins)


def test_an_unknown_verb_is_answered_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rnu"]) == 3
    assert capsys.readouterr().err.startswith(
        "g-core: 'rnu' is neither a verb nor an installed plugin (did you mean 'run'?)."
    )


def test_a_closed_pipe_of_the_output_is_no_error(installed: InstalledPlugins) -> None:
    listing = subprocess.Popen(
        [sys.executable, "-m", "gcore_core", "plugins"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert listing.stdout is not None and listing.stderr is not None
    listing.stdout.close()
    with listing.stderr as errors:
        assert errors.read() == b""
    assert listing.wait() == 141


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_error_keeps_its_exit_code_where_nobody_reads_its_text(unbuffered: str) -> None:
    """Python holds text back, by default, and writes it once more as it ends."""
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "gcore_core", "rnu"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    unread = subprocess.run(words, stdout=writing, stderr=writing, env=environment, check=False)
    os.close(writing)
    assert unread.returncode == 3
