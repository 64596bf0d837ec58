"""Every benchmark still runs on the present code: each in the shortest form that it has.

Those of more than ten seconds are slow: `tox run -e full` runs them. engine_pairs and
engine_overhead run with torch alone here; the stage `engines` runs pairs of real engines.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
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


def script_of(name: str) -> str:
    """Returns the script of a result, which may be of one of its parts: "proved_time"."""
    while not (BENCHMARKS / f"{name}.py").exists():
        name, _, _ = name.rpartition("_")
    return name


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
    """Whether weights are equal, a push comes once, a cut is noticed and nothing is left."""
    return (
        values["quickstart_weights_compared"] == 1
        and values["push_receivers_verified"] == 4
        and 1 <= values["push_bytes_per_node_over_model"] < 2
        and values["link_cut_noticed_s"] > 0
        and values["left_behind_on_any_node"] == 0
    )


def _episodes_cost_and_both_sides_agree(values: Mapping[str, float]) -> bool:
    """Whether log-probs agree, also over 30 turns, and each part has measured something."""
    return (
        values["logprob_gap_max"] <= 1e-3
        and 0 < values["logprob_gap_30_turns_max"] <= 1e-4
        and min(values["controller_bytes_per_episode"], values["turn_overhead_cpu_ms"]) > 0
        and 0 <= values["async_calculator_success_after_min"] <= 1
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
            "proved_sentinel",
            *("--parts", "sentinel", "--minutes", "0.2", "--generators", "torch", "--set", *SMALL),
            fact=lambda values: values["healthy_bf16_tokens_sampled"] > 0,
            slow=True,
        ),
        short(
            "proved_museum",
            *("--parts", "museum"),
            fact=lambda values: values["faults_named_share"] == 1,
            slow=True,
        ),
        short(
            "quickstart",
            *("--seeds", "0:1", "--trl-python", "/no/python"),
            fact=lambda values: values["train_inference_logprob_gap_max"] <= 1e-4,
            slow=True,
        ),
        short(
            "asynchronous_emulated",
            *("--seeds", "0", "--steps", "3", "--virtual"),
            fact=lambda values: (
                values["simulator_error_max"] < 0.1 and values["ahead_1_age_largest"] <= 4
            ),
            slow=True,
        ),
        short(
            "asynchronous_quickstart",
            *("--seeds", "0", "--steps", "3"),
            fact=lambda values: (
                values["age_max_over_promised"] <= 1 and not values["dropped_for_age"]
            ),
            slow=True,
        ),
        short(
            "environments",
            *("--seeds", "0", "--steps", "2", "--rounds", "1", "--episodes", "2"),
            fact=_episodes_cost_and_both_sides_agree,
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
    tmp_path: Path,
) -> None:
    """Bars are not held here: the machine may be busy, and one round says little."""
    if name not in ("startup", "protocol_async", "protocol_sim"):
        pytest.importorskip("torch")
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script_of(name)}.py", *words, "--out", str(out)],
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
    measured = [*result["claims"], *result["details"]]
    assert measured
    for claim in measured:
        assert_well_formed(claim)
    values = {claim["name"]: claim["value"] for claim in measured}
    assert len(values) == len(measured)
    assert any("interval" in claim for claim in measured) or not repeats
    assert fact(values), values


def assert_well_formed(claim: Mapping[str, Any]) -> None:
    """A claim has its keys, finite numbers and an interval whose ends are in order."""
    assert {"name", "value", "unit", "bar", "op"} == claim.keys() - {"interval"}, claim
    assert math.isfinite(claim["value"]), claim
    assert claim["op"] in (">=", "<="), claim
    assert claim["bar"] is None or math.isfinite(claim["bar"]), claim
    low, high = claim.get("interval", (0.0, 0.0))
    assert math.isfinite(low) and math.isfinite(high) and low <= high, claim


#: benchmarks whose short form is elsewhere, and where
ELSEWHERE = {
    "decode_real": "tests/integration/test_real_model_benchmark.py",
    "environments_read_again": "benchmarks/environments.py",  # runs it as a part
    "gpu": "tests/integration/test_gpu_benchmark.py",
    "house": "tests/unit/project/test_house.py",
    "real_model": "tests/integration/test_real_model_benchmark.py",
    "rendering": "plugins/gcore-environments/tests/test_rendering_benchmark.py",
}


def test_every_benchmark_has_a_short_form() -> None:
    (mark,) = (
        mark
        for mark in test_a_benchmark_measures_its_claims.pytestmark  # type: ignore[attr-defined]
        if mark.name == "parametrize"
    )
    tested = {script_of(case.values[0]) for case in mark.args[1]}
    scripts = {
        path.stem for path in BENCHMARKS.glob("*.py") if "add_options(parser)" in path.read_text()
    }
    untested = scripts - tested - ELSEWHERE.keys()
    assert not untested, f"add a case for {untested} to this file, or say in ELSEWHERE where it is"
    assert all((ROOT / path).exists() for path in ELSEWHERE.values())
