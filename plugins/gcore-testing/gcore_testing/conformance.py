"""Finds the contracts of an installed plugin: those it brings, and the plain one for each provider
it leaves out.

A plugin brings contracts in a module named ``conformance`` beside its root:
``gcore_mine.conformance`` where the root is a package, ``gcore_mine_conformance`` where it is one
file. Every contract class there whose name begins with ``Test`` is run, also one for a kind of the
plugin's own, and with the fixtures of that module. A test file that holds a plugin to everything is
two lines:

    from gcore_testing.conformance import contracts_of
    globals().update(contracts_of("mine"))
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import MISSING, fields
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest

import gcore_testing as testing
from gcore_core.config import catalog
from gcore_core.config.plugins import Plugins, Provided
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, PluginBroken
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.providers import AdvantageProvider
from gcore_core.contract.traits import traits_of
from gcore_testing import fake
from gcore_testing.contracts.base import Contract, closing, config_of, make
from gcore_testing.contracts.plugin import is_met

#: kind -> name of its contract; the other kinds of the core have none
BY_KIND = {
    "advantage": "AdvantageContract",
    "annotator": "AnnotatorContract",
    "balancer": "BalancerContract",
    "controller": "ControllerContract",
    "dataset": "DatasetContract",
    "environment": "EnvironmentContract",
    "filter": "FilterContract",
    "generator": "GeneratorContract",
    "launcher": "LauncherContract",
    "objective": "ObjectiveContract",
    "observer": "ObserverContract",
    "placement": "PlacementPolicyContract",
    "reward": "ScorerContract",
    "sentinel": "SentinelContract",
    "trainer": "TrainerContract",
    "view": "ViewContract",
}
#: Kinds whose factories are given the context of a worker.
_OF_WORKERS = {"annotator", "environment", "generator", "reward", "trainer"}


def contracts_of(name: str) -> dict[str, Any]:
    """Class name -> contract, for everything of the plugin that can be tested here.

    The fixtures of the plugin's own module are in it too, by their names: pytest looks for them
    where the classes are collected.
    """
    installed, provided = _load(name)
    contracts = _brought(installed)
    contracts["TestPlugin"] = type("TestPlugin", (testing.PluginContract,), {"provider": name})
    covered = {(contract.kind, contract.provider) for contract in contracts.values()}
    for item in provided:
        if (item.kind, item.reference) not in covered and not _obstacle(item):
            base = getattr(testing, _contract_name(item))
            title = "".join(
                word.capitalize() for word in re.split(r"[-_/]", f"{item.reference}-{item.kind}")
            )
            contracts[f"Test{title}"] = type(f"Test{title}", (base,), {"provider": item.reference})
            if item.kind == "generator" and _takes_tokens(item):
                contracts[f"Test{title}Tokens"] = type(
                    f"Test{title}Tokens", (testing.TokensContract,), {"provider": item.reference}
                )
            if item.kind == "sentinel":
                contracts[f"Test{title}Check"] = type(
                    f"Test{title}Check",
                    (testing.StepCheckContract,),
                    {"provider": item.reference},
                )
    return {**_fixtures(installed), **contracts}


def left_out(name: str) -> dict[str, str]:
    """Returns provider -> why no contract is run on it."""
    installed, provided = _load(name)
    covered = {(contract.kind, contract.provider) for contract in _brought(installed).values()}
    return {
        f"{item.kind} {item.reference}": reason
        for item in provided
        if (item.kind, item.reference) not in covered and (reason := _obstacle(item))
    }


def _load(name: str) -> tuple[catalog.Installed, list[Provided]]:
    installed = catalog.scan().get(name, where="g-core conformance")
    plugins = Plugins()
    plugins.load(installed)
    return installed, plugins.provided_by(name)


def _brought(installed: catalog.Installed) -> dict[str, type[Contract]]:
    """Returns the contract classes of the plugin's own module, if it has one."""
    module = _module(installed)
    if module is None:
        return {}
    return {
        name: value
        for name, value in vars(module).items()
        if name.startswith("Test") and isinstance(value, type) and issubclass(value, Contract)
    }


def _fixtures(installed: catalog.Installed) -> dict[str, Any]:
    """Returns the fixtures that the plugin's own module has outside its classes."""
    return {
        name: value
        for name, value in vars(_module(installed) or ModuleType("none")).items()
        if _is_fixture(value)
    }


def _is_fixture(value: object) -> bool:
    """Returns whether ``pytest.fixture`` has made it.

    pytest 8.4 makes an object of a class of its own; before, a function with a mark.
    """
    made = type(pytest.fixture(lambda: None))
    marked = hasattr(value, "_pytestfixturefunction")
    return marked or (made.__name__ != "function" and isinstance(value, made))


def _module(installed: catalog.Installed) -> ModuleType | None:
    if installed.name == catalog.CORE:  # its contracts lie with the kit
        return importlib.import_module("gcore_testing.core_contracts")
    root = importlib.import_module(installed.module)
    name = (
        f"{installed.module}.conformance"
        if hasattr(root, "__path__")
        else f"{installed.module}_conformance"
    )
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise PluginBroken(
            f"{name!r}, the contracts of plugin {installed.name!r} ({installed.owner}), does not "
            "import: "
            f"{type(error).__name__}: {error}",
            plugin=installed.name,
        ) from error


def _contract_name(item: Provided) -> str:
    at_actions = isinstance(item.spec, AdvantageProvider) and item.spec.level == "action"
    return "ActionAdvantageContract" if at_actions else BY_KIND[item.kind]


def _takes_tokens(item: Provided) -> bool:
    return traits_of(config_of(item.spec, {})).tokens


def _obstacle(item: Provided) -> str:
    """Returns why the plain contract cannot be run on a provider; empty when it can."""
    if item.kind not in BY_KIND:
        return f"there is no contract for {item.kind}"
    if missing := [need for need in item.spec.needs if not is_met(need)]:
        return f"its needs are not met here: {', '.join(missing)}"
    config = item.spec.config
    required = (
        []
        if config is None
        else [f.name for f in fields(config) if f.default is f.default_factory is MISSING]
    )
    if required:
        return f"it needs settings ({', '.join(required)}); bring a contract that gives them"
    try:
        import_attribute(item.spec.factory)
    except PluginBroken as error:
        return str(error)
    return _refusal_of_defaults(item)


def _refusal_of_defaults(item: Provided) -> str:
    """Returns why a provider is not to be had without settings or a model; empty when it is."""
    with TemporaryDirectory() as folder:
        context = WorkerContext(role="contract", deterministic=True, directory=folder)
        arguments: list[Any] = [context] if item.kind in _OF_WORKERS else []
        if item.kind == "environment":
            arguments.append(fake.FakeGenerator(fake.FakeGeneratorConfig(), context))
        try:
            if item.spec.config is not None:
                item.spec.config()
            for _ in closing(make(item.spec, {}, *arguments)):
                pass
        except ConfigError as error:
            problem = str(error).partition("\n")[0]
            return f"its defaults do not make it: {problem} Bring a contract that gives more"
        except Exception:  # its tests say what else is wrong
            pass
    return ""
