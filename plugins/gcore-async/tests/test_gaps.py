"""A checkpoint whose steps took groups out of order: who may go on from it, and how to leave it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gcore_testing.simulation import Outcome, Program, SimulatedJob, run_virtual, simulate

from gcore_core.contract.errors import ConfigError
from gcore_core.controllers.synchronous import SynchronousController as Synchronous
from gcore_core.runtime.messages import CommitCheckpoint
from tests.integration.test_resume import resume
from tests.support import runs

from .test_faults import program

JOB = SimulatedJob(
    shards=2,
    replicas=2,
    prompts=4,
    samples=2,
    steps=6,
    max_new_tokens=24,
    takes_stale=True,
    checkpoint_every=1,
)


def consumed_above(saved: CommitCheckpoint) -> list[int]:
    """Returns the ordinals that are consumed above the first that is not."""
    return list(saved.state.get("window", {}).get("above", ()))


def with_gaps(directory: Path) -> tuple[CommitCheckpoint, Outcome, Path]:
    """A checkpoint with gaps, what was done before it, and the run's store, named by its seed."""
    for seed in range(20):
        store = directory / str(seed)
        job = replace(JOB, seed=seed)
        outcome = run_virtual(simulate(job, store, None, program(1, 4, "recompute")))
        for saved in outcome.checkpoints[:-1]:
            if consumed_above(saved):
                outcome.batches = outcome.batches[: saved.step]
                return saved, outcome, store
    raise AssertionError("no step took its groups out of order")


def go_on(
    saved: CommitCheckpoint, store: Path, again: Path, made: Program = Synchronous, **changes: Any
) -> Outcome:
    """Resumes in the store ``again`` what was saved by a run in ``store``."""
    seed = int(store.name.partition("-")[0])
    files = store.with_name(f"{store.name}-step{saved.step}")
    files.rename(again.with_name(f"{again.name}-step{saved.step}"))
    job = replace(JOB, seed=seed, resumed=saved, **changes)
    return run_virtual(simulate(job, again, None, made))


def trained(*outcomes: Outcome) -> list[int]:
    steps = itertools.chain(*(outcome.batches for outcome in outcomes))
    return sorted(ordinal for step in steps for ordinal in {key[0] for key in step})


def test_the_synchronous_program_refuses_a_checkpoint_with_gaps(tmp_path: Path) -> None:
    saved, _, store = with_gaps(tmp_path)
    with pytest.raises(ConfigError, match="took groups out of order"):
        go_on(saved, store, tmp_path / "again")


def test_the_program_itself_goes_on_with_gaps_and_takes_nothing_twice(tmp_path: Path) -> None:
    saved, before, store = with_gaps(tmp_path)
    after = go_on(saved, store, tmp_path / "again", program(1, 4, "recompute"))
    ordinals = trained(before, after)
    assert len(set(ordinals)) == len(ordinals) == JOB.steps * JOB.prompts


def test_with_nothing_ahead_the_gaps_close(tmp_path: Path) -> None:
    """The synchronous program goes on behind them, and each ordinal is trained on once."""
    saved, before, store = with_gaps(tmp_path)
    consumed = saved.state["ledger"]["next_ordinal"] + len(consumed_above(saved))
    waiting = saved.state["window"]["front"] - consumed  # groups that no step has taken
    steps = saved.step + max(1, -(-waiting // JOB.prompts))
    again = tmp_path / f"{store.name}-again"
    closed = go_on(saved, store, again, program(0, 0, "wait"), steps=steps)
    newest = closed.checkpoints[-1]
    assert newest.step == steps
    assert not consumed_above(newest)
    last = go_on(newest, again, tmp_path / "last", steps=steps + 2)
    assert trained(before, closed, last) == list(range((steps + 2) * JOB.prompts))


def test_the_program_goes_on_behind_the_synchronous_one(tmp_path: Path) -> None:
    before = run_virtual(simulate(replace(JOB, steps=3), tmp_path / "0"))
    saved = before.checkpoints[-1]
    after = go_on(saved, tmp_path / "0", tmp_path / "again", program(1, 1, "wait"))
    assert trained(before, after) == list(range(JOB.steps * JOB.prompts))


STEPS = 8
PROMPTS = 6
SLOW = 7  # the ordinal that later steps overtake

OVERTAKEN = f'''
"""A generator that draws one group only when a test has laid the file "let go"."""
import os, time
from dataclasses import dataclass

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_testing import fake


class Overtaken(fake.FakeGenerator):
    def step(self):
        if os.path.exists("let go"):
            return super().step()
        held = {{key: one for key, one in self._running.items() if key[0] == {SLOW}}}
        self._running = {{key: one for key, one in self._running.items() if key not in held}}
        if not self._running:
            time.sleep(0.001)
        finished = super().step()
        self._running |= held
        return finished


@dataclass(frozen=True, kw_only=True)
class Config(fake.FakeGeneratorConfig):
    def traits(self):
        return Traits(receives_weights=True, midway_weights=True, abort=True)


@hookimpl
def gcore_generators():
    yield p.GeneratorProvider(
        name="slow",
        summary="-",
        factory="overtaken:Overtaken",
        config=Config,
    )
'''


@pytest.mark.slow
def test_a_run_changes_its_program_once_its_gaps_are_closed(tmp_path: Path) -> None:
    bounds = {"prompts": PROMPTS, "ahead": 1, "age": 4, "midway": "recompute"}
    job = runs.job(
        controller={"use": "async", "shards": 2, "config": bounds},
        objective={"use": "algorithms/ppo_clip"},
        run={"steps": STEPS},
        checkpoint={"every": 1, "last": 20},
        roles={"rollout": {"use": "overtaken/slow"}},
    )
    job["local"].append("overtaken.py")
    (tmp_path / "overtaken.py").write_text(OVERTAKEN)
    with runs.running(tmp_path, job) as run:
        run.read_until(f"step 3/{STEPS}")
        run.process.kill()
    (tmp_path / "let go").touch()
    refused = resume(run, "controller.use=core/sync")
    assert refused.returncode == 2
    assert f"ordinal {SLOW} is not consumed, and {SLOW + 1} is" in refused.stderr
    step = max(int(path.name[5:]) for path in (run.path / "checkpoints").glob("step-??????"))
    words = ["controller.use=async", "controller.config.ahead=0", "controller.config.age=0"]
    words.append(f"run.steps={step + 1}")
    for overrides in (words, ["controller.use=core/sync", "run.steps=7"]):
        done = resume(run, *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
    back = resume(run, "controller.use=async", f"run.steps={STEPS}")
    assert back.returncode == 0, back.stdout + back.stderr
    taken = [sorted({ordinal for ordinal, _ in batch}) for batch in run.batches()]
    made_again = len(taken) - STEPS  # steps behind the newest checkpoint
    ordinals = [*taken[:step], *taken[step + made_again :]]
    assert sorted(itertools.chain(*ordinals)) == list(range(STEPS * PROMPTS))
