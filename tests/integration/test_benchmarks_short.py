"""Every benchmark still runs on the present code: each in the shortest form that it has.

Those of more than ten seconds are slow: `tox run -e full` runs them. engine_pairs,
engine_overhead and proved_engines run with torch alone here; the stage `engines` runs pairs of real
engines.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SLOW = pytest.mark.slow

#: from the values of the claims to whether what no machine changes is so
Fact = Callable[[Mapping[str, float]], bool]


def short(name: str, *words: str, fact: Fact, repeats: bool = False, slow: bool = False) -> object:
    """A benchmark and its words.

    fact: what holds on every machine, however busy: counts, bytes, bits, and no time.
    repeats: whether the words ask for three rounds or more, so that there are intervals.
    """
    return pytest.param(name, words, fact, repeats, id=name, marks=[SLOW] if slow else [])


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Benchmark -> the script that measures it."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    measured = importlib.import_module("measured")
    try:
        return {benchmark.name: benchmark.script for benchmark in measured.BENCHMARKS}
    finally:
        del sys.modules["measured"]


def _sizes_are_those_of_rates(values: Mapping[str, float]) -> bool:
    """Whether 64 MB is what the rate says for the time."""
    return math.isclose(values["handover_gb_per_second"] * values["handover_ms"], 64)


def _no_part_is_lighter_than_the_mean(values: Mapping[str, float]) -> bool:
    """Whether the most burdened rank has at least the mean."""
    return all(value >= 1 for name, value in values.items() if "_ranks_" in name)


def _a_share_is_cost_times_rate(values: Mapping[str, float]) -> bool:
    """Whether one controller is busy for what its records cost, at the rate at which they come."""
    point = "c1_at_64_devices"
    us_a_second = (
        values[f"controller_us_per_record_{point}"] * values[f"records_per_second_{point}"]
    )
    return math.isclose(values[f"busiest_controller_share_{point}"], us_a_second / 1e6)


def _ratios_are_those_of_rates(values: Mapping[str, float]) -> bool:
    """Whether a push over a copy is what both rates say."""
    sizes = [name.removeprefix("memcpy_") for name in values if name.startswith("memcpy_")]
    return len(sizes) == 9 and all(
        math.isclose(
            values[size] / values[f"memcpy_{size}"],
            values[size.replace("gb_per_second", "gb_per_second_over_memcpy")],
        )
        for size in sizes
    )


def _dearer_swaps_cost_colocation_more(values: Mapping[str, float]) -> bool:
    """Whether co-location, which changes roles in every step, pays the price of a swap."""
    excess = [values[f"colocated_excess_swap_{price}"] for price in ("0s", "30s", "60s")]
    return excess[0] < excess[1] < excess[2]


def _the_papers_rule_is_at_its_best(values: Mapping[str, float]) -> bool:
    """Whether the step size that is reported for it is the best of those that were tried."""
    return all(
        values[f"paper_rule_mean_excess_{end}_same_start"]
        == min(
            value
            for name, value in values.items()
            if "_same_start_" in name
            and name.startswith("utilisation")
            and name.endswith(f"_mean_excess_{end}")
        )
        for end in ("64", "64_wrong_model")
    )


def _policies_used_the_same_groups(values: Mapping[str, float]) -> bool:
    """Whether each of three steps trained on 32 groups of 8, and only who may has moved devices."""
    fixed = {name: value for name, value in values.items() if re.match(r"split_\d+_moved", name)}
    return (
        values["records_trained"] == 3 * 32 * 8
        and values["groups_consumed"] >= 3 * 32
        and len(fixed) == 3
        and not any(fixed.values())
        and values["colocated_moved_cells"] > 0
        and "real_over_virtual_replay" in values
    )


def _four_nodes_are_as_one(values: Mapping[str, float]) -> bool:
    """Whether weights are equal, a push comes once and less of it where less has changed, a cut is
    noticed and nothing is left.
    """
    return (
        values["quickstart_weights_compared"] == 1
        and values["push_receivers_verified"] == 4
        and 1 <= values["push_bytes_per_node_over_model"] < 2
        and values["delta_push_bytes_share_bfloat16"] < values["delta_push_bytes_share_float32"] < 1
        and values["link_cut_noticed_s"] > 0
        and values["left_behind_on_any_node"] == 0
    )


SMALL = (
    "controller.config.prompts=4",
    "advantage.config.group_size=2",
    "evaluation.prompts=8",
    "roles.policy.model.make.config.steps=10",
)


@pytest.mark.parametrize(
    ("name", "words", "fact", "repeats"),
    [
        short(
            "startup",
            *("--rounds", "3", "--runs", "1"),
            fact=lambda values: values["controller_memory_mib"] > 1,
            repeats=True,
        ),
        short(
            "back_to_work",
            *("--faults", "1", "--kills", "1", "--every", "1"),
            fact=lambda values: 0 < values["fault_to_training_again_s"] < math.inf,
            slow=True,
        ),
        short(
            "machines",
            "--short",
            fact=_four_nodes_are_as_one,
            slow=True,
        ),
        short("handover", "--rounds", "3", fact=_sizes_are_those_of_rates, repeats=True),
        short("balance", "--draws", "3", fact=_no_part_is_lighter_than_the_mean, repeats=True),
        short(
            "protocol_sim",
            *("--seeds", "0:24", "--mutant-seeds", "0", "--processes", "1"),
            fact=lambda values: values["violations"] == 0 and values["seeds"] == 24,
        ),
        short(
            "protocol_async",
            *("--seeds", "0:64", "--mutant-seeds", "0", "--processes", "1"),
            fact=lambda values: values["async_violations"] == 0 and values["async_seeds"] == 64,
            slow=True,
        ),
        short(
            "weight_push",
            *("--rounds", "1", "--scale", "0.003"),
            fact=_ratios_are_those_of_rates,
            slow=True,
        ),
        short(
            "swap",
            *("--sizes", "50", "--rounds", "1", "--steps", "4"),
            fact=_dearer_swaps_cost_colocation_more,
            slow=True,
        ),
        short(
            "checkpoint",
            *("--sizes", "13", "--rounds", "1"),
            # part files have headers, torch.save's too: the tensors are by far the most
            fact=lambda values: abs(values["save_bytes_over_torch_save_13M"] - 1) < 0.01,
            slow=True,
        ),
        short(
            "checkpoint_convergence",
            *("--seeds", "0:1", "--steps", "6", "--set", *SMALL),
            # saving, being killed and going on changes no bit of what is learned
            fact=lambda values: (
                values["kills"] == 2
                and values["accuracy_every_step_less_none"] == 0
                and values["accuracy_killed_every_step_less_none"] == 0
            ),
            slow=True,
        ),
        short(
            "proved_hashes",
            *("--parts", "hashes", "--steps", "2", "--set", *SMALL),
            *("--cases", "1 controllers", "4 controllers, 2 replicas, 2 ranks", "inline"),
            fact=lambda values: (
                values["distinct_weight_hashes"] == 1
                and values["hashed_runs"] == 3
                and values["torch_pair_gap_max"] == 0
            ),
            slow=True,
        ),
        short(
            "proved_time",
            *("--parts", "time", "--steps", "2", "--rounds", "1", "--set", *SMALL),
            fact=lambda values: min(values.values()) > 0,
            slow=True,
        ),
        short(
            "proved_engines",
            *("--parts", "engines", "--engines", "torch", "--steps", "2", "--set", *SMALL),
            fact=lambda values: (
                values["torch_generator_on_same_in_a_batch"] == 1
                and values["torch_generator_on_same_in_another_place"] == 1
                and values["torch_generator_on_hashes_two_runs"] == 1
                and values["torch_generator_on_hashes_2_replicas"] == 1
                and values["torch_generator_on_logprob_gap_max"] == 0
            ),
            slow=True,
        ),
        short(
            "proved_sentinel",
            *("--parts", "sentinel", "--minutes", "0.2", "--generators", "torch", "--set", *SMALL),
            fact=lambda values: values["healthy_bf16_tokens_sampled"] > 0,
            slow=True,
        ),
        short(
            "roles_distilled",
            *("--parts", "distilled", "--seeds", "0", "--distilled-teaching-steps", "10"),
            *("--distilled-grpo-steps", "2", "--distilled-steps", "2"),
            fact=lambda values: (
                values["distillation_steps_over_grpo"] > 0
                and 0 <= values["distilled_accuracy_min"] <= 1
            ),
            slow=True,
        ),
        short(
            "proved_museum",
            *("--parts", "museum"),
            fact=lambda values: values["faults_named_share"] == 1,
            slow=True,
        ),
        short(
            "digits",
            *("--seeds", "0:1", "--set", "run.steps=2", "evaluation.every=0"),
            # the trainer computes the log-probs of the very batches that were sampled
            fact=lambda values: values["replay_logp_gap_same_batch"] == 0,
            slow=True,
        ),
        short(
            "quickstart",
            *("--seeds", "0:1", "--trl-python", "/no/python"),
            fact=lambda values: values["train_inference_logprob_gap_max"] <= 1e-4,
            slow=True,
        ),
        short(
            "large_plan",
            *("--parts", "plan", "--plan-cases", "1"),
            fact=lambda values: values["plan_memory_error_max"] <= 0.1,
            slow=True,
        ),
        short(
            "large_load",
            *("--parts", "load", "--load-layers", "4", "--load-width", "64"),
            fact=lambda values: values["losses_meta_init_equal"] <= 1e-6,
            slow=True,
        ),
        short(
            "large_logprobs",
            *("--parts", "logprobs", "--logprobs-actions", "64", "--logprobs-words", "512"),
            fact=lambda values: values["chunked_logprobs_time_over_full"] > 0,
        ),
        short(
            "large_sleep",
            *("--parts", "sleep", "--sleep-layers", "2", "--sleep-rounds", "1"),
            fact=lambda values: values["trainer_asleep_memory_over_awake"] < 0.5,
            slow=True,
        ),
        short(
            "large_moe",
            *("--parts", "moe", "--moe-prompts", "2"),
            fact=lambda values: values["moe_logprob_gap_with_replay"] <= 1e-4,
            slow=True,
        ),
        short(
            "large_whole",
            *("--parts", "whole", "--whole-layers", "2", "--whole-width", "128"),
            *("--whole-words", "512", "--whole-steps", "2"),
            fact=lambda values: (
                values["whole_job_steps"] == 2
                and values["whole_job_train_gib"] <= values["whole_job_peak_gib"]
                and 0 < values["whole_job_trainer_rollout_gib"] < values["whole_job_rollout_gib"]
            ),
            slow=True,
        ),
        short(
            "asynchronous_emulated",
            *("--parts", "emulated", "--emulated-seeds", "0", "--emulated-steps", "3"),
            "--emulated-virtual",
            fact=lambda values: (
                values["simulator_error_max"] < 0.1 and values["ahead_1_age_largest"] <= 4
            ),
            slow=True,
        ),
        short(
            "asynchronous_moving",
            *("--parts", "moving", "--moving-workloads", "drift", "--moving-steps", "4"),
            *("--moving-splits", "4"),
            fact=lambda values: (
                0.5 < values["moving_drift_over_best_fixed"] < 1.5
                and values["moving_drift_best_fixed"] in (4, 8)
            ),
            slow=True,
        ),
        short(
            "asynchronous_canaries",
            *("--parts", "canaries", "--seeds", "0"),
            fact=lambda values: (
                values["stale_replica_found_share"] == 1
                and values["stale_replica_false_alarms"] == 0
                and values["stale_replica_found_without"] == 0
            ),
            slow=True,
        ),
        short(
            "asynchronous_quickstart",
            *("--parts", "quickstart", "--seeds", "0", "--async-steps", "3"),
            fact=lambda values: (
                values["age_max_over_promised"] <= 1 and not values["dropped_for_age"]
            ),
            slow=True,
        ),
        short(
            "roles_lora",
            *("--parts", "lora", "--seeds", "0", "--lora-steps", "2"),
            fact=lambda values: values["lora_push_bytes_over_full"] < 0.05,
            slow=True,
        ),
        short(
            "roles_ppo",
            *("--parts", "ppo", "--seeds", "0", "--ppo-steps", "2", "--critic-steps", "2"),
            *("--ppo-set", *SMALL),
            fact=lambda values: values["ppo_accuracy_after_min"] <= 1,
            slow=True,
        ),
        short(
            "roles_dpo",
            *("--parts", "dpo", "--seeds", "0", "--dpo-steps", "2", "--dpo-rows", "64"),
            fact=lambda values: 0 <= values["dpo_accuracy_after_min"] <= 1,
            slow=True,
        ),
        short(
            "roles_reward_model",
            *("--parts", "reward_model", "--seeds", "0", "--rm-steps", "2", "--rm-rows", "512"),
            fact=lambda values: 0 <= values["reward_model_agreement_min"] <= 1,
            slow=True,
        ),
        short(
            "roles_sft",
            *("--parts", "sft", "--seeds", "0", "--sft-steps", "3"),
            fact=lambda values: values["sft_tokens_per_cpu_second"] > 0,
            slow=True,
        ),
        short(
            "large_context",
            *("--parts", "context", "--context-tokens", "512", "--context-rounds", "1"),
            fact=lambda values: values["cp_logprob_gap_max_float64"] <= 1e-10,
            slow=True,
        ),
        short(
            "roles_refined",
            *("--parts", "refined", "--seeds", "0", "--refined-steps", "2"),
            # groups as large as two waves need, of a policy that is right at times
            *("--refined-set", *SMALL[:1], *SMALL[2:3]),
            fact=lambda values: 0 <= values["refined_sampling_refined_reward"] <= 1,
            slow=True,
        ),
        short(
            "engine_pairs",
            *("--pairs", "torch:torch"),
            fact=lambda values: values["torch:torch logprob_gap_max"] <= 5e-4,
            slow=True,
        ),
        short(
            "engine_overhead",
            *("--engines", "torch", "--rounds", "1"),
            fact=lambda values: values["torch_tokens_per_second"] > 0,
            slow=True,
        ),
        short(
            "placement_sim",
            *("--seeds", "100:101", "--devices", "64", "--second", "64"),
            fact=_the_papers_rule_is_at_its_best,
            slow=True,
        ),
        short(
            "lending",
            *("--seeds", "0:1", "--workloads", "coarse"),
            fact=lambda values: values["coarse_continue_gain"] > values["coarse_keep_gain"] > 1,
            slow=True,
        ),
        short(
            "controllers",
            *("--parts", "numbers", "readers", "--controllers", "1", "--rounds", "1"),
            *("--read-size", "0.1GB", "--read-rounds", "1"),
            fact=lambda values: bool(values),
            slow=True,
        ),
        short(
            "controllers",
            *("--parts", "numbers", "saturation", "--controllers", "1", "--rounds", "1", "--short"),
            fact=_a_share_is_cost_times_rate,
            slow=True,
        ),
        short(
            "placement_emulated",
            *("--steps", "3", "--real", "2", "--processes", "1"),
            repeats=True,
            fact=_policies_used_the_same_groups,
            slow=True,
        ),
        short(
            "report_page",
            "--steps=200",
            "--answers=400",
            "--rounds=1",
            "--watched=3",
            fact=lambda values: values["panels_drawn_share"] == 1 and not values["console_errors"],
            slow=True,
        ),
        short(
            "rewards",
            fact=lambda values: values["numeric_false_positives"] == 0,
            slow=True,
        ),
    ],
)
def test_a_benchmark_measures_its_claims(
    name: str,
    words: tuple[str, ...],
    fact: Fact,
    repeats: bool,
    scripts: Mapping[str, str],
    tmp_path: Path,
) -> None:
    """Bars are not held here: the machine may be busy, and one round says little."""
    if name not in ("startup", "protocol_async", "protocol_sim"):
        pytest.importorskip("torch")
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, f"benchmarks/{scripts[name]}.py", *words, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["benchmark"] == name
    assert result["claims"]
    for claim in result["claims"]:
        assert_well_formed(claim)
    values = {claim["name"]: claim["value"] for claim in result["claims"]}
    assert len(values) == len(result["claims"])
    assert any("interval" in claim for claim in result["claims"]) or not repeats
    assert fact(values), values
    path = BENCHMARKS / "results" / f"{name}.json"
    assert path.exists() == (name not in NOT_MEASURED_YET), f"see NOT_MEASURED_YET for {name}"
    if not path.exists():
        return
    committed = json.loads(path.read_text())
    assert kinds_of(values) & kinds_of(claim["name"] for claim in committed["claims"])


def kinds_of(names: Iterable[str]) -> set[str]:
    """The names of claims without millions of parameters, which a short form may change."""
    return {re.sub(r"_\d+M\b", "", name) for name in names}


def assert_well_formed(claim: Mapping[str, Any]) -> None:
    """A claim has its keys, finite numbers and an interval whose ends are in order."""
    assert {"name", "value", "unit", "bar", "op"} == claim.keys() - {"interval"}, claim
    assert math.isfinite(claim["value"]), claim
    assert claim["op"] in (">=", "<="), claim
    assert claim["bar"] is None or math.isfinite(claim["bar"]), claim
    low, high = claim.get("interval", (0.0, 0.0))
    assert math.isfinite(low) and math.isfinite(high) and low <= high, claim


#: benchmarks without a committed result
NOT_MEASURED_YET: set[str] = set()

#: benchmarks whose short form is elsewhere, and where
ELSEWHERE = {
    "controllers_readers": "tests/unit/test_verl_rival.py",
    "controllers_saturation": "tests/integration/test_benchmarks_short.py",
    "gpu": "tests/integration/test_gpu_benchmark.py",
    "house": "tests/unit/test_house.py",
    "machines_ray": "plugins/gcore-ray/tests/test_benchmark.py",
    "placement_real": "tests/integration/test_placement_real.py",
    "placement_real_vllm": "tests/integration/test_placement_real.py",
    "real_model": "tests/integration/test_real_model_benchmark.py",
}


def test_every_benchmark_has_a_short_form(scripts: Mapping[str, str]) -> None:
    (mark,) = (
        mark
        for mark in test_a_benchmark_measures_its_claims.pytestmark  # type: ignore[attr-defined]
        if mark.name == "parametrize"
    )
    tested = {case.values[0] for case in mark.args[1]}
    untested = scripts.keys() - tested - ELSEWHERE.keys()
    assert not untested, f"add a case for {untested} to this file, or say in ELSEWHERE where it is"
    assert all((ROOT / path).exists() for path in ELSEWHERE.values())
