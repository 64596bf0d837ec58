"""Decides when a trainer that waits for records lends its devices to generators.

The trainer waits for groups, and engines that sleep on its devices could sample meanwhile. The
groups that are missing, over the rate at which the generators' own engines end groups, are the
seconds that it would wait. With more engines it would wait less:

    saved = missing / rate * lent / (own + lent)

A loan pays where this is more than what it costs: trainer and engines change places twice, and the
lent engines get the weights.

Everything here is pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Lending:
    """Says when a loan pays.

    own: engines that always sample.
    lent: engines on the trainer's devices.
    cost_s: seconds that a loan takes before and after its engines sample.
    """

    own: int
    lent: int
    cost_s: float

    def saved_s(self, missing: int, rate: float) -> float:
        """Returns the seconds that the trainer would wait less.

        missing: groups that it waits for.
        rate: groups that one engine ends in a second, as measured; 0 where nothing was measured,
            and then nothing is known to be saved.
        """
        if not rate or not self.lent:
            return 0.0
        wait_s = missing / (rate * self.own)
        return wait_s * self.lent / (self.own + self.lent)

    def pays(self, missing: int, rate: float) -> bool:
        """Returns whether the trainer would wait less by more than a loan takes."""
        return self.saved_s(missing, rate) > self.cost_s


@dataclass
class Rates:
    """Measures at which rate an engine ends groups, over the latest step and the present one.

    engines: how many sample now.
    """

    engines: int
    _groups: int = 0
    _engine_s: float = 0.0
    _since_s: float = 0.0
    _before: tuple[int, float] = field(default=(0, 0.0))  # counts of the step before

    def add(self, groups: int) -> None:
        """Counts groups that have ended."""
        self._groups += groups

    def awake(self, now_s: float, engines: int) -> None:
        """Says that from now on so many engines sample."""
        self._engine_s += self.engines * (now_s - self._since_s)
        self._since_s = now_s
        self.engines = engines

    def end_step(self, now_s: float) -> None:
        """Begins to measure another step; the one before the latest is forgotten."""
        self.awake(now_s, self.engines)
        self._before = (self._groups, self._engine_s)
        self._groups = 0
        self._engine_s = 0.0

    def per_engine_s(self, now_s: float) -> float:
        """Returns the groups that an engine ends in a second; 0 before a step has ended."""
        groups, engine_s = self._before
        if not engine_s:
            return 0.0
        engine_s += self._engine_s + self.engines * (now_s - self._since_s)
        return (groups + self._groups) / engine_s
