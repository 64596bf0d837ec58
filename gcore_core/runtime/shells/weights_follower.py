"""Keeps one generator's weights those of the policy; a new one asks for a push of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from gcore_core.contract.errors import ContractError, WeightMismatch, WeightsGone
from gcore_core.contract.generator import Fingerprints, Generator, ReceivesWeights
from gcore_core.contract.launching import Network
from gcore_core.contract.lineage import UNSEALED
from gcore_core.runtime.messages import (
    PUSH_BEGIN,
    BeginPush,
    HeldReply,
    PullWeights,
    PushConfirmed,
)
from gcore_core.runtime.process.compute import Compute
from gcore_core.runtime.push import UNTOLD_DTYPE, DtypeSetting, Here, pull_weights
from gcore_core.runtime.rpc.gathering import Gathering
from gcore_core.runtime.rpc.retry import PATIENT, insist, shown

RESTORE_BUCKET_BYTES = 256 << 20  # memory for all buckets of a push that a generator asks for
#: Pushes whose digests are kept, to tell from which of them the weights are that a generator holds
#: where they are not those of the last one.
_REMEMBERED = 16


class WeightsFollower:
    """Pulls weights into a backend, each push once.

    lock: held while weights are loaded; no step of the engine runs meanwhile.
    trainers: peer names of the policy's workers, the first of which sends; empty for a judge, whose
        weights never change.
    process: a number that no other process of the run has, for pushes of its own; 0: drawn here.
        Process ids would not do: they repeat.
    setting: what the generator's configuration says of its dtype, for errors.
    here: on which node this process is; None: on the trainer's.
    stamp: of the weights that the backend holds; ``UNSEALED`` where no push has brought them.
    restoring: held while a push of its own is asked for; the engine must not fall asleep then.
    """

    def __init__(
        self,
        backend: Generator,
        compute: Compute,
        network: Network,
        lock: asyncio.Lock,
        trainers: Sequence[str],
        process: int = 0,
        setting: DtypeSetting = UNTOLD_DTYPE,
        here: Here | None = None,
    ) -> None:
        self._backend = backend
        self._compute = compute
        self._network = network
        self._lock = lock
        self._setting = setting
        self._here = here
        self._trainers = list(trainers)
        number = process or int.from_bytes(os.urandom(5), "big")
        self._first_attempt = number * PATIENT.tries  # of pushes that this process asks for
        self._pulls = Gathering(1)
        self._mapped: dict[str, np.ndarray] = {}  # path -> shared memory, kept between pushes
        # (version, digest of each tensor that came) of the last pushes, the newest at the end.
        self._pushes: list[tuple[int, dict[str, int]]] = []
        self.restoring = asyncio.Lock()
        self.stamp = UNSEALED

    def is_behind(self, version: int) -> bool:
        """Returns whether the backend's weights are older than these and somebody can push newer
        ones.
        """
        return bool(self._trainers) and self._backend.version < version

    def check_is_at(self, version: int) -> None:
        """Raises WeightsGone where the backend holds newer weights than these."""
        if self._trainers and self._backend.version > version:
            raise weights_gone(version, "this generator", self._backend.version)

    async def pull(self, request: PullWeights, progress: Callable[[], None]) -> PushConfirmed:
        """Takes a push from the trainer.

        Once, and to its end: a pull that was begun anew would find the first buckets overwritten.
        """

        async def act(_: list[PullWeights]) -> PushConfirmed:
            async with self._lock:
                receiver = cast(ReceivesWeights, self._backend)
                source = self._network.peer(request.source)
                self.stamp = UNSEALED
                came: dict[str, int] = {}
                confirmed = await pull_weights(
                    receiver,
                    source,
                    request,
                    self._compute,
                    progress,
                    self._mapped,
                    self._setting,
                    came,
                    self._here,
                )
                self.stamp = confirmed.stamp
                if came:
                    self._remember(request.version, came)
                return confirmed

        key = request.version, request.attempt
        confirmed: PushConfirmed = await self._pulls.join(key, 0, request, act)
        return confirmed

    def _remember(self, version: int, digests: dict[str, int]) -> None:
        before = [push for push in self._pushes if push[0] != version]
        self._pushes = [*before[1 - _REMEMBERED :], (version, digests)]

    async def held(self) -> HeldReply:
        """Hashes what the backend holds now and compares it with what the last pushes brought."""
        backend = self._backend
        version = backend.version
        if not self._pushes or not isinstance(backend, Fingerprints):
            return HeldReply(version)
        async with self._lock:
            digests_held = await self._compute(backend.fingerprint)
        pushed, digests = self._pushes[-1]
        differ = [name for name, digest in digests.items() if digests_held.get(name) != digest]
        older, older_version = 0, -1
        for before_version, before in self._pushes[-2::-1]:  # of equal ones the newest
            same = sum(digests_held.get(name) == before.get(name, -1) for name in differ)
            if same > older or older_version < 0:
                older, older_version = same, before_version
        return HeldReply(version, pushed, True, differ, len(digests), older, older_version)

    async def restore(
        self, version: int, progress: Callable[[], None], *, exact: bool = False
    ) -> None:
        """Has a push of its own: this process was started after the push of these weights.

        Where another generator's push, or an update, takes the place of this one's, it is begun
        anew. The trainer is idle in a rollout, and holds ``version``; where generation runs ahead
        it trains meanwhile, and then holds a later one.

        exact: newer weights do not do; then WeightsGone is raised where the trainer holds those.
        progress: called all the time. A trainer that hangs is found by its own deadline; this
            process must not be taken for the one that hangs.
        """
        source = self._network.peer(self._trainers[0])
        version_to_ask = version
        async with self.restoring:
            for attempt in range(PATIENT.tries):
                if self._backend.version >= version:
                    return
                own = self._first_attempt + attempt
                begun = BeginPush(version_to_ask, RESTORE_BUCKET_BYTES, 1, own, waits=True)
                pulled = PullWeights(version_to_ask, 0, self._trainers[0], own)
                try:
                    with shown(progress):
                        await insist(source, PUSH_BEGIN, begun)
                    await self.pull(pulled, progress)
                except (ContractError, WeightMismatch) as error:
                    held = int(error.facts.get("held", version_to_ask))
                    if exact and held > version:
                        raise weights_gone(version, "the trainer", held) from error
                    if attempt == PATIENT.tries - 1:
                        raise
                    if not exact:
                        # Meanwhile the trainer may have gone on, by several versions where samples
                        # run through pushes. It has said then which one it holds.
                        version_to_ask = max(version, held)
                    await asyncio.sleep(PATIENT.pause_s(attempt))


def weights_gone(version: int, who: str, held: int) -> WeightsGone:
    """Returns the error of samples that must begin under weights that nobody gives any more.

    who: names the process that holds the newer version ``held`` in place of ``version``.
    """
    return WeightsGone(
        f"its samples need the weights of version {version}, and {who} holds version {held}",
        why="it was started again while the trainer went on; samples of newer weights would be "
        "others, and this run is to repeat (run.deterministic)",
        todo="the run goes on from its newest checkpoint; where it has none, set checkpoint.every",
        version=version,
        held=held,
    )
