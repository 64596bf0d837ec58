"""What ``g-core check`` says of jobs with a critic, before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gcore_core.config.plan import Plan, load_plan, trained_roles
from gcore_core.contract.errors import ConfigError

ROLES = {
    "policy": {"use": "torch", "model": {"path": "org/model"}},
    "rollout": {"use": "torch"},
    "critic": {"use": "torch"},
}


def plan_of(directory: Path, *overrides: str, **changes: Any) -> Plan:
    """Resolves a small job of PPO."""
    job: dict[str, Any] = {
        "plugins": ["critic"],
        "data": {"config": {"path": "rows.jsonl"}},
        "advantage": {"use": "algorithms/gae"},
        "objective": {"use": "algorithms/ppo_clip"},
        "roles": ROLES,
        "rewards": {"one": {"use": "core/function", "config": {"path": "f.py", "name": "one"}}},
    }
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(job | changes))
    return load_plan(file, overrides)


def test_a_critic_takes_what_the_policy_and_its_plugin_say(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert trained_roles(plan) == ["critic", "policy"]
    assert plan.settings.roles["critic"].model == plan.settings.roles["policy"].model
    assert plan.provided["roles.critic.objective"].reference == "critic"
    assert plan.at("roles.critic.objective.config") == {"clip": 0.2}
    assert "clip = 0.2" in plan.why("roles.critic.objective")
    changed = plan_of(tmp_path, "roles.critic.objective.config.clip=0.5", "roles.critic.epochs=3")
    assert changed.at("roles.critic.objective.config.clip") == 0.5
    assert changed.at("roles.critic.epochs") == 3


WITHOUT = {"roles": {name: role for name, role in ROLES.items() if name != "critic"}}


@pytest.mark.parametrize(
    ("overrides", "changes", "problem"),
    [
        ([], WITHOUT, "advantage: requires 'values', which roles.critic gives; add that role."),
        (
            ["plugins=[]"],
            WITHOUT,
            "advantage: requires 'values', which nothing supplies: no loaded plugin has a role",
        ),
        (
            ["advantage.use=algorithms/grpo"],
            {},
            "roles.critic: nothing requires what it gives (values, next_values); choose an ",
        ),
        (
            ["roles.critic.use=fake"],
            {
                "local": [
                    str(Path(__file__).parents[4] / "plugins/gcore-testing/gcore_testing/fake.py")
                ]
            },
            "roles.critic.use: fake has no value head, which roles.critic.objective ",
        ),
        (
            ["roles.policy.use=fake"],
            {
                "local": [
                    str(Path(__file__).parents[4] / "plugins/gcore-testing/gcore_testing/fake.py")
                ]
            },
            "roles.policy.use: fake cannot compute advantages for each action, as algorithms/gae",
        ),
        (["advantage.config.kl=0.1"], {}, "advantage: requires 'ref_logp', which nothing supplies"),
        (
            ["advantage.use=algorithms/grpo", "roles.critic.head_start=2"],
            {},
            "roles.critic.head_start: needs an advantage that is computed for each action",
        ),
        (
            ["roles.policy.minibatches=2"],
            {},
            "roles.policy.minibatches: only a trainer besides the policy has it; set controller.",
        ),
        (
            ["roles.rollout.head_start=2"],
            {},
            "roles.rollout.head_start: only a trainer besides the policy has it.",
        ),
        (
            ["roles.policy.objective={use: critic}"],
            {},
            "roles.policy.objective: only a trainer besides the policy has one; leave it out.",
        ),
        (
            ["roles.critic.objective.config.clip=-1"],
            {},
            "roles.critic.objective.config.clip: -1.0 is no distance",
        ),
    ],
)
def test_a_job_that_could_not_run_is_refused(
    overrides: list[str], changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(tmp_path, *overrides, **changes)
    found = "\n".join([str(caught.value), *caught.value.facts.get("problems", [])])
    assert problem in found


SHARED = "roles.policy.config.value_head.coefficient=0.5"


def test_a_policy_with_a_value_head_needs_no_critic(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, SHARED, **WITHOUT)
    assert trained_roles(plan) == ["policy"]
    assert plan.at("roles.policy.config.value_head.clip") == 0.2


@pytest.mark.parametrize(
    "layout", ["sharding.replicas=2", "sharding.tensor=2", "offload.state=true"]
)
def test_slots_may_share_a_policy_with_a_value_head(layout: str, tmp_path: Path) -> None:
    overrides = [SHARED, "roles.policy.slots=2", f"roles.policy.config.{layout}"]
    assert plan_of(tmp_path, *overrides, **WITHOUT).at("roles.policy.slots") == 2


@pytest.mark.parametrize(
    ("overrides", "changes", "problem"),
    [
        ([SHARED], {}, "roles.policy.config: computes 'values', as roles.critic does; leave one"),
        (
            [SHARED, "advantage.use=algorithms/grpo"],
            WITHOUT,
            "computes next_values, values, and the advantage requires none of them",
        ),
        (
            ["roles.critic.config.value_head.coefficient=0.5"],
            {},
            "roles.critic.config: computes next_values, values for an advantage of its own, and ",
        ),
        ([f"{SHARED}", "roles.policy.use=deepspeed"], WITHOUT, "value_head"),
        ([f"{SHARED}", "roles.policy.use=megatron"], WITHOUT, "value_head"),
        (
            [SHARED, "roles.policy.config.lora.rank=4"],
            WITHOUT,
            "roles.policy.config.value_head: does not go with lora",
        ),
    ],
)
def test_a_value_head_that_could_not_train_is_refused(
    overrides: list[str], changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(tmp_path, *overrides, **changes)
    found = "\n".join([str(caught.value), *caught.value.facts.get("problems", [])])
    assert problem in found
