"""Lends the trainer's devices to generators that sleep there, while the trainer waits for records.

    the trainer waits, and would wait less      the lead decides (``offer``), and tells all shards
                                                when they next compare (``RunningWindow._look``)
    lent replicas wake, get the weights         the lead; other shards go on
    the lead says that they are awake           every shard gives them parts and samples
    the groups of the step are there            no shard asks a lent replica any more (``close``)
    lent replicas give back what has not ended  the lead puts them to sleep (``take_back``)
    the trainer goes on                         own replicas go on with what was given back

Who sleeps here is known by replica: some of the policy's generators are lent, and the others, at
least one, are called its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from gcore_core.contract.launching import Peer
from gcore_core.controllers.placement.lending import Lending, Rates
from gcore_core.runtime.messages import GIVE_BACK, GiveBack
from gcore_core.runtime.rpc.retry import insist

#: What a shard knows of a loan: none; lent replicas wake; they are awake.
NONE = 0
COMING = 1
AWAKE = 2


class Loans:
    """Knows, on one shard, whether lent replicas can be asked; in the lead it makes the loans.

    lent: the replicas that sleep on the trainer's devices.
    own: returns the others that are awake.
    arrange: has the lent replicas awake or asleep; returns the seconds; only the lead calls it.
        Its arguments are whether they are to be awake, and the weights that they need then.
    metrics: of the latest step, in the lead.
    """

    def __init__(
        self,
        lent: Sequence[Peer],
        own: Callable[[], list[Peer]],
        arrange: Callable[[bool, int], Awaitable[float]],
    ) -> None:
        self._lent = list(lent)
        self._names = {peer.name for peer in lent}
        self._own = own
        self._arrange = arrange
        self._phase = NONE
        # The lead's.
        self._rates: Rates | None = None
        self._waking: asyncio.Task[None] | None = None
        self._woke_s = 0.0  # seconds that the latest wake took, with its push
        self._awake_since_s = 0.0
        # Seconds that a loan takes. Until one was made, twice those of the first sleep.
        self._cost_s = 0.0
        # Of the present step.
        self._count = 0
        self._lent_s = 0.0
        self._samples = 0
        self.metrics: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to lend."""
        return bool(self._lent)

    # -- every shard -------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a loan was made and is not over, as all shards were told."""
        return self._phase != NONE

    def note(self, phase: int) -> bool:
        """Notes what the lead says; returns whether lent replicas can be asked from now on."""
        begins = phase == AWAKE and self._phase != AWAKE
        self._phase = phase
        return begins

    def awake(self) -> list[Peer]:
        """Returns the lent replicas that can be asked now."""
        return list(self._lent) if self._phase == AWAKE else []

    def may_ask(self, replica: Peer) -> bool:
        """Returns whether a replica may be given samples now."""
        return self._phase == AWAKE or replica.name not in self._names

    def going_on(self, giver: str) -> list[Peer]:
        """Returns the replicas that go on with samples which a replica has given back."""
        lent = self.awake()
        if lent and giver not in self._names:
            return lent
        own = self._own()
        return [peer for peer in own if peer.name != giver] or own  # alone, it goes on itself

    def close(self) -> None:
        """Has this shard ask no lent replica any more."""
        self._phase = NONE

    # -- the lead ----------------------------------------------------------------------------------

    def ended(self, groups: int, samples: int) -> None:
        """Counts groups that have ended on any shard, and samples that were given back there."""
        self._measure().add(groups)
        self._samples += samples

    def offer(self, missing: int, version: int) -> int:
        """Makes a loan where it pays; returns what to tell the shards.

        missing: groups that the trainer waits for; 0 while it does not wait.
        version: of the weights that generators hold.
        """
        if self._waking is not None:
            # Also where the wake has failed: ``take_back`` raises that. Until then replicas that
            # sleep give back what they are asked for.
            return AWAKE if self._waking.done() else COMING
        lending = Lending(len(self._own()), len(self._lent), self._cost_s)
        rate = self._measure().per_engine_s(_now_s())
        if not missing or not lending.pays(missing, rate):
            return NONE
        self._waking = asyncio.ensure_future(self._wake(version))
        return COMING

    async def share(self) -> None:
        """Has own replicas give lent ones their part of what runs."""
        own = self._own()
        part = GiveBack(len(self._lent) / (len(own) + len(self._lent)))
        await asyncio.gather(*(insist(peer, GIVE_BACK, part) for peer in own))

    async def take_back(self) -> None:
        """Ends the loan: lent replicas give back what has not ended, and sleep.

        Every shard has called ``close``. Raises what failed in waking them.
        """
        waking = self._waking
        if waking is None:
            return
        await waking
        ended_s = _now_s()
        self._measure().awake(ended_s, len(self._own()))
        slept_s = await self._arrange(False, 0)
        self._waking = None
        self._cost_s = self._woke_s + slept_s
        self._count += 1
        self._lent_s += ended_s - self._awake_since_s

    def end_step(self) -> None:
        """Says that a step has taken its groups."""
        self._measure().end_step(_now_s())
        self.metrics = {
            "lending/loans": float(self._count),
            "lending/seconds": self._lent_s,
            "lending/cost_s": self._cost_s,
            "lending/samples": float(self._samples),
        }
        self._samples = 0
        self._count = 0
        self._lent_s = 0.0

    def slept_first(self, seconds: float) -> None:
        """Notes how long the first sleep took, from which the cost of a loan is guessed."""
        self._cost_s = self._cost_s or 2 * seconds

    def stop(self) -> None:
        """Ends what runs for a loan; the run ends."""
        if self._waking is not None:
            self._waking.cancel()

    async def _wake(self, version: int) -> None:
        self._woke_s = await self._arrange(True, version)
        self._awake_since_s = _now_s()
        self._measure().awake(self._awake_since_s, len(self._own()) + len(self._lent))

    def _measure(self) -> Rates:
        """Returns what measures the engines; it begins with the first call."""
        if self._rates is None:
            self._rates = Rates(len(self._own()), _since_s=_now_s())
        return self._rates


def _now_s() -> float:
    return asyncio.get_running_loop().time()
