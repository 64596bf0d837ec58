"""Plugins with one fault each, fabricated as installed distributions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from gcore_testing import PluginContract
from gcore_testing.installed import InstalledPlugins, Wheel

from gcore_core.config import catalog

ROOT = """
from gcore_core import hookimpl
from gcore_core.contract.providers import BalancerProvider, GeneratorProvider
from gcore_kit_parts import Settings, Sleeps

@hookimpl
def gcore_generators():
    yield GeneratorProvider(summary="nothing", factory="gcore_kit_parts:Engine", config=Sleeps, memory="gcore_kit_parts:needs")

@hookimpl
def gcore_balancers():
    yield BalancerProvider(summary="in order", factory="gcore_kit_parts:Engine", config=Settings, twin="gcore_kit_parts:twin")
"""  # noqa: E501

PARTS = """
from dataclasses import dataclass, field
from gcore_core.contract.memory import MemoryNeed
from gcore_core.contract.traits import Traits

def twin(node, directory):
    return {"config": {"size": 1}}

def needs(config, worker):
    yield MemoryNeed(phase="rollout", what="weights", nbytes=1)

@dataclass(frozen=True)
class Settings:
    size: int = 4
    names: list[str] = field(default_factory=list)

@dataclass(frozen=True)
class Sleeps:
    def traits(self):
        return Traits(sleeps=True)

class Engine:
    def sleep(self): ...
    def wake(self): ...
"""


class Clean(PluginContract):
    provider = "kit"
    caught_by: ClassVar[tuple[str, ...]] = ()
    root: ClassVar[str] = ROOT
    parts: ClassVar[str] = PARTS
    wheel: ClassVar[Wheel] = Wheel()

    @pytest.fixture
    def installed(self, tmp_path: Path) -> Iterator[catalog.Installed]:
        with InstalledPlugins(tmp_path / "site") as plugins:
            plugins.add("kit", self.root, self.wheel, {"gcore_kit_parts.py": self.parts})
            yield catalog.scan().get("kit", where="")


class ImportsItsEngineAtOnce(Clean):
    caught_by = ("test_importing_it_imports_no_engine",)
    root = f"import matplotlib{ROOT}"


class SetsWhatItDoesNotHave(Clean):
    caught_by = ("test_a_twin_changes_settings_that_there_are",)
    parts = PARTS.replace('{"size": 1}', '{"sizes": 1}')


class AsksAServerInAHook(Clean):
    caught_by = ("test_hooks_return_at_once_and_alike",)
    root = ROOT.replace(
        "    yield Balancer", "    import time; time.sleep(0.6)\n    yield Balancer"
    )


class AnswersDifferently(Clean):
    caught_by = ("test_hooks_return_at_once_and_alike",)
    root = ROOT.replace('summary="in order"', "summary=str(__import__('time').perf_counter_ns())")


class RefusesFilesOfOthers(Clean):
    caught_by = ("test_it_finds_nothing_wrong_with_files_of_other_plugins",)
    root = f"""{ROOT}
@hookimpl
def gcore_check_files(plan):
    if "path" in plan["data"]["config"]:
        yield f"data.config.path: {{plan['data']['config']['path']}} is not there."
"""


class RaisesWhereAModelIsMissing(Clean):
    caught_by = ("test_it_looks_at_files_that_are_missing_without_an_exception",)
    root = f"""{ROOT}
@hookimpl
def gcore_check_files(plan):
    for role in plan["roles"].values():
        if role["use"] == "kit":
            open(role["model"]["path"] + "/config.json")
"""


class LooksByAFunctionThatIsNotThere(Clean):
    caught_by = ("test_it_looks_at_files_that_are_missing_without_an_exception",)
    root = f"""{ROOT}
from gcore_core.contract.looking import Look

@hookimpl
def gcore_check_files(plan, datasets):
    for name, role in plan["roles"].items():
        if role["use"] == "kit" and "data" in datasets:
            yield Look(where=f"roles.{{name}}", function="gcore_kit_looks:find")
"""


class RaisesWhereItEstimates(Clean):
    caught_by = ("test_it_tells_of_a_start_and_raises_nothing",)
    root = f"""{ROOT}
@hookimpl
def gcore_preflight(job):
    yield f"{{job.settings.nowhere}} GiB"
"""


class EstimatesANumber(Clean):
    caught_by = ("test_it_tells_of_a_start_and_raises_nothing",)
    root = f"""{ROOT}
@hookimpl
def gcore_preflight(job):
    yield job.settings.run.steps
"""


class NamesAParserThatIsNone(Clean):
    caught_by = ("test_a_command_has_the_parser_that_it_names",)
    root = f"""{ROOT}
from gcore_core.contract.providers import CommandProvider

@hookimpl
def gcore_commands():
    factory = "gcore_kit_parts:Engine"
    yield CommandProvider(summary="-", factory=factory, parser=factory)
"""


class HasNoUpperBound(Clean):
    caught_by = ("test_its_metadata_bounds_the_core",)
    wheel = Wheel(requires=("gcore-core>=0.3",))


class RequiresNothing(Clean):
    caught_by = ("test_its_metadata_bounds_the_core",)
    wheel = Wheel(requires=())


class SaysNothingOfItself(Clean):
    caught_by = ("test_every_provider_says_what_it_is",)
    root = ROOT.replace('"in order"', '""')


class NamesAFactoryThatIsNotThere(Clean):
    caught_by = ("test_every_factory_imports",)
    root = ROOT.replace("gcore_kit_parts:Engine", "gcore_kit_parts:Engin")


class ClaimsWhatItsClassLacks(Clean):
    caught_by = ("test_claims_match_methods",)
    parts = PARTS.replace("    def wake(self): ...\n", "")


class HasWhatItDoesNotClaim(Clean):
    caught_by = ("test_claims_match_methods",)
    parts = PARTS + "    def fingerprint(self): return {}\n"


class HasSettingsThatYamlCannotHold(Clean):
    caught_by = ("test_settings_survive_yaml",)
    parts = PARTS.replace("size: int = 4", "size: complex = 4j")


class ImportsItsEngineToSayWhatItNeeds(Clean):
    caught_by = (
        "test_importing_it_imports_no_engine",  # its settings lie in the same module
        "test_it_says_what_it_needs_without_its_engine",
    )
    parts = f"import matplotlib{PARTS}"


class NeedsSomethingInAPhaseThatThereIsNot(Clean):
    caught_by = ("test_it_says_what_it_needs_without_its_engine",)
    parts = PARTS.replace('phase="rollout"', 'phase="lunch"')
