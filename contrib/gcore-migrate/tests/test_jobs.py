"""Jobs of real configurations: that they can be loaded, and how much of them is taken over.

``examples.json`` has what examples of verl and TRL set: every tenth shell script of verl's that
trains by one of the algorithms here, and every command in the head of a script of TRL's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from gcore_migrate import trl, verl
from gcore_migrate.commands import job_of_trl, job_of_verl
from gcore_migrate.rules import Draft, Outcome, Rule
from gcore_migrate.writing import written

from gcore_core.config.plan import load_plan
from gcore_core.contract.errors import ConfigError

EXAMPLES = json.loads(Path(__file__).with_name("examples.json").read_text())
VERL: Mapping[str, Any] = EXAMPLES["verl"]["configurations"]
TRL: Mapping[str, Any] = EXAMPLES["trl"]["configurations"]


def drafted(trainer: str, name: str) -> tuple[Draft, list[Outcome]]:
    if trainer == "verl":
        return job_of_verl(VERL[name])
    return job_of_trl(TRL[name]["kind"], TRL[name]["given"])


ALL = [("verl", name) for name in VERL] + [("trl", name) for name in TRL]


#: What a job may lack where it is made: engines, files, variables of the environment. Anything else
#: is a wrong job.
LACKING = re.compile(
    "has no (vLLM|SGLang|Megatron)|no venv|no such file|Environment variable",
    re.IGNORECASE,
)


@pytest.mark.parametrize(("trainer", "name"), ALL)
def test_a_job_is_one_that_can_be_loaded(trainer: str, name: str, tmp_path: Path) -> None:
    """It is loaded and checked as ``g-core check`` does it; this machine may lack what it needs."""
    draft, outcomes = drafted(trainer, name)
    job = tmp_path / "job.yaml"
    job.write_text(written(draft, outcomes, "an example"))
    try:
        load_plan(job)
    except ConfigError as error:
        wrong = [
            problem
            for problem in error.facts.get("problems", [str(error)])
            if not LACKING.search(problem)
        ]
        assert not wrong
    for outcome in outcomes:
        assert all(draft.has(target) for target in outcome.targets)


@pytest.mark.parametrize(("trainer", "name"), ALL)
def test_every_key_is_taken_over_or_it_is_said_why_not(trainer: str, name: str) -> None:
    draft, outcomes = drafted(trainer, name)
    text = written(draft, outcomes, "an example")
    given = VERL[name] if trainer == "verl" else TRL[name]["given"]
    assert [outcome.key for outcome in outcomes] == list(given)
    for outcome in outcomes:
        assert bool(outcome.targets) != bool(outcome.why), outcome
        assert outcome.targets or f"#   {outcome.key}=" in text
    assert yaml.safe_load(text) == draft.job


@pytest.mark.parametrize(("trainer", "configurations"), [("verl", VERL), ("trl", TRL)])
def test_four_of_five_keys_are_taken_over(trainer: str, configurations: Mapping[str, Any]) -> None:
    outcomes = [each for name in configurations for each in drafted(trainer, name)[1]]
    taken = sum(bool(outcome.targets) for outcome in outcomes)
    assert taken / len(outcomes) >= 0.8, f"{trainer}: {taken} of {len(outcomes)}"


def test_a_tracker_becomes_an_observer_in_its_project() -> None:
    given = {"trainer.logger": ["console", "wandb"], "trainer.project_name": "math"}
    draft, outcomes = job_of_verl(given)
    assert draft.job["observers"] == {
        "wandb": {"use": "trackers/wandb", "config": {"project": "math"}}
    }
    assert all(outcome.targets for outcome in outcomes)
    draft, outcomes = job_of_verl({"trainer.logger": ["console"]})
    assert "observers" not in draft.job and not outcomes[0].targets


def test_a_variable_of_the_environment_stays_one() -> None:
    tokens = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    other = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
    job = job_of_verl({tokens: "${oc.env:TOKENS}", other: 4096})[0].job
    assert job["roles"]["policy"]["config"]["budget_tokens"] == "${oc.env:TOKENS}"


def test_variables_of_a_chat_template_go_to_the_generator() -> None:
    job = job_of_verl({"data.apply_chat_template_kwargs.enable_thinking": False})[0].job
    assert job["roles"]["rollout"]["config"]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("rules", [verl.RULES, trl.RULES], ids=["verl", "trl"])
def test_a_rule_sets_no_key_but_those_that_it_names(rules: Mapping[str, Rule]) -> None:
    """Its table in the documents is made of these names."""
    trainer = "verl" if rules is verl.RULES else "trl"
    for name in VERL if trainer == "verl" else TRL:
        for outcome in drafted(trainer, name)[1]:
            rule = rules.get(outcome.key)
            for target in outcome.targets if rule is not None else ():
                assert any(
                    target == named or target.startswith(f"{named}.") for named in rule.targets
                ), (outcome.key, target)


def test_the_numbers_of_a_known_configuration_are_these() -> None:
    """GRPO on GSM8K: 1,024 prompts, minibatches of 256, 5 answers, KL in the loss."""
    job = job_of_verl(
        {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": "train.parquet",
            "data.train_batch_size": 1024,
            "data.max_prompt_length": 512,
            "data.max_response_length": 1024,
            "actor_rollout_ref.model.path": "Qwen/Qwen2.5-3B-Instruct",
            "actor_rollout_ref.actor.optim.lr": 3e-6,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 40,
            "actor_rollout_ref.actor.use_kl_loss": True,
            "actor_rollout_ref.actor.kl_loss_coef": 0.001,
            "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
            "actor_rollout_ref.rollout.n": 5,
            "trainer.total_training_steps": 30,
        }
    )[0].job
    assert job["controller"] == {"use": "core/sync", "config": {"prompts": 1024, "minibatches": 4}}
    assert job["advantage"] == {"use": "algorithms/grpo", "config": {"group_size": 5}}
    assert job["objective"]["config"]["kl"] == {"coefficient": 0.001, "estimator": "k3"}
    assert job["roles"]["policy"]["config"]["budget_tokens"] == 40 * 1536
    assert job["roles"]["rollout"]["config"] == {"context_length": 1536, "max_new_tokens": 1024}
    assert job["run"]["steps"] == 30


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_keeps_its_devices_and_its_sleep(engine: str) -> None:
    """Whichever of its keys stands first."""
    rollout = "actor_rollout_ref.rollout"
    given = {
        f"{rollout}.name": engine,
        f"{rollout}.tensor_model_parallel_size": 2,
        f"{rollout}.free_cache_engine": True,
    }
    for in_order in (given, dict(reversed(given.items()))):
        draft, outcomes = job_of_verl(in_order)
        assert draft.job["roles"]["rollout"]["use"] == f"{engine}/sleeping"
        assert draft.job["roles"]["rollout"]["config"]["tensor_parallel"] == 2
        assert all(outcome.targets for outcome in outcomes)


def test_experts_are_spread_over_as_many_slots() -> None:
    actor = "actor_rollout_ref.actor"
    given = {
        f"{actor}.strategy": "megatron",
        f"{actor}.megatron.expert_model_parallel_size": 8,
    }
    assert job_of_verl(given)[0].job["roles"]["policy"]["config"]["expert_parallel"] == 8


def test_verl_s_own_defaults_are_said_where_ours_are_others() -> None:
    job = job_of_verl({"actor_rollout_ref.model.path": "org/model"})[0].job
    assert job["advantage"]["config"]["lam"] == 1.0
    assert job["objective"]["config"]["dual_clip"] == 3.0
    assert job["roles"]["critic"]["config"]["learning_rate"] == 1e-5
    assert job["roles"]["critic"]["objective"] == {"use": "critic", "config": {"clip": 0.5}}
    grpo = job_of_verl({"algorithm.adv_estimator": "grpo"})[0].job
    assert "critic" not in grpo["roles"] and "lam" not in grpo["advantage"]["config"]


def test_a_clip_of_one_side_stays_whichever_key_stands_first() -> None:
    actor = "actor_rollout_ref.actor"
    given = {f"{actor}.clip_ratio_high": 0.28, f"{actor}.clip_ratio": 0.2}
    for in_order in (given, dict(reversed(given.items()))):
        config = job_of_verl(in_order)[0].job["objective"]["config"]
        assert (config["clip_low"], config["clip_high"]) == (0.2, 0.28)


def test_a_job_says_how_its_reward_functions_are_called() -> None:
    drafts = (
        job_of_verl({"custom_reward_function.path": "mine.py"})[0],
        job_of_trl("grpo", {"reward_funcs": "mine.right"})[0],
    )
    for draft in drafts:
        assert any("gets one record, with record.text" in todo for todo in draft.todo)


@pytest.mark.parametrize(("trainer", "key"), [("verl", "trainer.logger"), ("trl", "report_to")])
def test_no_tracker_is_left_out_without_a_word(trainer: str, key: str) -> None:
    def made(names: list[str]) -> tuple[Draft, list[Outcome]]:
        given = {key: names}
        return job_of_verl(given) if trainer == "verl" else job_of_trl("grpo", given)

    draft, (alone,) = made(["console", "wandb"])
    assert alone.targets == ("observers.wandb.use",)
    assert any("install gcore-report[wandb]" in todo for todo in draft.todo)
    _, (both,) = made(["tensorboard", "wandb"])
    assert both.targets == ("plugins.report", "observers.wandb.use")


def test_a_name_of_a_run_can_be_that_of_a_directory() -> None:
    assert job_of_verl({"trainer.experiment_name": "qwen/4b"})[0].job["run"]["name"] == "qwen-4b"
    assert job_of_trl("grpo", {"run_name": "qwen/4b"})[0].job["run"]["name"] == "qwen-4b"


@pytest.mark.parametrize("offloads", [True, False])
def test_a_trainer_on_megatron_that_verl_offloads_sleeps(offloads: bool) -> None:
    actor = "actor_rollout_ref.actor"
    given = {f"{actor}.strategy": "megatron", f"{actor}.megatron.param_offload": offloads}
    given |= {f"{actor}.megatron.{what}_offload": False for what in ("grad", "optimizer")}
    draft, outcomes = job_of_verl(given)
    assert draft.job["roles"]["policy"]["use"] == "megatron"
    expected = "always" if offloads else "never"
    assert draft.job["placement"] == {"sleep_in_rollout": expected}
    assert all(outcome.targets for outcome in outcomes)


def test_vllm_sleeps_for_trl_whichever_of_its_keys_stands_first() -> None:
    given = {"use_vllm": True, "vllm_enable_sleep_mode": True}
    for in_order in (given, dict(reversed(given.items()))):
        job = job_of_trl("grpo", in_order)[0].job
        assert job["roles"]["rollout"]["use"] == "vllm/sleeping"


@pytest.mark.parametrize("epochs", [0.5, 2, 3.0])
def test_a_part_of_an_epoch_stays_one(epochs: float) -> None:
    assert job_of_trl("grpo", {"num_train_epochs": epochs})[0].job["run"]["epochs"] == epochs


def test_trl_counts_records_and_a_job_counts_prompts() -> None:
    """8 records a pass, 2 passes an update, 8 passes drawn at a time, in groups of 8."""
    given = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 8,
        "num_generations": 8,
    }
    job = job_of_trl("grpo", given)[0].job
    assert job["controller"]["config"] == {"prompts": 8, "minibatches": 4}
