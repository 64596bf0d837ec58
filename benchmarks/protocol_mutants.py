"""Bugs to plant in the protocol: each a change of some lines of a function, made in memory."""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gcore_core.controllers.generation.dispatch import Lanes
from gcore_core.controllers.generation.in_step import InStep
from gcore_core.controllers.generation.ledger import Ledger
from gcore_core.controllers.generation.producer import Producer
from gcore_core.controllers.generation.scoring import Scoring
from gcore_core.controllers.training import Training
from gcore_core.runtime.agreements import AgreementService
from gcore_core.runtime.relay import Relay
from gcore_core.wire.gathering import Gathering
from gcore_core.workers.drawn_records import DrawnRecords
from gcore_core.workers.questions import Asking
from gcore_core.workers.rounds import Rounds
from gcore_core.workers.trainer import TrainerShell
from gcore_core.workers.weights_follower import WeightsFollower

#: (class, function, what stands there, what the bug puts there)
Mutant = tuple[type, str, str, str]

#: name -> the bug.
MUTANTS: dict[str, Mutant] = {
    "an ordinal has two owners": (
        Ledger,
        "lease",
        "ordinal % self.shards == self.shard",
        "ordinal % 3 == self.shard % 3",
    ),
    "a lost sample is forgotten": (
        Ledger,
        "take_back",
        "return again",
        "return again[1:]",
    ),
    "what is lost is counted as drawn": (
        Ledger,
        "take_back",
        "if s not in group.records",
        "if s and s not in group.records",
    ),
    "a duplicate is taken": (Ledger, "finished", " or header.sample in group.records", ""),
    "groups are complete too early": (
        Ledger,
        "_has_score",
        "len(group.scored) == self._samples",
        "len(group.records) == self._samples",
    ),
    "one reward is enough": (Ledger, "scored", "if names <= header", "if True or names <= header"),
    "a later reward replaces an earlier": (
        Ledger,
        "scored",
        "{**header.rewards, **score.values}",
        "score.values",
    ),
    "a score counts twice": (
        Ledger,
        "_has_score",
        "if sample not in group.scored:",
        "group.scored.add(-sample - 1)\n    if True:",
    ),
    "the step ends one too late": (
        InStep,
        "take_if_ready",
        "range(self.base, end)",
        "range(self.base, end + 1)",
    ),
    "the next step begins one too late": (
        InStep,
        "take_if_ready",
        "self.base = self.front = end",
        "self.base = self.front = end + 1",
    ),
    "carried groups stay settled": (
        Producer,
        "_close_step",
        "self._ledger.close(membership.consumed)",
        "self._ledger.close([*membership.consumed, *membership.surplus])",
    ),
    "verdicts are kept": (Ledger, "pop_verdicts", "self._closed.popleft()", "self._closed[0]"),
    "the first that finish are taken": (
        InStep,
        "take_if_ready",
        "teach = sorted(",
        "teach = list(",
    ),
    "one group too few": (
        InStep,
        "take_if_ready",
        "teach[needed - 1] + 1",
        "teach[needed - 2] + 1",
    ),
    "the step is over too early": (InStep, "take_if_ready", "self.in_flight or ", ""),
    "a meeting runs again": (
        Gathering,
        "join",
        "if member in values:",
        "if member in values and len(values) < self.members:",
    ),
    "a meeting misses one": (
        Gathering,
        "join",
        "len(values) == self.members",
        "len(values) >= max(1, self.members - 1)",
    ),
    "an older agreement answers a newer one": (
        AgreementService,
        "_join",
        "(type(request).__name__, request.key)",
        '(type(request).__name__, request.key.rpartition("/")[2])',
    ),
    "what is shared forgets a shard": (
        AgreementService,
        "share",
        "await self._join(request, request.payload)",
        "(await self._join(request, request.payload))[:3]",
    ),
    "deals are of another shard": (
        AgreementService,
        "deal",
        "[request.shard]",
        "[request.shard - 1]",
    ),
    "a relay drops a shard": (
        Relay,
        "relay",
        "zip(*(shard.parts for shard in requests), strict=True)",
        "zip(*(shard.parts for shard in requests[1:] + requests[1:2]), strict=True)",
    ),
    "a relay answers another": (Relay, "relay", "of_rank[request.shard]", "of_rank[0]"),
    "running samples are submitted again": (
        DrawnRecords,
        "begin",
        " if key not in self._running]",
        "]",
    ),
    "finished samples are not told again": (
        DrawnRecords,
        "listen",
        "if headers := [",
        "if headers := False and [",
    ),
    "a restarted generator draws with old weights": (
        WeightsFollower,
        "check_is_not_behind",
        "held < version",
        "False",
    ),
    "records are released too early": (
        DrawnRecords,
        "release",
        "max(self.over, before)",
        "max(self.over, before + 1)",
    ),
    "a pull runs twice": (
        WeightsFollower,
        "pull",
        "self._pulls.run_once(",
        "(lambda *_: act([request]))(",
    ),
    "late parts are not drawn": (
        Rounds,
        "join",
        "leases = request.leases",
        "leases = []",
    ),
    "answers go to whoever asked last": (
        Asking,
        "take",
        "for opened in self._open:",
        "for opened in self._open[-1:]:",
    ),
    "training runs again": (
        TrainerShell,
        "train",
        'await self._requests.run_once(("train", parts[0].step), parts, act)',
        "await act([parts])",
    ),
    "a lost replica's part is dropped": (
        Lanes,
        "_work_off",
        "waiting.append(unfinished)",
        "pass",
    ),
    "duplicates are scored as fresh": (
        Lanes,
        "_draw_part",
        "if ledger.finished(header)",
        "if ledger.finished(header) or True",
    ),
    "only the first batch is scored": (
        Scoring,
        "add",
        "self._waiting += headers",
        "self._waiting += headers[:1]",
    ),
    "advantages of a group are dropped": (
        Training,
        "train",
        "advantages.items()",
        "list(advantages.items())[1:]",
    ),
}


@contextmanager
def planted(name: str, mutants: Mapping[str, Mutant] = MUTANTS) -> Iterator[None]:
    """Has the bug in place while the block runs.

    mutants: what the name is a key of.

    Raises LookupError when the lines that it changes are not there any more.
    """
    owner, function, before, after = mutants[name]
    original: Any = owner.__dict__[function]
    plain = getattr(original, "fget", original)
    source = textwrap.dedent(inspect.getsource(plain))
    if before not in source:
        raise LookupError(f"{owner.__name__}.{function} has no {before!r} any more")
    source = source.replace(before, after)
    found: dict[str, Any] = {}
    code = compile(source, f"<{name}>", "exec", __future__.annotations.compiler_flag)
    exec(code, vars(sys.modules[owner.__module__]), found)  # our own text above
    setattr(owner, function, found[function])
    try:
        yield
    finally:
        setattr(owner, function, original)
