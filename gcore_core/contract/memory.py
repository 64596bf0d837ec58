"""Defines how a backend says, before any process starts, how much memory its workers will need.

A provider names a function in its description (``Provider.memory``). It is called as
``function(config, worker)`` in the process that reads the configuration, so it imports no engine,
loads no weights and starts nothing. ``g-core plan`` prints the answers of all roles next to the
memory of their devices; ``g-core check`` and ``g-core run`` refuse a job that cannot fit.

    def memory(config: MyConfig, worker: WorkerShape) -> Iterable[MemoryNeed]:
        for phase in PHASES:
            yield MemoryNeed(phase=phase, what="weights", nbytes=2 * parameters)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: What a run does in turn. Generators sample in ``rollout``; trainers compute what a loss needs in
#: ``preparation`` and update in ``training``; ``push`` brings the new weights to generators.
PHASES = ("rollout", "preparation", "training", "push")
#: Stands for every phase in which the worker sleeps; of backends with the trait ``sleeps``.
ASLEEP = "asleep"
#: Shared memory that a weight push goes through, where a step program's settings say nothing else.
PUSH_BYTES = 256 << 20

Where = Literal["device", "host"]


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Says what one worker holds in one phase, for one purpose.

    phase: one of ``PHASES``, or ``ASLEEP``.
    what: the purpose in a few words, such as "weights", "gradients" or "key-value cache".
    nbytes: on each of the worker's devices; None: nobody knows, and ``note`` says why.
    on: "device", or "host" for memory of the machine. For a device of kind "cpu" both are the same
        memory.
    shared: all workers of the role on one machine hold it together, once.
    at_most: the number is a bound that a step reaches only where it is as full as the settings
        allow, such as a micro-batch of ``budget_tokens``. A job that fits without such needs is not
        refused.
    setting: the setting that makes this need smaller, as it is written below the role, such as
        "config.budget_tokens: less" or "slots: more"; "": none.
    note: what the number rests on, in a few words.
    """

    phase: str
    what: str
    nbytes: int | None
    on: Where = "device"
    shared: bool = False
    at_most: bool = False
    setting: str = ""
    note: str = ""

    def problems(self) -> list[str]:
        """Returns the reasons why this need is not valid; none when it is."""
        problems = []
        if self.phase not in (*PHASES, ASLEEP):
            problems.append(f"phase {self.phase!r} is none of {', '.join((*PHASES, ASLEEP))}")
        if not self.what:
            problems.append("what: says nothing")
        if self.nbytes is None and not self.note:
            problems.append(f"{self.what}: nbytes is None and no note says why")
        if self.nbytes is not None and (type(self.nbytes) is not int or self.nbytes < 0):
            problems.append(f"{self.what}: nbytes is {self.nbytes!r}, not a number of bytes")
        if self.on not in ("device", "host"):
            problems.append(f"{self.what}: on is {self.on!r}, neither 'device' nor 'host'")
        return problems


@dataclass(frozen=True, kw_only=True)
class WorkerShape:
    """Says what is known of a role's workers before they start.

    role: name of the role.
    device: kind of the devices, as in ``Device.kind``.
    slots: slots of the role, which is the number of a trainer's ranks.
    model: ``model:`` of the role, or of the role that it follows; ``path`` is a directory where
        there is one already. A model that the run makes has none before.
    engine: ``engine:`` of the role.
    requires: columns that the role's objective requires; empty for other roles than trainers.
    given: columns that other roles give.
    deterministic: whether the run is deterministic.
    acts: of a generator, whether an environment is built around it, which asks it for turns.
    push_bytes: shared memory that a weight push may go through, for all its buckets together. It
        takes less where the weights are smaller, and more where one tensor is larger.
    records: most records that a step brings to all workers of the role together: those that a
        trainer trains on, or the samples that a generator draws at a time. 0: not known.
    group_size: how many of them have one prompt.
    minibatches: parts of a step's records; each is one optimizer update.
    facts: name -> what a look has counted of the job (``gcore_core.contract.looking``); a name that
        is absent is not known.
    """

    role: str
    device: str = "cpu"
    slots: int = 1
    model: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    requires: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()
    deterministic: bool = False
    acts: bool = False
    push_bytes: int = PUSH_BYTES
    records: int = 0
    group_size: int = 1
    minibatches: int = 1
    facts: Mapping[str, int] = field(default_factory=dict)
