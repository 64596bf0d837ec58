"""A reward shows images of a record to the model that it asks: what travels is their reference."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gcore_testing import fake

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import DataError
from gcore_core.contract.generator import SampleRequest
from gcore_core.contract.job_settings import RunSettings
from gcore_core.contract.questions import Question
from gcore_core.contract.records import Header, Prompt, RecordScore, Ref
from gcore_core.contract.scorer import Score, ScoredRecord
from gcore_core.runtime.compute import ThreadCompute
from gcore_core.runtime.messages import ScoreRequest
from gcore_core.runtime.worker_settings import GeneratorSettings
from gcore_core.store.client import StoreReader, StoreWriter
from gcore_core.store.server import SlabService, StoreSpec
from gcore_core.wire.in_process import InlineNetwork, InlineView
from gcore_core.wire.service import Call, Service
from gcore_core.workers.generator import GeneratorShell
from gcore_core.workers.role_sampler import RoleSampler
from gcore_core.workers.scorer import NamedScorer, ScorerShell
from tests.support.joined_stores import joining
from tests.support.wires import free_address

SECRET = b"s" * 32
ALL = frozenset({0})
IMAGE = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)


class Looker(fake.FakeGenerator):
    """A judge that remembers what it was shown."""

    def __init__(self) -> None:
        super().__init__(fake.FakeGeneratorConfig(), WorkerContext(role="judge"))
        self.shown: list[list[np.ndarray]] = []

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self.shown += [list(request.images) for request in requests]
        super().submit(requests)


class Asks:
    """Asks about each record, showing ``names`` of its media."""

    def __init__(self, sampler: RoleSampler, names: Sequence[str]) -> None:
        self._sampler, self._names = sampler, names

    async def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        questions = [
            Question(
                prompt=Prompt(row=0, text="?"),
                seed=record.sample,
                about=(record.ordinal, record.sample),
                images=[record.refs[name] for name in self._names],
            )
            for record in records
        ]
        answers = await self._sampler.sample(questions)
        return [Score(value=float(len(row[0].text))) for row in answers]


class Bench:
    """Two nodes: on the first, records with media and their scorer; on the second, the judge."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.network, self.judge = directory, InlineNetwork(), Looker()
        self.stores: list[SlabService] = []
        self.scorer_view: InlineView = self.network.view("scorer.0")

    async def open(self) -> None:
        bulk = {node: free_address() for node in ("agent.0", "agent.1")}
        for node in bulk:
            place = self._directory / node
            place.mkdir()
            spec = StoreSpec(node=node, directory=str(place), spill=str(place / "spill"))
            self.stores.append(SlabService(spec, SECRET, joining(SECRET, bulk)))
            await self._serve(node, self.stores[-1])
            self.stores[-1].remote.open()
        view = self.network.view("judge.0")
        settings = GeneratorSettings(run=RunSettings(), batch_s=0.0)
        writer = StoreWriter(
            self._directory / "agent.1", "agent.1", SECRET, view.peer("agent.1"), "judge.0"
        )
        await self._serve(
            "judge.0", GeneratorShell(self.judge, {}, writer, ThreadCompute(), view, settings)
        )

    async def _serve(self, name: str, shell: Any) -> None:
        service = Service(name)
        shell.register(service)
        await self.network.view(name).serve(name, service)

    async def headers(self, *media: dict[str, np.ndarray]) -> list[Header]:
        agent = self.network.view("rollout.0").peer("agent.0")
        writer = StoreWriter(self._directory / "agent.0", "agent.0", SECRET, agent, "rollout.0")
        ref = await writer.put(0, ALL, [{"text": np.zeros(0, np.uint8)} for _ in media])
        return [
            Header(
                ordinal=3,
                sample=i,
                row=0,
                seed=0,
                columns=ref,
                slot=i,
                media=dict(
                    zip(own, await writer.put_blobs(0, ALL, list(own.values())), strict=True)
                ),
            )
            for i, own in enumerate(media)
        ]

    async def score(self, headers: list[Header], *names: str) -> list[RecordScore]:
        sampler = RoleSampler("judge", [self.scorer_view.peer("judge.0")], lambda: None)
        named = NamedScorer(
            name="seen", scorer=Asks(sampler, names), timeout_s=60.0, sampler=sampler
        )
        store = StoreReader(self._directory / "agent.0", "agent.0", SECRET)
        dataset = fake.FakeDataset(fake.FakeDataConfig(rows=8))
        shell = ScorerShell([named], {"train": dataset}, store, ThreadCompute(), lambda code: None)
        return await shell.score(ScoreRequest("train", headers), Call(lambda: None))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    await bench.open()
    yield bench
    for store in bench.stores:
        store.close()


async def test_a_judge_on_another_node_gets_identical_images_outside_of_messages(
    bench: Bench,
) -> None:
    headers = await bench.headers(
        {"image": IMAGE}, {"image": IMAGE}, {"image": IMAGE[::-1], "small": IMAGE[:8, :8]}
    )
    scores = await bench.score(headers, "image")
    assert [score.statuses for score in scores] == [{"seen": "ok"}] * 3
    expected = (IMAGE, IMAGE, IMAGE[::-1])
    for (shown,), wanted in zip(bench.judge.shown, expected, strict=True):
        np.testing.assert_array_equal(shown, wanted)
        assert not shown.flags.writeable and not shown.flags.owndata, "a view of the node's store"
    assert bench.scorer_view.traffic.nbytes < 1000 * len(headers)


async def test_several_images_come_in_the_order_in_which_they_are_named(bench: Bench) -> None:
    headers = await bench.headers({"a": IMAGE[:4, :4], "b": IMAGE[:2, :8]})
    await bench.score(headers, "b", "a", "b")
    assert [array.shape for array in bench.judge.shown[0]] == [(2, 8, 3), (4, 4, 3), (2, 8, 3)]


async def test_a_question_without_images_shows_none(bench: Bench) -> None:
    await bench.score(await bench.headers({"image": IMAGE}))
    assert bench.judge.shown == [[]]


async def test_an_image_that_many_records_share_is_copied_to_the_judge_s_node_once(
    bench: Bench, tmp_path: Path
) -> None:
    await bench.score(await bench.headers(*[{"image": IMAGE}] * 8), "image")
    assert len({shown.__array_interface__["data"][0] for (shown,) in bench.judge.shown}) == 1
    assert len(bench.judge.shown) == 8


@pytest.mark.parametrize(
    "change", [{"offset": 16}, {"nbytes": 16, "shape": (16,)}, {"mac": bytes(16)}]
)
async def test_a_reference_changed_after_signing_is_refused(
    bench: Bench, change: dict[str, Any]
) -> None:
    (header,) = await bench.headers({"image": IMAGE})
    forged: Ref = msgspec.structs.replace(header.media["image"], **change)
    sampler = RoleSampler("judge", [bench.scorer_view.peer("judge.0")], lambda: None)
    with pytest.raises(DataError, match="a reference carries a wrong MAC"):
        await sampler.sample([Question(prompt=Prompt(row=0, text="?"), seed=0, images=[forged])])
    assert bench.judge.shown == []
