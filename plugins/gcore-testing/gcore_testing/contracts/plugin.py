"""The contract of a plugin as a whole.

Its root module is light, its descriptions are true, and its settings survive YAML.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from gcore_core.config import catalog
from gcore_core.config.plan import load_plan
from gcore_core.config.plugins import Plugins, Provided
from gcore_core.contract.errors import ConfigError, GcoreError, PluginBroken
from gcore_core.contract.factories import import_attribute, import_source, reference_to
from gcore_core.contract.job_settings import JobSettings, RewardSettings, RoleSettings
from gcore_core.contract.memory import MemoryNeed, WorkerShape
from gcore_core.contract.providers import (
    AnnotatorProvider,
    CommandProvider,
    DatasetProvider,
    GeneratorProvider,
    RewardProvider,
    TrainerProvider,
)
from gcore_core.contract.records import Prompt
from gcore_core.contract.traits import Traits, methods_of, protocols_of
from gcore_core.run.initial_placement import find_nodes, place
from gcore_testing import fake
from gcore_testing.contracts.base import Contract
from gcore_testing.plugin_commands.descriptions import default_traits

#: What a hook may take: descriptions are data, nothing is computed or opened for them.
HOOKS_LIMIT_S = 0.5

# Programs for a new process. Each imports what its first argument names, a factory or a module, and
# prints which of the engines in the third argument are imported then.
_ASK = """
import json, sys
sys.path[:0] = json.loads(sys.argv[2])
from gcore_core.contract.factories import import_attribute
assert callable(import_attribute(sys.argv[1])), sys.argv[1]
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} & set(json.loads(sys.argv[3])))))
"""  # noqa: E501
_LOOK = """
import importlib, json, os, sys
sys.path[:0] = json.loads(sys.argv[2])
importlib.import_module(sys.argv[1])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} & set(json.loads(sys.argv[3])))))
"""  # noqa: E501


_OF_ANOTHER: dict[str, Any] = {"use": "another", "config": {"path": "/nowhere"}}
#: A resolved job, as far as checks of files look at it, with files that are not there.
_JOB_OF_ANOTHER: dict[str, Any] = {
    "controller": _OF_ANOTHER,
    "data": _OF_ANOTHER,
    "evaluation": {"data": _OF_ANOTHER},
    "rewards": {"any": _OF_ANOTHER},
    "roles": {"policy": {**_OF_ANOTHER, "model": {"path": "/nowhere"}, "engine": {}}},
}

#: A whole job, of which every part is a fake.
_JOB_OF_FAKES: dict[str, Any] = {
    "local": [fake.__file__],
    "data": {"use": "fake"},
    "advantage": {"use": "fake"},
    "objective": {"use": "fake"},
    "roles": {"policy": {"use": "fake"}, "rollout": {"use": "fake"}},
    "rewards": {"letters": {"use": "fake"}},
}

#: What describes a worker that holds a model.
_HOLDS_A_MODEL = (AnnotatorProvider, GeneratorProvider, TrainerProvider)


class PluginContract(Contract):
    """To test a plugin, override ``provider`` with its name; it must be installed."""

    kind: ClassVar[str] = "plugin"

    @pytest.fixture
    def installed(self) -> catalog.Installed:
        assert isinstance(self.provider, str), 'set provider = "<name of the plugin>"'
        return catalog.scan().get(self.provider, where=type(self).__name__)

    @pytest.fixture
    def provided(self, installed: catalog.Installed) -> list[Provided]:
        plugins = Plugins()
        plugins.load(installed)
        return plugins.provided_by(installed.name)

    def test_importing_it_imports_no_engine(self, installed: catalog.Installed) -> None:
        words = [
            installed.module,
            json.dumps([path for path in sys.path if path]),
            json.dumps(catalog.HEAVY),
        ]
        assert _heavy_modules(_LOOK, words) == []

    def test_it_says_what_it_needs_without_its_engine(self, provided: list[Provided]) -> None:
        """What ``memory`` of a description names is imported where no engine is; and what it
        answers, for a model of which nothing is known, are needs. A plugin without models has none.
        """
        named = [item for item in provided if item.spec.memory]
        if not named and any(isinstance(item.spec, _HOLDS_A_MODEL) for item in provided):
            self.not_claimed("memory")
        for item in named:
            words = [item.spec.memory, json.dumps([path for path in sys.path if path])]
            assert _heavy_modules(_ASK, [*words, json.dumps(catalog.HEAVY)]) == [], item.reference
            if item.spec.config is not None and not _defaults_are_allowed(item.spec.config):
                continue
            config = None if item.spec.config is None else item.spec.config()
            needs = list(import_attribute(item.spec.memory)(config, WorkerShape(role="any")))
            assert all(isinstance(need, MemoryNeed) for need in needs), item.reference
            assert [problem for need in needs for problem in need.problems()] == []

    def test_a_twin_changes_settings_that_there_are(
        self, provided: list[Provided], tmp_path: Path
    ) -> None:
        """What ``twin`` of a description names answers for a node that says nothing, and names no
        setting that its provider does not have. A plugin without models need have none.
        """
        named = [item for item in provided if item.spec.twin]
        if not named and any(isinstance(item.spec, _HOLDS_A_MODEL) for item in provided):
            self.not_claimed("twin")
        for item in named:
            node: dict[str, Any] = {"use": item.reference, "config": {}, "model": {}, "engine": {}}
            changes = import_attribute(item.spec.twin)(node, tmp_path)
            assert isinstance(changes, Mapping), item.reference
            assert set(changes) <= set(node), f"{item.reference}: {sorted(changes)}"
            config = item.spec.config
            known = {field.name for field in dataclasses.fields(config)} if config else set()
            unknown = sorted(set(changes.get("config") or {}) - known)
            assert not unknown, f"{item.reference} has no {unknown}"

    def test_hooks_return_at_once_and_alike(self, installed: catalog.Installed) -> None:
        Plugins().load(installed)  # imports are not counted
        descriptions = []
        times_s = []
        for _ in range(3):
            plugins = Plugins()
            start_s = time.perf_counter()
            plugins.load(installed)
            times_s.append(time.perf_counter() - start_s)
            descriptions.append(plugins.provided_by(installed.name))
        assert min(times_s) < HOOKS_LIMIT_S
        assert descriptions[0] == descriptions[1] == descriptions[2]

    def test_it_finds_nothing_wrong_with_files_of_other_plugins(
        self, installed: catalog.Installed
    ) -> None:
        """``gcore_check_files`` says nothing of a job whose parts all come from another plugin."""
        plugins = Plugins()
        plugins.load(installed)
        for here in (True, False):
            checked = plugins.check_files(_JOB_OF_ANOTHER, here=here)
            assert checked.problems == []
            assert checked.looks == []

    def test_it_looks_at_files_that_are_missing_without_an_exception(
        self, installed: catalog.Installed, provided: list[Provided]
    ) -> None:
        """``gcore_check_files`` raises nothing for a job of its own that names files which are not
        there. What it yields as a ``Look`` is valid, and the module of its function is there.
        """
        plugins = Plugins()
        plugins.load(installed)
        for job in _jobs_of_its_own(provided):
            for here, datasets in ((True, {"data": _TwoRows()}), (False, {})):
                checked = plugins.check_files(job, here=here, datasets=datasets)
                raised = [text for text in checked.problems if "gcore_check_files raised" in text]
                not_valid = [text for text in checked.problems if "a look that is not" in text]
                assert raised == not_valid == []
                for _, look in checked.looks:
                    assert _is_module(look.function.rpartition(":")[0]), look.function

    def test_it_tells_of_a_start_and_raises_nothing(
        self, installed: catalog.Installed, tmp_path: Path
    ) -> None:
        """``gcore_preflight`` gives notes and errors for a job of fakes, and raises none."""
        if not hasattr(import_source(installed.module), "gcore_preflight"):
            return
        file = tmp_path / "job.yaml"
        file.write_text(json.dumps(_JOB_OF_FAKES))
        plan = load_plan(file)
        plugins = Plugins()
        plugins.load(installed)
        said = list(plugins.preflight(plan, place(plan, find_nodes(plan)), (), {}))
        assert [one for one in said if "gcore_preflight raised" in str(one)] == []
        assert [one for one in said if not isinstance(one, str | GcoreError)] == []

    def test_a_command_has_the_parser_that_it_names(self, provided: list[Provided]) -> None:
        for item in provided:
            if isinstance(item.spec, CommandProvider) and item.spec.parser:
                parser = import_attribute(item.spec.parser)()
                assert isinstance(parser, argparse.ArgumentParser), item.reference

    def test_its_metadata_bounds_the_core(self, installed: catalog.Installed) -> None:
        if installed.name == catalog.CORE:
            self.not_claimed("a requirement on itself")
        lines = importlib.metadata.requires(installed.distribution) or []
        core = [line for line in lines if re.match(r"gcore[-_.]core\b", line, re.IGNORECASE)]
        assert core, "the distribution has no requirement on gcore-core"
        assert all("<" in line or "~=" in line or "==" in line for line in core), (
            f"{core} has no upper bound"
        )

    def test_every_provider_says_what_it_is(self, provided: list[Provided]) -> None:
        assert [item.reference for item in provided if not item.spec.summary.strip()] == []

    def test_every_factory_imports(self, provided: list[Provided]) -> None:
        """Those whose needs are met here; the others are listed as not claimed."""
        unmet = []
        for item in provided:
            if missing := [need for need in item.spec.needs if not is_met(need)]:
                unmet.append(f"{item.reference} ({', '.join(missing)})")
            elif item.spec.factory:
                assert callable(import_attribute(item.spec.factory)), item.reference
        if unmet:
            self.not_claimed(f"needs of {'; '.join(unmet)}")

    def test_claims_match_methods(self, provided: list[Provided]) -> None:
        for item in provided:
            if item.kind != "generator":
                continue
            try:
                backend = import_attribute(item.spec.factory)
            except PluginBroken:  # another test's
                continue
            if not inspect.isclass(backend):
                continue
            traits = default_traits(item.spec.config) or Traits()
            for trait, protocol in protocols_of("generator").items():
                has = all(hasattr(backend, method) for method in methods_of(protocol))
                claimed = getattr(traits, trait)
                assert has == claimed, (
                    f"{item.reference}: {trait} claimed: {claimed}, implemented: {has}"
                )

    def test_settings_survive_yaml(self, provided: list[Provided]) -> None:
        """OmegaConf accepts every config class.

        Its defaults are the same after YAML and in a worker.
        """
        from omegaconf import OmegaConf

        from gcore_core.config import yaml12
        from gcore_core.config.yaml_source import written

        for item in provided:
            config = item.spec.config
            if config is None:
                continue
            tree = OmegaConf.structured(config)
            defaults: Any = OmegaConf.to_container(tree)
            text = written(defaults)
            again = OmegaConf.merge(tree, yaml12.load(text))
            missing = OmegaConf.missing_keys(again)
            plain: Any = OmegaConf.to_container(again)
            assert import_attribute(reference_to(config)) is config, (
                f"a worker cannot find {config.__qualname__}"
            )
            if not missing and _defaults_are_allowed(config):
                assert msgspec.convert(plain, config) == config(), item.reference


class _TwoRows:
    """A dataset of a text and a chat."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> Prompt:
        if row == 0:
            return Prompt(row=0, text="1 + 1 =", fields={"answer": "2"})
        return Prompt(row=1, messages=[{"role": "user", "content": "1 + 1 = ?"}])


def _jobs_of_its_own(provided: list[Provided]) -> Iterator[dict[str, Any]]:
    """Yields a resolved job for each provider that opens files, which are not there.

    One whose settings have no defaults is left out.
    """
    for item in provided:
        config = item.spec.config
        if config is not None and not _defaults_are_allowed(config):
            continue
        node: dict[str, Any] = {"use": item.reference, "config": asdict(config()) if config else {}}
        job: dict[str, Any] = asdict(JobSettings())
        if isinstance(item.spec, _HOLDS_A_MODEL):
            role = RoleSettings(**node, model={"path": "/nowhere/at-all"})
            job["roles"] = {"policy": asdict(role)}
        elif isinstance(item.spec, RewardProvider):
            job["rewards"] = {"any": asdict(RewardSettings(**node))}
        elif isinstance(item.spec, DatasetProvider):
            job["data"].update(node)
        else:
            continue
        yield job


def _is_module(name: str) -> bool:
    """Says whether there is a module, or a file of a project, without importing it."""
    try:
        return name.endswith(".py") or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _heavy_modules(program: str, words: list[str]) -> list[str]:
    """Returns what a program prints: the engines that are imported after it, in a new process."""
    completed = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert completed.returncode == 0, completed.stderr
    heavy: list[str] = json.loads(completed.stdout.splitlines()[-1])
    return heavy


def _defaults_are_allowed(config: type) -> bool:
    """Says whether every field of the class has a default, and these make an object."""
    if not all(
        field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        for field in dataclasses.fields(config)
        if field.init
    ):
        return False
    try:
        config()
    except ConfigError:
        return False
    return True


def is_met(requirement: str) -> bool:
    """Says whether this environment meets a requirement such as ``torch>=2.7``."""
    from packaging.requirements import Requirement

    parsed = Requirement(requirement)
    if parsed.marker is not None and not parsed.marker.evaluate():
        return True
    return any(
        parsed.specifier.contains(version, prereleases=True) for version in _versions(parsed.name)
    )


def _versions(name: str) -> Iterator[str]:
    try:
        yield importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return
