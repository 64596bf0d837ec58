"""The step program, ledger and shells on virtual time: delays, lost and repeated messages change
nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
from gcore_testing import fake
from gcore_testing.simulation import (
    MOST_TURNS,
    Deadlock,
    Outcome,
    SimulatedJob,
    Storm,
    run_virtual,
    simulate,
)

from gcore_core.builtin.filters import Varied
from gcore_core.contract.algorithms import GroupScalars
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.order import row_of, sample_seed
from gcore_core.contract.scorer import ScoredRecord

SEEDS = 200
RELAYS = ["relay.prepare", "relay.train"]
SMALL = SimulatedJob(
    shards=1, replicas=1, ranks=2, steps=2, prompts=4, samples=2, evaluate_prompts=2
)


def sized(base: SimulatedJob, shards: int, replicas: int) -> SimulatedJob:
    return SimulatedJob(**{**vars(base), "shards": shards, "replicas": replicas})


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_virtual(simulate(SMALL, tmp_path_factory.mktemp("calm") / "store"))


@pytest.fixture(scope="module")
def lost() -> Counter[tuple[str, str]]:
    return Counter()


@pytest.mark.parametrize("block", range(10))
def test_random_faults_give_the_same_run_as_one_calm_shard(
    block: int, calm: Outcome, lost: Counter[tuple[str, str]], tmp_path: Path
) -> None:
    for seed in range(block * SEEDS // 10, (block + 1) * SEEDS // 10):
        storm = Storm(seed)
        job = sized(SMALL, shards=1 + seed % 4, replicas=1 + seed // 4 % 3)
        found = run_virtual(simulate(job, tmp_path / str(seed), storm))
        assert found.batches == calm.batches, f"storm {seed} of {job}"
        assert found.logits == calm.logits, f"storm {seed} of {job}"
        assert found.ledger == calm.ledger, f"storm {seed} of {job}"
        assert [report.step for report in found.reports] == list(range(SMALL.steps + 1)), (
            f"storm {seed} of {job}"
        )
        lost.update(storm.lost)


def test_a_store_of_one_page_gives_the_same_run(calm: Outcome, tmp_path: Path) -> None:
    """Replicas wait for slabs, and what finds no room goes to disk; messages about it are lost and
    repeated.
    """
    for seed in range(12):
        job = SimulatedJob(
            **{**vars(sized(SMALL, 1 + seed % 4, 1 + seed // 4)), "store_bytes": 1 << 12}
        )
        found = run_virtual(simulate(job, tmp_path / str(seed), Storm(seed)))
        assert found.logits == calm.logits, f"storm {seed} of {job}"
        assert found.ledger == calm.ledger, f"storm {seed} of {job}"
    assert any((tmp_path / f"{seed}-spill").exists() for seed in range(12)), (
        "nothing was spilled: this tests nothing"
    )


def test_simulated_faults_lose_every_kind_of_message(lost: Counter[tuple[str, str]]) -> None:
    """Request (from whoever asks) and answer (from whoever is asked) of every method of a run."""
    asked = {
        "controller": [
            "generate",
            "score",
            "relay.prepare",
            "relay.train",
            "push.begin",
            "push.pull",
            "published",
            "step_end",
        ],
        "rollout": ["push.plan", "push.bucket", "slab", "release"],
        "policy": ["prepare", "train", "push.begin", "push.exported"],
    }
    asked["controller"] += [
        "agree.sum",
        "agree.share",
        "agree.collect",
        "agree.deal",
        "agree.ask",
    ]
    answered = {
        "rollout": ["generate", "push.pull"],
        "scorer": ["score"],
        "policy": [
            "relay.prepare",
            "relay.train",
            "prepare",
            "train",
            "push.begin",
            "push.exported",
            "push.plan",
            "push.bucket",
        ],
        "supervisor": ["published", "step_end", "slab", "release"] + asked["controller"][-5:],
    }
    if not lost:
        pytest.skip("counts what the storms before it lost; run the whole file")
    wanted = {
        (who, method)
        for table in (asked, answered)
        for who, methods in table.items()
        for method in methods
    }
    assert set(lost) == wanted


def test_different_fault_seeds_give_different_faults(tmp_path: Path) -> None:
    times = {
        run_virtual(simulate(SMALL, tmp_path / str(seed), Storm(seed))).virtual_s
        for seed in range(3)
    }
    assert len(times) == 3


def test_the_same_fault_seed_repeats_the_same_faults(tmp_path: Path) -> None:
    job = sized(SMALL, shards=3, replicas=2)
    times = [
        run_virtual(simulate(job, tmp_path / name, Storm(5))).virtual_s
        for name in ("first", "second")
    ]
    assert times[0] == times[1]


def test_a_deadlock_is_reported() -> None:
    async def waits_for_nobody() -> None:
        await asyncio.sleep(3)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="at 3.000 s of virtual time"):
        run_virtual(waits_for_nobody())


@pytest.mark.parametrize("pause_s", [0.0, 0.1])
def test_an_endless_loop_is_reported_and_ended(pause_s: float) -> None:
    ended = []

    async def never_ends() -> None:
        try:
            while True:
                await asyncio.sleep(pause_s)
        finally:
            ended.append(True)

    with pytest.raises(Deadlock, match=f"turn {MOST_TURNS} of the loop"):
        run_virtual(never_ends())
    assert ended


def passing(samples: int, seed: int, rows: int) -> list[int]:
    """The ordinals of version 0 whose group passes ``Varied``, lowest first, worked out without any
    process.
    """
    generator = fake.FakeGenerator(fake.FakeGeneratorConfig(), WorkerContext(role="rollout"))
    scorer = fake.FakeScorer(None, WorkerContext(role="scorer"))
    dataset = fake.FakeDataset(fake.FakeDataConfig(rows=rows))

    def teaches(ordinal: int) -> bool:
        epoch, row = row_of(ordinal, rows, seed)
        generator.submit(
            [
                SampleRequest(
                    ordinal=ordinal,
                    sample=s,
                    seed=sample_seed(seed, ordinal, epoch, s),
                    prompt=dataset[row],
                )
                for s in range(samples)
            ]
        )
        records = []
        while len(records) < samples:
            records += generator.step()
        scored = [
            ScoredRecord(
                ordinal=ordinal,
                sample=record.request.sample,
                prompt=record.request.prompt,
                text=record.columns["text"].tobytes().decode(),
                status=record.status,
                columns=record.columns,
            )
            for record in records
        ]
        rewards = np.array([score.value for score in scorer.score(scored)])
        return Varied().keep(GroupScalars(rewards=rewards, lengths=rewards))[0]

    return list(islice(filter(teaches, count()), 6))


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_dynamic_sampling_takes_the_lowest_ordinals_that_pass(shards: int, tmp_path: Path) -> None:
    job = SimulatedJob(
        shards=shards,
        steps=2,
        prompts=6,
        samples=2,
        evaluate_prompts=0,
        filter="gcore_core.builtin.filters:Varied",
    )
    alone = run_virtual(simulate(sized(job, 1, 1), tmp_path / "alone"))
    found = run_virtual(simulate(job, tmp_path / "store", Storm(shards)))
    wanted = passing(job.samples, job.seed, rows=16)
    assert wanted != list(range(6)), "nothing was dropped: this tests nothing"
    assert sorted({ordinal for ordinal, _, _ in found.batches[0]}) == wanted
    assert found.batches == alone.batches
    assert found.logits == alone.logits
    assert found.ledger["next_ordinal"] == alone.ledger["next_ordinal"] > 12
    dropped = sum(report.metrics.get("groups/dropped/equal_rewards", 0) for report in found.reports)
    assert dropped == found.ledger["next_ordinal"] - 12


def test_a_step_without_a_group_that_teaches_is_skipped(tmp_path: Path) -> None:
    names = "gcore_core.builtin.filters:Varied"
    job = SimulatedJob(
        shards=2, steps=8, prompts=1, samples=2, evaluate_prompts=0, max_rounds=1, filter=names
    )
    found = run_virtual(simulate(job, tmp_path / "store"))
    trained = [{ordinal for ordinal, _, _ in batch} for batch in found.batches]
    kept = {report.step - 1: report.metrics["groups/kept"] for report in found.reports[1:]}
    assert trained == [{step} for step in range(8) if kept[step]]
    skipped = [report.step - 1 for report in found.reports if "skipped" in report.metrics]
    assert skipped == [step for step in range(8) if not kept[step]]
    assert 0 < len(skipped) < 8
    assert found.published == list(range(9)), "a skipped step has a version too"
    assert found.ledger["next_ordinal"] == 8


def test_a_run_ends_well_when_many_steps_in_a_row_teach_nothing(tmp_path: Path) -> None:
    job = SimulatedJob(
        shards=2,
        steps=8,
        prompts=2,
        samples=2,
        evaluate_prompts=0,
        max_rounds=1,
        max_skipped_steps=3,
        checkpoint_every=1,
        filter="tests.support.filters:Nothing",
    )
    found = run_virtual(simulate(job, tmp_path / "store"))
    assert found.batches == []
    assert found.published == [0, 1, 2, 3]
    assert [report.metrics["skipped"] for report in found.reports[1:]] == [1, 2, 3]
    assert [commit.step for commit in found.checkpoints] == [1, 2, 3]
    assert found.checkpoints[-1].state["skipped"] == 3
    assert "the run ends: 3 steps in a row had no group to train on" in found.notes[-1]


def test_a_step_goes_on_with_fewer_groups_when_rounds_are_over(tmp_path: Path) -> None:
    names = "gcore_core.builtin.filters:Varied"
    job = SimulatedJob(
        shards=2, steps=1, prompts=6, samples=2, evaluate_prompts=0, max_rounds=1, filter=names
    )
    found = run_virtual(simulate(job, tmp_path / "store"))
    taken = {ordinal for ordinal, _, _ in found.batches[0]}
    assert taken == set(passing(job.samples, job.seed, rows=16)) & set(range(6))
    assert found.ledger["next_ordinal"] == 6
