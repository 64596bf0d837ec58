"""The window: what a step program sees of producing groups, with nothing ahead and with a step
ahead of training.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gcore_core.contract.errors import ContractError
from gcore_core.controllers.checkpointing import unless
from gcore_core.controllers.step_program import StepProgram
from gcore_core.controllers.synchronous import SynchronousController
from gcore_core.controllers.tracing import Stopwatch
from gcore_core.controllers.window import Taken
from gcore_core.testing.faults import FAULTS, Faults
from gcore_core.testing.simulation import (
    Outcome,
    SimulatedJob,
    Storm,
    run_virtual,
    simulate,
    violations,
)

JOB = SimulatedJob(
    shards=1, replicas=2, ranks=2, steps=4, prompts=4, samples=2, evaluate_prompts=2, scorers=1
)
VARIED = "gcore_core.builtin.filters:Varied"


class OneStepAhead(StepProgram):
    """Draws the next step while it trains on this one."""

    async def step(self, step: int) -> bool:
        watch = Stopwatch(self.context.trace, step)
        taken = await unless(self.context.stopping, self.window.take(step))
        if not self.is_last(step, taken):
            self.window.produce(step + 1, least=step)
        trained = await self.train(step, taken, watch)
        await self.window.drain()
        last = await self.end(step, taken, trained, watch)
        assert self.window.state()["ledger"]["next_ordinal"] == taken.next_ordinal
        return last


def ahead(directory: Path, job: SimulatedJob, weather: Any = None) -> Outcome:
    return run_virtual(simulate(job, directory / "store", weather, OneStepAhead))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return ahead(tmp_path_factory.mktemp("calm"), JOB)


def test_a_step_produced_ahead_uses_the_previous_weights_and_is_declared_stale(
    calm: Outcome,
) -> None:
    ordinals = [{ordinal for ordinal, _, _ in batch} for batch in calm.batches]
    assert ordinals == [set(range(4 * step, 4 * step + 4)) for step in range(4)]
    assert calm.stale == [set(), *ordinals[1:]]


@pytest.mark.parametrize("storm", range(12))
def test_under_random_faults_producing_ahead_gives_the_calm_run(
    storm: int, calm: Outcome, tmp_path: Path
) -> None:
    job = replace(JOB, shards=1 + storm % 4, replicas=1 + storm // 4)
    outcome = ahead(tmp_path, job, Storm(storm))
    assert outcome.batches == calm.batches
    assert outcome.stale == calm.stale
    assert outcome.logits == calm.logits
    assert outcome.ledger == calm.ledger


def test_sampling_during_training_takes_less_time(tmp_path: Path) -> None:
    """Without faults: under them a run's time is that of the waits for what was lost."""
    seconds = {}
    for program in (SynchronousController, OneStepAhead):
        store = tmp_path / program.__name__ / "store"
        store.parent.mkdir()
        run = simulate(replace(JOB, shards=2, evaluate_prompts=0), store, None, program)
        seconds[program] = run_virtual(run).virtual_s
    assert seconds[OneStepAhead] < 0.95 * seconds[SynchronousController]


@pytest.mark.parametrize("takes_stale", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_producing_ahead_takes_every_ordinal_once_with_left_over_groups(
    shards: int, takes_stale: bool, tmp_path: Path
) -> None:
    job = replace(JOB, shards=shards, prompts=6, steps=6, filter=VARIED, takes_stale=takes_stale)
    outcome = ahead(tmp_path, job, Storm(shards))
    surplus = sum(report.metrics.get("groups/surplus", 0) for report in outcome.reports)
    assert surplus, "nothing was left over: this tests nothing"
    consumed = outcome.ledger["next_ordinal"]
    assert sorted(ordinal for _, ordinal in outcome.verdicts) == list(range(consumed))
    taken = [sorted({ordinal for ordinal, _, _ in batch}) for batch in outcome.batches]
    assert all(len(step) == 6 for step in taken)
    assert sum(taken, []) == sorted({ordinal for step in taken for ordinal in step})


@pytest.mark.parametrize("block", range(2))
def test_generators_that_die_during_training_lose_and_repeat_nothing(
    block: int, calm: Outcome, tmp_path: Path
) -> None:
    """One that is born while the trainer updates its weights gets those of before or of after, so
    what it draws again may differ from the calm run.
    """
    hit = set()
    for seed in range(30 * block, 30 * block + 30):
        weather = Faults(seed, kills=0.01)
        job = replace(JOB, shards=1 + seed % 3, takes_stale=True)
        directory = tmp_path / str(seed)
        directory.mkdir()
        outcome = ahead(directory, job, weather)
        assert not violations(outcome, calm, weather, job), f"seed {seed}"
        hit |= {fault for _, _, fault in weather.hits}
    assert hit == set(FAULTS)


class Misuse(SynchronousController):
    """Asks the window for what it does not do."""

    async def run(self) -> None:
        await self.publishing.publish(0, 0)
        await self.window.drain()  # nothing runs ahead: returns at once
        self.window.produce(0, least=0)
        with pytest.raises(ContractError, match="producing step 1: step 0 runs ahead already"):
            self.window.produce(1, least=0)
        with pytest.raises(ContractError, match="taking step 1: step 0 runs ahead"):
            await self.window.take(1)
        await self.window.drain()
        taken: Taken = await self.window.take(0)
        assert [group[0].ordinal for group in taken.groups] == [0, 1, 2, 3]
        assert (taken.next_ordinal, taken.oldest, taken.carried) == (4, 1, [])
        assert self.window.state()["ledger"]["next_ordinal"] == 0, "it is not committed"
        assert set(self.window.commit(taken)) == {0, 1, 2, 3}
        assert self.window.state() == taken.state


def test_only_one_step_may_run_ahead_and_must_be_taken_before_another(tmp_path: Path) -> None:
    run_virtual(simulate(JOB, tmp_path / "store", None, Misuse))
