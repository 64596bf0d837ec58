"""Has what authors of plugins test with: contracts, fakes, fabricated installs, virtual time.

The contract classes can be imported from here; their modules, which need pytest, are loaded when
one is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore_testing.contracts.advantage import ActionAdvantageContract, AdvantageContract
    from gcore_testing.contracts.agreement import TrainerWithGeneratorContract
    from gcore_testing.contracts.annotator import AnnotatorContract
    from gcore_testing.contracts.balancer import BalancerContract
    from gcore_testing.contracts.base import Contract, NotClaimed, claims
    from gcore_testing.contracts.controller import ControllerContract
    from gcore_testing.contracts.dataset import DatasetContract
    from gcore_testing.contracts.environment import EnvironmentContract
    from gcore_testing.contracts.filter import FilterContract
    from gcore_testing.contracts.generator import GeneratorContract
    from gcore_testing.contracts.launcher import LauncherContract
    from gcore_testing.contracts.meter import MeterContract
    from gcore_testing.contracts.objective import ObjectiveContract
    from gcore_testing.contracts.observer import ObserverContract
    from gcore_testing.contracts.placement import PlacementPolicyContract
    from gcore_testing.contracts.plugin import PluginContract
    from gcore_testing.contracts.remote_store import RemoteStoreContract
    from gcore_testing.contracts.scorer import ScorerContract
    from gcore_testing.contracts.sentinel import SentinelContract
    from gcore_testing.contracts.site_files import SiteFilesContract
    from gcore_testing.contracts.step_check import StepCheckContract
    from gcore_testing.contracts.tokens import TokensContract
    from gcore_testing.contracts.trainer import TrainerContract
    from gcore_testing.contracts.view import ViewContract

_HOMES = {
    "ActionAdvantageContract": "advantage",
    "AdvantageContract": "advantage",
    "AnnotatorContract": "annotator",
    "BalancerContract": "balancer",
    "Contract": "base",
    "ControllerContract": "controller",
    "DatasetContract": "dataset",
    "EnvironmentContract": "environment",
    "FilterContract": "filter",
    "GeneratorContract": "generator",
    "LauncherContract": "launcher",
    "MeterContract": "meter",
    "NotClaimed": "base",
    "ObjectiveContract": "objective",
    "ObserverContract": "observer",
    "PlacementPolicyContract": "placement",
    "PluginContract": "plugin",
    "RemoteStoreContract": "remote_store",
    "ScorerContract": "scorer",
    "SentinelContract": "sentinel",
    "SiteFilesContract": "site_files",
    "StepCheckContract": "step_check",
    "TokensContract": "tokens",
    "TrainerContract": "trainer",
    "TrainerWithGeneratorContract": "agreement",
    "ViewContract": "view",
    "claims": "base",
}

__all__ = [
    "ActionAdvantageContract",
    "AdvantageContract",
    "AnnotatorContract",
    "BalancerContract",
    "Contract",
    "ControllerContract",
    "DatasetContract",
    "EnvironmentContract",
    "FilterContract",
    "GeneratorContract",
    "LauncherContract",
    "MeterContract",
    "NotClaimed",
    "ObjectiveContract",
    "ObserverContract",
    "PlacementPolicyContract",
    "PluginContract",
    "RemoteStoreContract",
    "ScorerContract",
    "SentinelContract",
    "SiteFilesContract",
    "StepCheckContract",
    "TokensContract",
    "TrainerContract",
    "TrainerWithGeneratorContract",
    "ViewContract",
    "claims",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.contracts.{_HOMES[name]}"), name)
