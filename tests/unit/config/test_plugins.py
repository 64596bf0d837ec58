from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gcore_testing.installed import InstalledPlugins

from gcore_core.config import catalog
from gcore_core.config.plugins import Plugins, local_plugin
from gcore_core.contract.errors import ConfigError, ContractError, PluginBroken
from gcore_core.contract.factories import FactorySpec, build, reference_to
from gcore_core.contract.records import RunFacts, StepReport, WorkerFailure

HEAD = "from gcore_core import hookimpl\nfrom gcore_core.contract import providers as p\n"
RUN = RunFacts(name="r", directory="/r", steps=1, config={})
JOB: Any = object()


def load(*names: str) -> Plugins:
    plugins, installed = Plugins(), catalog.scan()
    for name in names:
        plugins.load(installed.get(name, where=""), where="plugins")
    return plugins


def add(installed: InstalledPlugins, name: str, source: str) -> None:
    installed.add(name, HEAD + source)


def test_a_broken_plugin_does_not_disturb_the_loaded_ones(
    installed: InstalledPlugins,
) -> None:
    add(installed, "aaa", "import no_such_module")
    add(installed, "zzz", "import no_such_module")
    assert [item.name for item in load("fake").loaded] == ["fake"]


def test_a_named_plugin_that_fails_to_import_is_fatal_with_its_cause(
    installed: InstalledPlugins,
) -> None:
    add(installed, "broken", "import jinja9")
    with pytest.raises(PluginBroken) as caught:
        load("broken")
    assert str(caught.value).splitlines() == [
        "plugins: plugin 'broken' (gcore-broken 0.1.0, gcore_broken) failed to import: "
        "ModuleNotFoundError: No module named 'jinja9'",
        "  see the whole cause: G_CORE_TRACEBACK=1 g-core plugins show broken",
    ]
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "@hookimpl\ndef gcore_trainer():\n    return []",
            r"no hook 'gcore_trainer' \(did you mean 'gcore_trainers'\?\)",
        ),
        (
            "@hookimpl\ndef gcore_samplers():\n    return []",
            r"no hook 'gcore_samplers' any more\.\n  remove it; draw, look at the answer",
        ),
        ("def gcore_trainers():\n    return []", "function 'gcore_trainers' lacks @hookimpl"),
        ("@hookimpl\ndef gcore_run_end(run, err):\n    pass", "err"),
        (
            "@hookimpl\ndef gcore_run_end(run, error=''):\n    pass",
            "gives a default to 'error'.*never passed",
        ),
        (
            "@hookimpl(tryfirst=True)\ndef gcore_run_end(run):\n    pass",
            "is marked as a wrapper, tryfirst or trylast",
        ),
        (
            "@hookimpl(wrapper=True)\ndef gcore_run_end(run):\n    yield",
            "is marked as a wrapper, tryfirst or trylast",
        ),
        (
            "@hookimpl\ndef gcore_filters():\n    yield 5",
            "gcore_filters must yield FilterProvider, not int",
        ),
        (
            (
                "@hookimpl\ndef gcore_filters():\n    yield p.FilterProvider(name='A B', "
                "summary='', "
                "factory='nowhere')"
            ),
            "(?s)invalid description, 'A B'.*not lower case words.*"
            "factory 'nowhere' is not 'module:attribute'",
        ),
        (
            (
                "@hookimpl\ndef gcore_filters():\n    yield p.FilterProvider(summary='', "
                "factory='a:b', config=dict())"
            ),
            "config {} is not a dataclass",
        ),
        (
            "@hookimpl\ndef gcore_trainers():\n"
            "    yield p.TrainerProvider(summary='', factory='a:b', "
            "capabilities=frozenset({'sleep'}))",
            "TrainerProvider has no 'capabilities'; it is what traits",
        ),
        (
            (
                "@hookimpl\ndef gcore_filters():\n    return [p.FilterProvider(summary='', "
                "factory='a:b')] * 2"
            ),
            "gcore_filters offers 'default' twice",
        ),
        (
            ("@hookimpl\ndef gcore_roles():\n    yield p.RoleProvider(summary='', kind='thing')"),
            "kind 'thing' is none of trainer, generator, annotator",
        ),
        (
            (
                "@hookimpl\ndef gcore_roles():\n    yield p.RoleProvider(summary='', "
                "kind='trainer', factory='a:b')"
            ),
            "factory 'a:b': a role is never called, its backend is",
        ),
        (
            (
                "@hookimpl\ndef gcore_roles():\n    yield p.RoleProvider(summary='', "
                "kind='annotator')"
            ),
            "an annotator gives columns; name them",
        ),
        (
            (
                "@hookimpl\ndef gcore_roles():\n    yield p.RoleProvider(summary='', "
                "kind='annotator', columns=('logp',))"
            ),
            "column 'logp': generators write it",
        ),
    ],
)
def test_a_plugin_that_breaks_the_contract_is_refused(
    installed: InstalledPlugins, source: str, message: str
) -> None:
    add(installed, "bad", source)
    with pytest.raises(ContractError, match=message) as caught:
        load("bad")
    assert "'bad'" in str(caught.value) and len(str(caught.value).splitlines()) <= 6


@pytest.mark.parametrize("body", ["raise ValueError('no')", "return None"])
def test_a_provider_hook_that_fails_makes_the_plugin_broken(
    installed: InstalledPlugins, body: str
) -> None:
    add(installed, "bad", f"@hookimpl\ndef gcore_filters():\n    {body}")
    with pytest.raises(PluginBroken, match="gcore_filters failed: (ValueError: no|TypeError)"):
        load("bad")


def test_use_names_a_default_or_another_provider_of_the_kind(installed: InstalledPlugins) -> None:
    plugins = load("fake")
    default = plugins.resolve("generator", "fake", where="roles.rollout.use")
    assert (default.reference, default.kind, default.owner) == (
        "fake",
        "generator",
        "gcore-fake 0.1.0",
    )
    assert plugins.resolve("generator", "fake/async", where="").reference == "fake/async"
    assert plugins.resolve("trainer", "fake", where="").kind == "trainer"


@pytest.mark.parametrize(
    ("kind", "use", "expected"),
    [
        (
            "generator",
            "fake/asinc",
            "roles.x.use: plugin 'fake' has no generator named 'asinc' (did you mean "
            "'fake/async'?).\n"
            "  choices: fake, fake/async",
        ),
        (
            "objective",
            "fake",
            "roles.x.use: plugin 'fake' has no default objective; say which.\n  choices: fake/pg",
        ),
        (
            "balancer",
            "fake",
            "roles.x.use: plugin 'fake' offers no balancer.\n"
            "  it offers: advantage, dataset, generator, objective, reward, trainer\n"
            "  choices: none",
        ),
    ],
)
def test_error_for_an_unresolved_use_lists_the_choices(
    installed: InstalledPlugins, kind: str, use: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load("fake").resolve(kind, use, where="roles.x.use")
    assert str(caught.value) == expected


OBSERVER = """
CALLS = []

@hookimpl
def gcore_step_end(report):
    CALLS.append(report.step)
    {body}

@hookimpl
def gcore_run_end(run, error):
    CALLS.append(error)
"""


def test_an_observer_that_raises_is_reported_once_and_disabled_while_others_continue(
    installed: InstalledPlugins,
) -> None:
    import sys

    for name, body in (("first", "pass"), ("bad", "raise ValueError('no')"), ("last", "pass")):
        add(installed, name, OBSERVER.format(body=body))
    reported: list[tuple[str, str, str]] = []
    observers = load("first", "bad", "last").observers(
        lambda plugin, hook, error: reported.append((plugin, hook, str(error)))
    )
    for step in (1, 2):
        observers.step_end(RUN, StepReport(step=step, version=step, metrics={}))
    observers.run_end(RUN, "")
    assert reported == [("bad", "gcore_step_end", "no")]
    assert sys.modules["gcore_bad"].CALLS == [1]
    assert sys.modules["gcore_first"].CALLS == sys.modules["gcore_last"].CALLS == [1, 2, ""]


def test_every_observer_hook_passes_the_arguments_of_its_spec(installed: InstalledPlugins) -> None:
    import sys

    add(
        installed,
        "all",
        """
CALLS = []
@hookimpl
def gcore_run_start(run): CALLS.append(("run_start", run.name))
@hookimpl
def gcore_step_end(run, report): CALLS.append(("step_end", report.step))
@hookimpl
def gcore_weights_published(run, version): CALLS.append(("weights_published", version))
@hookimpl
def gcore_checkpoint_saved(run, step, path): CALLS.append(("checkpoint_saved", step, path))
@hookimpl
def gcore_worker_failed(run, failure): CALLS.append(("worker_failed", failure.role))
@hookimpl
def gcore_run_end(run, error): CALLS.append(("run_end", error))
""",
    )
    observers = load("all").observers(lambda *_: pytest.fail("an observer raised"))
    observers.run_start(RUN)
    observers.step_end(RUN, StepReport(step=1, version=1, metrics={}))
    observers.weights_published(RUN, 1)
    observers.checkpoint_saved(RUN, 1, "checkpoints/step-000001")
    observers.worker_failed(RUN, WorkerFailure(role="rollout", rank=0, reason="lost"))
    observers.run_end(RUN, "why")
    assert sys.modules["gcore_all"].CALLS == [
        ("run_start", "r"),
        ("step_end", 1),
        ("weights_published", 1),
        ("checkpoint_saved", 1, "checkpoints/step-000001"),
        ("worker_failed", "rollout"),
        ("run_end", "why"),
    ]


def test_check_collects_the_problems_of_all_plugins_and_cannot_change_the_plan(
    installed: InstalledPlugins,
) -> None:
    add(
        installed,
        "one",
        "@hookimpl\ndef gcore_check(plan):\n    plan['a']['b'] = 2\n    yield 'a.b: bad.'",
    )
    add(installed, "two", "@hookimpl\ndef gcore_check(plan):\n    raise ValueError('no')")
    add(installed, "three", "@hookimpl\ndef gcore_check(plan):\n    return None")
    add(installed, "four", "@hookimpl\ndef gcore_check(job):\n    yield f'c: {job}.'")
    config = {"a": {"b": 1}}
    assert load("one", "two", "three", "four").check(config, JOB) == [
        "a.b: bad. [plugin one]",
        "gcore_check raised ValueError: no [plugin two]",
        f"c: {JOB}. [plugin four]",
    ]
    assert config == {"a": {"b": 1}}


def test_checks_of_files_are_told_whether_workers_start_here_and_cannot_change_the_plan(
    installed: InstalledPlugins,
) -> None:
    hook = "@hookimpl\ndef gcore_check_files"
    add(installed, "one", f"{hook}(plan, here):\n    plan.clear()\n    yield f'a.b: {{here}}.'")
    add(installed, "two", f"{hook}(plan):\n    raise ValueError('no')")
    config = {"a": {"b": 1}}
    plugins = load("one", "two")
    assert plugins.check_files(config, here=False).problems == [
        "a.b: False. [plugin one]",
        "gcore_check_files raised ValueError: no [plugin two]",
    ]
    assert plugins.check(config, JOB) == []
    assert config == {"a": {"b": 1}}


def test_a_description_of_a_class_of_the_plugins_own_is_one_of_its_kind(
    installed: InstalledPlugins,
) -> None:
    add(
        installed,
        "own",
        "from dataclasses import dataclass\n"
        "class OwnFilter(p.FilterProvider):\n    pass\n"
        "@dataclass\nclass Settings:\n    size: int = 1\n"
        "@hookimpl\ndef gcore_filters():\n"
        "    yield OwnFilter(summary='', factory='x:F', config=Settings)\n",
    )
    assert [item.reference for item in load("own").providers("filter")] == ["own"]


def test_a_project_file_is_a_plugin_named_by_its_stem_whose_factories_are_found_by_path(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        HEAD + "class F:\n    pass\n@hookimpl\ndef gcore_filters():\n"
        "    yield p.FilterProvider(summary='', factory='mine:F')\n"
        "    yield p.FilterProvider(name='other', summary='', factory=f'{__name__}:F')\n"
        "    yield p.FilterProvider(name='core', summary='', "
        "factory='gcore_core.builtin.filters:KeepAll')\n"
    )
    plugins = Plugins()
    plugins.load(local_plugin(file))
    assert plugins.loaded[0].version.startswith("blake2b:")
    assert [item.spec.factory for item in plugins.providers("filter")] == [
        f"{file}:F",
        f"{file}:F",
        "gcore_core.builtin.filters:KeepAll",
    ]


def test_whatever_a_description_of_a_project_file_names_in_it_is_found_by_path(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        HEAD + "class T:\n    pass\n@hookimpl\ndef gcore_trainers():\n"
        "    yield p.TrainerProvider(summary='', factory='mine:T', memory='mine:m', "
        "twin='mine:t', opens='mine:o')\n"
    )
    plugins = Plugins()
    plugins.load(local_plugin(file))
    (item,) = plugins.providers("trainer")
    assert [item.spec.memory, item.spec.twin, item.spec.opens] == [  # type: ignore[attr-defined]
        f"{file}:m",
        f"{file}:t",
        f"{file}:o",
    ]


def test_a_project_file_may_be_several_files_and_its_version_is_of_all(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"{HEAD}from settings import Settings\n@hookimpl\ndef gcore_filters():\n"
        "    yield p.FilterProvider(summary='', factory='keeping:Keep', config=Settings)\n"
    )
    keeping = "from settings import Settings\nclass Keep:\n    def __init__(self, config): pass"
    (tmp_path / "keeping.py").write_text(keeping)
    head = "from dataclasses import dataclass\n@dataclass(frozen=True)\n"
    settings = f"{head}class Settings:\n    n: int = 1"
    (tmp_path / "settings.py").write_text(settings)
    plugins = Plugins()
    plugins.load(local_plugin(file))
    (item,) = plugins.providers("filter")
    assert item.spec.factory == f"{tmp_path}/keeping.py:Keep"
    config_class = reference_to(item.spec.config)  # type: ignore[arg-type]
    assert build(FactorySpec(item.spec.factory, config_class, {"n": 2}))
    version = local_plugin(file).version
    (tmp_path / "settings.py").write_text(f"{settings}\n")
    assert local_plugin(file).version != version


def test_a_project_file_that_lacks_another_is_told_where_to_put_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import settings")
    with pytest.raises(PluginBroken) as caught:
        Plugins().load(local_plugin(tmp_path / "mine.py"))
    assert "No module named 'settings'" in str(caught.value)
    assert "put settings.py next to mine.py" in caught.value.todo


def test_a_missing_project_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="local: cannot read .*gone.py: No such file"):
        local_plugin(tmp_path / "gone.py")


def test_two_plugins_in_one_module_are_refused(installed: InstalledPlugins) -> None:
    from gcore_testing.installed import Wheel

    add(installed, "one", "")
    installed.add("two", HEAD, Wheel(module="gcore_one"))
    with pytest.raises(ContractError, match="'two'"):
        load("one", "two")
