"""What the plugin says of itself holds: names, factories, configs, and that controllers stay free
of torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import subprocess
import sys

import gcore_algorithms
import msgspec
import pluggy
import pytest
from omegaconf import OmegaConf

from gcore_core.contract import hookspecs
from gcore_core.contract.algorithms import ActionAdvantage, Advantage, Objective
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.traits import traits_of

PROVIDERS = [*gcore_algorithms.gcore_advantages(), *gcore_algorithms.gcore_objectives()]
BY_NAME = {provider.name: provider for provider in PROVIDERS}
RECORD_LEVEL = ["grpo", "dr-grpo", "rloo", "reinforce-pp", "reinforce-pp-baseline"]
OBJECTIVES = ["ppo_clip", "gspo", "cispo", "sapo"]

each_provider = pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.name)


def make(name: str, **config: object) -> object:
    provider = BY_NAME[name]
    module, attribute = provider.factory.split(":")
    return getattr(importlib.import_module(module), attribute)(
        msgspec.convert(config, provider.config)
    )


def test_every_hook_it_implements_is_specified():
    manager = pluggy.PluginManager("gcore")
    manager.add_hookspecs(hookspecs)
    manager.register(gcore_algorithms)
    manager.check_pending()
    assert {hook.name for hook in manager.get_hookcallers(gcore_algorithms)} == {
        "gcore_advantages",
        "gcore_check",
        "gcore_objectives",
        "gcore_rewards",
    }


def test_the_names_are_the_documented_ones():
    assert list(BY_NAME) == [*RECORD_LEVEL, "gdpo", "gae", *OBJECTIVES]


@each_provider
def test_a_description_has_no_problems(provider):
    assert provider.problems("algorithms") == []


@each_provider
def test_what_a_factory_makes_satisfies_its_protocol_and_its_config(provider):
    made, config = make(provider.name), provider.config()
    if provider.name in OBJECTIVES:
        protocol = Objective
    else:
        protocol = ActionAdvantage if provider.level == "action" else Advantage
        assert made.group_size == config.group_size == 8
    assert isinstance(made, protocol)
    assert made.requires == traits_of(config).requires


@each_provider
def test_a_config_survives_msgspec_and_omegaconf(provider):
    config = provider.config()
    assert msgspec.convert(msgspec.to_builtins(config), provider.config) == config
    tree = OmegaConf.structured(provider.config)
    assert OmegaConf.to_object(tree) == config
    name = dataclasses.fields(provider.config)[0].name
    changed = {"group_size": 4} if name == "group_size" else {"kl": {"coefficient": 0.5}}
    merged = OmegaConf.to_container(OmegaConf.merge(tree, changed))
    assert msgspec.convert(merged, provider.config) == msgspec.convert(changed, provider.config)


@pytest.mark.parametrize("name", RECORD_LEVEL)
def test_a_kl_in_the_reward_requires_its_scalar_and_no_coefficient_requires_none(name):
    assert make(name).requires == frozenset()
    assert make(name, kl={"coefficient": 0.1, "estimator": "k3"}).requires == {"kl_k3"}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_requires_only_what_its_terms_read(name):
    assert make(name).requires == frozenset()
    assert make(name, old_logprobs="recompute").requires == {"old_logp"}
    assert make(name, kl={"coefficient": 0.1}, entropy_coefficient=0.01).requires == {
        "ref_logp",
        "entropy",
    }


def test_controllers_import_no_torch():
    code = (
        "import sys, gcore_algorithms, gcore_algorithms.advantages; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == "False"


BAD = [
    (
        "grpo",
        {"group_size": 1},
        "advantage.config.group_size: a group of 1 has no baseline",
        "algorithms/reinforce-pp",
    ),
    (
        "dr-grpo",
        {"group_size": 1},
        "advantage.config.group_size: a group of 1 has no baseline",
        "2 or more",
    ),
    (
        "rloo",
        {"group_size": 1},
        "advantage.config.group_size: a group of 1 has no baseline",
        "2 or more",
    ),
    ("reinforce-pp-baseline", {"group_size": 1}, "a group of 1 has no baseline", "2 or more"),
    (
        "reinforce-pp",
        {"group_size": 0},
        "advantage.config.group_size: 0 is not a number of records",
        "1 or more",
    ),
    ("grpo", {"eps": -1.0}, "advantage.config.eps: -1.0 is negative", "0 or more"),
    ("grpo", {"eps": math.inf}, "advantage.config.eps: inf is no finite number", "0 or more"),
    ("gae", {"gamma": 1.5}, "advantage.config.gamma: 1.5 is not between 0 and 1", "set gamma"),
    ("gae", {"kl": -0.1}, "advantage.config.kl: -0.1 is no cost", "set kl to 0 or more"),
    ("gae", {"lam": -0.5}, "advantage.config.lam: -0.5 is not between 0 and 1", "set lam"),
    (
        "ppo_clip",
        {"normalise": "constant"},
        "objective.config.constant_length: normalise: constant needs",
        "longest",
    ),
    ("gspo", {"clip_low": -0.1}, "objective.config.clip_low: -0.1 is negative", "0 or more"),
    ("cispo", {"clip_high": -0.1}, "objective.config.clip_high: -0.1 is negative", "0 or more"),
    ("ppo_clip", {"clip_low": math.nan}, "objective.config.clip_low: nan", "0 or more"),
    ("ppo_clip", {"dual_clip": math.nan}, "objective.config.dual_clip: nan", "3 is usual"),
    (
        "grpo",
        {"kl": {"coefficient": -0.1}},
        "advantage.config.kl.coefficient: -0.1 is no penalty",
        "0, which needs no reference",
    ),
    (
        "ppo_clip",
        {"kl": {"coefficient": -0.1}},
        "objective.config.kl.coefficient: -0.1 is no penalty",
        "0, which needs no reference",
    ),
    (
        "ppo_clip",
        {"dual_clip": 1.0},
        "objective.config.dual_clip: 1.0 is not above 1",
        "3 is usual",
    ),
    (
        "ppo_clip",
        {"correction": {"kind": "mask"}},
        "objective.config.old_logprobs: correction 'mask'",
        "recompute",
    ),
    (
        "ppo_clip",
        {"correction": {"cap": 0.5}},
        "objective.config.correction: the weights [0.0, 0.5]",
        "cap to 1",
    ),
    (
        "ppo_clip",
        {"old_logprobs": "interpolate"},
        "objective.config.correction.kind: old_logprobs: interpolate needs a correction",
        "truncate or mask",
    ),
    (
        "ppo_clip",
        {"stale_mask": {"older_than": -1}},
        "objective.config.stale_mask.older_than: -1 is not a number of versions",
        "0 or more",
    ),
    (
        "gspo",
        {"stale_mask": {"older_than": 2, "floor": 1.5}},
        "objective.config.stale_mask: the ratios [1.5, 2.0] do not contain 1",
        "floor between 0 and 1",
    ),
]


@pytest.mark.parametrize(("name", "config", "what", "todo"), BAD)
def test_a_bad_value_is_refused_with_where_why_and_what_to_do(name, config, what, todo):
    with pytest.raises(msgspec.ValidationError) as caught:
        make(name, **config)
    error = caught.value.__cause__
    assert isinstance(error, ConfigError)
    assert what in str(error)
    assert error.why
    assert todo in error.todo


def test_the_batch_normalised_estimator_takes_groups_of_one():
    assert make("reinforce-pp", group_size=1).group_size == 1
