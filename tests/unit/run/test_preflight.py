"""What starting a job would refuse, ``g-core check`` refuses: before any process starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from gcore_testing.installed import InstalledPlugins

from gcore_core import __version__, cli
from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import CheckpointError, ConfigError, PlacementError
from gcore_core.run import preflight
from gcore_core.run.checkpoint_service import CONFIG, Resumed
from gcore_core.run.checkpoints import CheckpointFacts, Checkpoints
from gcore_core.run.make_model import make_model, models_cache
from gcore_core.run.preflight import (
    changed_settings,
    check_same,
    check_same_files,
    check_version,
)

Job = Callable[..., Path]

PLUGIN = """
from gcore_core import hookimpl
from gcore_core.contract import providers as p

@hookimpl
def gcore_advantages():
    yield p.AdvantageProvider(name="none", summary="-", factory="gcore_parts_made:NoRecords")

@hookimpl
def gcore_check_files(plan, here):
    yield f"roles.policy.model.path: not there, workers here: {here}."

@hookimpl
def gcore_datasets():
    for name in ("NoData", "BadRow", "Nowhere"):
        factory = f"gcore_parts_made:{name}"
        yield p.DatasetProvider(name=name.lower(), summary="-", factory=factory)

@hookimpl
def gcore_filters():
    yield p.FilterProvider(name="bare", summary="-", factory="gcore_parts_made:TakesNothing")
    yield p.FilterProvider(name="gone", summary="-", factory="gcore_parts_made:Gone")

@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(summary="-", factory="gcore_nowhere.engine:Engine")
"""
PARTS = """
class NoRecords:
    group_size = 0
    requires = frozenset()
    def __init__(self, config=None): ...

class TakesNothing:
    def __init__(self): ...

class NoData:
    def __init__(self, config):
        raise OSError("no disk")

class BadRow:
    def __init__(self, config): ...
    def __len__(self):
        return 3
    def __getitem__(self, row):
        return [1, 2][row]
"""
OPENS = """
evaluation: {every: 1, data: {use: fake/rows, config: {path: rows.jsonl}}}
"""
MORE_TIME = ["rewards.length.timeout_s=60", "rewards.length.workers=2"]


@pytest.fixture
def parts(installed: InstalledPlugins) -> InstalledPlugins:
    installed.add("parts", PLUGIN, files={"gcore_parts_made.py": PARTS})
    return installed


def refused(job: Job, capsys: pytest.CaptureFixture[str], *overrides: str, code: int) -> str:
    assert cli.main(["check", str(job()), *overrides]) == code
    return capsys.readouterr().err


def test_groups_without_records_are_refused(
    parts: InstalledPlugins, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(job, capsys, "advantage.use=parts/none", code=2)
    assert "advantage.config.group_size: 0 is not a number of records." in shown
    assert "parts/none (gcore-parts" in shown


def test_a_factory_that_takes_no_config_is_reported_with_its_provider(
    parts: InstalledPlugins, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(job, capsys, "filter.use=parts/bare", code=3)
    assert "filter.use: parts/bare (gcore-parts" in shown and "TypeError" in shown
    assert "called as gcore_parts_made:TakesNothing(config)" in shown


def test_a_missing_factory_is_refused(
    parts: InstalledPlugins, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no 'Gone'" in refused(job, capsys, "filter.use=parts/gone", code=3)


def test_a_backend_without_a_module_is_refused_although_only_workers_import_it(
    parts: InstalledPlugins, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(job, capsys, "roles.rollout.use=parts", code=3)
    assert "roles.rollout.use: parts (" in shown and "no module gcore_nowhere.engine" in shown


def test_an_invalid_number_is_refused_with_its_path(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(job, capsys, "run.patience_s=.inf", code=2)
    assert "run.patience_s: must be a finite number, not inf." in shown


def test_a_model_that_cannot_be_made_is_refused_with_its_path(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = "roles.policy.model={make: {path: no.py, name: teach}}"
    shown = refused(job, capsys, overrides, code=2)
    assert "roles.policy.model.make.path:" in shown and "no such file" in shown


def test_a_file_of_known_rewards_that_is_none_is_refused(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(job, capsys, "rewards.length.known=known.jsonl", code=2)
    assert shown.startswith("rewards.length.known: ") and "FileNotFoundError" in shown
    (tmp_path / "known.jsonl").write_text('{"row": {"prompt": "a"}, "text": "b"}')
    assert "KeyError" in refused(job, capsys, "rewards.length.known=known.jsonl", code=2)


def test_a_resumed_run_may_give_a_reward_more_time_and_no_other_weight(
    job: Job, tmp_path: Path
) -> None:
    (tmp_path / CONFIG).write_bytes(msgspec.json.encode(load_plan(job()).config))
    resumed = Resumed(step=2, path=str(tmp_path), state={})
    check_same(resumed, load_plan(job(), MORE_TIME), rows=8)
    with pytest.raises(ConfigError) as error:
        check_same(resumed, load_plan(job(), [*MORE_TIME, "rewards.length.weight=2"]), rows=8)
    assert error.value.why == "rewards.length.weight: 1.0 was saved, 2.0 is asked for"


def test_a_run_goes_on_from_checkpoints_of_its_own_minor_version_alone(
    job: Job, tmp_path: Path
) -> None:
    run = tmp_path / "my run"
    checkpoint = Checkpoints(run).begin(2)
    key, _, value = "sentinel.canaries=3".partition("=")
    config = _with(load_plan(job()).config, key.split("."), value)
    (run / "config.yaml").write_bytes(msgspec.json.encode(config))
    (checkpoint / "state.json").write_text("{}")
    facts = CheckpointFacts(run="job", lock={"gcore-core": "0.2.0"})
    saved = Checkpoints(run).commit(2, facts)
    major, minor, _ = __version__.split(".")
    check_version(run, saved, f"{major}.{minor}.99")
    check_version(run, saved, "")
    with pytest.raises(CheckpointError) as error:
        cli._dispatch(["resume", str(run)], owns_process=False)
    assert error.value.what == (
        f"gcore-core 0.2.0 saved it, and {__version__} goes on from checkpoints of {major}.{minor} "
        "alone."
    )
    assert error.value.where == str(saved)
    assert error.value.todo.endswith(f": g-core export '{run}' --step 2 --to DIRECTORY")
    assert "go on with gcore-core 0.2.0" in error.value.todo
    (run / "weights").mkdir()
    with pytest.raises(CheckpointError) as error:
        check_version(run, saved, "0.2.0")
    assert error.value.todo.endswith(f"its weights: g-core export '{run}' --to DIRECTORY")


@pytest.mark.parametrize(
    "changed",
    [
        "run.dir=elsewhere",
        "evaluation.data.config.path=other.jsonl",
        "roles.rollout.model.path=org/other",
        "roles.policy.config.reference_path=org/other",
        "roles.policy.config.lora.path=org/other",
    ],
)
def test_a_run_goes_on_with_the_models_the_questions_and_the_place_it_began_with(
    changed: str, job: Job, tmp_path: Path
) -> None:
    config = load_plan(job(OPENS)).config
    (tmp_path / CONFIG).write_bytes(msgspec.json.encode(config))
    resumed = Resumed(step=2, path=str(tmp_path), state={})
    key, _, value = changed.partition("=")
    plan = SimpleNamespace(config=_with(config, key.split("."), value))
    with pytest.raises(ConfigError) as error:
        check_same(resumed, cast(Any, plan), rows=8)
    assert str(error.value.why).startswith(f"{key}: ")
    assert f"{value!r} is asked for" in str(error.value.why)


def test_a_run_that_did_not_evaluate_may_begin_to_when_it_goes_on(job: Job, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_bytes(msgspec.json.encode(load_plan(job()).config))
    resumed = Resumed(step=2, path=str(tmp_path), state={})
    check_same(resumed, load_plan(job(OPENS)), rows=8)


def test_other_settings_that_differ_from_the_saved_ones_are_told_in_one_line(
    job: Job, tmp_path: Path
) -> None:
    config = load_plan(job()).config
    (tmp_path / CONFIG).write_bytes(msgspec.json.encode(config))
    resumed = Resumed(step=2, path=str(tmp_path), state={})
    assert changed_settings(resumed, load_plan(job())) == []
    steps, shards = config["run"]["steps"], config["controller"]["shards"]
    changed = load_plan(job(), [f"run.steps={steps + 1}", f"controller.shards={shards + 1}"])
    assert changed_settings(resumed, changed) == [
        "the run goes on with other settings than were saved: "
        f"controller.shards {shards} -> {shards + 1}, run.steps {steps} -> {steps + 1}"
    ]
    config["roles"]["policy"]["config"] |= {f"k{number}": number for number in range(8)}
    (tmp_path / CONFIG).write_bytes(msgspec.json.encode(config))
    (line,) = changed_settings(resumed, load_plan(job()))
    assert line.endswith("and 2 more")


@pytest.mark.parametrize(
    ("key", "asked", "by_itself"),
    [
        ("roles.policy.model.path", "refused", "refused"),
        ("roles.policy.config.lora.path", "refused", "refused"),
        ("roles.judge.config.reference_path", "refused", "refused"),
        ("roles.policy.model.make.path", "goes on", "refused"),
        ("rewards.own.config.path/helpers.py", "goes on", "refused"),
        ("data.config.path", "goes on", "refused"),
    ],
)
def test_only_who_asks_for_it_goes_on_with_other_files_and_nobody_with_other_models(
    key: str, asked: str, by_itself: str
) -> None:
    for verdict, alone in ((asked, False), (by_itself, True)):
        if verdict == "refused":
            with pytest.raises(ConfigError, match="with other files") as error:
                check_same_files({}, [key], by_itself=alone)
            assert error.value.where == key
        else:
            check_same_files({}, [key], by_itself=alone)


def _with(config: dict[str, Any], keys: list[str], value: object) -> dict[str, Any]:
    """Returns a copy of a tree in which one leaf has another value."""
    first, *rest = keys
    return {**config, first: _with(config.get(first) or {}, rest, value) if rest else value}


def test_what_a_plugin_misses_of_files_is_refused_and_a_job_that_is_only_read_is_not(
    parts: InstalledPlugins, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(job, capsys, "plugins=[parts]", code=2)
    assert "roles.policy.model.path: not there, workers here: True. [plugin parts]" in shown
    assert cli.main(["config", str(job()), "plugins=[parts]"]) == 0


@pytest.mark.parametrize("where", ["data", "evaluation.data"])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nodata", "parts/nodata: opening it raised OSError: no disk [plugin parts]"),
        ("badrow", "reading row 2 raised IndexError: list index out of range [plugin parts]"),
        ("nowhere", "gcore_parts_made has no 'Nowhere'. [plugin parts]"),
    ],
)
def test_a_dataset_of_any_plugin_that_cannot_be_opened_or_read_is_refused(
    parts: InstalledPlugins,
    job: Job,
    capsys: pytest.CaptureFixture[str],
    where: str,
    name: str,
    problem: str,
) -> None:
    shown = refused(job, capsys, "evaluation.every=1", f"{where}.use=parts/{name}", code=2)
    assert f"{where}.use: " in shown and problem in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("where", ["data", "evaluation.data"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "rows.jsonl: no such file (did you mean 'row.jsonl'?)."),
        ("", "rows.jsonl: the file holds no rows."),
        ('{"prompt": "a"}\n{"prompt": ', 'rows.jsonl, line 2: not JSON: {{"prompt":;'),
        (
            '{"prompt": "a"}\n{"question": "b", "answer": "c"}\n',
            "rows.jsonl, line 2: no field 'prompt'; it has: question, answer; "
            "set {where}.config.prompt to the field that holds the prompt.",
        ),
    ],
)
def test_data_without_prompts_is_refused_with_file_line_and_columns(
    tmp_path: Path,
    job: Job,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    content: str | None,
    problem: str,
) -> None:
    monkeypatch.setenv("G_CORE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "row.jsonl").write_text('{"prompt": "a"}\n')
    if content is not None:
        (tmp_path / "rows.jsonl").write_text(content)
    overrides = (f"{where}.use=core/jsonl", f"{where}.config.path={tmp_path / 'rows.jsonl'}")
    shown = refused(job, capsys, "evaluation.every=1", *overrides, code=2)
    assert f"{where}.config.path: {tmp_path}/{problem.format(where=where)}" in shown


def test_of_a_path_and_a_model_that_is_made_the_command_line_wins_and_both_are_refused(
    tmp_path: Path, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "make.py").write_text("def teach(directory, config, progress): ...\n")
    make = f"{{path: {tmp_path / 'make.py'}, name: teach}}"

    def model(file: Path, *overrides: str) -> dict[str, object]:
        return load_plan(file, overrides).settings.roles["policy"].model

    given = job()  # it names a path
    assert list(model(given, f"roles.policy.model.make={make}")) == ["make"]
    both = (f"roles.policy.model.make={make}", "roles.policy.model.path=org/other")
    shown = refused(job, capsys, *both, code=2)
    assert "roles.policy.model: has both path (org/other) and make; leave one of them" in shown
    made = tmp_path / "made.yaml"
    made.write_text(given.read_text().replace("path: org/name", f"make: {make}"))
    assert list(model(made)) == ["make"]
    assert model(made, "roles.policy.model.path=org/other") == {"path": "org/other"}
    assert model(made, "roles.policy.model.make=null") == {}


MADE = """
from gcore_core import hookimpl

@hookimpl
def gcore_check_files(plan):
    for name, role in plan["roles"].items():
        model = role["model"]
        if "make" in model:
            yield f"roles.{name}.model.make: {model.get('path', 'not made')}."
"""


def test_plugins_see_the_directory_of_a_made_model_once_it_is_there(
    tmp_path: Path,
    job: Job,
    installed: InstalledPlugins,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("G_CORE_CACHE", str(tmp_path / "cache"))
    teach = "def teach(directory, config, progress): (directory / 'config.json').touch()"
    (tmp_path / "make.py").write_text(teach)
    installed.add("made", MADE)
    make = {"path": str(tmp_path / "make.py"), "name": "teach", "config": {}}
    overrides = (
        "plugins=[fake,made]",
        f"roles.policy.model.make={{path: {make['path']}, name: teach}}",
    )
    assert "roles.policy.model.make: not made." in refused(job, capsys, *overrides, code=2)
    directory = make_model(make, models_cache(), lambda share, text: None)
    assert f"roles.policy.model.make: {directory}." in refused(job, capsys, *overrides, code=2)


FORESEES = """
from gcore_core import hookimpl
from gcore_core.contract.errors import PlacementError

@hookimpl
def gcore_preflight(job, placed, overrides, facts):
    steps = job.settings.run.steps
    yield f"{steps} steps on {placed.host(placed.nodes[0].name)}, with {overrides}"
    if steps == 7:
        raise ValueError("seven")
    if steps > 10:
        yield PlacementError("there are too many steps.", where="run.steps")
"""


@pytest.mark.parametrize("named", [True, False])
def test_estimates_are_notes_also_of_the_plugin_that_every_job_gets(
    named: bool,
    job: Job,
    installed: InstalledPlugins,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed.add("foresees", FORESEES)
    monkeypatch.setattr(preflight, "ESTIMATES", "foresees")
    words = ["run.steps=3", *(["plugins=[fake,foresees]"] if named else [])]
    assert cli.main(["check", str(job()), *words]) == 0
    shown = capsys.readouterr().out
    assert shown.count(f"note: 3 steps on this machine, with {words}") == 1


def test_the_error_of_an_estimate_ends_the_start(
    job: Job,
    installed: InstalledPlugins,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed.add("foresees", FORESEES)
    monkeypatch.setattr(preflight, "ESTIMATES", "foresees")
    code = PlacementError("").exit_code
    shown = refused(job, capsys, "run.steps=11", code=code)
    assert "run.steps: there are too many steps." in shown


@pytest.mark.parametrize(
    ("plugin", "note"),
    [
        ("nowhere", ""),
        ("foresees", "note: gcore_preflight raised ValueError: seven [plugin foresees]"),
        ("broken", "note: nothing is estimated: plugin 'broken'"),
    ],
)
def test_a_job_is_checked_without_estimates_where_they_are_not_there_or_fail(
    plugin: str,
    note: str,
    job: Job,
    installed: InstalledPlugins,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed.add("foresees", FORESEES)
    installed.add("broken", "import jinja9\n")
    monkeypatch.setattr(preflight, "ESTIMATES", plugin)
    assert cli.main(["check", str(job()), "run.steps=7"]) == 0
    shown = capsys.readouterr().out
    assert note in shown
    assert shown.endswith("nothing wrong found\n")
