"""What a config class may tell the core by its method ``traits``."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from gcore_testing.plugin_commands.descriptions import field_help

from gcore_core.contract.errors import ContractError
from gcore_core.contract.providers import KINDS, ObjectiveProvider
from gcore_core.contract.traits import (
    FORMER_METHODS,
    Traits,
    near_misses,
    traits_of,
    wrong_methods,
)


@dataclass
class Silent:
    rate: float = 1.0


@dataclass
class Talkative:
    slots: int = 4

    def traits(self) -> Traits:
        return Traits(replica_slots=self.slots, meters={"cpu": "mine:Meter"})


def test_a_config_without_the_method_has_no_traits() -> None:
    assert traits_of(None) == traits_of(Silent()) == Traits()
    assert traits_of(None).requires == frozenset()
    assert traits_of(None).replica_slots == 1


def test_traits_depend_on_settings() -> None:
    assert traits_of(Talkative(slots=2)) == Traits(replica_slots=2, meters={"cpu": "mine:Meter"})


def test_traits_can_be_copied() -> None:
    traits = Traits(takes_stale=True)
    assert copy.deepcopy(traits) == traits
    assert replace(traits, precision="int8") == Traits(takes_stale=True, precision="int8")


def test_every_field_says_what_it_promises_and_of_which_kinds() -> None:
    helps = field_help(Traits)
    for item in fields(Traits):
        assert helps[item.name].endswith("."), item.name
        assert item.metadata["kinds"] and item.metadata["kinds"] <= KINDS.keys()


@pytest.mark.parametrize(
    ("name", "meant"), [("take_stale", "takes_stale"), ("meter", "meters"), ("require", "requires")]
)
def test_a_misspelt_field_names_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(ContractError) as caught:
        Traits(**{name: True})
    assert str(caught.value) == f"Traits has no field {name!r} (did you mean {meant!r}?)."


@pytest.mark.parametrize(
    ("name", "value", "type_"),
    [
        ("requires", "old_logp", "frozenset[str]"),
        ("takes_stale", "no", "bool"),
        ("replica_slots", 1.5, "int"),
        ("meters", ("cpu",), "Mapping[str, str]"),
        ("precision", None, "str"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any, type_: str) -> None:
    with pytest.raises(ContractError) as caught:
        Traits(**{name: value})
    assert str(caught.value) == f"Traits.{name} is {type_}, not {value!r}."


def test_a_field_of_another_kind_is_named() -> None:
    traits = Traits(requires=frozenset({"values"}), shows_images=True)
    assert traits.misplaced("objective") == [
        "Traits.shows_images is of dataset, reward, not of objective"
    ]
    assert traits.misplaced("reward") == [
        "Traits.requires is of advantage, objective, not of reward"
    ]


def test_a_method_that_does_not_return_traits_is_refused() -> None:
    @dataclass
    class Wrong:
        def traits(self) -> Any:
            return {"requires"}

    @dataclass
    class Raises:
        def traits(self) -> Traits:
            raise KeyError("dtype")

    @dataclass
    class Misspells:
        def traits(self) -> Traits:
            return Traits(require=frozenset())  # type: ignore[call-arg]

    with pytest.raises(ContractError, match=r"Wrong.traits\(\) returned \{'requires'\}"):
        traits_of(Wrong())
    with pytest.raises(ContractError, match=r"Raises.traits\(\) raised KeyError: 'dtype'"):
        traits_of(Raises())
    with pytest.raises(ContractError, match=r"Misspells.traits\(\): Traits has no field 'require'"):
        traits_of(Misspells())


def config_with(name: str, value: Any) -> type:
    return dataclass(type("Config", (), {name: value}))


async def _coroutine(self: Any) -> Traits:
    return Traits()


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (True, "'traits' is no method"),
        (property(lambda self: Traits()), "'traits' is no method"),
        (lambda self, step: Traits(), "'traits' takes arguments, and the core gives it none"),
        (_coroutine, "'traits' is async, and the core does not wait for it"),
    ],
)
def test_a_method_that_cannot_be_called_makes_a_description_invalid(value: Any, wrong: str) -> None:
    provider = ObjectiveProvider(summary="", factory="a:B", config=config_with("traits", value))
    (problem,) = provider.problems("mine")
    assert problem == f"config class Config: {wrong}; write def traits(self) -> Traits"


@pytest.mark.parametrize("name", ["traits", "rate", "_takes_stale"])
def test_a_method_that_the_core_calls_or_that_is_the_plugins_own_is_accepted(name: str) -> None:
    config = config_with(name, lambda self: Traits())
    assert list(wrong_methods(config)) == list(near_misses(config)) == []


@pytest.mark.parametrize(
    ("name", "todo"),
    [
        ("takes_stale", "return Traits(takes_stale=...) from traits()"),
        ("keeps_weights", "check it yourself"),
        ("compares_samples", "check it yourself"),
    ],
)
def test_a_method_that_the_core_once_called_is_refused(name: str, todo: str) -> None:
    (told,) = wrong_methods(config_with(name, lambda self: True))
    assert told == f"the core does not call {name}(); {todo}, see docs/how-to/move-to-0.3.md"


def test_every_former_method_has_a_field() -> None:
    assert set(FORMER_METHODS.values()) <= {"", *(item.name for item in fields(Traits))}


def test_a_setting_may_have_the_name_of_a_trait() -> None:
    assert list(wrong_methods(config_with("logprob_band", None))) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trait", "traits()"),
        ("get_traits", "traits()"),
        ("take_stale", "Traits(takes_stale=...) of traits()"),
        ("updates_pre_step", "Traits(updates_per_step=...) of traits()"),
    ],
)
def test_a_method_of_nearly_such_a_name_is_a_near_miss(name: str, meant: str) -> None:
    (told,) = near_misses(config_with(name, lambda self: None))
    assert told == f"the core never calls {name}(); did you mean {meant}?"
