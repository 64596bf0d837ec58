"""Runs something once when every member has come, and gives all of them its result."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from gcore_core.contract.errors import ContractError
from gcore_core.wire.service import encode

Act = Callable[[list[Any]], Awaitable[Any]]
T = TypeVar("T")


class Gathering:
    """Brings members together under a key.

    Members 0 to n-1 join, each with a value. When all have joined, ``act`` runs once, with the
    values in member order, and every member gets its result.

    A member that joins a key again, because its reply was lost, gets the first result: that of a
    finished key is remembered until ``keep`` later ones have finished too. A member that joins
    again with another value is refused: that is not the same request.

    ``act`` runs in a task of its own: it goes on when the member that came last goes away.

    members: n, how many there are.
    keep: how many finished keys are remembered.
    """

    def __init__(self, members: int, keep: int = 32) -> None:
        self.members = members
        self.keep = keep
        # key -> (member -> its value, the result). Finished keys are in the order of their ends.
        self._open: OrderedDict[Any, tuple[dict[int, Any], asyncio.Future[Any]]] = OrderedDict()

    async def join(self, key: Any, member: int, value: Any, act: Act) -> Any:
        """Returns what ``act`` gives, or raises what it raises, when all members have joined.

        Raises ContractError for a member that there is not, or that comes again with another value.
        """
        if not 0 <= member < self.members:
            raise ContractError(f"there is no member {member}, only {self.members}", where=str(key))
        values, result = self._open.setdefault(
            key, ({}, asyncio.get_running_loop().create_future())
        )
        if member in values:
            if not _is_same(values[member], value):
                raise ContractError(
                    f"member {member} came twice with different values", where=str(key)
                )
        else:
            values[member] = value
            if len(values) == self.members:
                self._drop_oldest_finished()
                await self._run(key, values, result, act)
        return await shared(result)

    async def run_once(self, key: Any, value: Any, act: Act) -> Any:
        """Returns what ``act`` gave when the key came first; there must be one member."""
        return await self.join(key, 0, value, act)

    async def _run(
        self, key: Any, values: dict[int, Any], result: asyncio.Future[Any], act: Act
    ) -> None:
        task = asyncio.ensure_future(act([values[m] for m in range(self.members)]))

        def finish(done: asyncio.Future[Any]) -> None:
            if result.done():
                return
            self._open.move_to_end(key)
            if done.cancelled():
                result.cancel()
            elif (error := done.exception()) is not None:
                result.set_exception(error)
                result.exception()  # a member that went away must not leave a warning
            else:
                result.set_result(done.result())

        task.add_done_callback(finish)
        # The action outlives the member that happened to come last.
        await shared(result)

    def abandon(self, error: BaseException) -> None:
        """Raises ``error`` at every member that waits for others."""
        for _, result in self._open.values():
            if not result.done():
                result.set_exception(error)
                result.exception()  # a member that went away must not leave a warning

    def _drop_oldest_finished(self) -> None:
        finished = [key for key, (_, result) in self._open.items() if result.done()]
        for key in finished[: max(0, len(finished) - self.keep)]:
            del self._open[key]


async def shared(future: asyncio.Future[T]) -> T:
    """Returns the result of a future for which several wait.

    The future goes on when one of them is cancelled.
    If it failed, each of them gets the error with the line that raised it. A plain ``await`` loses
    that line: the second time that a failed task is awaited, its traceback begins at the ``await``.
    """
    if not future.done():
        await asyncio.wait([future])
    if not future.cancelled() and (error := future.exception()) is not None:
        raise error
    return future.result()


def _is_same(first: Any, second: Any) -> bool:
    """Whether a member came with the same value again; NaN is the same as NaN here."""
    return bool(first == second or encode(first) == encode(second))
