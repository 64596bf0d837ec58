"""Bugs to plant in the asynchronous program: each a change of some lines, made in memory."""

from __future__ import annotations

from protocol_mutants import Mutant

from gcore_core.controllers.generation.ahead import Ahead
from gcore_core.controllers.generation.dispatch import Lanes
from gcore_core.controllers.generation.ledger import Ledger
from gcore_core.controllers.generation.producer import Producer

#: name -> (class, function, what stands there, what the bug puts there)
ASYNC_MUTANTS: dict[str, Mutant] = {
    "a deadline is one step late": (
        Ahead,
        "due",
        "version + self.bounds.age - self.step",
        "version + self.bounds.age + 1 - self.step",
    ),
    "more is begun than can be taken in time": (
        Ahead,
        "issue",
        "self.bounds.age + 1 - self.step",
        "self.bounds.age + 9 - self.step",
    ),
    "generation runs one step too far ahead": (
        Ahead,
        "issue",
        "self.bounds.ahead + 1",
        "self.bounds.ahead + 2",
    ),
    "a repeatable run begins nothing while a push waits": (
        Ahead,
        "issue",
        "self.push_waits and not self.bounds.exact",
        "self.push_waits",
    ),
    "memory is released one version too early": (
        Ahead,
        "oldest",
        "min(self._begun.values(), default=self.step)",
        "min(self._begun.values(), default=self.step) + 1",
    ),
    "a step releases what was generated ahead": (
        Producer,
        "seal",
        "oldest=schedule.oldest",
        "oldest=taken.step + 1",
    ),
    "old weights may begin a sample": (
        Lanes,
        "_draw_part",
        "least=round_.version",
        "least=0",
    ),
    "due groups are not waited for": (
        Ahead,
        "take_if_ready",
        "any(ordinal not in self._told for ordinal in must)",
        "False",
    ),
    "due groups have no priority": (
        Ahead,
        "take_if_ready",
        "alive[: self.due]",
        "[]",
    ),
    "a step is taken with too few groups": (
        Ahead,
        "take_if_ready",
        "is_short and (self.in_flight or self.issued < self._most_issued)",
        "False",
    ),
    "a step is taken before every shard wants it": (
        Ahead,
        "take_if_ready",
        "self.wanted < self.step",
        "False",
    ),
    "groups that teach nothing are trained on": (
        Ahead,
        "_alive",
        "or self._told[o].teaches",
        "or True",
    ),
    "a repeatable run takes what is complete": (
        Ahead,
        "take_if_ready",
        "alive[:prompts] if self.bounds.exact else",
        "",
    ),
    "the base stays behind": (
        Ahead,
        "_consume",
        "while self.base in self._above:",
        "if self.base in self._above:",
    ),
    "an ended group is told twice": (Producer, "_look", "self._latest = []", "pass"),
    "one shard goes by its own version": (
        Producer,
        "_look",
        "self._schedule.look(version,",
        "self._schedule.look(self._version,",
    ),
    "newer weights are counted before all shards have them": (
        Producer,
        "_look",
        "min(look.version for look in looks)",
        "max(look.version for look in looks) + 1",
    ),
    "a push does not wait for samples": (
        Producer,
        "_note_quiet",
        "self._schedule.in_flight or self._is_behind()",
        "False",
    ),
    "a shard waits for its own samples alone": (
        Producer,
        "_note_quiet",
        "self._schedule.in_flight or self._is_behind()",
        "self._draws",
    ),
    "newer weights do where the run is to repeat": (
        Lanes,
        "_draw_part",
        "exact=facts.run.deterministic",
        "exact=False",
    ),
    "an ordinal has two owners": (
        Ledger,
        "lease",
        "ordinal % self.shards == self.shard",
        "ordinal % 3 == self.shard % 3",
    ),
    "verdicts of a step are forgotten": (
        Ledger,
        "close",
        "verdicts[ordinal] = group.verdict",
        "pass",
    ),
    "a step commits what it did not take": (
        Ledger,
        "close",
        "self._closed.append(verdicts)",
        "self._closed.append(verdicts | {o: one.verdict for o, one in self._settled.items()})",
    ),
}
