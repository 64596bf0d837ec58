"""Defines what a backend learns about its place in the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gcore_core.contract.questions import Sampler, Speaker


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """Tells a backend its place in the job, when its factory is called.

    The factory, and then the backend, is called in the main thread of its process, one call at a
    time, and no event loop runs there. Signals, timers and ``asyncio.run`` may be used.

    role: its name in the job, or that of the scorer worker.
    rank, ranks: which worker of the role this is, and how many there are.
    seed: of the run.
    deterministic: whether the run is to repeat bit for bit.
    steps: how many the run makes.
    updates_per_step: optimizer updates of one step.
    engine: the role's ``engine:`` mapping, which the plugin hands to its engine unread.
    model: the role's ``model:`` mapping, ``path`` already resolved.
    devices: the devices that placement gave it, by their numbers on this machine.
    threads: CPU threads that it may use while it works: its part of the machine's cores, which the
        devices that are in use meanwhile share, but no more than OMP_NUM_THREADS. 1 in a
        deterministic run, since the number decides how sums are rounded.
    rendezvous: an existing private directory in which the ranks of one role may meet (a file
        store), if they are on one node; empty when alone. Ranks on other nodes have other
        directories.
    meeting_address: "HOST:PORT" on which rank 0 is to listen and where the other ranks find it, if
        ranks of one role are on several nodes; else empty. It is reached over a network that is
        declared private: what ranks send each other is in plain.
    parts: what the backend needs besides its own, already made: of a trainer "objective", and
        "advantage" where that is of level "action".
    directory: the run's, for what a person may want to look into after a failure.
    columns: names of the per-action columns that the role gives (``RoleProvider.columns``), without
        those that are not given under its settings.
    given: of a trainer, names of the per-action columns that the roles of the job give, its own
        role too: each record that is prepared has them.
    policy: of an annotator, the ``model:`` mapping of the role policy, ``path`` already resolved:
        its columns are of that model's tokens.
    sampler: of a reward, the generator role that its ``role:`` names; None where it names none.
    acts: of a generator, whether an environment is built around it, which asks it for turns.
    speakers: of an environment, player -> the generator role that speaks for it, as
        ``environment.roles`` has it. The policy speaks for every other player.
    progress: call it during long work; it extends the caller's deadline.
    """

    role: str
    rank: int = 0
    ranks: int = 1
    devices: tuple[int, ...] = ()
    threads: int = 1
    seed: int = 0
    deterministic: bool = False
    steps: int = 1
    updates_per_step: int = 1
    model: Mapping[str, Any] = field(default_factory=dict)
    rendezvous: str = ""
    meeting_address: str = ""
    parts: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    directory: str = "."
    columns: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    policy: Mapping[str, Any] = field(default_factory=dict)
    sampler: Sampler | None = None
    acts: bool = False
    speakers: Mapping[str, Speaker] = field(default_factory=dict)
    progress: Callable[[], None] = lambda: None
