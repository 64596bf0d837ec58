from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gcore_testing.installed import InstalledPlugins, Wheel

from gcore_core.config import schema
from gcore_core.config.plan import load_plan
from gcore_core.config.yaml_source import read_source, resolve_paths, written
from gcore_core.contract.errors import (
    ConfigError,
    ContractError,
    GcoreError,
    PluginBroken,
    PluginClash,
    PluginIncompatible,
    PluginNotFound,
)
from gcore_core.contract.factories import build
from gcore_core.contract.job_settings import (
    MISSING,
    DataSettings,
    JobSettings,
    RewardSettings,
    RoleSettings,
)
from tests.support import made_pages

Job = Callable[..., Path]
ROOT = Path(__file__).parents[3]


def message(file: Path, *overrides: str, kind: type[GcoreError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        load_plan(file, overrides)
    text = str(caught.value)
    assert len(text.splitlines()) <= 6
    return text


# -- what a good file becomes ----------------------------------------------------------------------


def test_a_short_file_becomes_a_whole_plan(job: Job) -> None:
    plan = load_plan(job())
    run = {
        "name": "job",
        "steps": 100,
        "epochs": None,
        "seed": 0,
        "dir": None,
        "deterministic": False,
    }
    assert plan.config["run"] == run | {"patience_s": 600.0}
    assert plan.config["controller"]["config"]["prompts"] == 32, (
        "the provider's defaults are filled in"
    )
    assert plan.config["roles"]["rollout"]["config"] == {
        "tensor_parallel": 2,
        "dtype": "float32",
        "optimizer": {"learning_rate": 1e-3},
        "limit": None,
    }
    assert plan.config["roles"]["rollout"]["follows"] == "policy"
    assert plan.config["roles"]["policy"]["follows"] is None
    assert {path: (item.kind, item.reference) for path, item in plan.provided.items()} == {
        "launcher": ("launcher", "core/local"),
        "controller": ("controller", "core/sync"),
        "data": ("dataset", "fake/rows"),
        "advantage": ("advantage", "fake/mean"),
        "objective": ("objective", "fake/pg"),
        "filter": ("filter", "core/keep-all"),
        "balance": ("balancer", "balance"),
        "sentinel": ("sentinel", "sentinel"),
        "placement": ("placement", "core/even"),
        "roles.policy": ("trainer", "fake"),
        "roles.rollout": ("generator", "fake"),
        "rewards.length": ("reward", "fake/length"),
    }
    assert [(item["plugin"], item["distribution"]) for item in plan.lock] == [
        ("core", "gcore-core"),
        ("fake", "gcore-fake"),
        ("balance", "gcore-placement"),
        ("sentinel", "gcore-sentinel"),
    ]


def test_a_factory_of_the_plan_is_built_as_a_worker_would(job: Job) -> None:
    spec = load_plan(job()).factory("roles.rollout")
    built, args = build(spec, "context")
    assert (type(built).__name__, built.tensor_parallel, args) == ("EngineConfig", 2, ("context",))
    assert load_plan(job()).factory("rewards.length").config_class == ""


def test_the_factory_of_a_place_without_a_choice_is_an_error(job: Job) -> None:
    with pytest.raises(
        ConfigError,
        match=r"roles.rolout: no provider is chosen at this key \(did you mean 'roles.rollout'\?\)",
    ):
        load_plan(job()).factory("roles.rolout")


def test_overrides_win_over_the_file_and_the_last_override_wins(job: Job) -> None:
    plan = load_plan(
        job(), ["run.steps=5", "run.steps=7", "roles.rollout.config.optimizer.learning_rate=1e-5"]
    )
    assert plan.config["run"]["steps"] == 7
    assert plan.config["roles"]["rollout"]["config"]["optimizer"]["learning_rate"] == 1e-5


def test_an_empty_mapping_takes_away_what_the_file_has(tmp_path: Path) -> None:
    """What a later override adds is there, and nothing else."""
    file = tmp_path / "job.yaml"
    file.write_text("a: {b: 1, c: {d: 2, e: {f: 3}}}\n")
    assert read_source(file, ["a.c={}"]).tree == {"a": {"b": 1, "c": {}}}
    assert read_source(file, ["a.c={}", "a.c.g=4"]).tree == {"a": {"b": 1, "c": {"g": 4}}}
    assert read_source(file, ["a.new={}"]).tree["a"]["new"] == {}
    assert read_source(file, ["a.c={d: 5}"]).tree["a"]["c"] == {"d": 5, "e": {"f": 3}}


def test_interpolations_see_the_defaults_of_plugins(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKEND", "fake")
    file = job(
        "run: {seed: '${advantage.config.group_size}'}\nrewards: {r: {use: "
        "'${oc.env:BACKEND}/length'}}"
    )
    plan = load_plan(file)
    assert plan.config["run"]["seed"] == 4
    assert plan.provided["rewards.r"].reference == "fake/length"


def test_plugins_may_be_a_list_and_config_may_be_left_empty(
    job: Job, installed: InstalledPlugins
) -> None:
    installed.add("report")
    plan = load_plan(job("plugins: [report]\nadvantage:\n  use: fake/mean\n  config:"))
    assert plan.config["plugins"] == {"report": None}
    assert [item["plugin"] for item in plan.lock] == [
        "core",
        "report",
        "fake",
        "balance",
        "sentinel",
    ]


def test_a_local_file_offers_providers_under_its_stem(job: Job, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from gcore_core import hookimpl\nfrom gcore_core.contract import providers as p\n"
        "@dataclass\nclass C:\n    bonus: float = 0.5\n"
        "@hookimpl\ndef gcore_rewards():\n"
        "    yield p.RewardProvider(name='mine', summary='', factory='mine:make', config=C)\n"
        "def make(config, context):\n    return config.bonus, context\n"
    )
    plan = load_plan(job("local: [mine.py]\nrewards: {r: {use: mine/mine, config: {bonus: 2}}}"))
    assert build(plan.factory("rewards.r"), "context") == (2.0, "context")
    assert plan.config["local"] == [str(tmp_path / "mine.py")]
    assert plan.lock[-1]["version"].startswith("blake2b:")


def test_relative_paths_are_resolved_against_the_files_directory(job: Job, tmp_path: Path) -> None:
    (tmp_path / "model_dir").mkdir()
    extra = """\
evaluation: {data: {use: fake/rows, config: {path: ../eval.jsonl}}}
roles:
  policy: {use: fake, model: {make: {path: make.py}}}
  rollout: {use: fake, model: {path: org/name}}
"""
    plan = load_plan(job(extra))
    assert plan.config["data"]["config"]["path"] == str(tmp_path / "rows.jsonl")
    assert plan.config["evaluation"]["data"]["config"]["path"] == str(
        tmp_path.parent / "eval.jsonl"
    )
    model = plan.config["roles"]["policy"]["model"]
    assert model["make"]["path"] == str(tmp_path / "make.py")
    assert plan.config["roles"]["rollout"]["model"]["path"] == "org/name", "a hub name stays"
    there = load_plan(job(extra.replace("make: {path: make.py}", "path: model_dir")))
    assert there.config["roles"]["policy"]["model"]["path"] == str(tmp_path / "model_dir")


def test_paths_of_a_role_are_relative_to_the_file_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "start").mkdir(parents=True)
    given: dict[str, Any] = {
        "reference_path": "../base/a/b",
        "lora_path": "org/name",
        "dump_dir": "x/y/z",
    }
    config = {**given, "lora": {"path": "start"}}
    settings = JobSettings(roles={"policy": RoleSettings(config=config)})
    resolve_paths(settings, tmp_path / "jobs")
    expected = {
        **given,
        "reference_path": str(tmp_path / "base/a/b"),
        "lora": {"path": str(tmp_path / "jobs/start")},
    }
    assert settings.roles["policy"].config == expected


def test_an_interpreter_of_data_and_of_a_reward_is_found_as_a_roles_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("G_CORE_VENVS", str(tmp_path / "venvs"))
    settings = JobSettings(
        data=DataSettings(config={"python": "games/bin/python"}),
        rewards={"right": RewardSettings(config={"python": "venv:games"})},
    )
    resolve_paths(settings, tmp_path / "jobs")
    assert settings.data.config["python"] == str(tmp_path / "jobs/games/bin/python")
    assert settings.rewards["right"].config["python"] == str(tmp_path / "venvs/games/bin/python")


def test_a_path_through_the_latest_run_names_that_run(job: Job, tmp_path: Path) -> None:
    weights = tmp_path / "runs" / "job" / "001" / "weights"
    weights.mkdir(parents=True)
    (tmp_path / "runs" / "job" / "latest").symlink_to("001")
    plan = load_plan(job(), ["roles.policy.model.path=runs/job/latest/weights"])
    assert plan.config["roles"]["policy"]["model"]["path"] == str(weights)


# -- why -------------------------------------------------------------------------------------------


def test_why_shows_value_and_origin(job: Job) -> None:
    file = job("run: {steps: 3}")
    plan = load_plan(file, ["run.seed=9"])
    steps_line = 1 + file.read_text().splitlines().index("run: {steps: 3}")
    assert plan.why("run.steps") == f"run.steps = 3  # job.yaml, line {steps_line}"
    assert plan.why("run.seed") == "run.seed = 9  # override 'run.seed=9'"
    assert plan.why("run.name") == 'run.name = "job"  # stem of job.yaml'
    assert plan.provenance()["run.seed"] == "override 'run.seed=9'"
    assert plan.why("run.dir") == "run.dir = null  # default of the core (gcore-core 0.3.0)"
    assert plan.why("roles.rollout.config.dtype").endswith(
        '= "float32"  # default of fake (gcore-fake 0.1.0)'
    )
    assert plan.why("roles.rollout.follows").endswith(
        "# default of role rollout (gcore-core 0.3.0)"
    )
    assert len(plan.why("roles.rollout.config").splitlines()) == 4, (
        "a line for each value below a mapping"
    )


def test_why_of_an_unknown_key_suggests_one(job: Job) -> None:
    with pytest.raises(
        ConfigError, match=r"run.step: .*no such key \(did you mean 'run.steps'\?\)"
    ):
        load_plan(job()).why("run.step")


# -- files and overrides that cannot be read -------------------------------------------------------


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert message(tmp_path / "no.yaml").startswith(f"{tmp_path / 'no.yaml'}: no such file.")
    (tmp_path / "another.yaml").touch()
    assert "(did you mean 'another.yaml'?)" in message(tmp_path / "another.yml")


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n", "5\n"])
def test_a_file_that_holds_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert "must hold a mapping" in message(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("run:\n\tsteps: 1\n", 2, "cannot start any token"),
        ("a: 1\na: 2\n", 2, "duplicate key a"),
        ("a: [1\nb: 2\n", 2, "expected ',' or ']'"),
    ],
)
def test_a_syntax_error_has_its_line(tmp_path: Path, text: str, line: int, problem: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    shown = message(tmp_path / "x.yaml")
    assert (
        shown.startswith(f"{tmp_path / 'x.yaml'}, line {line}: not valid YAML: ")
        and problem in shown
    )


def test_a_character_that_no_yaml_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("run: {name: a\x1b}\n")
    shown = message(tmp_path / "x.yaml")
    assert shown == (
        f"{tmp_path / 'x.yaml'}: not valid YAML: unacceptable character #x001b: "
        "special characters are not allowed."
    )


@pytest.mark.parametrize(
    "override", ["run.steps", "=3", "run..steps=1", "run.steps =1", "a[0]=1", ""]
)
def test_an_override_without_an_equals_sign_is_refused(job: Job, override: str) -> None:
    assert message(job(), override).startswith(
        f"override {override!r} is not of the form key=value."
    )


def test_an_override_with_a_broken_value_is_refused(job: Job) -> None:
    assert (
        message(job(), "run.steps=[1")
        == "run.steps: the value of override 'run.steps=[1' is not valid YAML."
    )


def test_an_unknown_interpolation_is_refused_with_its_path(job: Job) -> None:
    assert (
        message(job("run: {seed: '${nowhere}'}"))
        == "run.seed: Interpolation key 'nowhere' not found."
    )


def test_what_is_no_reference_is_refused_and_may_be_written_as_text(
    job: Job, tmp_path: Path
) -> None:
    file = job(r"run: {name: '${\frac{1}{2}}'}")
    shown = message(file)
    assert shown.startswith(f"{file}: what is set cannot be read: ") and r"write \${" in shown
    override = r"run.name=${\frac}"
    assert message(job(), override).startswith("run.name: what is set cannot be read: ")
    plan = load_plan(job(r"run: {name: '\${\frac} and \\\${x}'}"))
    assert plan.config["run"]["name"] == r"${\frac} and \${x}"
    (tmp_path / "again.yaml").write_text(written(plan.config))
    assert load_plan(tmp_path / "again.yaml").config["run"]["name"] == plan.name


# -- wrong keys and values -------------------------------------------------------------------------


def test_error_for_an_unknown_key_has_path_line_and_suggestion(job: Job) -> None:
    assert message(job("run: {stepz: 3}")) == (
        "run.stepz: there is no such key (did you mean 'steps'?).\n"
        "  job.yaml, line 12\n"
        "  there are: name, steps, epochs, seed, dir, deterministic, patience_s"
    )
    assert message(job(), "role.x=1").startswith(
        "role: there is no such key (did you mean 'roles'?)."
    )


def test_an_unknown_key_of_a_plugin_names_the_plugin(job: Job) -> None:
    assert message(job(), "roles.rollout.config.tensor_paralel=1") == (
        "roles.rollout.config.tensor_paralel: 'EngineConfig' has no such field (did you mean "
        "'tensor_parallel'?).\n"
        "  override 'roles.rollout.config.tensor_paralel=1'\n"
        "  from plugin fake (gcore-fake 0.1.0); its fields: g-core plugins show fake\n"
        "  there are: tensor_parallel, dtype, optimizer, limit"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "run.steps=many",
            "run.steps: expected int, got str: 'many'.",
        ),
        (
            "run.steps=1.5",
            "run.steps: Value '1.5' of type 'float' could not be converted to Integer.",
        ),
        ("run.steps=null", "run.steps: Incompatible value 'None' for field of type 'int'."),
        ("run.steps=[1]", "run.steps: expected int, got a list: [1]."),
        ("run=5", "run: expected a mapping, got int: 5."),
        ("roles=5", "roles: expected a mapping, got int: 5."),
        ("roles.rollout=fake", "roles.rollout: expected a mapping, got str: 'fake'."),
        ("roles.rollout.model=5", "roles.rollout.model: expected a mapping, got int: 5."),
        ("roles.rollout.config=5", "roles.rollout.config: expected a mapping, got int: 5."),
        (
            "roles.rollout.config.optimizer=5",
            "roles.rollout.config.optimizer: expected a mapping, got int: 5.",
        ),
        (
            "roles.rollout.config.limit=x",
            "roles.rollout.config.limit: expected float, got str: 'x'.",
        ),
        (
            "roles.rollout.config.dtype=f8",
            "roles.rollout.config.dtype: Invalid value 'f8', expected one of",
        ),
        (
            "advantage.config.scalars=kl",
            "advantage.config.scalars: expected a list, got str: 'kl'.",
        ),
        ("local=mine.py", "local: expected a list, got str: 'mine.py'."),
        (
            "roles.my role={use: fake}",
            "override 'roles.my role={use: fake}' is not of the form key=value.",
        ),
        ("roles.a:b={use: fake}", "roles.a:b: a name is made of letters, digits, '_' and '-'."),
    ],
)
def test_error_for_a_wrong_type_has_path_value_and_expected_type(
    job: Job, override: str, expected: str
) -> None:
    assert message(job(), override).startswith(expected)


def test_error_for_a_value_that_a_plugin_refuses_has_its_path(job: Job) -> None:
    shown = message(job(), "roles.rollout.config.tensor_parallel=0")
    assert shown.startswith("roles.rollout.config: tensor_parallel must be at least 1, not 0.")
    assert "from plugin fake (gcore-fake 0.1.0)" in shown


def test_settings_for_a_provider_without_settings_are_refused(job: Job) -> None:
    assert (
        message(job(), "filter.config.x=1")
        == "filter.config: core/keep-all has no settings, but x is set."
    )


# -- what must be there ----------------------------------------------------------------------------


def test_all_missing_keys_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("run: {steps: 3}\n")
    assert (
        message(tmp_path / "x.yaml")
        .splitlines()[0]
        .endswith(
            "x.yaml: missing: data, advantage.use, objective.use, roles.policy, roles.rollout, "
            "rewards.<name>."
        )
    )


def test_a_role_without_use_is_named(job: Job) -> None:
    assert "missing: roles.judge.use." in message(job(), "roles.judge.slots=1")


@pytest.mark.parametrize(
    "path", ["launcher", "data", "advantage", "sentinel", "roles.policy", "rewards.letters"]
)
def test_a_use_that_is_empty_is_missing(job: Job, path: str) -> None:
    assert f"missing: {path}.use." in message(job(), f"{path}.use=")


def test_a_folder_is_no_job(tmp_path: Path) -> None:
    assert message(tmp_path) == f"{tmp_path}: cannot be read as text: Is a directory."


def test_a_mandatory_setting_of_a_plugin_is_named_with_its_plugin(job: Job) -> None:
    assert message(job("data: {use: fake/rows}")) == (
        "data.config.path: a value is missing.\n  required by fake/rows (gcore-fake 0.1.0)"
    )


def test_error_for_an_unknown_role_lists_the_known_ones(job: Job) -> None:
    shown = message(job(), "roles.rolout={use: fake}")
    assert shown.startswith(
        "roles.rolout: no loaded plugin knows a role 'rolout' (did you mean 'rollout'?)."
    )
    assert "known roles: policy, rollout, judge" in shown


def test_settings_of_a_replaced_provider_are_dropped_if_the_new_one_has_none(
    job: Job,
) -> None:
    file = job("balance: {use: core/in-order, config: {slope: 2.0}}")
    assert "core/in-order has no settings, but slope is set" in message(file)
    assert load_plan(file, ["balance.use=core/in-order"]).config["balance"]["config"] == {}
    refused = ["balance.use=core/in-order", "balance.config.slope=3.0"]
    assert "core/in-order has no settings, but slope is set" in message(file, *refused)
    kept = job("controller: {use: other/sync, config: {prompts: 7, pace: 3}}")
    assert (
        load_plan(kept, ["controller.use=core/sync"]).config["controller"]["config"]["prompts"] == 7
    )


def test_a_plugin_may_bring_a_role(job: Job, installed: InstalledPlugins) -> None:
    role = (
        "from gcore_core import hookimpl\nfrom gcore_core.contract import providers as p\n"
        "@hookimpl\ndef gcore_roles():\n"
        "    yield p.RoleProvider(name={!r}, summary='', kind='trainer')\n"
    )
    teacher = (
        "    yield p.RoleProvider(name='teacher', summary='', kind='annotator', columns=('t',))\n"
        "@hookimpl\ndef gcore_annotators():\n"
        "    yield p.AnnotatorProvider(summary='', factory='a:b')\n"
    )
    installed.add("ppo", role.format("critic") + teacher)
    file = job("plugins: {ppo: null}")
    plan = load_plan(file, ["roles.teacher={use: ppo}"])
    assert plan.provided["roles.teacher"].kind == "annotator"
    assert [column.name for column in plan.columns["teacher"]] == ["t"]
    assert message(file, "roles.critic={use: fake}") == (
        "roles.critic.objective: nothing says what this role trains; set objective.use."
    )
    installed.add("twin", role.format("policy"))
    assert "role 'policy' is defined by gcore-core 0.3.0 and by gcore-twin 0.1.0" in message(
        job("plugins: [twin]"), kind=PluginClash
    )


def test_controllers_that_own_replicas_have_one_each(job: Job) -> None:
    file = job("")
    owned = ["controller.replicas=owned", "roles.rollout.slots=2"]
    assert load_plan(file, [*owned, "controller.shards=2"]).settings.controller.replicas == "owned"
    assert message(file, *owned, "controller.shards=3") == (
        'controller.replicas: with "owned" each of 3 controllers needs a replica of its own, and '
        "roles.rollout has 2; set controller.shards to at most 2, raise roles.rollout.slots, or "
        'choose "shared".'
    )
    assert message(file, *owned, "run.deterministic=true") == (
        'controller.replicas: "owned" cannot be had with run.deterministic, in which every replica '
        'hears every controller; choose "shared".'
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.steps=0", "run.steps: must be at least 1, not 0."),
        ("controller.shards=0", "controller.shards: must be at least 1, not 0."),
        ("roles.rollout.slots=0", "roles.rollout.slots: must be at least 1, not 0."),
        (
            "controller.replicas=mine",
            "controller.replicas: must be one of shared, owned, not ",
        ),
        (
            "placement.sleep_in_training=on",
            "placement.sleep_in_training: must be one of auto, always, never, not ",
        ),
        (
            "placement.sleep_in_rollout=on",
            "placement.sleep_in_rollout: must be one of never, always, not ",
        ),
        ("roles.rollout.least=0", "roles.rollout.least: must be at least 1, not 0."),
        ("evaluation.every=-1", "evaluation.every: must be at least 0, not -1."),
        (
            "rewards.length.timeout_s=0",
            "rewards.length.timeout_s: must be greater than 0, not 0.0.",
        ),
        (
            "cluster.devices=none",
            "cluster.devices: must be 'auto' or a number of devices, not 'none'.",
        ),
        (
            "roles.rollout.follows=judge",
            "roles.rollout.follows: this run has no other role 'judge'; other roles: policy.",
        ),
        (
            "roles.policy.follows=rollout",
            "roles.policy.follows: nobody trains roles.rollout, so it pushes no weights; name a",
        ),
        (
            "objective.config.values=true",
            "roles.policy.use: fake has no value head, which objective (fake/pg) trains; take",
        ),
        (
            "rewards.length.worker=policy",
            "rewards.length.worker: 'policy' cannot name a worker; use letters",
        ),
        (
            "rewards.length.worker=agent",
            "rewards.length.worker: 'agent' cannot name a worker; use letters",
        ),
        (
            "rewards.length.weight=.nan",
            "rewards.length.weight: must be a finite number, not nan.",
        ),
        (
            "controller.config.failure_limit=50",
            "controller.config: failure_limit must be from 0 to 1, not 50.0.",
        ),
        (
            "roles.policy.config.optimizer.learning_rate=.nan",
            "roles.policy.config.optimizer.learning_rate: must be a number, not nan.",
        ),
        (
            "rewards.length.when={source: [1, .nan]}",
            "rewards.length.when.source[1]: must be a finite number, not nan.",
        ),
        ("run.name=a/b", "run.name: 'a/b' cannot name a directory; use letters, digits"),
        ("run.epochs=0", "run.epochs: must be greater than 0, not 0.0."),
        ("rewards.length.workers=0", "rewards.length.workers: must be at least 1, not 0."),
        (
            "rewards.length.normalise=groups",
            "rewards.length.normalise: must be one of none, group, batch (did you",
        ),
        (
            "rewards.length.role=rollout",
            "rewards.length.role: fake/length asks no model; leave it out.",
        ),
        (
            "roles.judge.use=fake",
            "roles.judge: no reward asks it; set rewards.<name>.role: judge, have it speak",
        ),
        (
            "advantage.config.scalars=[kl]",
            "advantage: requires 'kl', which nothing supplies (known: age, entropy, group, kl_k1,",
        ),
    ],
)
def test_a_value_out_of_range_or_an_unmet_requirement_is_refused(
    job: Job, override: str, expected: str
) -> None:
    assert message(job(), override).startswith(expected)


def test_a_reward_that_is_no_function_of_one_record_is_not_asked_alone(
    job: Job, installed: InstalledPlugins
) -> None:
    installed.add(
        "many",
        (
            "from gcore_core import hookimpl\nfrom gcore_core.contract import providers as p\n"
            "from gcore_testing.fake_judge import FakeAskerConfig as Asks\n"
            "@hookimpl\ndef gcore_rewards():\n"
            "    yield p.RewardProvider(name='group', summary='-', factory='a:B', level='group')\n"
            "    yield p.RewardProvider(name='asks', summary='-', factory='a:B', config=Asks)\n"
        ),
    )
    together = ["rewards.length.use=many/group", "rewards.length.alone_every=4"]
    assert message(job(), *together).startswith(
        "rewards.length.alone_every: many/group sees the records of a prompt together; only"
    )
    asks = ["rewards.length.use=many/asks", "rewards.length.role=rollout"]
    assert message(job(), *asks, "rewards.length.alone_every=4").startswith(
        "rewards.length.alone_every: many/asks asks a model; only"
    )
    load_plan(job(), asks)
    load_plan(job(), ["rewards.length.alone_every=4"])


def test_traits_of_another_kind_are_refused(job: Job, installed: InstalledPlugins) -> None:
    installed.add(
        "odd",
        (
            "from dataclasses import dataclass\nfrom gcore_core import hookimpl\n"
            "from gcore_core.contract import providers as p\n"
            "from gcore_core.contract.traits import Traits\n"
            "@dataclass(frozen=True)\nclass Odd:\n"
            "    def traits(self):\n        return Traits(sleeps=True)\n"
            "@hookimpl\ndef gcore_rewards():\n"
            "    yield p.RewardProvider(summary='-', factory='a:B', config=Odd)\n"
        ),
    )
    with pytest.raises(ContractError) as caught:
        load_plan(job(), ["rewards.length.use=odd"])
    assert str(caught.value).startswith(
        "rewards.length: reward odd claims what is not its own: Traits.sleeps is of generator, "
        "trainer, not of reward."
    )


def test_no_role_has_a_name_of_the_core_s_own_processes(job: Job) -> None:
    text = message(job(), "roles.agent.use=fake", "rewards.length.role=agent")
    assert "roles.agent: processes of the core are named so" in text


def test_columns_that_every_trainer_supplies_may_be_required(job: Job) -> None:
    load_plan(job(), ["advantage.config.scalars=[kl_k1, ref_logp, entropy, rollout_logp]"])


def test_all_problems_are_reported_together_including_those_of_plugins(
    job: Job, installed: InstalledPlugins
) -> None:
    installed.add(
        "picky",
        (
            "from gcore_core import hookimpl\n@hookimpl\ndef gcore_check(plan):\n    yield "
            "'run.seed: I dislike it.'"
        ),
    )
    with pytest.raises(ConfigError) as caught:
        load_plan(job("plugins: [picky]"), ["run.steps=0", "roles.policy.slots=0"])
    assert caught.value.facts["problems"] == [
        "run.steps: must be at least 1, not 0.",
        "roles.policy.slots: must be at least 1, not 0.",
        "run.seed: I dislike it. [plugin picky]",
    ]
    assert "the configuration has 3 problems." in str(caught.value)


# -- plugins ---------------------------------------------------------------------------------------


def test_an_unknown_plugin_is_named_with_the_key_that_names_it(job: Job) -> None:
    shown = message(job(), "roles.rollout.use=fkae", kind=PluginNotFound)
    assert shown.startswith("roles.rollout.use: no plugin named 'fkae' is installed.")


def test_no_plugin_is_imported_before_all_are_found(job: Job, installed: InstalledPlugins) -> None:
    installed.add("broken", "raise RuntimeError('imported')")
    assert "'gone'" in message(job("plugins: [broken, gone]"), kind=PluginNotFound)
    assert "'broken'" in message(job("plugins: [broken]"), kind=PluginBroken)


def test_clashing_incompatible_and_unpinned_plugins_are_refused(
    job: Job, installed: InstalledPlugins
) -> None:
    assert "asks for fake>=3" in message(job("plugins: {fake: '>=3'}"), kind=PluginIncompatible)
    installed.add("old", wheel=Wheel(requires=["gcore-core<0.1"]))
    assert "needs gcore-core<0.1" in message(job("plugins: [old]"), kind=PluginIncompatible)
    installed.add("fake", "", Wheel(distribution="gcore-fork", module="gcore_fork"))
    assert "gcore-fake 0.1.0 and gcore-fork 0.1.0" in message(job(), kind=PluginClash)


def test_two_local_files_of_one_name_are_refused(job: Job, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").touch()
    load_plan(job("local: [a/mine.py, a/mine.py]"))
    shown = message(job("local: [a/mine.py, b/mine.py]"), kind=PluginClash)
    assert "two local files are named 'mine'" in shown and str(tmp_path / "b/mine.py") in shown


def test_a_local_file_may_not_take_the_name_of_an_installed_plugin(
    job: Job, tmp_path: Path
) -> None:
    (tmp_path / "fake.py").write_text("")
    assert "'fake' is both a local file and an installed plugin" in message(
        job("local: [fake.py]"), kind=PluginClash
    )


def test_a_local_file_that_is_not_there_is_named(job: Job) -> None:
    assert message(job("local: [gone.py]")).startswith("local[0]: cannot read ")


def test_a_config_class_that_cannot_be_a_schema_breaks_the_contract(
    job: Job, installed: InstalledPlugins
) -> None:
    installed.add(
        "odd",
        "from dataclasses import dataclass\nfrom gcore_core import hookimpl\nfrom "
        "gcore_core.contract import providers as p\n"
        "@dataclass\nclass C:\n    a: set = None\n"
        "@hookimpl\ndef gcore_filters():\n    yield p.FilterProvider(summary='', factory='a:b', "
        "config=C)",
    )
    shown = message(job("filter: {use: odd}"), kind=ContractError)
    assert shown.startswith("filter: odd (gcore-odd 0.1.0): config class C cannot be a schema: ")


def test_every_config_class_of_the_core_can_be_a_schema_and_be_found_again() -> None:
    from omegaconf import OmegaConf

    from gcore_core.config import catalog
    from gcore_core.config.plugins import Plugins
    from gcore_core.contract.factories import import_attribute, reference_to

    plugins = Plugins()
    plugins.load(catalog.scan().get("core", where=""))
    classes = [item.spec.config for item in plugins.provided_by("core") if item.spec.config]
    assert classes
    for cls in classes:
        OmegaConf.structured(cls)
        assert import_attribute(reference_to(cls)) is cls


# -- the page --------------------------------------------------------------------------------------


def test_the_page_lists_exactly_the_keys_of_the_core_with_their_defaults() -> None:
    page = made_pages.page("reference/config.md")
    rows = re.findall(r"^\| `([\w.*<>]+)` \| ([^|]+) \|", page, flags=re.M)
    documented = {key.replace("<name>", "*"): default.strip().strip("`") for key, default in rows}
    shown = {"None": "null", "True": "true", "False": "false", MISSING: "must be given"}
    assert documented == {
        key: shown.get(str(value), str(value)) for key, value in schema.core_keys().items()
    }
