"""Generators that sleep while the trainer works: real processes, which write down what they do and
when.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gcore_core import cli
from gcore_core.contract import run_files
from tests.support import runs

WITNESS = '''
"""Fakes that write down what they do, with a clock that all processes share."""
import json, os, signal, time
from dataclasses import dataclass, replace
from pathlib import Path

from gcore_core import hookimpl
from gcore_core.contract import providers as p
from gcore_core.contract.traits import Traits
from gcore_testing import fake, fake_judge


class Writes:
    def __init__(self, config, context):
        super().__init__(config, context)
        self._name = f"{context.role}.{context.rank}"

    def _tell(self, what):
        row = [time.monotonic_ns(), os.getpid(), what, self.version]
        with open(f"{self._name}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\\n")


class Sleeper(Writes, fake.FakeGenerator):
    def step(self):
        self._tell("step")
        return super().step()

    def sleep(self):
        super().sleep()
        self._tell("asleep")

    def wake(self):
        self._tell("awake")
        super().wake()


class Doomed(Sleeper):
    """Is killed by the trainer while it sleeps."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self._tell("made")


class Mortal(Sleeper):
    """A judge whose replica 2 is killed at its first answer; the process after it is never ready."""

    def __init__(self, config, context):
        if os.path.exists(f"gone.{context.rank}"):
            signal.pause()
        super().__init__(config, context)

    def step(self):
        if self._name == "judge.2":
            Path("gone.2").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


def kill_asleep(name):
    """Kills a generator; returns when the process after it has made its engine, or says that it
    sleeps.
    """
    told = Path(f"{name}.jsonl")
    rows = [json.loads(line) for line in told.read_text().splitlines()]
    os.kill(rows[-1][1], signal.SIGKILL)
    while told.read_text().count('"made"') < 2:
        if any("sleeps" in log.read_text() for log in Path(".").glob(f"**/logs/{name}.log")):
            return
        time.sleep(0.01)


class Trainer(Writes, fake.FakeTrainer):
    def sleep(self):
        super().sleep()
        self._tell("asleep")

    def wake(self):
        self._tell("awake")
        super().wake()

    def prepare(self, records, scalars):
        self._tell("begins")
        if Path("doomed").exists():
            kill_asleep(Path("doomed").read_text())
            Path("doomed").unlink()
        with open("batches.jsonl", "a") as file:
            file.write(json.dumps([[r.ordinal, r.sample] for r in records]) + "\\n")
        return super().prepare(records, scalars)

    def train(self, *told):
        found = super().train(*told)
        self._tell("trained")
        return found


@dataclass(frozen=True, kw_only=True)
class Restless(fake.FakeGeneratorConfig):
    def traits(self):
        return Traits(receives_weights=True, fingerprints=True, determinism=True, abort=True)


@dataclass(frozen=True, kw_only=True)
class Sleeping(Restless):
    def traits(self):
        return replace(super().traits(), sleeps=True)


@dataclass(frozen=True, kw_only=True)
class SleepingTrainer(fake.FakeTrainerConfig):
    def traits(self):
        return replace(super().traits(), sleeps=True)


@hookimpl
def gcore_generators():
    for name, cls, config in (
        ("sleeper", "Sleeper", Sleeping),
        ("mortal", "Mortal", Sleeping),
        ("doomed", "Doomed", Sleeping),
        ("restless", "Sleeper", Restless),
    ):
        yield p.GeneratorProvider(
            name=name, summary="-", factory=f"witness:{cls}", config=config
        )


@hookimpl
def gcore_trainers():
    for name, config in (("trainer", SleepingTrainer), ("wakeful", fake.FakeTrainerConfig)):
        yield p.TrainerProvider(
            name=name, summary="-", factory="witness:Trainer", config=config
        )


@hookimpl
def gcore_rewards():
    yield p.RewardProvider(
        name="asks", summary="-", factory="gcore_testing.fake_judge:FakeAsker", config=fake_judge.FakeAskerConfig
    )


@hookimpl
def gcore_placement_policies():
    for name in ("Turning", "InTurns"):
        yield p.PlacementProvider(
            name=name.lower(), summary="-", factory=f"gcore_testing.fake_judge:{name}"
        )
'''  # noqa: E501

ROLES = {
    "policy": {"use": "witness/trainer"},
    "rollout": {"use": "witness/sleeper", "slots": 3},
    "judge": {"use": "witness/sleeper", "slots": 3},
}


def judged(directory: Path, **placement: Any) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "witness.py").write_text(WITNESS)
    told = runs.job(
        cluster={"devices": 3},
        rewards={"judged": {"use": "witness/asks", "role": "judge"}},
        placement=placement,
    )
    return {**told, "roles": ROLES, "local": [str(runs.FAKE), "witness.py"]}


def rows(run: Any, worker: str) -> list[tuple[int, int, str, int]]:
    """(nanoseconds, pid, what, version) of everything a worker wrote down."""
    file = run.directory / f"{worker}.jsonl"
    return (
        [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    )


def asleep_at(told: list[tuple[int, int, str, int]], at_ns: int) -> bool:
    latest = [
        what for when_ns, _, what, _ in told if what in ("asleep", "awake") and when_ns < at_ns
    ]
    return latest[-1:] == ["asleep"]


def finished(directory: Path, config: Mapping[str, Any], *overrides: str) -> Any:
    code, run = runs.finish(directory, config, *overrides)
    assert code == 0, run.output
    return run


@pytest.fixture(scope="module")
def restless(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("restless")
    return finished(directory / "run", judged(directory / "run"))


def test_by_default_no_generator_sleeps_without_an_accelerator(restless: Any) -> None:
    assert {what for i in range(3) for _, _, what, _ in rows(restless, f"rollout.{i}")} == {"step"}
    assert not any("placement/switch_s" in row for row in restless.metrics())


@pytest.mark.parametrize("use", ["core/even", "witness/turning", "witness/inturns"])
def test_generators_are_asleep_while_the_trainer_works_and_sample_with_its_latest_weights(
    use: str, tmp_path: Path, restless: Any
) -> None:
    run = finished(tmp_path / "run", judged(tmp_path / "run", use=use, sleep_in_training="always"))
    workers = {
        f"{role}.{i}": rows(run, f"{role}.{i}") for role in ("rollout", "judge") for i in range(3)
    }
    trainer = rows(run, "policy.0")
    assert len({told[0][1] for told in [trainer, *workers.values()]}) == 7, (
        "each is a process of its own"
    )
    begins = [at_ns for at_ns, _, what, _ in trainer if what == "begins"]
    trained = [at_ns for at_ns, _, what, _ in trainer if what == "trained"]
    assert len(begins) == len(trained) == 3
    for name, told in workers.items():
        for begin_ns, end_ns in zip(begins, trained, strict=True):
            assert asleep_at(told, begin_ns) and asleep_at(told, end_ns), name
            assert not [what for at_ns, _, what, _ in told if begin_ns < at_ns < end_ns], (
                f"{name} did something"
            )
    for i in range(3):
        for at_ns, _, what, version in workers[f"rollout.{i}"]:
            if what == "step":
                assert version == sum(end_ns < at_ns for end_ns in trained)
    assert run.batches() == restless.batches() and run.weights() == restless.weights()
    told = [row["placement/switch_s"] for row in run.metrics() if "placement/switch_s" in row]
    assert len(told) == 3 and min(told[1:]) > 0
    if use != "core/even":
        _, outcomes = run_files.read_placement(run.path)
        assert all(outcomes[step].switch_s > 0 for step in (1, 2))


@pytest.mark.parametrize("launcher", ["core/inline", "core/local"])
def test_a_deterministic_run_repeats_with_generators_that_sleep(
    launcher: str, tmp_path: Path, restless: Any
) -> None:
    config = judged(tmp_path / "run", sleep_in_training="always")
    run = finished(
        tmp_path / "run", {**config, "launcher": {"use": launcher}}, "run.deterministic=true"
    )
    assert run.batches() == restless.batches() and run.weights() == restless.weights()
    assert "asleep" in {what for _, _, what, _ in rows(run, "rollout.0")}


def test_trainers_are_asleep_while_generators_draw_and_the_run_stays_the_same(
    tmp_path: Path, restless: Any
) -> None:
    """Pushes and preparation find them awake; seconds are told of each sleep but the last step's,
    which has no rollout after it.
    """
    run = finished(tmp_path / "run", judged(tmp_path / "run", sleep_in_rollout="always"))
    trainer = rows(run, "policy.0")
    told = [what for _, _, what, _ in trainer]
    assert told == ["asleep", "awake", "begins", "trained"] * 3
    for i in range(3):
        for at_ns, _, what, _ in rows(run, f"rollout.{i}"):
            assert what != "step" or asleep_at(trainer, at_ns)
    assert run.batches() == restless.batches() and run.weights() == restless.weights()
    slept = [row for row in run.metrics() if "trainer_sleep_s" in row]
    assert len(slept) == 2
    assert all(row["trainer_sleep_s"] > 0 and row["trainer_wake_s"] > 0 for row in slept)


def test_a_trainer_that_must_sleep_but_cannot_is_refused_at_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = judged(tmp_path / "run", sleep_in_rollout="always")
    code, run = runs.finish(tmp_path / "run", config, "roles.policy.use=witness/wakeful")
    assert code != 0
    assert "placement.sleep_in_rollout: always, but trainer witness/wakeful" in run.output


def test_a_generator_that_must_sleep_but_cannot_is_refused(tmp_path: Path) -> None:
    config = judged(tmp_path / "run", sleep_in_training="always")
    code, run = runs.finish(tmp_path / "run", config, "roles.judge.use=witness/restless")
    assert code != 0
    assert (
        "roles.judge.use: its backend cannot sleep" in run.output
        and "sleep_in_training: auto" in run.output
    )


@pytest.mark.parametrize("role", ["rollout", "judge"])
def test_a_generator_that_is_killed_asleep_makes_no_engine_before_it_is_woken(
    role: str, tmp_path: Path, restless: Any
) -> None:
    """The trainer has its memory until then. The run stays the same."""
    config = judged(tmp_path / "run", sleep_in_training="always")
    (tmp_path / "run" / "doomed").write_text(f"{role}.1")
    run = finished(tmp_path / "run", config, f"roles.{role}.use=witness/doomed")
    assert f"{role}.1 ended with signal SIGKILL" in run.output
    told = rows(run, f"{role}.1")
    made_ns = [at_ns for at_ns, _, what, _ in told if what == "made"]
    trained_ns = [at_ns for at_ns, _, what, _ in rows(run, "policy.0") if what == "trained"]
    assert len(made_ns) == 2
    assert made_ns[1] > trained_ns[0]
    assert "step" in [what for at_ns, _, what, _ in told if at_ns > made_ns[1]]
    assert run.batches() == restless.batches() and run.weights() == restless.weights()


@pytest.mark.protects
def test_a_lost_judge_is_replaced_on_policy_cells_and_nothing_is_lost(
    tmp_path: Path, restless: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gcore_placement")
    split = {"use": "placement/split", "config": {"cells": 1}, "sleep_in_training": "always"}
    run = finished(
        tmp_path / "run", judged(tmp_path / "run", **split), "roles.judge.use=witness/mortal"
    )
    assert "judge.2 ended with signal SIGKILL" in run.output
    assert run.batches() == restless.batches() and run.weights() == restless.weights()
    assert {what for _, _, what, _ in rows(run, "judge.1")} >= {"asleep", "awake", "step"}
    decisions, outcomes = run_files.read_placement(run.path)
    assert [len(decisions[step].rescues) for step in (0, 1, 2)] == [1, 1, 1]
    assert decisions[0].rescues[0].seen == {
        "starving": "judge",
        "lost": {"rollout": [], "judge": [2]},
    }
    assert outcomes[0].moved == 1
    capsys.readouterr()
    assert cli.main(["placement", "explain", str(run.path), "--step", "0"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "rescue of judge",
        "no replica of judge answers: 1 cells of rollout judge",
        "devices 1",
        "lost",
    ):
        assert words in shown, words
