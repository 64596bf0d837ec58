"""Two dtypes of one policy, and contexts that slots cannot share, are refused before a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gcore_context.settings import ContextSettings
from gcore_language.lora_settings import LoraSettings
from gcore_torch import gcore_check
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.mesh import refuse_images
from gcore_torch.offload_settings import OffloadSettings
from gcore_torch.sharding_settings import ShardingSettings

from gcore_core.contract.abilities import replica_slots
from gcore_core.contract.errors import ConfigError


def plan(policy: dict[str, Any], rollout: dict[str, Any], use: str = "torch") -> dict[str, Any]:
    roles = {
        "policy": {"use": "any", "config": policy},
        "rollout": {"use": use, "config": rollout},
        "judge": {"use": "torch", "config": {"dtype": "float16"}, "follows": None},
    }
    return {"roles": roles}


def test_two_dtypes_are_refused_with_the_key_to_set() -> None:
    assert list(gcore_check(plan({"dtype": "bfloat16"}, {"dtype": "float32"}))) == [
        "roles.rollout.config.dtype: the policy pushes bfloat16 weights, and this generator would "
        "hold float32; set it to bfloat16."
    ]


@pytest.mark.parametrize(
    "fits",
    [
        plan({"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        plan({}, {"dtype": "float32"}),
        plan({"dtype": "bfloat16"}, {"dtype": "float32"}, use="another"),
        {"roles": {"rollout": {"use": "torch", "config": {"dtype": "float32"}}}},
    ],
    ids=["one", "unknown", "of-another-plugin", "no-policy"],
)
def test_what_may_fit_passes(fits: dict[str, Any]) -> None:
    assert list(gcore_check(fits)) == []


def sharing(context: dict[str, Any], path: Path | None = None, **run: Any) -> dict[str, Any]:
    model = {"path": str(path)} if path else {}
    role = {"use": "torch", "config": {"context": context}, "model": model}
    return {"roles": {"policy": role}, "run": run}


def test_heads_that_cannot_be_divided_among_slots_are_refused_before_a_start(
    tmp_path: Path,
) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(heads))
    for ulysses, problem in (
        (8, "12 query heads cannot be divided among 8 slots"),
        (6, "4 key-value heads can be neither divided among 6 slots nor repeated"),
    ):
        assert list(gcore_check(sharing({"ulysses": ulysses}, tmp_path))) == [
            f"roles.policy.config.context.ulysses: {problem}; take more ring and less ulysses."
        ]
    for ulysses in (1, 2, 4, 12):
        assert list(gcore_check(sharing({"ulysses": ulysses, "ring": 3}, tmp_path))) == []


def test_a_deterministic_run_and_shared_contexts_are_refused_together() -> None:
    (problem,) = gcore_check(sharing({"ring": 2}, deterministic=True))
    assert problem.startswith("roles.policy.config.context: ")
    assert "run.deterministic" in problem
    assert list(gcore_check(sharing({"ring": 1}, deterministic=True))) == []


@pytest.mark.parametrize(
    "setting",
    [
        {"packing": "padded"},
        {"packing": "shared_prompt"},
        {"attn_implementation": "eager"},
        {"dtype": "bfloat16"},
        {"lora": LoraSettings(rank=2)},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_is_not_tested_with_shared_contexts_is_refused(setting: dict[str, Any]) -> None:
    TorchTrainerConfig(**setting)
    with pytest.raises(ConfigError, match="context") as caught:
        TorchTrainerConfig(**setting, context=ContextSettings(ring=2))
    assert caught.value.where == next(iter(setting))


def test_sizes_below_one_are_refused() -> None:
    for name in ("ulysses", "ring"):
        with pytest.raises(ConfigError, match="at least 1, is 0"):
            ContextSettings(**{name: 0})


def test_slots_that_share_contexts_are_one_replica() -> None:
    assert replica_slots(TorchTrainerConfig()) == 1
    shared = TorchTrainerConfig(context=ContextSettings(ulysses=2, ring=4))
    assert replica_slots(shared) == 8


def sharded(sharding: dict[str, Any], slots: int = 4, **run: Any) -> dict[str, Any]:
    role = {"use": "torch", "config": {"sharding": sharding}, "slots": slots}
    return {"roles": {"policy": role}, "run": run}


def test_slots_that_cannot_be_divided_into_replicas_are_refused_before_a_start() -> None:
    assert list(gcore_check(sharded({"replicas": 3}))) == [
        "roles.policy.config.sharding.replicas: 4 slots cannot be divided into 3 replicas; take a "
        "number that divides slots."
    ]
    for replicas in (1, 2, 4):
        assert list(gcore_check(sharded({"replicas": replicas}))) == []


def test_layers_that_slots_cannot_split_are_refused_before_a_start(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(sizes))

    def found(tensor: int) -> list[str]:
        plan = sharded({"tensor": tensor}, slots=tensor)
        plan["roles"]["policy"]["model"] = {"path": str(tmp_path)}
        return list(gcore_check(plan))

    assert found(2) == found(4) == []
    assert found(3) == [
        "roles.policy.config.sharding.tensor: 4 key-value heads cannot be divided among 3 slots; "
        "take a smaller number."
    ]
    (problem,) = gcore_check(sharded({"tensor": 2}, deterministic=True))
    assert problem.startswith("roles.policy.config.sharding.tensor: ")


@pytest.mark.parametrize(
    "setting",
    [
        {"lora": LoraSettings(rank=2)},
        {"offload": OffloadSettings(state=True)},
        {"dtype": "bfloat16"},
        {"attn_implementation": "eager"},
        {"context": ContextSettings(ring=2)},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_is_not_tested_with_split_layers_is_refused(setting: dict[str, Any]) -> None:
    TorchTrainerConfig(**setting)
    with pytest.raises(ConfigError, match="sharding"):
        TorchTrainerConfig(**setting, sharding=ShardingSettings(tensor=2))


def test_slots_that_split_the_layers_are_one_replica() -> None:
    assert replica_slots(TorchTrainerConfig(sharding=ShardingSettings(tensor=2))) == 2
    with pytest.raises(ConfigError, match="does not go with replicas"):
        ShardingSettings(tensor=2, replicas=2)


def test_what_is_not_tested_with_replicas_is_refused() -> None:
    (problem,) = gcore_check(sharded({"replicas": 2}, deterministic=True))
    assert problem.startswith("roles.policy.config.sharding.replicas: ")
    replicas = ShardingSettings(replicas=2)
    with pytest.raises(ConfigError, match="does not go with context"):
        TorchTrainerConfig(sharding=replicas, context=ContextSettings(ring=2))
    with pytest.raises(ConfigError, match="takes images"):
        refuse_images(replicas, "policy")
    with pytest.raises(ConfigError, match="at least 1, is 0"):
        ShardingSettings(replicas=0)
