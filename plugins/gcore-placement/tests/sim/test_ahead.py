"""The simulation of generation that runs ahead, and the command in front of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gcore_placement.sim import ahead_command
from gcore_placement.sim.ahead import (
    AheadJob,
    Asking,
    GroupLengths,
    Layout,
    TrainerPace,
    mean_seconds,
    simulate_ahead,
)
from gcore_placement.sim.ahead_trace import measured_run
from gcore_placement.sim.batching import ContinuousBatch
from gcore_placement.sim.command import run as run_virtual
from gcore_placement.sim.config import EngineProfile

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


# -- judges ----------------------------------------------------------------------------------------

VERDICT = 500


@dataclass(frozen=True)
class Judged:
    """Groups of two answers, about each of which judges are asked in ``rounds`` rounds.

    answers: tokens of the two answers of a group.
    verdicts: tokens of each verdict on them.
    """

    answers: tuple[int, int] = (1000, 1000)
    verdicts: tuple[int, int] = (VERDICT, VERDICT)
    rounds: int = 1

    def group(self, ordinal: int) -> GroupLengths:
        asked = [[[Asking("judge", 10, tokens)]] * self.rounds for tokens in self.verdicts]
        return GroupLengths(10, self.answers, asked=asked)


def judged(train_s: float, **settings: Any) -> AheadJob:
    """Judges write as fast as the policy's engines, and reading takes nothing."""
    made = job(train_s, **settings)
    return replace(made, judges={"judge": made.profile})


IN_TURNS = Layout(2, 2, shared=True, judges={"judge": 2})
APART = Layout(2, 2, judges={"judge": 2})


@pytest.mark.parametrize(
    ("source", "settings", "rollout_tokens"),
    [
        (Judged(), {}, 1000 + VERDICT),
        (Judged(rounds=3), {}, 1000 + 3 * VERDICT),
        (Judged((10, 1000), (2000, 500)), {}, 10 + 2000),
        (Judged((10, 1000), (2000, 500)), {"asks_groups": True}, 1000 + 2000),
    ],
    ids=["once", "in-rounds", "as-answers-end", "as-groups-end"],
)
def test_a_synchronous_step_has_its_verdicts_behind_its_answers(
    source: Judged, settings: dict[str, Any], rollout_tokens: int
) -> None:
    for step in simulate_ahead(judged(4.0, ahead=0, age=0, **settings), IN_TURNS, source, 4):
        expected_s = rollout_tokens * TOKEN_S + 4.0 + PUSH_S
        assert step.seconds == pytest.approx(expected_s, abs=3 * TOLERANCE_S)
        if len(set(source.verdicts)) == 1:  # both judges write for as long
            busy_s = source.rounds * VERDICT * TOKEN_S
            assert step.judges_idle_share == pytest.approx(1 - busy_s / expected_s, abs=0.01)


def test_judges_go_on_through_a_push() -> None:
    """A step is sampled in 10 s and judged in 40 s, while five are on their way.

    They are staggered, since each is trained for 4 s and pushed for 3 s. So two or more pushes
    come while a step is judged. If judges stood still for them, it would take 6 s more.
    """
    source = Judged(verdicts=(4000, 4000))
    steps = simulate_ahead(judged(4.0, ahead=4, age=4, waits=False), APART, source, 40)
    alone_s = (1000 + 4000) * TOKEN_S + 4.0 + PUSH_S
    for first in range(10, 30):
        five = steps[first : first + 5]
        period_s = sum(step.seconds for step in five)
        assert alone_s <= period_s + TOLERANCE_S
        assert period_s <= alone_s + 2 * PUSH_S + 5 * TOLERANCE_S, "two pushes stop its sampling"
        idle_s = sum(step.judges_idle_share * step.seconds for step in five)
        assert idle_s < 0.05 * period_s, "some step is always being judged"


def test_a_judge_without_an_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="the judge 'judge' has no engine"):
        simulate_ahead(judged(1.0), Layout(2, 2), Judged(), 2)


def test_a_judge_that_is_too_slow_for_its_engines_has_steps_take_its_time() -> None:
    """One verdict is written after the other, so a step takes those of all 16 answers."""
    slow = judged(1.0, ahead=1, age=1)
    engine = EngineProfile(
        base_s=TOKEN_S, running_s=0.0, cached_s=0.0, prefill_s=0.0, max_running=1
    )
    slow = replace(slow, judges={"judge": engine})
    seconds = {}
    for engines in (1, 2):
        layout = Layout(2, 2, judges={"judge": engines})
        steps = simulate_ahead(slow, layout, Judged((10, 10)), 10)
        seconds[engines] = mean_seconds(steps[3:-2], 0)
        if engines == 1:
            assert all(step.judges_idle_share < 0.15 for step in steps[3:-2])
    assert seconds[1] >= 16 * VERDICT * TOKEN_S
    assert seconds[2] == pytest.approx(seconds[1] / 2, rel=0.1)


@pytest.mark.parametrize("units", [2, 3, 7, 64])
@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
def test_the_best_split_is_that_of_trying_all(units: int, ratio: float) -> None:
    def cost(counts: tuple[int, ...]) -> float:
        generators, trainer = counts
        return max(ratio / generators, 1.0 / trainer)

    splits = [(count, units - count) for count in range(1, units)]
    assert ahead_command.best_split(units, (1, 1), cost) == min(splits, key=cost)


@pytest.mark.parametrize("units", [3, 5, 16, 40])
@pytest.mark.parametrize("work", [(1.0, 1.0, 1.0), (0.1, 1.0, 5.0), (9.0, 0.2, 1.0)])
def test_the_best_split_of_three_parties_takes_as_long_as_that_of_trying_all(
    units: int, work: tuple[float, float, float]
) -> None:
    def cost(counts: tuple[int, ...]) -> float:
        return max(one / count for one, count in zip(work, counts, strict=True))

    splits = [
        (one, other, units - one - other)
        for one in range(1, units - 1)
        for other in range(1, units - one)
    ]
    found = ahead_command.best_split(units, (1, 1, 1), cost)
    assert sum(found) == units
    assert cost(found) == min(map(cost, splits))


@pytest.mark.parametrize(
    ("units", "least"), [(18, (1, 16, 1)), (19, (1, 16, 1)), (11, (1, 4, 4, 1)), (40, (1, 8, 9, 1))]
)
def test_a_party_never_has_less_than_its_least(units: int, least: tuple[int, ...]) -> None:
    """Also where a coarse grid from one unit on would leave out all splits that can be."""
    seen = []

    def cost(counts: tuple[int, ...]) -> float:
        assert all(count >= few for count, few in zip(counts, least, strict=True))
        assert sum(counts) == units
        seen.append(counts)
        return sum(1 / count for count in counts)

    assert ahead_command.best_split(units, least, cost) in seen


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


@pytest.fixture
def asked(finished: Path) -> Path:
    """The same run, in which a judge of two replicas wrote a verdict on each answer."""
    file = finished / "trace" / "controller.0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines[1:]:
        ended_s = line["finished_s"]
        verdict_s = ended_s + VERDICT * TOKEN_S
        line["asked"] = [["judge", line["sample"], 10, VERDICT, ended_s, verdict_s]]
        line["scored_s"] = verdict_s
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = json.loads((finished / "config.yaml").read_text())
    config["roles"]["judge"] = {"slots": 2}
    (finished / "config.yaml").write_text(json.dumps(config))
    return finished


def test_judges_get_their_share_of_the_split(
    asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command finds a split of ten devices that is as fast as the best of all 36."""
    found = simulated(asked, capsys, "--devices", "10", "--age", "1", "--steps", "4")
    split = found["split ahead 1"]
    assert split["generators"] + split["judges"]["judge"] + split["trainer"] == 10
    measured = measured_run(asked)
    told = job(0.0, ahead=1, age=1)
    told = replace(
        told,
        prompts=PROMPTS,
        profile=measured.profile,
        trainer=measured.trainer,
        judges={role: judge.profile for role, judge in measured.judges.items()},
        asks_groups=measured.asks_groups,
    )
    seconds = [
        mean_seconds(simulate_ahead(told, layout, measured, 4 + 2 + 1)[:-1], 2)
        for layout in (
            Layout(one, 10 - one - other, judges={"judge": other})
            for one in range(1, 9)
            for other in range(1, 10 - one)
        )
    ]
    assert len(seconds) == 36
    assert split["seconds"] == pytest.approx(min(seconds), rel=0.01)
    shared = found["shared in turns"]
    assert shared["generators"] + shared["judges"]["judge"] == shared["trainer"] == 10


@pytest.mark.parametrize(("told", "devices"), [(12, 12), ("auto", RANKS + REPLICAS + 2 + 2)])
def test_two_judges_have_a_share_each(
    told: int | str, devices: int, asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one is asked when the first has answered. The run says how many devices it had."""
    file = asked / "trace" / "controller.0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines[1:]:
        _, _, _, _, _, ended_s = line["asked"][0]
        line["asked"].append(["style", 0, 10, VERDICT, ended_s, ended_s + 1.0])
        line["scored_s"] = ended_s + 1.0
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = json.loads((asked / "config.yaml").read_text())
    config["roles"]["style"] = {"slots": 2}
    config["cluster"] = {"devices": told}
    (asked / "config.yaml").write_text(json.dumps(config))
    measured = measured_run(asked)
    assert measured.judges["style"].size == 2, "one replica was asked"
    assert [len(rounds) for rounds in measured.groups[0].asked] == [2, 2]
    split = simulated(asked, capsys, "--steps", "3")["split ahead 1"]
    assert set(split["judges"]) == {"judge", "style"}
    assert split["generators"] + split["trainer"] + sum(split["judges"].values()) == devices


def test_the_command_shows_what_judges_get(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--async", "--trace", str(asked), "--steps", "3"]) == 0
    shown = capsys.readouterr().out
    assert "judges wait" in shown and " serve judge; " in shown


def test_a_judge_needs_the_devices_of_a_replica(
    asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((asked / "config.yaml").read_text())
    config["roles"]["judge"] = {"slots": 8}  # its two replicas have four each
    (asked / "config.yaml").write_text(json.dumps(config))
    command = ["simulate", "--async", "--trace", str(asked), "--steps", "3", "--devices"]
    assert cli.main([*command, "5"]) == 2
    assert "6 are needed: one trains, one generates, 4 for 'judge'" in capsys.readouterr().err
    assert cli.main([*command, "9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["candidates"]
    assert all(one["judges"]["judge"] >= 4 for one in found)


def test_a_group_that_a_later_step_needed_counts_once_and_others_teach_by_their_rewards(
    finished: Path,
) -> None:
    """Of the 16 groups one is in the trace twice, and two were never needed."""
    file = finished / "trace" / "controller.0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    later = []
    for line in lines[1:]:
        line["rewards"] = {"exact": float(line["sample"])}
        if line["ordinal"] == 3:
            later.append({**line, "verdict": "surplus"})
        elif line["ordinal"] in (4, 5):
            line["verdict"] = "surplus"
            line["rewards"]["exact"] *= line["ordinal"] == 4
        elif line["ordinal"] == 6:
            line |= {"verdict": "filtered", "rewards": {"exact": 1.0}}
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *later]))
    groups = measured_run(finished).groups
    assert [len(group.answers) for group in groups] == [2] * 16
    assert [ordinal for ordinal, group in enumerate(groups) if not group.teaches] == [5, 6]


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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ahead", "3", "--age", "2"], "ahead 3 and age 2 do not fit together"),
        (["--devices", "4", "--size", "4"], "4 devices hold 1 of the units of 4, 2 are needed"),
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


@pytest.mark.slow
def test_a_run_on_virtual_time_takes_what_was_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_job: Callable[..., Path]
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
            "config": {
                "prompts": 8,
                "minibatches": 1,
                "ahead": 1,
                "age": 3,
                "midway": "recompute",
            },
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
            profile=profile,
            trainer=TrainerPace(record_s=2.0),
            push_s=PUSH_S,
        ),
        Layout(2, 2),
        Rows(),
        steps,
    )
    assert sum(step.seconds for step in played) == pytest.approx(ran_s, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("midway", "chosen", "off"),
    [
        ("recompute", "core/keep-all", 0.05),
        ("wait", "core/keep-all", 0.05),
        ("wait", "core/varied", 0.1),
    ],
)
def test_a_judged_run_on_virtual_time_takes_what_the_trace_of_a_synchronous_one_foretells(
    midway: str,
    chosen: str,
    off: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_job: Callable[..., Path],
) -> None:
    """The real program with a judge, against the simulation.

    With the run's own lengths and the engines' own terms they agree within 1%. With what the trace
    of a synchronous run tells of both, which knows nothing of the other run, within 5%; 10% where a
    filter leaves groups out, since steps of the one run then need other groups than of the other.
    """
    monkeypatch.chdir(tmp_path)
    steps = 12
    trainer = {"record_s": 2.0, "token_s": 0.0, "token2_s": 0.0, "prepare_share": 0.0}
    engine = {"weights_gb": 1.0, "push_s_per_gb": PUSH_S}

    def seconds_of(directory: str, controller: dict[str, Any]) -> float:
        file = write_job(
            run={"steps": steps, "seed": 0},
            cluster={"devices": 6},
            controller=controller,
            data={"config": {"rows": 256, "drift": {"ordinals": 60, "keep": [0.7, 0.5]}}},
            objective={"use": "algorithms/ppo_clip", "config": {"old_logprobs": "rollout"}},
            roles={
                "policy": {"slots": 2, "config": {**trainer, "update_s": 0.0}},
                "rollout": {"slots": 2, "config": engine},
                "judge": {"use": "sim", "slots": 2, "config": {}},
            },
            filter={"use": chosen},
            rewards={"judged": {"use": "sim/asks", "role": "judge"}},
        )
        assert run_virtual([str(file), f"run.dir={directory}"]) == 0
        lines = Path(directory, "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line)["metrics"] for line in lines]
        return sum(row.get("seconds/step", 0.0) for row in rows)

    config = {"prompts": 8, "minibatches": 1}
    seconds_of("sync", {"use": "core/sync", "config": config})
    bounds = {"ahead": 1, "age": 3, "midway": midway}
    ran_s = seconds_of("async", {"use": "async", "config": {**config, **bounds}})
    measured = measured_run(Path("sync"))
    assert measured.judges["judge"].size == 1
    told = AheadJob(
        prompts=measured.prompts,
        ahead=1,
        age=3,
        waits=midway == "wait",
        profile=measured.profile,
        trainer=measured.trainer,
        push_s=measured.push_s,
        reward_s=measured.reward_s,
        judges={role: judge.profile for role, judge in measured.judges.items()},
        asks_groups=measured.asks_groups,
    )
    layout = Layout(2, 2, judges={"judge": 2})
    played = simulate_ahead(told, layout, measured, steps)
    assert sum(step.seconds for step in played) == pytest.approx(ran_s, rel=off)
    true = EngineProfile()
    told = replace(told, profile=true, judges={"judge": true}, trainer=TrainerPace(record_s=2.0))
    played = simulate_ahead(told, layout, measured_run(Path("async")), steps)
    assert sum(step.seconds for step in played) == pytest.approx(ran_s, rel=0.01)
