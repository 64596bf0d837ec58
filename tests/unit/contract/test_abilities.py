"""What a config class may tell the core by a method of an agreed name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from gcore_core.contract import abilities
from gcore_core.contract.abilities import ABILITIES, near_misses, wrong_signatures
from gcore_core.contract.providers import KINDS, ObjectiveProvider, kind_of


@dataclass
class Silent:
    rate: float = 1.0


@dataclass
class Talkative:
    def requires(self) -> frozenset[str]:
        return frozenset({"old_logp"})

    def samples_alike(self) -> str:
        return "temperature=0"

    def logprob_band(self) -> float:
        return 0.5

    def takes_stale(self) -> bool:
        return True

    def replica_slots(self) -> int:
        return 4

    def keeps_weights(self) -> bool:
        return False

    def takes_adapters(self) -> bool:
        return False

    def own_columns(self) -> frozenset[str]:
        return frozenset({"values"})

    def shows_images(self) -> bool:
        return True

    def reads_rewards(self) -> frozenset[str]:
        return frozenset({"exact"})

    def updates_per_step(self) -> int:
        return 6

    def groups_per_step(self) -> int:
        return 32

    def records_per_group(self) -> int:
        return 2

    def meters(self) -> dict[str, str]:
        return {"cpu": "mine:Meter"}


def test_a_config_without_an_ability_gets_the_documented_default() -> None:
    silent = Silent()
    assert abilities.required_by(silent) == frozenset()
    assert abilities.samples_alike(None) == ""
    assert abilities.logprob_band(silent, None) == 1e-3
    assert abilities.takes_stale(silent) is False
    assert abilities.rewards_read_by(silent) == frozenset()
    assert abilities.replica_slots(silent) == 1
    assert abilities.keeps_weights(silent) is True
    assert abilities.takes_adapters(silent) is True
    assert abilities.own_columns(silent) == frozenset()
    assert abilities.shows_images(None) is False
    assert abilities.updates_per_step(silent) == 1
    assert abilities.groups_per_step(silent) == 0
    assert abilities.records_per_group(silent) == 1
    assert abilities.meter_of(silent, "cpu") == ""


def test_the_answer_of_a_config_with_an_ability_is_used() -> None:
    talkative = Talkative()
    assert abilities.required_by(talkative) == {"old_logp"}
    assert abilities.samples_alike(talkative) == "temperature=0"
    assert abilities.logprob_band(talkative, Silent()) == 0.5
    assert abilities.takes_stale(talkative) is True
    assert abilities.rewards_read_by(talkative) == {"exact"}
    assert abilities.replica_slots(talkative) == 4
    assert abilities.keeps_weights(talkative) is False
    assert abilities.takes_adapters(talkative) is False
    assert abilities.own_columns(talkative) == {"values"}
    assert abilities.shows_images(talkative) is True
    assert abilities.updates_per_step(talkative) == 6
    assert abilities.groups_per_step(talkative) == 32
    assert abilities.records_per_group(talkative) == 2
    assert abilities.meter_of(talkative, "cpu") == "mine:Meter"
    assert abilities.meter_of(talkative, "cuda") == ""


def test_every_ability_belongs_to_existing_kinds() -> None:
    assert len(ABILITIES) == 24
    for ability in ABILITIES:
        assert ability.kinds and ability.kinds <= KINDS.keys()


def config_with(name: str, value: Any) -> type:
    return dataclass(type("Config", (), {name: value}))


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        ("objective", "take_stale", "takes_stale"),
        ("objective", "require", "requires"),
        ("trainer", "replica_slot", "replica_slots"),
        ("generator", "log_prob_band", "logprob_band"),
        ("generator", "keep_weight", "keeps_weights"),
        ("generator", "take_adapters", "takes_adapters"),
        ("dataset", "show_images", "shows_images"),
        ("controller", "updates_pre_step", "updates_per_step"),
        ("controller", "group_per_step", "groups_per_step"),
        ("placement", "meter", "meters"),
    ],
)
def test_a_method_within_two_edits_of_an_ability_is_a_near_miss(
    kind: str, name: str, meant: str
) -> None:
    (told,) = near_misses(kind, config_with(name, lambda self: None))
    assert told == f"the core never calls {name}(); did you mean {meant}()?"


@pytest.mark.parametrize("name", ["rate", "taken", "_take_stale", "takes_stale_records"])
def test_unrelated_names_are_no_near_miss(name: str) -> None:
    assert list(near_misses("objective", config_with(name, lambda self: None))) == []


def test_an_ability_of_another_kind_is_a_near_miss() -> None:
    (told,) = near_misses("filter", config_with("shows_images", lambda self: True))
    assert told == "the core calls shows_images() only on the config of a dataset or reward"


def test_an_ability_with_a_wrong_return_type_is_a_near_miss() -> None:
    def takes_stale(self: Any) -> str:
        return "no"

    (told,) = near_misses("objective", config_with("takes_stale", takes_stale))
    assert told == "takes_stale() returns str; write def takes_stale(self) -> bool"


async def _coroutine(self: Any) -> bool:
    return True


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (True, "'takes_stale' is no method"),
        (property(lambda self: True), "'takes_stale' is no method"),
        (lambda self, step: True, "'takes_stale' takes step, and the core calls it with nothing"),
        (_coroutine, "'takes_stale' is async, and the core does not wait for it"),
    ],
)
def test_an_ability_that_cannot_be_called_makes_a_description_invalid(
    value: Any, wrong: str
) -> None:
    provider = ObjectiveProvider(
        summary="", factory="a:B", config=config_with("takes_stale", value)
    )
    (problem,) = provider.problems("mine")
    told = f"config class Config: {wrong}; write def takes_stale(self) -> bool"
    assert problem == told


@pytest.mark.parametrize(
    "value", [lambda self: True, lambda self, step=0: True, classmethod(lambda cls: True)]
)
def test_an_ability_that_can_be_called_is_accepted(value: Any) -> None:
    config = config_with("takes_stale", value)
    assert list(wrong_signatures("objective", config)) == []
    assert list(near_misses("objective", config)) == []


def test_a_setting_may_have_the_name_of_an_ability_of_another_kind() -> None:
    config = config_with("logprob_band", None)
    assert list(wrong_signatures("controller", config)) == []
    assert list(near_misses("controller", config)) == []


def test_the_kind_of_a_description_follows_from_its_class() -> None:
    assert kind_of(ObjectiveProvider(summary="", factory="a:B")) == "objective"
