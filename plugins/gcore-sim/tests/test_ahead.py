"""The simulation of generation that runs ahead, and the command in front of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_sim import ahead_command
from gcore_sim.ahead import (
    AheadJob,
    GroupLengths,
    Layout,
    TrainerPace,
    mean_seconds,
    simulate_ahead,
)
from gcore_sim.batching import ContinuousBatch
from gcore_sim.command import run as run_virtual
from gcore_sim.config import EngineProfile

from gcore_core import cli

TOKEN_S = 0.01
PUSH_S = 3.0
#: Whole tokens: an engine goes on to the end of one.
TOLERANCE_S = 2 * TOKEN_S


@dataclass(frozen=True)
class Constant:
    """Every answer has as many tokens."""

    tokens: int
    samples: int = 2

    def group(self, ordinal: int) -> GroupLengths:
        return GroupLengths(10, [self.tokens] * self.samples)


class HeavyTail:
    """Log-normal lengths, with a sigma of 1.4."""

    def group(self, ordinal: int) -> GroupLengths:
        normal = np.random.default_rng(ordinal).standard_normal(4)
        return GroupLengths(10, [1 + int(300 * np.exp(1.4 * x)) for x in normal])


def job(train_s: float, **settings: Any) -> AheadJob:
    """Decoding takes ``TOKEN_S`` a token whatever runs, and reading takes nothing."""
    engine = {"base_s": TOKEN_S, "running_s": 0.0, "cached_s": 0.0, "prefill_s": 0.0}
    return AheadJob(
        prompts=8,
        push_s=PUSH_S,
        profile=EngineProfile(**{**engine, **settings.pop("engine", {})}),
        trainer=TrainerPace(fixed_s=train_s),
        **settings,
    )


@pytest.mark.parametrize("train_s", [4.0, 40.0])
def test_a_synchronous_step_is_the_sum_of_generation_training_and_push(train_s: float) -> None:
    steps = simulate_ahead(
        job(train_s, ahead=0, age=0), Layout(2, 2, shared=True), Constant(1000), 4
    )
    for step in steps:
        assert step.seconds == pytest.approx(1000 * TOKEN_S + train_s + PUSH_S, abs=TOLERANCE_S)
        assert step.age_largest == 0


@pytest.mark.parametrize("train_s", [4.0, 40.0])
def test_where_pushes_wait_a_step_is_the_larger_of_generation_and_training_and_a_push(
    train_s: float,
) -> None:
    steps = simulate_ahead(job(train_s, ahead=1, age=1), Layout(2, 2), Constant(1000), 8)
    expected_s = max(1000 * TOKEN_S, train_s) + PUSH_S
    for step in steps[2:-1]:
        assert step.seconds == pytest.approx(expected_s, abs=TOLERANCE_S)
        assert (step.age_mean, step.age_largest) == (1.0, 1)


@pytest.mark.parametrize("train_s", [4.0, 40.0])
def test_where_samples_go_on_generation_may_take_two_steps(train_s: float) -> None:
    """Groups begin at a push and are taken after the next: two steps, of which one push stops them.

    So two steps take at least generation, the push in it, and training and push behind it.
    """
    steps = simulate_ahead(
        job(train_s, ahead=1, age=1, waits=False), Layout(2, 2), Constant(1000), 10
    )
    generation_s = 1000 * TOKEN_S + PUSH_S
    expected_s = max(2 * (train_s + PUSH_S), generation_s + train_s + PUSH_S)
    for one, other in zip(steps[2:-2], steps[3:-1], strict=True):
        assert one.seconds + other.seconds == pytest.approx(expected_s, abs=2 * TOLERANCE_S)


def test_what_runs_through_a_push_is_read_again() -> None:
    """Two answers of equal length go through one push each; all they have is read at its end."""
    reading = {"engine": {"prefill_s": 0.001}}
    # Trained at once, so a push comes while the next groups run.
    free, read = (
        simulate_ahead(
            job(0.0, ahead=2, age=2, waits=False, **engine), Layout(1, 1), Constant(1000), 10
        )
        for engine in ({}, reading)
    )
    assert mean_seconds(read[3:-3], 0) > mean_seconds(free[3:-3], 0)


def test_what_goes_on_over_kept_caches_is_not_read_again() -> None:
    """Prompts alone are read: a step takes less by what answers have so far at a push."""
    read, kept, free = (
        simulate_ahead(
            job(5.0, ahead=2, age=4, waits=False, keeps=keeps, engine={"prefill_s": prefill_s}),
            Layout(1, 1),
            Constant(1000),
            10,
        )
        for keeps, prefill_s in ((False, 0.001), (True, 0.001), (True, 0.0))
    )
    seconds = [mean_seconds(steps[3:-3], 0) for steps in (free, kept, read)]
    assert seconds[0] < seconds[1] < seconds[2] - 1.0


@pytest.mark.parametrize(("ahead", "age"), [(1, 1), (1, 4), (2, 4)])
def test_no_record_is_older_than_its_bound_and_no_step_shorter_than_its_work(
    ahead: int, age: int
) -> None:
    steps = simulate_ahead(
        job(5.0, ahead=ahead, age=age, waits=False), Layout(2, 1), HeavyTail(), 20
    )
    assert max(step.age_largest for step in steps) <= age
    for step in steps:
        parts = step.waited_s + step.trained_s + step.drained_s + step.pushed_s
        assert step.seconds == pytest.approx(parts)
        assert step.seconds >= 5.0 + PUSH_S - 1e-9
        assert 0 <= step.idle_share <= 1


def test_an_age_above_the_lead_pays_where_tails_are_heavy() -> None:
    strict, wide = (
        simulate_ahead(job(5.0, ahead=1, age=age, waits=False), Layout(2, 1), HeavyTail(), 30)
        for age in (1, 4)
    )
    assert mean_seconds(wide[6:-4], 0) < 0.8 * mean_seconds(strict[6:-4], 0)


def test_groups_that_teach_nothing_are_replaced() -> None:
    class Half(HeavyTail):
        def group(self, ordinal: int) -> GroupLengths:
            return GroupLengths(10, super().group(ordinal).answers, teaches=ordinal % 2 == 0)

    steps = simulate_ahead(job(1.0, ahead=1, age=2, waits=False), Layout(2, 1), Half(), 6)
    assert len(steps) == 6


def test_the_next_end_is_foreseen_exactly() -> None:
    batch = ContinuousBatch(EngineProfile(), prefix_cache=True)
    for sample, answer in enumerate((50, 20, 70)):
        batch.add((0, sample), 100, answer)
    ended = []
    while (foreseen_s := batch.seconds_to_end()) < np.inf:
        took_s, keys = batch.advance(1e9)
        assert took_s == pytest.approx(foreseen_s)
        ended += keys
    assert ended == [(0, 1), (0, 0), (0, 2)]


@pytest.mark.parametrize("units", [2, 3, 7, 64])
@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
def test_the_best_split_is_that_of_trying_all(units: int, ratio: float) -> None:
    def cost(count: int) -> float:
        return max(ratio / count, 1.0 / (units - count))

    assert ahead_command.best_split(units, cost) == min(range(1, units), key=cost)


# -- on the trace of a run -------------------------------------------------------------------------

RANKS, REPLICAS, PROMPTS, ANSWER, PROMPT = 2, 2, 4, 200, 10
TRAIN_S = 8.0


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A synchronous run of four equal steps of 4 groups of 2; each engine takes 0.01 s a token."""
    (tmp_path / "trace").mkdir()
    lines: list[dict[str, Any]] = [{"what": "clock", "shard": 0, "wall_s": 0.0}]
    rows = []
    for step in range(4):
        for index in range(PROMPTS * 2):
            ordinal, sample = divmod(index, 2)
            begun_s = 100.0 * step
            line = {"what": "record", "step": step, "ordinal": PROMPTS * step + ordinal}
            line |= {"sample": sample, "attempt": 0, "replica": f"rollout.{index % REPLICAS}"}
            line |= {"sent_s": begun_s, "finished_s": begun_s + ANSWER * TOKEN_S}
            line |= {"scored_s": begun_s + ANSWER * TOKEN_S, "n_prompt": PROMPT}
            lines.append(line | {"n_actions": ANSWER, "verdict": "trained"})
        metrics = {"groups/trained": float(PROMPTS), "seconds/push": PUSH_S}
        metrics |= {"seconds/train": 0.75 * TRAIN_S, "seconds/prepare": 0.25 * TRAIN_S}
        rows.append({"step": step + 1, "version": step + 1, "time_unix_s": 0.0, "metrics": metrics})
    for name, entries in (("trace/controller.0.jsonl", lines), ("metrics.jsonl", rows)):
        (tmp_path / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    roles = {"policy": {"slots": RANKS}, "rollout": {"slots": REPLICAS}}
    config = {"controller": {"use": "core/sync", "config": {"prompts": PROMPTS}}, "roles": roles}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    return tmp_path


ENGINE = '{"base_s": 0.01, "running_s": 0, "cached_s": 0, "prefill_s": 0}'


def simulated(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["simulate", "--async", "--trace", str(run), "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    return {
        one["name"].split(",")[0] + one["name"].split(",")[1]: one for one in found["candidates"]
    }


def test_the_command_finds_the_split_that_arithmetic_finds(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Generation takes 2 s whatever the split, and training 16 s over the ranks."""
    found = simulated(finished, capsys, "--devices", "10", "--profile", ENGINE, "--age", "1")
    split = found["split ahead 1"]
    assert (split["trainer"], split["generators"]) == (9, 1)
    work_s = RANKS * TRAIN_S
    assert split["seconds"] == pytest.approx(max(2.0, work_s / 9) + PUSH_S, abs=TOLERANCE_S)
    shared = found["shared in turns"]
    assert shared["seconds"] == pytest.approx(2.0 + work_s / 10 + PUSH_S, abs=TOLERANCE_S)
    assert shared["steps_a_minute"] == pytest.approx(60 / shared["seconds"])


def test_the_speed_of_the_engine_is_that_of_the_trace(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a profile, the layout of the run takes about what it took."""
    found = simulated(finished, capsys)
    assert found["split synchronous"]["seconds"] == pytest.approx(
        ANSWER * TOKEN_S + RANKS * TRAIN_S / 3 + PUSH_S, rel=0.1
    )


def test_a_run_whose_replicas_have_several_devices_has_no_more_devices_than_slots(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same run, each of whose ranks and replicas had four devices."""
    plain = simulated(finished, capsys)["shared in turns"]
    config = json.loads((finished / "config.yaml").read_text())
    config["roles"] = {"policy": {"slots": 4 * RANKS}, "rollout": {"slots": 4 * REPLICAS}}
    (finished / "config.yaml").write_text(json.dumps(config))
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["metrics"] |= {f"cpu_seconds/policy.{rank}": 1.0 for rank in range(RANKS)}
    (finished / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for words in ([], ["--size", "4"]):
        found = simulated(finished, capsys, *words)["shared in turns"]
        assert found["trainer"] == 4 * (RANKS + REPLICAS)
        assert found["seconds"] == plain["seconds"], "as many ranks, each as fast as it was"


def test_the_command_prints_the_best_split(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", "--async", "--trace", str(finished), "--steps", "3"]) == 0
    shown = capsys.readouterr().out
    assert "best split:" in shown and "trainer waits" in shown and "largest" in shown


def test_the_command_says_what_lending_would_bring(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ten devices the trainer never waits at the best split, so there is nothing to lend."""
    words = ("--devices", "10", "--profile", ENGINE, "--age", "1", "--lend", "keep")
    found = simulated(finished, capsys, *words)
    assert found["lent keep"]["seconds"] == found["split ahead 1"]["seconds"]
    assert found["lent keep"]["lent_s"] == found["split ahead 1"]["lent_s"] == 0
    command = ["simulate", "--async", "--trace", str(finished), "--lend", "redraw"]
    assert cli.main([*command, "--steps", "3"]) == 0
    assert "lending: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ahead", "3", "--age", "2"], "ahead 3 and age 2 do not fit together"),
        (["--devices", "4", "--size", "4"], "4 devices make 1 replicas of 4, two units are needed"),
        (["--size", "0"], "must be at least 1"),
        (["--profile", '{"base": 1}'], "terms: base_s, running_s, cached_s"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    words: list[str], told: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", "--async", "--trace", str(finished), *words]) == 2
    assert told in capsys.readouterr().err


def test_a_run_without_a_step_is_refused(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (finished / "metrics.jsonl").write_text("")
    assert cli.main(["simulate", "--async", "--trace", str(finished)]) != 0
    assert "the run has finished no step that trained" in capsys.readouterr().err


@pytest.mark.parametrize("midway", ["recompute", "keep"])
@pytest.mark.slow
def test_a_run_on_virtual_time_takes_what_was_simulated(
    midway: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_job: Callable[..., Path]
) -> None:
    """The real program, with its messages, against the simulation: within 3% of all its steps."""
    monkeypatch.chdir(tmp_path)
    lengths = [300, 40, 900, 120, 60, 2000, 80]

    class Rows:
        def group(self, ordinal: int) -> GroupLengths:
            from gcore_core.contract.order import row_of

            return GroupLengths(50, [lengths[row_of(ordinal, 70, 0)[1] % len(lengths)]] * 2)

    steps = 8
    profile = EngineProfile()
    trainer = {"record_s": 2.0, "token_s": 0.0, "token2_s": 0.0, "prepare_share": 0.0}
    file = write_job(
        run={"steps": steps, "seed": 0},
        controller={
            "use": "async",
            "config": {"prompts": 8, "minibatches": 1, "ahead": 1, "age": 3, "midway": midway},
        },
        data={"config": {"rows": 70, "prompt_tokens": [50], "answer_tokens": lengths}},
        objective={"use": "algorithms/ppo_clip", "config": {"old_logprobs": "rollout"}},
        roles={
            "policy": {"slots": 2, "config": {**trainer, "update_s": 0.0}},
            "rollout": {"slots": 2, "config": {"weights_gb": 1.0, "push_s_per_gb": PUSH_S}},
        },
        rewards={"judged": {"config": {"replicas": 10**9}}},
    )
    assert run_virtual([str(file), "run.dir=run"]) == 0
    rows = [json.loads(line) for line in Path("run", "metrics.jsonl").read_text().splitlines()]
    ran_s = sum(row["metrics"].get("seconds/step", 0.0) for row in rows)
    played = simulate_ahead(
        AheadJob(
            prompts=8,
            ahead=1,
            age=3,
            waits=False,
            keeps=midway == "keep",
            profile=profile,
            trainer=TrainerPace(record_s=2.0),
            push_s=PUSH_S,
        ),
        Layout(2, 2),
        Rows(),
        steps,
    )
    assert sum(step.seconds for step in played) == pytest.approx(ran_s, rel=0.03)
