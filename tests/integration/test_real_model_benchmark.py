"""benchmarks/real_model.py in short: what it compares, and what it refuses to compare."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gcore_language.tiny import save_untrained

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)  # it imports others that lie beside it
    yield importlib.import_module("real_model")
    for name in ("real_model", "quickstart_runs", "report"):
        del sys.modules[name]


def round_of(bench: ModuleType) -> dict[str, Any]:
    """A round of GRPO: alone our thread takes less of the processor, and two are sooner done."""

    def run(threads: str, cpu_s: float, wall_s: float) -> Any:
        return bench.Run(
            threads=threads,
            units=64,
            cpu_s=cpu_s,
            wall_s=wall_s,
            answers=64,
            answer_tokens=1600,
            rewards=[0.2],
        )

    return {
        "ours-auto": run("auto", 40, 20),
        "ours-1": run("1", 32, 32),
        "trl-1": run("1", 96, 96),
        "trl-2": run("2", 112, 56),
    }


def test_trl_counts_with_the_number_of_threads_that_is_best_in_each_measure(
    bench: ModuleType,
) -> None:
    rounds = [round_of(bench)] * 3
    by_name = {claim.name: claim for claim in bench.over("cpu", rounds, "cpu_s", 3.5)}
    by_name |= {claim.name: claim for claim in bench.over("wall", rounds, "wall_s", 3.0)}
    assert {name: claim.value for name, claim in by_name.items()} == pytest.approx(
        {
            "cpu": 96 / 40,
            "cpu_one_thread": 96 / 32,
            "cpu_each_best": 96 / 32,
            "wall": 56 / 20,
            "wall_one_thread": 96 / 32,
            "wall_each_best": 56 / 20,
        }
    )
    assert [name for name, claim in by_name.items() if claim.bar] == ["cpu", "wall"]
    assert by_name["cpu"].interval == pytest.approx((2.4, 2.4))


def test_without_trl_only_our_own_rates_are_told(bench: ModuleType) -> None:
    ours = {name: run for name, run in round_of(bench).items() if name.startswith("ours")}
    names = {claim.name for claim in bench.rates("grpo", "samples", [ours])}
    assert "samples_per_cpu_second_grpo_ours_auto" in names
    assert not any("trl" in name for name in names)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"answers": 63}, "gave 63 answers of 64"),
        ({"answer_tokens": 640}, "answers have 10.0 tokens in TRL, 25.0 here"),
        ({"rewards": [float("nan")]}, "rewards are not finite"),
    ],
)
def test_sides_that_do_not_do_the_same_are_not_compared(
    bench: ModuleType, change: dict[str, Any], told: str
) -> None:
    found = round_of(bench)
    bench.check("grpo", found)
    found["trl-2"] = replace(found["trl-2"], **change)
    with pytest.raises(SystemExit, match=told):
        bench.check("grpo", found)


def test_another_first_loss_on_the_same_rows_ends_the_comparison(bench: ModuleType) -> None:
    found = round_of(bench)
    bench.check("sft", found)
    found["trl-1"] = replace(found["trl-1"], first_loss=0.01)
    with pytest.raises(SystemExit, match="begins with a loss of 0.01"):
        bench.check("sft", found)


def test_trl_is_to_count_the_tokens_that_rows_have(bench: ModuleType) -> None:
    steps = [{"logs": {"num_tokens": 789.0}}, {"logs": {"num_tokens": 1578.0}}]
    bench.check_tokens(steps, 789.0)
    with pytest.raises(SystemExit, match="TRL counted 789 tokens"):
        bench.check_tokens(steps, 788.0)


def test_a_run_that_ended_is_not_made_again(bench: ModuleType, tmp_path: Path) -> None:
    made: list[str] = []

    def run() -> list[Any]:
        made.append("run")
        return [bench.Run(threads="1", units=8, cpu_s=2.0, wall_s=1.0, versions={"trl": "1.16.0"})]

    for _ in range(2):
        again = bench.Bench(tmp_path, None, 1, tmp_path)
        (one,) = again._kept("sft-0-trl", run)
    assert made == ["run"]
    assert (one.units, one.cpu_s, one.versions) == (8, 2.0, {"trl": "1.16.0"})


def test_trl_gets_the_settings_of_our_run(bench: ModuleType, tmp_path: Path) -> None:
    tiny = pytest.importorskip("gcore_language.tiny")
    tiny.save_untrained(tmp_path / "model")
    given = bench.Bench(tmp_path, None, 1, tmp_path / "model")
    settings = {
        part: bench.trl_settings(part, given._plan(part, part, "auto")[1], [2, 1, 2])
        for part in ("grpo", "lora")
    }
    assert settings["grpo"]["lora"] is None
    assert settings["lora"]["lora"] == {"rank": 16, "alpha": 32}
    assert settings["grpo"]["learning_rate"] == 1e-5
    assert (settings["grpo"]["batch"], settings["grpo"]["group_size"]) == (32, 8)
    assert settings["grpo"]["max_new_tokens"] == 48
    assert len(Path(settings["grpo"]["data"]).read_text().splitlines()) == 4


@pytest.mark.slow
def test_it_measures_our_side_on_another_model(tmp_path: Path) -> None:
    tiny = pytest.importorskip("gcore_language.tiny")
    tiny.save_untrained(tmp_path / "model")
    words = ["--parts", "grpo", "start", "gap", "--rounds", "1", "--steps", "1"]
    words += ["--model", str(tmp_path / "model"), "--trl-python", "/no/python"]
    out = tmp_path / "result.json"
    subprocess.run(
        [sys.executable, "benchmarks/real_model.py", *words, "--out", str(out)],
        cwd=ROOT,
        check=True,
        timeout=600,
    )
    result = json.loads(out.read_text())
    measured = [*result["claims"], *result["details"]]
    values = {claim["name"]: claim["value"] for claim in measured}
    assert values["samples_per_cpu_second_grpo_ours_auto"] > 0
    assert values["start_to_first_step_s"] > 0
    assert values["logprob_gap_max"] <= 1e-4


def test_a_token_step_is_measured_beside_that_of_transformers(tmp_path: Path) -> None:
    """On a tiny model, in which nothing is fast: every number is there, and log-probs agree."""
    save_untrained(tmp_path / "model")
    done = subprocess.run(
        [
            *(sys.executable, "benchmarks/decode_real.py", str(tmp_path / "model"), "--json"),
            *("--rounds", "1", "--rows", "1", "8"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    values = {claim["name"]: claim["value"] for claim in report["claims"] + report["details"]}
    assert 0 <= values["logprob_gap_max"] < 1e-4
    assert values["decode_over_memory_bound_1_row"] > 0
    assert all(values[f"decode_over_transformers_{rows}_rows"] > 0 for rows in (1, 8))
