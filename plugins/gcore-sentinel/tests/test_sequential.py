"""Both halves together: any deal of records gives one verdict, and a resumed run judges alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gcore_sentinel.calibrate import Kept, main, make_table, peak
from gcore_sentinel.config import SequentialConfig
from gcore_sentinel.sequential import Sequential
from gcore_sentinel.synthetic import healthy, records
from gcore_sentinel.tables import find

from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.sentinel import Alarm, Compared, Pair, SentinelContext, Source

PAIR = Pair(
    generator="torch",
    generator_precision="bfloat16",
    trainer="torch",
    trainer_precision="bfloat16",
)


def kept(seed: int, groups: int = 600) -> Kept:
    trainer, gaps = healthy(np.random.default_rng(seed), groups)
    steps, ordinals = np.repeat(np.arange(groups) // 32, 64), np.repeat(np.arange(groups), 64)
    rollout = (trainer + gaps).astype(np.float32).ravel()
    return Kept(
        pair=PAIR,
        model={},
        rollout=rollout,
        trainer=trainer.ravel(),
        entropy=np.full(rollout.shape, np.nan, np.float32),
        step=steps,
        ordinal=ordinals,
    )


def entropy_of(record: Compared) -> np.ndarray:
    assert record.entropy is not None
    return record.entropy


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of the synthetic records' own healthy gaps."""
    drawn = [record for seed in range(4) for record in records(np.random.default_rng(seed), 64)]
    file = make_table(
        [
            Kept(
                pair=PAIR,
                model={},
                rollout=np.concatenate([r.rollout_logp for r in drawn]),
                trainer=np.concatenate([r.trainer_logp for r in drawn]),
                entropy=np.concatenate([entropy_of(r) for r in drawn]),
                step=np.zeros(len(drawn) * 8, np.int64),
                ordinal=np.repeat([r.ordinal for r in drawn], 8),
            )
        ]
    )
    path = tmp_path_factory.mktemp("table") / "table.json"
    path.write_bytes(msgspec.json.encode(file))
    return path


def sentinel(table: Path | str, replicas: int = 2, band: float = 4.0) -> Sequential:
    context = SentinelContext(pair=PAIR, band=band, replicas=replicas)
    return Sequential(SequentialConfig(table=str(table)), context)


def step_of(
    made: Sequential, step: int, parts: list[list[Compared]], shards: int = 1
) -> list[Alarm]:
    """Judges a step whose records lie on ranks as ``parts`` says, their groups on some shards."""
    sums: list[dict[tuple[int, int, int], np.ndarray]] = [{} for _ in range(shards)]
    for part in parts:
        for record, row in zip(part, made.measure(part), strict=True):
            key = record.ordinal, record.replica, record.version
            shard = sums[record.ordinal % shards]
            shard[key] = shard.get(key, np.zeros(row.shape)) + row
    evidence: dict[Source, np.ndarray] = {}
    for shard in sums:
        if not shard:
            continue
        for (_, *source), row in zip(
            shard, made.weigh(np.stack(list(shard.values()))), strict=True
        ):
            at = (source[0], source[1])
            evidence[at] = evidence.get(at, np.zeros(row.shape)) + row
    return made.judge(step, evidence)


def drawn(step: int, bad_replica: int = -1) -> list[Compared]:
    """A step of two replicas, one of which may be off by a little."""
    generator = np.random.default_rng(step)
    found = []
    for record in records(generator, 24, step=step):
        replica = record.ordinal % 2
        rollout = record.rollout_logp
        if replica == bad_replica:
            rollout = rollout + np.float32(0.03) * generator.standard_normal(8).astype(np.float32)
        found.append(replace(record, replica=replica, rollout_logp=rollout))
    return found


def test_the_replica_that_went_wrong_is_named_with_the_step(table: Path) -> None:
    made = sentinel(table)
    for step in range(4):
        assert step_of(made, step, [drawn(step)]) == []
    for step in range(4, 12):
        alarms = step_of(made, step, [drawn(step, bad_replica=1)])
        if alarms:
            break
    assert [alarm.replica for alarm in alarms] == [1]
    assert alarms[0].since_step in (4, 5) and "log e" in alarms[0].text
    assert alarms[0].actions <= 8 * 24 * 8


@pytest.mark.parametrize(("ranks", "shards"), [(1, 1), (3, 1), (2, 4), (5, 2)])
def test_any_deal_of_records_to_ranks_and_shards_gives_the_same_state(
    table: Path, ranks: int, shards: int
) -> None:
    whole, dealt = sentinel(table), sentinel(table)
    for step in range(3):
        found = drawn(step)
        step_of(whole, step, [found])
        order = np.random.default_rng(ranks).permutation(len(found))
        step_of(dealt, step, [[found[i] for i in order[r::ranks]] for r in range(ranks)], shards)
    assert whole.state() == dealt.state()


@pytest.mark.parametrize("temperature", [0.998, 1.002])
def test_a_temperature_that_makes_no_gap_larger_is_found_by_its_slope(
    table: Path, temperature: float
) -> None:
    def tempered(draw: np.random.Generator, logits: np.ndarray, actions: np.ndarray) -> np.ndarray:
        other = logits / temperature
        other = other - np.log(np.exp(other).sum(axis=1, keepdims=True))
        logp: np.ndarray = other[np.arange(len(actions)), actions]
        return logp

    made = sentinel(table, replicas=1)
    alarms: list[Alarm] = []
    actions = 0
    for step in range(60):
        found = records(np.random.default_rng(500 + step), 32, step=step, fault=tempered)
        actions += sum(record.mask.size for record in found)
        alarms = step_of(made, step, [found])
        if alarms:
            break
    assert "as those of another temperature" in alarms[0].text and actions <= 60_000


def test_healthy_gaps_have_no_slope(table: Path) -> None:
    made = sentinel(table, replicas=1)
    for step in range(40):
        assert (
            step_of(made, step, [records(np.random.default_rng(900 + step), 32, step=step)]) == []
        )
    assert made.metrics()["sentinel/log_e"] < 8


def test_a_resumed_run_judges_alike(table: Path) -> None:
    straight, first = sentinel(table), sentinel(table)
    for step in range(3):
        step_of(straight, step, [drawn(step, 0)])
        step_of(first, step, [drawn(step, 0)])
    resumed = sentinel(table)
    resumed.restore(json.loads(json.dumps(first.state())))
    for step in range(3, 6):
        seen = step_of(straight, step, [drawn(step, 0)])
        assert step_of(resumed, step, [drawn(step, 0)]) == seen
    assert resumed.state() == straight.state()


def test_a_resumed_run_with_fewer_replicas_forgets_those_that_are_gone(table: Path) -> None:
    made = sentinel(table)
    step_of(made, 0, [drawn(0)])
    assert set(made.state()) == {"-1", "0", "1"}
    resumed = sentinel(table, replicas=1)
    resumed.restore(made.state())
    assert set(resumed.state()) == {"0"}  # the level of all together would stay as it is


def test_float32_keeps_its_band_and_needs_no_table() -> None:
    made = sentinel("auto", band=1e-3)
    assert made.notes() == []
    clean = [replace(r, rollout_logp=r.trainer_logp) for r in records(np.random.default_rng(0), 8)]
    assert step_of(made, 0, [clean]) == []
    rollout = clean[5].rollout_logp.copy()
    rollout[2] += 0.002
    clean[5] = replace(clean[5], rollout_logp=rollout)
    (alarm,) = step_of(made, 1, [clean])
    assert alarm.text == "1 of 512 actions are off by more than 0.001 nats"


@pytest.mark.parametrize("temperature", [0.99986, 1.00014])
def test_float32_gaps_that_all_stay_in_the_band_are_found_when_they_are_too_many(
    temperature: float,
) -> None:
    def tempered(draw: np.random.Generator, logits: np.ndarray, actions: np.ndarray) -> np.ndarray:
        other = logits / temperature
        other = other - np.log(np.exp(other).sum(axis=1, keepdims=True))
        logp: np.ndarray = other[np.arange(len(actions)), actions]
        return logp

    made = sentinel("auto", band=1e-3)
    found = [
        replace(record, replica=record.ordinal % 2)
        for record in records(np.random.default_rng(0), 256, noise=0.0, fault=tempered)
    ]
    wrong = [
        record if record.replica else replace(record, rollout_logp=record.trainer_logp)
        for record in found
    ]
    assert max(np.abs(r.rollout_logp - r.trainer_logp).max() for r in wrong) < 1e-3
    steps = [wrong[at : at + 256] for at in range(0, len(wrong), 256)]
    alarms = [alarm for step, part in enumerate(steps) for alarm in step_of(made, step, [part])]
    assert {alarm.replica for alarm in alarms} == {1}
    assert "0.0001 nats, a tenth of the band, too often" in alarms[0].text


def test_float32_gaps_of_which_few_are_beyond_a_tenth_of_the_band_are_healthy() -> None:
    made = sentinel("auto", band=1e-3)
    draw = np.random.default_rng(0)
    for step in range(60):
        found = []
        for record in drawn(step):
            rare = draw.random(8) < 0.05
            rollout = record.trainer_logp + (np.where(rare, 5e-4, 3e-5)).astype(np.float32)
            found.append(replace(record, rollout_logp=rollout))
        assert step_of(made, step, [found]) == []
    assert made.metrics()["sentinel/log_e"] < 5


def test_low_precision_without_a_table_keeps_the_gross_stop_and_says_so() -> None:
    made = sentinel("")
    assert "no table of healthy gaps for torch in bfloat16" in made.notes()[0]
    found = drawn(0)
    assert step_of(made, 0, [found]) == []
    wrong = replace(found[0], rollout_logp=np.full(8, np.nan, np.float32))
    assert [a.replica for a in step_of(made, 1, [[wrong, *found[1:]]])] == [0]


def test_a_masked_end_on_every_record_is_an_alarm(table: Path) -> None:
    made = sentinel(table, replicas=1)
    ends = np.array([True] * 7 + [False])
    found = [replace(r, mask=ends) for r in records(np.random.default_rng(0), 24)]
    assert "last action" in step_of(made, 0, [found])[0].text
    one_trained = [replace(found[0], mask=np.ones(8, bool)), *found[1:]]
    assert step_of(sentinel(table, replicas=1), 0, [one_trained]) == []


def test_a_few_versions_with_more_rounding_than_others_are_healthy() -> None:
    """Weights round as they do for some steps: the bound is that of the worst, not of the mean."""

    def run(seed: int) -> Kept:
        found = kept(seed, 1280)
        of_steps = np.isin(found.step, np.r_[12:18, 30:34])
        gap = found.rollout.astype(np.float64) - found.trainer
        rollout = found.trainer + np.where(of_steps, 2.5, 1.0) * gap
        return replace(found, rollout=rollout.astype(np.float32))

    file = make_table([run(seed) for seed in range(3)])
    assert max(peak(run(seed), file.table()) for seed in (97, 98, 99)) < np.log(1e8) / 2


def test_a_table_is_held_out_and_covers_runs_that_it_has_not_seen(tmp_path: Path) -> None:
    file = make_table([kept(seed) for seed in range(3)])
    assert file.runs == 3 and file.actions == 3 * 600 * 64
    assert all(0 < share < 0.2 for share in file.worst_shares)
    assert peak(kept(99), file.table()) < np.log(1e8) / 2


def test_runs_of_two_pairs_make_no_table() -> None:
    other = replace(kept(1, 60), pair=Pair(generator="vllm"))
    with pytest.raises(DataError, match="cannot make one table"):
        make_table([kept(0, 60), other])


def test_the_command_makes_a_table_from_what_runs_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = SentinelContext(pair=PAIR, band=4.0, directory=str(tmp_path), rank=0)
    made = Sequential(SequentialConfig(keep=True, table=""), context)
    for step in range(6):
        made.measure(drawn(step))
    assert main([str(tmp_path), "--out", str(tmp_path / "table.json")]) == 0
    assert (
        "torch in bfloat16 with torch in bfloat16; largest healthy shares"
        in capsys.readouterr().out
    )
    assert find(str(tmp_path / "table.json"), PAIR, {}) is not None
    with pytest.raises(ConfigError, match="is of torch in bfloat16 with torch in bfloat16, this"):
        find(str(tmp_path / "table.json"), Pair(generator="vllm"), {})


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="kept no log-probs"):
        main([str(tmp_path), "--out", str(tmp_path / "t.json")])
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(DataError, match="this is no table of gaps"):
        find(str(tmp_path / "t.json"), PAIR, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        find(str(tmp_path / "absent.json"), PAIR, {})


@pytest.mark.parametrize("steps", [1.0, float("nan"), float("inf")])
def test_a_rate_of_alarms_at_which_none_is_ever_raised_is_refused(steps: float) -> None:
    with pytest.raises(ConfigError, match="steps_to_false_alarm: must be a finite number above 1"):
        SequentialConfig(steps_to_false_alarm=steps)
