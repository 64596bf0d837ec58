"""Pushes verified weights to every generator that is awake, before the next step begins.

One that was started again meanwhile is behind. The shard that asks it for records has the lead push
to it alone, when the trainers are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from gcore_core.contract.errors import (
    CheckpointError,
    ContractError,
    WeightMismatch,
    WorkerDied,
)
from gcore_core.contract.job_settings import POLICY
from gcore_core.contract.launching import Endpoint, Peer, Request
from gcore_core.contract.weight_transfer import SHM
from gcore_core.controllers.annotating import release_annotations
from gcore_core.controllers.checkpointing import Stopped
from gcore_core.controllers.config import SyncConfig
from gcore_core.controllers.context import ControllerContext
from gcore_core.controllers.placement.shard import PlacementShard
from gcore_core.controllers.placement.sleepers import sleep_trainers
from gcore_core.runtime.messages import (
    CATCH_UP,
    PLACE_WEIGHTS,
    PUBLISHED,
    PUSH_BEGIN,
    PUSH_PULL,
    RELEASE_STEPS,
    SAVE_PRETRAINED,
    UNSAVED_WEIGHTS,
    BeginPush,
    CatchUp,
    Nothing,
    PlaceWeights,
    Published,
    PullWeights,
    PushConfirmed,
    ReleaseSteps,
    SaveWeights,
    UnsavedWeights,
)
from gcore_core.wire.retry import LOST, PUSHES, RetryPolicy, insist, keep_alive
from gcore_core.wire.service import Call

#: Its pauses lie between two attempts to write the final weights; none is the last one.
_SAVES = RetryPolicy(tries=1, first_pause_s=0.5, longest_pause_s=10.0)


class Publishing:
    """Pushes weights from the trainers to every generator that is awake.

    The lead pushes. The other shards wait for it, which is the barrier at the end of a step.

    No sample may be in flight meanwhile, unless it may have several versions. So a program that
    generates ahead first calls ``Producer.drain``, or has generators that go on with samples
    through a push (trait ``midway_weights``).

    version: of the weights that the trainers hold, or are about to.
    """

    def __init__(
        self, context: ControllerContext, config: SyncConfig, placement: PlacementShard
    ) -> None:
        self._context = context
        self._config = config
        self._placement = placement
        self._stamp = 0
        self.version = -1
        # With its version, a push has a name by this number.
        self._attempts = itertools.count()
        # generators that are, and the version that they need; only the lead knows
        self._behind: dict[str, int] = {}
        context.service.add(CATCH_UP, self.catch_up)

    def digests(self) -> dict[str, int]:
        """Returns the stamp of the weights that were pushed last, in the lead.

        It is empty in other shards, and where no generator was awake.
        """
        return {"weights": self._stamp} if self._stamp else {}

    async def publish(self, version: int, release_before: int) -> bool:
        """Pushes the trainers' weights to the generators; all shards call it.

        Returns whether the run is to end here, the same on all shards.

        version: of the weights that the trainers hold.
        release_before: no record of earlier steps is needed any more; their memory is freed.
        """
        if self._context.agree.lead:
            await self._push_until_whole(version, release_before)
        return await self._context.agree.barrier("published", self._context.stopping.is_set())

    async def before_update(self, version: int) -> None:
        """Lets pushes to generators that are behind go first, and names what is pushed from now on.

        They wait for the trainers, and still get the weights of before the update.

        version: of the weights that the trainers hold after the update.
        """
        async with self._context.trainers_free():
            pass  # who waits for them comes first
        self.version = version

    async def catch_up(self, request: CatchUp, call: Call) -> Nothing:
        """Pushes to one generator that is behind; returns when it has its weights, or is lost.

        Only the lead is asked. The push waits until the trainers are free. Where the next push to
        all generators comes first, it is enough. Raises what the push raised.
        """
        needed = max(request.needed, self._behind.get(request.replica, 0))
        self._behind[request.replica] = needed
        with keep_alive(call.progress):
            await self._context.trainers_turn.acquire()
            # The push goes on when the one who asked goes away: the trainers are at it.
            await asyncio.shield(asyncio.ensure_future(self._catch_up(request.replica)))
        return Nothing()

    async def _catch_up(self, replica: str) -> None:
        """Pushes to one generator, and gives the trainers back.

        Nothing is pushed where it has had a push meanwhile. A generator that is lost on the way is
        not waited for. The shard that asks it for records finds it behind again, and asks again.
        One that has what is needed by now is left alone: a request that is late must not cut what
        it samples by a newer version.
        """
        try:
            if replica in self._behind:
                broken_off = (ContractError, WeightMismatch)
                with contextlib.suppress(*LOST):
                    await PUSHES.run(lambda _: self._push_to_one(replica), broken_off)
                # All who have asked meanwhile have had their push, too, or the replica is lost
                # again: whoever finds it behind then asks again.
                self._behind.pop(replica, None)
                await sleep_trainers(self._context)
        finally:
            self._context.trainers_turn.release()

    async def _push_to_one(self, replica: str) -> None:
        peers = [peer for peer in self._context.replicas if peer.name == replica]
        await self._push(peers, SHM, needed=self._behind[replica])

    async def _push_until_whole(self, version: int, release_before: int) -> None:
        """Pushes again while replicas are lost, as often as ``PUSHES`` allows.

        A replica that is restarted in the middle of a push asks for its first bucket. That one is
        overwritten by then (WeightMismatch), so the whole push begins again.
        """
        lost = (WorkerDied, ContractError, WeightMismatch)
        self.version = version
        await PUSHES.run(partial(self._push_to_all, release_before), lost)
        self._behind.clear()
        await release_annotations(self._context, release_before)
        await insist(self._context.supervisor, PUBLISHED, Published(version))

    async def _push_to_all(self, release_before: int, attempt: int) -> None:
        """Makes one attempt of a push to every generator that is awake."""
        configured = self._config.push_transport
        # Further attempts go through shared memory, which cannot fail for a device's sake.
        transport = SHM if attempt and configured == "auto" else configured
        confirmed = await self._push(self._placement.replicas, transport, release_before)
        self._stamp = confirmed[0].stamp if confirmed else 0

    async def _push(
        self,
        replicas: Sequence[Peer],
        transport: str,
        release_before: int = 0,
        *,
        needed: int = -1,
    ) -> list[PushConfirmed]:
        """Makes one attempt of a push of what the trainers hold.

        needed: of ``PullWeights``. A replica that is lost is not waited for where one is behind:
            WorkerDied or DeadlineExceeded is raised.
        """
        source = self._context.trainers[0]
        attempt = next(self._attempts)
        request = BeginPush(
            self.version,
            self._config.push_bucket_bytes,
            len(replicas),
            attempt,
            transport,
            self._config.push_fan_out,
        )

        async def pull(receiver: int, replica: Peer) -> PushConfirmed:
            ask = PullWeights(
                self.version,
                receiver,
                source.name,
                attempt,
                release_before,
                needed,
            )
            with _naming(replica):
                if needed >= 0:
                    return await replica.call(PUSH_PULL, ask)
                return await insist(replica, PUSH_PULL, ask)

        await insist(source, PUSH_BEGIN, request)
        return await asyncio.gather(*(pull(i, replica) for i, replica in enumerate(replicas)))

    async def save(self) -> None:
        """Asks the ranks to write the final weights in Hugging Face layout; all shards call it.

        A role that is trained besides the policy has its own next to the policy's, with the role's
        name behind a dash.

        Every rank takes part, since a rank may need collectives. Where the disk takes them not, it
        is tried again until it does: the trained weights are in the ranks alone, and somebody can
        free some space. Raises Stopped, in all shards, when the run is told to stop meanwhile.
        """
        agree = self._context.agree
        stopping = self._context.stopping
        for attempt in itertools.count():
            failed = agree.lead and not await self._save_once(self._context.facts.output)
            if not await agree.barrier("saved", failed):
                return
            if agree.lead:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), _SAVES.pause_s(attempt))
            if await agree.barrier("unsaved", stopping.is_set()):
                raise Stopped

    async def _save_once(self, output: str) -> bool:
        """Returns whether the weights of all trained roles are at their places now.

        output: of the policy's; empty: none are saved.
        """
        if not output:
            return True
        directories = []
        for role in self._context.trained:
            own = output if role == POLICY else f"{output}-{role}"
            directories += [(peer, own) for peer in self._context.workers_of(role)]
        remove = [(peer, PlaceWeights(directory, False)) for peer, directory in directories]
        place = [(peer, PlaceWeights(directory, True)) for peer, directory in directories]
        write = [(peer, SaveWeights(directory)) for peer, directory in directories]
        try:
            await _each(PLACE_WEIGHTS, remove)  # of an attempt that was lost
            await _each(SAVE_PRETRAINED, write)
            await _each(PLACE_WEIGHTS, place)
        except CheckpointError as error:
            with contextlib.suppress(CheckpointError):
                await _each(PLACE_WEIGHTS, remove)
            unsaved = UnsavedWeights(str(error))
            await insist(self._context.supervisor, UNSAVED_WEIGHTS, unsaved)
            return False
        return True


class Releasing(Publishing):
    """Ends a step where generators hold no weights: nothing is pushed, only memory is freed.

    Final weights are saved as in any run.
    """

    async def _push_until_whole(self, version: int, release_before: int) -> None:
        """Pushes nothing: tells annotators and generators what nobody needs any more."""
        await release_annotations(self._context, release_before)
        request = ReleaseSteps(release_before)
        replicas = self._context.replicas
        await asyncio.gather(*(insist(replica, RELEASE_STEPS, request) for replica in replicas))


async def _each(
    endpoint: Endpoint[Request, Nothing], asked: Sequence[tuple[Peer, Request]]
) -> None:
    """Asks every rank and waits for all of them, then raises what one of them raised.

    An error of the disk comes last: with any other one it is of no use to try again.
    """

    async def ask(peer: Peer, request: Request) -> None:
        try:
            await insist(peer, endpoint, request)
        except CheckpointError as error:
            error.where = f"{peer.name}, {error.where}"
            raise

    answers = await asyncio.gather(*(ask(*one) for one in asked), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in sorted(errors, key=lambda one: isinstance(one, CheckpointError)):
        raise error


@contextmanager
def _naming(replica: Peer) -> Iterator[None]:
    """Adds the replica's name to where its weights are wrong."""
    try:
        yield
    except WeightMismatch as error:
        error.where = f"{replica.name}, {error.where}" if error.where else replica.name
        raise
