"""Two dtypes of one policy, and contexts that slots cannot share, are refused before a start."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gcore_language.context.settings import ContextSettings
from gcore_language.lora_settings import LoraSettings
from gcore_language.shared_settings import ValueHeadSettings
from gcore_language.twins import twin_of_role
from gcore_torch import gcore_check, gcore_check_files, narrow_dtypes
from gcore_torch.config import TorchTrainerConfig
from gcore_torch.expert_parallel import spread_experts
from gcore_torch.mesh import refuse_images
from gcore_torch.offload_settings import OffloadSettings
from gcore_torch.sharding_settings import ShardingSettings

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.looking import Look
from gcore_core.contract.traits import traits_of

#: Shows nothing of what is chosen.
JOB: Any = SimpleNamespace(objects={}, provided={})


def plan(policy: dict[str, Any], rollout: dict[str, Any], use: str = "torch") -> dict[str, Any]:
    roles = {
        "policy": {"use": "any", "config": policy},
        "rollout": {"use": use, "config": rollout},
        "judge": {"use": "torch", "config": {"dtype": "float16"}, "follows": None},
    }
    return {"roles": roles}


def test_two_dtypes_are_refused_with_the_key_to_set() -> None:
    assert list(gcore_check(plan({"dtype": "bfloat16"}, {"dtype": "float32"}), JOB)) == [
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
    assert list(gcore_check(fits, JOB)) == []


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
        assert list(gcore_check(sharing({"ulysses": ulysses}, tmp_path), JOB)) == [
            f"roles.policy.config.context.ulysses: {problem}; take more ring and less ulysses."
        ]
    for ulysses in (1, 2, 4, 12):
        assert list(gcore_check(sharing({"ulysses": ulysses, "ring": 3}, tmp_path), JOB)) == []


def test_a_deterministic_run_and_shared_contexts_are_refused_together() -> None:
    (problem,) = gcore_check(sharing({"ring": 2}, deterministic=True), JOB)
    assert problem.startswith("roles.policy.config.context: ")
    assert "run.deterministic" in problem
    assert list(gcore_check(sharing({"ring": 1}, deterministic=True), JOB)) == []


@pytest.mark.parametrize(
    "setting",
    [
        {"packing": "padded"},
        {"packing": "shared_prompt"},
        {"attn_implementation": "eager"},
        {"sharding": ShardingSettings(tensor=2)},
        {"sharding": ShardingSettings(experts=2)},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_is_not_tested_with_shared_contexts_is_refused(setting: dict[str, Any]) -> None:
    TorchTrainerConfig(**setting)
    with pytest.raises(ConfigError, match="context") as caught:
        TorchTrainerConfig(**setting, context=ContextSettings(ring=2))
    where = caught.value.where
    assert where is not None and where.startswith(next(iter(setting)))


@pytest.mark.parametrize(
    "setting",
    [
        {"dtype": "bfloat16"},
        {"lora": LoraSettings(rank=2)},
        {"value_head": ValueHeadSettings(coefficient=0.5)},
        {
            "offload": OffloadSettings(state=True, activations=True),
            "gradient_checkpointing": True,
        },
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_slots_that_share_contexts_can_do_beside_is_taken(setting: dict[str, Any]) -> None:
    shared = TorchTrainerConfig(**setting, context=ContextSettings(ring=2))
    assert traits_of(shared).replica_slots == 2


def test_sizes_below_one_are_refused() -> None:
    for name in ("ulysses", "ring"):
        with pytest.raises(ConfigError, match="at least 1, is 0"):
            ContextSettings(**{name: 0})


def test_slots_that_share_contexts_are_one_replica() -> None:
    assert traits_of(TorchTrainerConfig()).replica_slots == 1
    shared = TorchTrainerConfig(context=ContextSettings(ulysses=2, ring=4))
    assert traits_of(shared).replica_slots == 8


def sharded(sharding: dict[str, Any], slots: int = 4, **run: Any) -> dict[str, Any]:
    role = {"use": "torch", "config": {"sharding": sharding}, "slots": slots}
    return {"roles": {"policy": role}, "run": run}


def test_slots_that_cannot_be_divided_into_replicas_are_refused_before_a_start() -> None:
    assert list(gcore_check(sharded({"replicas": 3}), JOB)) == [
        "roles.policy.config.sharding.replicas: 4 slots cannot be divided into 3 replicas; take a "
        "number that divides slots."
    ]
    for replicas in (1, 2, 4):
        assert list(gcore_check(sharded({"replicas": replicas}), JOB)) == []


def test_layers_that_slots_cannot_split_are_refused_before_a_start(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(sizes))

    def found(tensor: int) -> list[str]:
        plan = sharded({"tensor": tensor}, slots=tensor)
        plan["roles"]["policy"]["model"] = {"path": str(tmp_path)}
        return list(gcore_check(plan, JOB))

    assert found(2) == found(4) == []
    assert found(3) == [
        "roles.policy.config.sharding.tensor: 4 key-value heads cannot be divided among 3 slots; "
        "take a smaller number."
    ]
    (problem,) = gcore_check(sharded({"tensor": 2}, deterministic=True), JOB)
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
    assert traits_of(TorchTrainerConfig(sharding=ShardingSettings(tensor=2))).replica_slots == 2
    with pytest.raises(ConfigError, match="does not go with replicas"):
        ShardingSettings(tensor=2, replicas=2)


@pytest.mark.parametrize(
    ("section", "settings"), [("sharding", ShardingSettings), ("context", ContextSettings)]
)
def test_a_twin_s_trainer_is_whole_however_the_job_splits_the_model(
    section: str, settings: type[Any], tmp_path: Path
) -> None:
    """A twin's settings are merged over the job's, so each size must be among them."""
    sizes = [one.name for one in dataclasses.fields(settings) if isinstance(one.default, int)]
    split = dict.fromkeys(sizes, 4)
    twin = twin_of_role({"config": {section: split}}, tmp_path)["config"][section]
    assert settings(**{**split, **twin}) == settings()


def spread(experts: int, sizes: dict[str, Any], path: Path, **run: Any) -> list[str]:
    """Returns the problems of a trainer of four slots whose experts are spread."""
    (path / "config.json").write_text(json.dumps(sizes))
    found = sharded({"experts": experts}, **run)
    found["roles"]["policy"]["model"] = {"path": str(path)}
    return list(gcore_check(found, JOB))


def test_experts_that_slots_cannot_share_are_refused_before_a_start(tmp_path: Path) -> None:
    qwen = {"model_type": "qwen3_moe", "num_experts": 6}
    mixtral = {"model_type": "mixtral", "num_local_experts": 8}
    assert spread(2, qwen, tmp_path) == spread(4, mixtral, tmp_path) == []
    where = "roles.policy.config.sharding.experts: "
    assert spread(4, qwen, tmp_path) == [
        f"{where}6 experts cannot be divided among 4 slots; take a smaller number."
    ]
    assert spread(3, qwen, tmp_path) == [
        f"{where}4 slots cannot be divided into groups of 3; take a number that divides slots."
    ]
    for family in ("llama", "olmoe"):
        assert spread(2, {"model_type": family, "num_experts": 8}, tmp_path) == [
            f"{where}the experts of a model of the family {family} cannot be spread; tested are "
            "mixtral, qwen3_moe; take a smaller number."
        ]
    (problem,) = spread(2, qwen, tmp_path, deterministic=True)
    assert problem.startswith(where) and "run.deterministic" in problem


@pytest.mark.parametrize(
    "setting",
    [
        {"lora": LoraSettings(rank=2)},
        {"attn_implementation": "eager"},
        {"context": ContextSettings(ring=2)},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_is_not_tested_with_spread_experts_is_refused(setting: dict[str, Any]) -> None:
    TorchTrainerConfig(**setting)
    with pytest.raises(ConfigError, match="experts"):
        TorchTrainerConfig(**setting, sharding=ShardingSettings(experts=2))


def test_a_trainer_says_why_experts_cannot_be_spread_once_it_has_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a name on the hub, of which ``g-core check`` knows nothing, and an old transformers."""
    mesh = SimpleNamespace(size=lambda: 2)
    dense = SimpleNamespace(config=SimpleNamespace(model_type="llama"))
    with pytest.raises(ConfigError, match="of the family llama cannot be spread") as caught:
        spread_experts(dense, mesh, "policy")
    assert caught.value.where == "roles.policy.config.sharding.experts"
    sizes = SimpleNamespace(model_type="mixtral", num_local_experts=8)
    monkeypatch.setitem(sys.modules, "transformers.distributed.tensor_parallel", None)
    with pytest.raises(ConfigError, match="Install transformers 5.19 or newer"):
        spread_experts(SimpleNamespace(config=sizes), mesh, "policy")


@pytest.mark.parametrize("other", ["replicas", "tensor"])
def test_spread_experts_go_with_no_other_layout(other: str) -> None:
    with pytest.raises(ConfigError, match="neither with replicas nor with tensor"):
        ShardingSettings(**{"experts": 2, other: 2})


def test_slots_that_experts_are_spread_over_have_records_of_their_own() -> None:
    assert traits_of(TorchTrainerConfig(sharding=ShardingSettings(experts=2))).replica_slots == 1


def test_what_is_not_tested_with_replicas_is_refused() -> None:
    (problem,) = gcore_check(sharded({"replicas": 2}, deterministic=True), JOB)
    assert problem.startswith("roles.policy.config.sharding.replicas: ")
    replicas = ShardingSettings(replicas=2)
    with pytest.raises(ConfigError, match="takes images"):
        refuse_images(replicas, "policy")
    with pytest.raises(ConfigError, match="at least 1, is 0"):
        ShardingSettings(replicas=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is faster in bfloat16")
def test_bfloat16_is_noted_where_a_cpu_is_not_faster_in_it(tmp_path: Path) -> None:
    cpu = tmp_path / "cpuinfo"
    arguments = {"dtype": "bfloat16", "cpu": str(cpu)}
    cpu.write_text("flags : fpu avx512f\n")
    (note,) = narrow_dtypes.notes(arguments)
    assert "bfloat16 is not faster on this CPU" in note and "float32" in note
    for flag in ("amx_bf16", "avx512_bf16", "bf16"):
        cpu.write_text(f"flags : fpu {flag} amx_tile\n")
        assert list(narrow_dtypes.notes(arguments)) == []
    assert list(narrow_dtypes.notes({**arguments, "cpu": str(tmp_path / "none")})) == []


def test_a_narrow_dtype_is_looked_at_where_workers_start_here() -> None:
    job = {
        "roles": {
            "policy": {"use": "torch", "config": {"dtype": "bfloat16"}, "python": "venv:mine"},
            "rollout": {"use": "torch", "config": {"dtype": "float32"}},
            "judge": {"use": "vllm", "config": {"dtype": "bfloat16"}},
        }
    }
    looks = [look for look in gcore_check_files(job, True, {}) if isinstance(look, Look)]
    found = [(look.where, look.python) for look in looks if "narrow" in look.function]
    assert found == [("roles.policy.config.dtype", "venv:mine")]
    assert list(gcore_check_files(job, False, {})) == []
