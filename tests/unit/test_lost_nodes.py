"""A machine that has nothing but generators is lost, and the step goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore_core.contract.errors import GcoreError, WorkerDied
from gcore_core.contract.records import TRAINED, Header, RecordScore, Ref
from gcore_core.controllers.lost_nodes import LostNodes, StandInPeer
from gcore_core.controllers.window.keeping import Keeping
from gcore_core.controllers.window.ledger import Ledger
from gcore_core.run.lost_nodes import expendable_nodes, keeping_nodes, replicas_left, stand_ins
from gcore_core.runtime.messages import KeepRequest, ReleaseRequest
from gcore_core.runtime.rpc.in_process import InlineNetwork
from gcore_core.runtime.rpc.retry import insist, is_gone
from gcore_core.runtime.rpc.service import Call, Service
from gcore_core.runtime.store.client import StoreReader
from gcore_core.testing import fake
from gcore_core.testing.faults import Faults, Life
from gcore_core.testing.simulated_nodes import HOME, SECRET, SimulatedNodes
from gcore_core.testing.simulation import (
    Deadlock,
    Outcome,
    SimulatedJob,
    run_virtual,
    simulate,
    violations,
)

JOB = SimulatedJob(replicas=4, generator_nodes=2, prompts=4, samples=2, evaluate_prompts=2)
#: Nobody opens a record before the trainer does: no copy lies anywhere by chance.
UNSCORED = replace(JOB, scorers=0, replicas=2)


def _run(job: SimulatedJob, store: Path, weather: Faults | None = None) -> Outcome:
    return run_virtual(simulate(job, store, weather))


def _calm(job: SimulatedJob, tmp_path: Path) -> Outcome:
    return _run(replace(job, shards=1), tmp_path / "calm")


def _lost_at(
    job: SimulatedJob, calm: Outcome, tmp_path: Path, share: float
) -> tuple[Outcome, list[str]]:
    """Loses a machine when that share of a calm run is over; returns the rules that it broke."""
    weather = Faults(7, rate=0.0, kills=0.0)
    job = replace(job, loses_s=share * calm.virtual_s)
    found = _run(job, tmp_path / f"{share:.3f}", weather)
    assert found.lost
    return found, violations(found, calm, weather, job)


@pytest.mark.parametrize("job", [JOB, UNSCORED], ids=["scored", "unscored"])
def test_whenever_a_machine_is_lost_the_run_is_the_calm_one(
    job: SimulatedJob, tmp_path: Path
) -> None:
    calm = _calm(job, tmp_path)
    for share in np.linspace(0.02, 0.98, 8):
        job = replace(job, deterministic=not job.deterministic)
        assert _lost_at(job, calm, tmp_path, float(share))[1] == []


@pytest.mark.parametrize(
    "setting",
    [{"rests": True}, {"owns_replicas": True}, {"annotators": 2}, {"pushes": False}],
    ids=lambda setting: next(iter(setting)),
)
def test_a_machine_is_lost_in_runs_of_other_kinds(setting: dict[str, Any], tmp_path: Path) -> None:
    job = replace(JOB, **setting)
    calm = _calm(job, tmp_path)
    for share in (0.35, 0.85):
        assert _lost_at(job, calm, tmp_path, share)[1] == []


def test_a_machine_is_lost_in_any_weather(tmp_path: Path) -> None:
    """Also where groups are dropped, and the surplus is carried to the next step."""
    varied = replace(JOB, filter="gcore_core.builtin.filters:Varied")
    calm = _calm(varied, tmp_path)
    for seed in range(5):
        weather = Faults(seed)
        job = replace(varied, takes_stale=bool(seed % 2), loses_s=(0.2 + seed) / 5 * calm.virtual_s)
        found = _run(job, tmp_path / str(seed), weather)
        assert found.lost
        assert violations(found, calm, weather, job) == [], f"seed {seed}"


def test_without_copies_a_verdict_is_lost_with_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the copies are what the tests above rest on."""

    async def keep(self: Keeping, step: int, headers: Any) -> None:
        pass

    calm = _calm(UNSCORED, tmp_path)
    monkeypatch.setattr(Keeping, "keep", keep)
    with pytest.raises((GcoreError, Deadlock)):
        for share in np.linspace(0.02, 0.98, 25):
            _lost_at(UNSCORED, calm, tmp_path, float(share))


def test_an_engine_that_draws_otherwise_the_second_time_disturbs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is drawn again had no verdict, so it may be another record."""
    draw = fake.FakeGenerator.submit

    calm = _calm(JOB, tmp_path)
    drawn_again = 0

    def otherwise(self: fake.FakeGenerator, requests: Any) -> None:
        nonlocal drawn_again
        drawn_again += sum(one.attempt > 0 for one in requests)
        draw(self, [replace(one, seed=one.seed + one.attempt) for one in requests])

    monkeypatch.setattr(fake.FakeGenerator, "submit", otherwise)
    for share in (0.3, 0.5, 0.7):
        found, broken = _lost_at(JOB, calm, tmp_path, share)
        assert [report.step for report in found.reports] == list(range(JOB.steps + 1))
        assert all(len(verdicts) == 1 for verdicts in found.verdicts.values())
        assert not {"every ordinal has one verdict", "steps are full"} & set(broken)
    assert drawn_again


# -- the ledger ------------------------------------------------------------------------------------


def _header(ordinal: int, sample: int, node: str) -> Header:
    ref = Ref(node, "1", 8, 8, 1, b"")
    return Header(ordinal=ordinal, sample=sample, row=ordinal, seed=1, columns=ref)


def test_the_ledger_forgets_what_was_lost_and_has_no_verdict() -> None:
    """A group with a verdict keeps its records; a forgotten one needs new scores."""
    ledger = Ledger(shard=0, shards=1, rows=8, seed=0, samples=2)
    ledger.lease(2)
    for ordinal in (0, 1):
        for sample, node in enumerate(("node1", "node2")):
            assert ledger.finished(_header(ordinal, sample, node))
            ledger.scored(RecordScore(ordinal, sample, {}, {}), set())
    ledger.settle(0, TRAINED)
    lost = ledger.forget(lambda header: header.columns.node == "node1", [0, 1])  # type: ignore[union-attr]
    assert [(lease.ordinal, lease.samples, lease.attempt) for lease in lost] == [(1, (0,), 1)]
    assert ledger.complete() == []
    assert ledger.finished(_header(1, 0, "node2"))
    assert ledger.complete() == []
    ledger.scored(RecordScore(1, 0, {}, {}), set())
    (group,) = ledger.complete()
    assert ledger.has(group)
    assert ledger.forget(lambda header: True, [0]) == []


# -- whom to ask -----------------------------------------------------------------------------------


class _Silent:
    """A peer that gives one item, and then never answers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0

    async def call(self, endpoint: Any, request: Any, *, deadline_s: float | None = None) -> Any:
        self.calls += 1
        if self.name.startswith("ready"):
            return self.name
        return await asyncio.get_running_loop().create_future()

    async def stream(
        self, endpoint: Any, request: Any, *, deadline_s: float | None = None
    ) -> AsyncGenerator[Any, None]:
        yield 1
        await asyncio.get_running_loop().create_future()

    def peer(self, name: str) -> _Silent:
        return self


def _lost() -> LostNodes:
    lost = LostNodes({"node1": ["rollout.0", "scorer.1"]})
    lost.survivable = True
    return lost


def test_nobody_waits_for_a_process_of_a_lost_machine() -> None:
    async def main() -> None:
        lost = _lost()
        silent = _Silent("rollout.0")
        peer: Any = lost.peer(silent, "rollout.0")  # type: ignore[arg-type]
        items = peer.stream(None, None)
        assert await anext(items) == 1
        waiting = [
            asyncio.ensure_future(insist(peer, None, None)),  # type: ignore[type-var,arg-type]
            asyncio.ensure_future(anext(items)),
        ]
        await asyncio.sleep(1)
        assert not any(task.done() for task in waiting)
        assert lost.lose("node1")
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, WorkerDied) and is_gone(error)
        assert silent.calls == 1
        assert lost.peer(silent, "policy.0") is silent  # type: ignore[arg-type,comparison-overlap]

    run_virtual(main())


def test_another_scorer_stands_in_for_a_lost_one() -> None:
    async def main() -> None:
        lost = _lost()
        first: Any = lost.peer(_Silent("scorer.1"), "scorer.1")  # type: ignore[arg-type]
        scorer = StandInPeer([first, _Silent("ready.0")], lost)  # type: ignore[list-item]
        asking = asyncio.ensure_future(insist(scorer, None, None))  # type: ignore[type-var,arg-type]
        await asyncio.sleep(1)
        assert not asking.done()
        lost.lose("node1")
        assert await asking == "ready.0"

    run_virtual(main())


def test_a_shard_that_has_lost_its_own_generators_asks_those_of_others() -> None:
    lost = LostNodes({"node1": ["rollout.0", "rollout.1"]})
    lost.survivable = True
    own: list[Any] = [_Silent("rollout.0"), _Silent("rollout.1")]
    others: list[Any] = [*own, _Silent("rollout.2")]
    assert lost.stand_in(own, 1, lambda: others) is own[1]
    lost.lose("node1")
    assert lost.stand_in(own, 1, lambda: others) is others[2]
    with pytest.raises(WorkerDied) as error:
        lost.stand_in(own, 1)
    assert is_gone(error.value)


def test_a_machine_is_lost_for_good_only_where_the_program_goes_on_without_it() -> None:
    lost = LostNodes({"node1": ["rollout.0"]})
    assert not lost.lose("node1")  # such as a program that draws in waves
    lost.survivable = True
    assert not lost.lose("node2")
    assert lost.names() == []
    assert lost.lose("node1")
    assert lost.names() == ["node1"] and lost.has("rollout.0")


@pytest.mark.parametrize(
    ("where", "expendable"),
    [
        pytest.param({"rollout.0": "a", "rollout.1": "b"}, ["b"], id="not home"),
        pytest.param({"rollout.0": "b", "rollout.1": "b"}, ["b"], id="all generators"),
        pytest.param({"rollout.0": "b", "policy.1": "b"}, [], id="a rank of the trainer"),
        pytest.param({"rollout.0": "b", "controller.1": "b"}, [], id="a controller"),
        pytest.param({"rollout.0": "b", "judge.0": "b"}, [], id="a judge"),
        pytest.param({"rollout.0": "b", "rule.0": "b"}, [], id="the only scorer"),
        pytest.param({"rollout.0": "b", "rule.0": "a", "rule.1": "b"}, ["b"], id="one of two"),
        pytest.param({"rollout.0": "a", "rule.0": "a", "rule.1": "b"}, [], id="no generator"),
    ],
)
def test_a_machine_is_expendable_when_others_can_do_what_it_does(
    where: dict[str, str], expendable: list[str]
) -> None:
    where = {"policy.0": "a", "controller.0": "a"} | where
    nodes = expendable_nodes(where, "a", {"rule"})
    assert list(nodes) == expendable
    assert keeping_nodes(where, nodes) == (["a"] if expendable else [])
    assert all(where[other] == "a" for one in stand_ins(where, nodes).values() for other in one)
    rollouts = [node for name, node in where.items() if name.startswith("rollout")]
    assert replicas_left(where, expendable) == sum(node not in expendable for node in rollouts)


# -- copies ----------------------------------------------------------------------------------------


def test_a_kept_copy_stays_until_its_step_is_released(tmp_path: Path) -> None:
    """Another copy makes room for what comes; this one does not, though its machine is lost."""

    async def main() -> None:
        call = Call(lambda: None)
        network = InlineNetwork()
        job = replace(JOB, store_bytes=4 * 4096)
        nodes = SimulatedNodes(network, job, tmp_path / "store")
        await nodes.serve()
        home = nodes.slabs[HOME]
        home.register(Service(HOME))
        writer = nodes.writer(Life("rollout.0", 0))
        arrays = [{"text": np.full(3000, i, np.uint8)} for i in range(8)]
        refs = [await writer.put(1, frozenset({0}), [array]) for array in arrays]  # type: ignore[list-item]
        (kept,) = await home.keep(KeepRequest({0: 1}, refs[:1]), call)
        assert await home.keep(KeepRequest({0: 1}, refs[:1]), call) == [kept]
        for ref in refs[1:]:
            await home.fetch(ref, call)
        nodes.lost = "node1"
        reader = StoreReader(tmp_path / "store", HOME, SECRET)
        assert (reader.open(kept)[0]["text"] == 0).all()
        with pytest.raises(WorkerDied):
            await home.fetch(refs[1], call)
        before = home._used_bytes
        await home.release(ReleaseRequest("kept", {0: (0, 2)}), call)
        assert kept.slab not in home._slabs and home._used_bytes == before

    run_virtual(main())
