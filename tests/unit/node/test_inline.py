"""The network inside one process: messages travel as bytes, and behave as on a socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from types import NoneType

import pytest
from gcore_testing.simulation import run_virtual

from gcore_core.contract.errors import ContractError, DataError, DeadlineExceeded, WorkerDied
from gcore_core.contract.launching import Endpoint, Peer, StreamEndpoint
from gcore_core.contract.records import Header
from gcore_core.runtime.messages import ScoreRequest
from gcore_core.wire.in_process import InlineNetwork
from gcore_core.wire.service import Call, Service


def header() -> Header:
    return Header(ordinal=1, sample=2, row=3, seed=4, rewards={"exact": 1.0})


KEEP = Endpoint("keep", ScoreRequest, list[Header])
STREAM = StreamEndpoint("stream", ScoreRequest, Header)
HANG = Endpoint("hang", ScoreRequest, NoneType)
HANG_STREAM = StreamEndpoint("hang", ScoreRequest, Header)
TOIL = Endpoint("toil", ScoreRequest, int)


class Recorder:
    """Keeps and changes what it is given."""

    def __init__(self) -> None:
        self.kept: list[Header] = []
        self.cancelled = False

    def service(self) -> Service:
        service = Service("recorder")
        service.add(KEEP, self.keep)
        service.add(STREAM, self.stream)
        service.add(HANG, self.hang)
        service.add(TOIL, self.toil)
        return service

    async def keep(self, request: ScoreRequest, call: Call) -> list[Header]:
        if not request.headers:
            raise DataError("nothing to keep", where="recorder")
        self.kept += request.headers
        self.kept[-1].rewards["exact"] = 7.0
        return self.kept

    async def stream(self, request: ScoreRequest, call: Call) -> AsyncGenerator[Header, None]:
        try:
            for _ in range(3):
                yield self.kept[-1]
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled = True
            raise

    async def hang(self, request: ScoreRequest, call: Call) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled = True

    async def toil(self, request: ScoreRequest, call: Call) -> int:
        for _ in range(5):
            await asyncio.sleep(8)
            call.progress()
        return 5


async def connect(recorder: Recorder) -> Peer:
    network = InlineNetwork()
    await network.view("recorder").serve("recorder", recorder.service())
    return network.view("caller").peer("recorder")


async def test_caller_and_receiver_share_no_object() -> None:
    recorder = Recorder()
    peer = await connect(recorder)
    mine = header()
    answer = await peer.call(KEEP, ScoreRequest("train", [mine]))
    assert mine == header()  # the receiver's change stays with the receiver
    assert answer[0].rewards == {"exact": 7.0}
    answer[0].rewards["exact"] = 9.0
    assert recorder.kept[0].rewards == {"exact": 7.0}  # and the caller's with the caller


async def test_items_of_a_stream_are_not_shared() -> None:
    recorder = Recorder()
    recorder.kept.append(header())
    peer = await connect(recorder)
    async for item in peer.stream(STREAM, ScoreRequest("train", [])):
        item.rewards["exact"] = 5.0
    assert recorder.kept == [header()]


async def test_errors_unknown_methods_and_absent_services_behave_as_on_a_socket() -> None:
    peer = await connect(Recorder())
    with pytest.raises(DataError, match="recorder: nothing to keep") as caught:
        await peer.call(KEEP, ScoreRequest("train", []))
    assert caught.value.facts["process"] == "recorder"
    with pytest.raises(ContractError, match="no method 'keeep'"):
        await peer.call(Endpoint("keeep", NoneType, NoneType), None)
    with pytest.raises(ContractError, match=r"malformed request 'keep'"):
        await peer.call(Endpoint("keep", str, list[Header]), "not a request")
    with pytest.raises(WorkerDied, match="the connection to nobody broke"):
        await InlineNetwork().view("caller").peer("nobody").call(KEEP, ScoreRequest("train", []))


async def test_closing_a_stream_early_cancels_its_handler() -> None:
    recorder = Recorder()
    recorder.kept.append(header())
    peer = await connect(recorder)
    stream = peer.stream(HANG_STREAM, ScoreRequest("train", []))
    async with contextlib.aclosing(stream):
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0)
    assert recorder.cancelled


def test_progress_of_a_process_counts_for_all_its_calls() -> None:
    """As a backend does that computes for several callers at once."""

    async def main() -> None:
        recorder, network = Recorder(), InlineNetwork()
        service = recorder.service()
        await network.view("recorder").serve("recorder", service)
        peer = network.view("caller").peer("recorder")
        calls = [
            asyncio.ensure_future(peer.call(HANG, ScoreRequest("train", []), deadline_s=5))
            for _ in "ab"
        ]
        for _ in range(10):
            await asyncio.sleep(4)
            service.progress()
        assert not any(call.done() for call in calls)
        await asyncio.sleep(6)
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in found] == [DeadlineExceeded] * 2

    run_virtual(main())


def test_the_deadline_counts_from_the_last_progress() -> None:
    async def main() -> None:
        peer = await connect(Recorder())
        assert await peer.call(TOIL, ScoreRequest("train", []), deadline_s=10) == 5
        with pytest.raises(DeadlineExceeded, match="no sign of progress for 5 s in toil"):
            await peer.call(TOIL, ScoreRequest("train", []), deadline_s=5)

    run_virtual(main())
