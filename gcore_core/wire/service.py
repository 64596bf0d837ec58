"""Serves requests in a process, whatever carries the bytes: handlers, calls, errors on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar, overload

import msgspec

from gcore_core.contract.deadlines import Deadlines, Wait
from gcore_core.contract.errors import ContractError, GcoreError, WorkerError, error_types
from gcore_core.contract.launching import ALIVE, Endpoint, Item, Reply, Request, StreamEndpoint

T = TypeVar("T")
Body = bytes | bytearray | memoryview | msgspec.Raw
MESSAGE_LIMIT_BYTES = 64 << 20
PROGRESS_S = 1.0  # a request shows progress no more often; no deadline may be that short
# A request on records (``Wait.WORK``) shows progress each time that this share of its deadline is
# over. Hundreds of them are open at a time in a rollout, and each sign of progress is a message.
PROGRESS_SHARE = 0.05

_TEXT_LIMIT = 4000  # characters of one text of an error on the wire

encode = msgspec.msgpack.Encoder().encode


def decoded(decoder: msgspec.msgpack.Decoder[T], body: Body, what: str, where: str) -> T:
    """Decodes bytes.

    Raises ContractError, with the path, for bytes that are not what the decoder reads.
    """
    try:
        return decoder.decode(body)
    # ValueError: text that is no UTF-8
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ContractError(f"malformed {what}: {error}", where=where) from None


class Call:
    """Lets a handler show the progress of its request.

    report: sends a sign of progress to the caller.
    every_s: seconds between two signs, at least.
    """

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report
        self.every_s = PROGRESS_S
        self._loop = asyncio.get_running_loop()
        # The caller knows that it began now: a request shorter than ``every_s`` sends no sign.
        self._last_s = self._loop.time()

    def progress(self) -> None:
        """Extends the caller's deadline. Any thread may call it, as often as it likes."""
        now_s = self._loop.time()
        if now_s - self._last_s >= self.every_s:
            self._last_s = now_s
            self._loop.call_soon_threadsafe(self._report)


Handler = Callable[[Request, Call], Awaitable[Reply]]
StreamHandler = Callable[[Request, Call], AsyncGenerator[Item, None]]


class Service:
    """Holds the handlers of one process, by endpoint.

    A handler is ``async def handler(request, call) -> reply``, or an async generator of items.
    Requests are decoded against their type before the handler sees them, so a malformed one is
    refused with its path. Every service answers ``ALIVE``.

    answered: set when a request was answered, or an item of a stream was sent. A sign of life and a
        push (``Wait.SOON``) do not count: what kills a process may come after them.
    deadlines: its callers', which say how often a request must show progress; None: it does
        so every ``PROGRESS_S``.
    """

    def __init__(self, name: str, deadlines: Deadlines | None = None) -> None:
        self.name = name
        self.answered = asyncio.Event()
        self._deadlines = deadlines
        # endpoint -> its decoder, its handler, seconds between two signs of progress, whether it
        # counts as answered
        self._handlers: dict[
            str, tuple[msgspec.msgpack.Decoder[Any], Callable[[Any, Call], Any], float, bool]
        ] = {}
        self._running: set[Call] = set()
        # From the first request on it is the event loop's clock, which is virtual in a simulation.
        self._clock = time.monotonic
        self._walked_s = float("-inf")  # when all running requests last showed progress

    @overload
    def add(self, endpoint: Endpoint[Request, Reply], handler: Handler[Request, Reply]) -> None: ...

    @overload
    def add(
        self,
        endpoint: StreamEndpoint[Request, Item],
        handler: StreamHandler[Request, Item],
    ) -> None: ...

    def add(
        self,
        endpoint: Endpoint[Any, Any] | StreamEndpoint[Any, Any],
        handler: Callable[[Any, Call], Any],
    ) -> None:
        """Serves an endpoint. A handler that was added before under the same name is replaced."""
        every_s = PROGRESS_S
        if self._deadlines is not None and endpoint.wait is Wait.WORK:
            every_s = max(PROGRESS_S, PROGRESS_SHARE * self._deadlines.seconds(Wait.WORK))
        counts = endpoint.wait is not Wait.SOON
        self._handlers[endpoint.name] = endpoint.request_decoder, handler, every_s, counts

    def progress(self) -> None:
        """Extends the deadline of every running request.

        Any thread may call it, as often as it likes.
        """
        now_s = self._clock()
        if now_s - self._walked_s >= PROGRESS_S / 2:
            self._walked_s = now_s
            for call in tuple(self._running):
                call.progress()

    async def handle(
        self,
        method: str,
        body: Body,
        call: Call,
        emit: Callable[[bytes], Awaitable[None]],
    ) -> bytes:
        """Runs one request and returns its encoded reply, nil for a stream.

        emit: called with each item of a stream, encoded.
        """
        if method == ALIVE.name:
            return encode(None)
        try:
            decoder, handler, call.every_s, counts = self._handlers[method]
        except KeyError:
            raise ContractError(f"no method {method!r}", where=self.name) from None
        request = decoded(decoder, body, f"request {method!r}", self.name)
        self._clock = asyncio.get_running_loop().time
        self._running.add(call)
        try:
            outcome = handler(request, call)
            if not inspect.isasyncgen(outcome):
                reply = encode(await outcome)
                if counts:
                    self.answered.set()
                return reply
            async with contextlib.aclosing(outcome):
                async for item in outcome:
                    await emit(encode(item))
                    self.answered.set()
            self.answered.set()
            return encode(None)
        finally:
            self._running.discard(call)


class RemoteFailure(msgspec.Struct, array_like=True, frozen=True):
    """Carries an error on the wire, as plain values.

    kind: name of the error's class.
    what, where, why, todo, facts: as of ``GcoreError``.
    """

    kind: str
    what: str
    where: str = ""
    why: str = ""
    todo: str = ""
    facts: dict[str, Any] = {}


def to_wire(error: BaseException, process: str) -> RemoteFailure:
    """Turns an error into what is sent.

    It can always be encoded, whatever text or facts the error has: text that is too long is cut,
    facts that cannot be sent are left out.
    """
    trace = _text("".join(traceback.format_exception(error))[-_TEXT_LIMIT:])
    if isinstance(error, GcoreError):
        facts = {k: v for k, v in error.facts.items() if _travels(v)}
        facts.setdefault("process", process)
        facts.setdefault("traceback", trace)
        what, where, why, todo = map(_text, (error.what, error.where, error.why, error.todo))
        return RemoteFailure(type(error).__name__, what, where, why, todo, facts)
    last = traceback.extract_tb(error.__traceback__)[-1:] or None
    place = f"{last[0].filename}:{last[0].lineno}" if last else ""
    what = _text(f"{type(error).__name__}: {error}")
    return RemoteFailure(
        "WorkerError", what, process, f"at {place}", "", {"process": process, "traceback": trace}
    )


def from_wire(failure: RemoteFailure) -> GcoreError:
    """Turns what was sent into an error.

    It is a WorkerError where this process does not know the type.
    """
    kind = error_types().get(failure.kind, WorkerError)
    error = kind(failure.what, where=failure.where, why=failure.why, todo=failure.todo)
    error.facts = failure.facts
    return error


def _text(text: str) -> str:
    return str(text)[:_TEXT_LIMIT].encode("utf-8", "replace").decode()


def _travels(fact: Any) -> bool:
    try:
        return (
            isinstance(fact, (str, int, float, bool, list, dict))
            and len(encode(fact)) <= 4 * _TEXT_LIMIT
        )
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
