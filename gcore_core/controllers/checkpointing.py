"""Saves the run's state while the next step runs.

The lead has the ranks begin a save, and has them finish it at a later boundary of steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gcore_core.contract.errors import CheckpointError
from gcore_core.contract.launching import Endpoint, Peer, Reply, Request
from gcore_core.contract.records import Header
from gcore_core.controllers.context import ControllerContext
from gcore_core.runtime.messages import (
    BEGIN_CHECKPOINT,
    CARRIED,
    COMMIT_CHECKPOINT,
    FINISH_SAVE,
    OPEN_CHECKPOINT,
    SAVE_STATE,
    Carried,
    CommitCheckpoint,
    OpenCheckpoint,
    SaveState,
)
from gcore_core.wire.retry import insist

T = TypeVar("T")


class Checkpointing:
    """Saves checkpoints, in the lead. The other shards cannot train before the lead goes on.

    When a save fails, the supervisor gets the reason and training goes on; earlier checkpoints stay
    whole.
    """

    def __init__(self, context: ControllerContext, state: Mapping[str, Any]) -> None:
        facts = context.facts
        self._context = context
        # The checkpoint of what the trainers hold between two steps.
        self._newest = CommitCheckpoint(facts.start_step, dict(state), {})
        # Step of the latest save; -1: none.
        self._saved = facts.start_step if facts.state else -1
        self._begun: CommitCheckpoint | None = None  # the save that runs

    async def carry(self, step: int, headers: list[Header]) -> None:
        """Sends the records that this shard carries to the next step to the supervisor.

        Every shard calls it. The records go into the checkpoint of ``step``, whenever that is made.
        """
        if headers:
            carried = Carried(step, self._context.facts.shard, headers)
            await self._send_to_supervisor(CARRIED, carried)

    def is_due(self, step: int, last: bool) -> bool:
        """Returns whether ``at`` begins a save at the end of this step, as far as is known now.

        Only the lead knows what somebody asks for meanwhile.

        step, last: as of ``at``.
        """
        every = self._context.facts.checkpoint.every
        stopping = self._context.stopping.is_set()
        saving = self._context.saving.is_set()
        return saving or (last and bool(every or stopping)) or (every > 0 and step % every == 0)

    async def at(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float], last: bool
    ) -> dict[str, float]:
        """Finishes the save that was begun before, and begins another where one is due.

        It is called at the end of each step. A run that ends early, or that somebody asks to save,
        is saved even if ``checkpoint.every`` is 0.

        step: the step that begins now, and the version of the weights.
        state: what a resumed run of the controller needs, as plain values.
        metrics: of the step; retention may choose the best checkpoint by them.
        last: whether the run ends with this step. Then ``settle`` is to be called when it is
            reported.

        Returns in the lead the metric "seconds/checkpoint", the time for which saving held the run
        up. It is empty in other shards, and in a run without ``checkpoint.every`` unless a save was
        begun or finished.
        """
        every = self._context.facts.checkpoint.every
        self._newest = CommitCheckpoint(step, dict(state), dict(metrics))
        due = self.is_due(step, last)
        if not self._context.agree.lead or not (every or due or self._begun):
            return {}
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await self._finish()
        if due:
            self._context.saving.clear()
            await self._begin()
        return {"seconds/checkpoint": clock() - began_s}

    async def settle(self) -> None:
        """Commits a save that was begun, since the run ends.

        Nothing newer is saved: after an error the trainers no longer hold what an earlier step
        left.
        """
        await self._finish()

    async def flush(self) -> None:
        """Saves what is not saved yet, since the run ends here, between two steps.

        The trainers must hold the state of the last step's end.
        """
        if self._context.agree.lead:
            await self._finish()
            if self._saved != self._newest.step:
                await self._begin()
                await self._finish()

    async def _begin(self) -> None:
        """Lets the ranks begin to save what they hold, if the supervisor has a place for it."""
        step = self._saved = self._newest.step
        place = await self._send_to_supervisor(OPEN_CHECKPOINT, OpenCheckpoint(step))
        # Without a path the supervisor cannot write a checkpoint now, and has already said why.
        if place.path:
            self._begun = self._newest
            await self._send_to_ranks(SAVE_STATE, SaveState(step, place.path))
        if self._begun is not None:
            # So that the supervisor can commit it, if this process ends before it does.
            await self._send_to_supervisor(BEGIN_CHECKPOINT, self._begun)

    async def _finish(self) -> None:
        """Waits until the save that runs is whole, if one does, and has it committed."""
        if self._begun is None:
            return
        urgent = self._context.stopping.is_set()
        saved = await self._send_to_ranks(FINISH_SAVE, SaveState(self._begun.step, "", urgent))
        # ``_send_to_ranks`` sets ``_begun`` to None when the save failed.
        if self._begun is not None:
            begun = msgspec.structs.replace(self._begun, weights_sha256=saved[0].weights_sha256)
            self._begun = None
            await self._send_to_supervisor(COMMIT_CHECKPOINT, begun)

    async def _send_to_ranks(
        self, endpoint: Endpoint[SaveState, Reply], request: SaveState
    ) -> list[Reply]:
        """Sends a request of a save to every rank of every trainer, since saving may need
        collectives; returns their replies, the policy's first.

        When a rank cannot save, the save is given up and the supervisor gets the reason.
        """
        asked = self._asked(request)
        try:
            return await asyncio.gather(*(insist(peer, endpoint, one) for peer, one in asked))
        except CheckpointError as error:
            self._begun = None
            if endpoint is SAVE_STATE:
                await self._end_saves(request.step)
            failed = CommitCheckpoint(request.step, {}, {}, str(error))
            await self._send_to_supervisor(COMMIT_CHECKPOINT, failed)
            return []

    def _asked(self, request: SaveState) -> list[tuple[Peer, SaveState]]:
        """Returns every rank of every trainer, the policy's first, and what it is asked.

        request: names the checkpoint's directory, in which each role has its own.
        """
        asked = []
        for role in reversed(list(self._context.trained)):
            directory = str(Path(request.directory) / role) if request.directory else ""
            own = msgspec.structs.replace(request, directory=directory)
            asked += [(peer, own) for peer in self._context.workers_of(role)]
        return asked

    async def _end_saves(self, step: int) -> None:
        """Ends what some ranks began of a save that was given up, so that a next one can begin."""
        urgent = self._context.stopping.is_set()
        asked = self._asked(SaveState(step, "", urgent))
        ended = await asyncio.gather(
            *(insist(peer, FINISH_SAVE, one) for peer, one in asked), return_exceptions=True
        )
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, CheckpointError):
                raise error

    async def _send_to_supervisor(
        self, endpoint: Endpoint[Request, Reply], request: Request
    ) -> Reply:
        return await insist(self._context.supervisor, endpoint, request)


class Stopped(Exception):
    """Says that the run is to end now, while its trainers hold the state of a step's end."""


async def unless(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Returns what ``work`` gives; cancels it and raises Stopped when ``stopping`` is set first."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise Stopped
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
