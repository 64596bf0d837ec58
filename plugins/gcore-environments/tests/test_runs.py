"""Runs of the calculator's job with torch's engine, started as a person starts them.

A deterministic one has the same weights whatever must leave no trace: the number of shards, of
processes for environments, how long environments take, and a process of theirs that is killed in
the middle. And environments that hang, fail or die cost their own groups and nothing else.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from gcore_core.contract.order import sample_seed
from gcore_core.contract.run_files import RecordTrace, read_trace
from gcore_core.run.saved_weights import weights_sha256
from tests.integration.test_resume import resume
from tests.support import runs

pytest.importorskip("gcore_torch")
pytest.importorskip("gcore_algorithms")
pytestmark = pytest.mark.rest
RECIPES = runs.REPOSITORY / "recipes"
STEPS = 12
#: In the line after which something is done to a run on its way.
AT_WORK = f" 4/{STEPS} "
PROMPTS = 8
PATIENCE_S = 400.0
HERE = Path(__file__).parent


def job(*, deterministic: bool, **settings: Any) -> dict[str, Any]:
    """Returns a job whose model is taught for a moment only.

    settings: of the environment's plugin.
    """
    text = (RECIPES / "calculator.yaml").read_text()
    for folder in ("quickstart", "calculator"):
        text = text.replace(f" {folder}/", f" {RECIPES}/{folder}/")
    found: dict[str, Any] = yaml.safe_load(text)
    found["run"] |= {"name": "fake", "steps": STEPS, "deterministic": deterministic}
    found["controller"]["config"] |= {"prompts": PROMPTS}
    found["evaluation"] |= {"every": 0, "prompts": 16}
    found["launcher"] = {"use": "core/local"}
    found["roles"]["policy"]["model"]["make"]["config"] = {"seed": 0, "steps": 150}
    found["environment"]["config"] |= {
        "environment": f"{HERE}/watched.py:Watched",
        **settings,
    }
    del found["plugins"]
    return found


def nothing(run: runs.Run) -> None:
    """Leaves a run alone."""
    assert run.wait(PATIENCE_S) == 0, run.output


def finish(
    directory: Path,
    job: dict[str, Any],
    *overrides: str,
    trouble: Callable[[runs.Run], None] = nothing,
) -> runs.Run:
    """Starts a run and waits for it; then none of its processes is left.

    trouble: what is done to it on its way, until it has ended.
    """
    with runs.running(directory, job, *overrides) as run:
        trouble(run)
    assert pids(directory), "nothing was played"
    assert not still_alive(directory), "a process of environments is left"
    return run


def weights_of(run: runs.Run) -> str:
    return weights_sha256(run.path / "weights")


def pids(directory: Path) -> set[int]:
    """Returns the processes in which environments ran."""
    found = [file for file in directory.rglob("pids") if file.is_file()]
    return {int(line) for file in found for line in file.read_text().split()}


def still_alive(directory: Path) -> set[int]:
    """Returns which of these are left when they have had time to end."""
    until_s = time.monotonic() + 10
    while (left := set(filter(_runs, pids(directory)))) and time.monotonic() < until_s:
        time.sleep(0.05)
    return left


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# -- one hash --------------------------------------------------------------------------------------


def generator_is_killed(run: runs.Run) -> None:
    run.read_until(AT_WORK)
    os.kill(run.pids()["rollout.0"], signal.SIGKILL)
    run.read_until("rollout.0 ended with signal SIGKILL; it is started again")
    nothing(run)


def supervisor_is_killed(run: runs.Run) -> None:
    """Another one takes its place by itself."""
    run.read_until(AT_WORK)
    os.kill(run.supervisor(), signal.SIGKILL)
    nothing(run)


def killed_and_resumed(run: runs.Run) -> None:
    run.read_until(AT_WORK)
    run.process.kill()
    go_on(run)


def stopped_and_resumed(run: runs.Run) -> None:
    run.read_until(AT_WORK)
    os.kill(run.process.pid, signal.SIGINT)  # Ctrl-C
    assert run.wait(PATIENCE_S) == 130, run.output
    go_on(run)


def go_on(run: runs.Run) -> None:
    done = resume(run)
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that ends with the weights of the plain one.

    processes: how many processes environments ran in, at least.
    """

    overrides: tuple[str, ...] = ()
    trouble: Callable[[runs.Run], None] = nothing
    processes: int = 1


CHECKPOINTS = "checkpoint.every=1"
CASES = {
    "one shard": Case(overrides=("controller.shards=1",)),
    "four shards": Case(overrides=("controller.shards=4",)),
    "three hosts": Case(overrides=("environment.config.hosts=3",), processes=3),
    "sleeps at random": Case(overrides=("environment.config.config.sleeps=0.02",)),
    "a host is killed in two steps": Case(
        overrides=("environment.config.config.dies_at=[300,700]",), processes=3
    ),
    "a generator is killed": Case(trouble=generator_is_killed, processes=2),
    "a supervisor is killed": Case(
        overrides=(CHECKPOINTS, "checkpoint.restarts=1"), trouble=supervisor_is_killed, processes=2
    ),
    "killed and resumed": Case(overrides=(CHECKPOINTS,), trouble=killed_and_resumed, processes=2),
    "stopped and resumed": Case(overrides=(CHECKPOINTS,), trouble=stopped_and_resumed, processes=2),
}


#: What `tox run -e rest` leaves out: other cases come near to it.
SLOW = ("four shards", "a supervisor is killed", "killed and resumed")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run with two shards and one process of environments."""
    return weights_of(finish(tmp_path_factory.mktemp("plain"), job(deterministic=True)))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES],
)
def test_weights_do_not_depend_on(name: str, plain: str, tmp_path: Path) -> None:
    case = CASES[name]
    run = finish(tmp_path, job(deterministic=True), *case.overrides, trouble=case.trouble)
    assert weights_of(run) == plain
    assert len(pids(tmp_path)) >= case.processes


def test_weights_depend_on_the_seed(plain: str, tmp_path: Path) -> None:
    assert weights_of(finish(tmp_path, job(deterministic=True), "run.seed=8")) != plain


# -- faults ----------------------------------------------------------------------------------------

#: What an episode of the environment does -> the reason of its record.
FAULTS = {
    "loops": "environment_hung: it ran for",
    "awaits": "environment_hung: it awaited for",
    "tool": "environment_hung: it awaited for",
    "raises": "environment_error: step: RuntimeError: no more paper",
    "prints": "",
}
#: The same of an agent.
AGENTS_FAULTS = {
    "rubbish": "environment_error: run: ValueError: ",
    "drops": "environment_error: run: ConnectionError: the agent has dropped its connection",
    "leaves": "environment_hung: it awaited for",
}
#: One episode in so many has each fault, of the 768 of a run.
ONE_IN = 100


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "faults"),
    [("Watched", FAULTS), ("Agent", AGENTS_FAULTS)],
    ids=["environment", "agent"],
)
def test_a_share_of_guilty_episodes_costs_their_own_groups_alone(
    name: str, faults: dict[str, str], deterministic: bool, tmp_path: Path
) -> None:
    """Its first process has died at its import, too. Nothing is lost, and nothing comes twice."""
    (tmp_path / "dies at import").touch()
    config = job(
        deterministic=deterministic,
        environment=f"{HERE}/watched.py:{name}",
        config={"faults": list(faults), "every": ONE_IN},
        hosts=2,
        turn_s=3.0,
    )
    run = finish(tmp_path, config)
    assert (tmp_path / "died at import").exists()
    assert {mark.suffix[1:] for mark in tmp_path.glob("met.*")} == set(faults)
    rows = run.metrics()[1:]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert {row["groups/trained"] for row in rows} == {PROMPTS}
    firsts = [row["ordinals/first"] for row in rows]
    nexts = [row["ordinals/next"] for row in rows]
    assert firsts == [0, *nexts[:-1]], "a group is lost, or comes twice"
    consumed = range(int(nexts[-1]))
    guilty = {}
    for ordinal in consumed:
        for sample in range(8):
            number = sample_seed(7, ordinal, 0, sample) % ONE_IN
            if number < len(faults) and (reason := [*faults.values()][number]):
                guilty[ordinal, sample] = reason
    records = [
        line
        for line in read_trace(run.path)
        if isinstance(line, RecordTrace) and line.ordinal in consumed
    ]
    # A group that its step has not needed is traced once more where it fails in a later one.
    last = {(one.ordinal, one.sample): one for one in records}
    assert set(last) == {(ordinal, sample) for ordinal in consumed for sample in range(8)}
    failed = {key: one.reason for key, one in last.items() if one.status == "failed"}
    assert failed.keys() == guilty.keys()
    assert all(failed[key].startswith(reason) for key, reason in guilty.items()), failed
    lost = {key[0] for key, one in last.items() if one.verdict == "quarantined"}
    assert lost == {ordinal for ordinal, _ in guilty}
    assert sum(row.get("groups/quarantined", 0) for row in rows) == len(lost)
    assert len(consumed) == STEPS * PROMPTS + len(lost), "each group is trained on or quarantined"
