"""Gives one generator the policy's weights, and says where it is behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import numpy as np

from gcore_core.contract.errors import WeightsBehind, WeightsGone
from gcore_core.contract.generator import Fingerprints, Generator, ReceivesWeights
from gcore_core.contract.launching import Network
from gcore_core.contract.lineage import UNSEALED
from gcore_core.contract.step_check import Held
from gcore_core.runtime.compute import Compute
from gcore_core.runtime.messages import PullWeights, PushConfirmed
from gcore_core.wire.gathering import Gathering
from gcore_core.workers.push import UNTOLD_DTYPE, DtypeSetting, Here, pull_weights

#: Pushes whose digests are kept, to tell from which of them the weights are that a generator holds
#: where they are not of the last one.
_REMEMBERED = 16


class WeightsFollower:
    """Pulls weights into a backend, each push once.

    lock: held while weights are loaded; no step of the engine runs meanwhile.
    follows: whether pushes come; none do to a judge, whose weights never change.
    setting: what the generator's configuration says of its dtype, for errors.
    here: on which node this process is; None: on the trainer's.
    stamp: of the weights that the backend holds; ``UNSEALED`` where no push has brought them.
    """

    def __init__(
        self,
        backend: Generator,
        compute: Compute,
        network: Network,
        lock: asyncio.Lock,
        follows: bool,
        setting: DtypeSetting = UNTOLD_DTYPE,
        here: Here | None = None,
    ) -> None:
        self._backend = backend
        self._compute = compute
        self._network = network
        self._lock = lock
        self._setting = setting
        self._here = here
        self._follows = follows
        self._pulls = Gathering(1)
        self._mapped: dict[str, np.ndarray] = {}  # path -> shared memory, kept between pushes
        # (version, digest of each tensor that came) of the last pushes, the newest at the end.
        self._pushes: list[tuple[int, dict[str, int]]] = []
        self.stamp = UNSEALED

    def check_is_not_behind(self, version: int) -> None:
        """Raises WeightsBehind where the backend holds older weights than these.

        It was started again, or has slept through a push.
        """
        held = self._backend.version
        if self._follows and held < version:
            what = f"samples need the weights of version {version}, and this generator holds {held}"
            raise WeightsBehind(what)

    def check_is_at(self, version: int) -> None:
        """Raises WeightsGone where the backend holds newer weights than these."""
        if self._follows and self._backend.version > version:
            raise weights_gone(version, self._backend.version)

    async def pull(self, request: PullWeights, progress: Callable[[], None]) -> PushConfirmed:
        """Takes a push from the trainer.

        Once, and to its end: a pull that was begun again would find the first buckets overwritten.
        """

        async def act(_: list[PullWeights]) -> PushConfirmed:
            async with self._lock:
                if 0 <= request.needed <= self._backend.version:
                    return PushConfirmed(request.version, 0, True, self.stamp)
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
        confirmed: PushConfirmed = await self._pulls.run_once(key, request, act)
        return confirmed

    def _remember(self, version: int, digests: dict[str, int]) -> None:
        before = [push for push in self._pushes if push[0] != version]
        self._pushes = [*before[1 - _REMEMBERED :], (version, digests)]

    async def held(self) -> Held:
        """Hashes what the backend holds now and compares it with what the last pushes brought."""
        backend = self._backend
        version = backend.version
        if not self._pushes or not isinstance(backend, Fingerprints):
            return Held(version)
        async with self._lock:
            digests_held = await self._compute(backend.fingerprint)
        pushed, digests = self._pushes[-1]
        differ = [name for name, digest in digests.items() if digests_held.get(name) != digest]
        older, older_version = 0, -1
        for before_version, before in self._pushes[-2::-1]:  # of equal ones the newest
            same = sum(digests_held.get(name) == before.get(name, -1) for name in differ)
            if same > older or older_version < 0:
                older, older_version = same, before_version
        return Held(version, pushed, True, differ, len(digests), older, older_version)


def weights_gone(version: int, held: int) -> WeightsGone:
    """Returns the error of samples that must begin under weights that nobody gives any more.

    held: the newer version that the generator holds in place of ``version``.
    """
    return WeightsGone(
        f"its samples need the weights of version {version}, and this generator holds version "
        f"{held}",
        why="it was started again while the trainer went on; samples of newer weights would be "
        "others, and this run is to repeat (run.deterministic)",
        todo="the run goes on from its newest checkpoint; where it has none, set checkpoint.every",
        version=version,
        held=held,
    )
