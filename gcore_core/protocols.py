"""The run-time seams: what the core calls on the objects that providers' factories make.

Arrays are numpy here; inside a trainer an objective gets torch tensors. All of these run in a
worker process except ``Controller``, ``Advantage`` (level "record"), ``Filter``, ``Balancer`` and
``PlacementPolicy``, which run in a controller and must stay light. An optional ability is a
protocol of its own, implemented if and only if the description claims the capability of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from gcore_core.errors import ContractError
from gcore_core.questions import Sampler
from gcore_core.records import Prompt, Ref, TensorSpec, WeightPlan

if TYPE_CHECKING:
    from torch import Tensor

Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What a backend learns about its place in the job when its factory is called.

    model: the role's ``model:`` mapping, ``path`` already resolved. devices: indexes of the devices
        placement gave it.
    rendezvous: an existing private directory in which the ranks of one role may meet (a file
        store); empty when alone.
    parts: factories the backend needs besides its own (a trainer's "objective", "advantage"),
        already made.
    directory: the run's, for what a person may want to look into after a failure.
    sampler: of a reward, the generator role that its ``role:`` names; None where it names none.
    progress: call it during long work; it extends the caller's deadline.
    """

    role: str
    rank: int = 0
    ranks: int = 1
    devices: tuple[int, ...] = ()
    seed: int = 0
    deterministic: bool = False
    steps: int = 1
    updates_per_step: int = 1
    model: Mapping[str, Any] = field(default_factory=dict)
    rendezvous: str = ""
    parts: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    directory: str = "."
    sampler: Sampler | None = None
    progress: Callable[[], None] = lambda: None


# -- generation ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One sample to draw. Requests of one ``ordinal`` share prompt and images, so an engine may
    encode these once.
    images: uint8[H, W, C], for the places of the prompt behind those of ``prompt.images``;
        capability "images".
    """

    ordinal: int
    sample: int
    seed: int
    prompt: Prompt
    greedy: bool = False
    attempt: int = 0
    images: Sequence[np.ndarray] = ()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One record that ended. ``columns`` as listed in ``gcore_core.records``; ``status`` and
    ``reason`` likewise.

    A request that cannot be served ends alone: status "failed", a reason ("prompt_too_long", ...)
        and no columns.
    ``versions``: first and last weights version that sampled its actions. ``media``: arrays that
    scorers and trainers need besides, such as an image; what records share is stored once.
    """

    request: SampleRequest
    status: str
    versions: tuple[int, int]
    columns: Columns = field(default_factory=dict)
    reason: str = ""
    media: Columns = field(default_factory=dict)


@runtime_checkable
class Generator(Protocol):
    """An engine in three verbs. Calls come one at a time from one thread."""

    version: int

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queues requests; returns at once. They may join a batch that is already running."""

    def step(self) -> list[Finished]:
        """Advances every unfinished sample by one unit of work; returns those that ended, perhaps
        none.
        """

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        """Ends the named (ordinal, sample) now, with what they have, status "aborted". Capability
        "abort".
        """

    def close(self) -> None: ...


@runtime_checkable
class ReceivesWeights(Protocol):
    """Capability "weights.push". Between ``begin`` and ``commit`` no ``step`` is called."""

    def begin_weights(self, plan: WeightPlan) -> None:
        """Raises WeightMismatch naming the tensor when the plan is of another model or older than
        ``version``.
        """

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        """Copies in some of the tensors; each array is flat uint8, valid only during the call."""

    def commit_weights(self, plan: WeightPlan) -> None:
        """All tensors have come: drops every cache that depended on the old ones and sets
        ``version``.
        """


@runtime_checkable
class Fingerprints(Protocol):
    """Capability "weights.fingerprint"."""

    def fingerprint(self) -> dict[str, int]:
        """Hugging Face name -> xxh3-64 of the bytes it holds, for every tensor of a push."""


@runtime_checkable
class Sleeps(Protocol):
    """Capability "sleep".

    Samples that run keep what they have and go on after the wake, read again. Asleep, ``step`` and
    a weight push raise an error that says so; a second ``sleep``, or ``wake`` of one that is awake,
    does nothing.
    """

    def sleep(self) -> None:
        """Gives the memory of weights and caches back. Not between ``begin_weights`` and
        ``commit_weights``.
        """

    def wake(self) -> None:
        """Takes the memory again; holds the same bytes of the same ``version``, or raises
        WeightMismatch.
        """


@runtime_checkable
class ScoresLogprobs(Protocol):
    """Capability "logprobs"."""

    def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
        """float32[A] for each record, at that record's temperature."""


# -- rewards ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ScoredRecord:
    """What a scorer sees of a record. text: the completion. media: of ``Finished``; refs: theirs,
    for ``Question``.
    """

    ordinal: int
    sample: int
    prompt: Prompt
    text: str
    status: str
    columns: Columns
    media: Columns = field(default_factory=dict)
    refs: Mapping[str, Ref] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Score:
    """A finite ``value`` with status "ok", or no value and why. A failed reward is a status, never
    a number.
    """

    value: float | None
    status: str = "ok"
    reason: str = ""


@runtime_checkable
class Scorer(Protocol):
    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """One score per record, in order. Calls come one at a time from one thread.
        Of a provider of level "group" the records are those of whole groups, neighbours by ordinal.
        """


@runtime_checkable
class AsyncScorer(Protocol):
    """A scorer that waits for others, such as a judge or a service: calls overlap, on the worker's
    event loop.
    """

    async def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """One score per record, in order."""


# -- training --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainRecord:
    """A record at its data-parallel rank. minibatch: in which update of an epoch. fresh: of this
    step's weights.
    """

    ordinal: int
    sample: int
    minibatch: int
    columns: Columns
    media: Columns = field(default_factory=dict)
    fresh: bool = True


@runtime_checkable
class Trainer(Protocol):
    """One data-parallel rank of a policy. All ranks get the same calls in the same order, so
    collectives may be used.

    Records come sorted by (ordinal, sample). A rank may get none.
    """

    version: int

    def prepare(
        self, records: Sequence[TrainRecord], scalars: frozenset[str]
    ) -> list[dict[str, float]]:
        """Keeps the records for ``train``, computes what the objective requires of them (old and
        reference log-probs) and returns per record the named scalars ("kl_k1": sum over actions of
        logp - ref_logp, ...).
        """

    def train(
        self, step: int, advantages: np.ndarray, minibatches: int, epochs: int
    ) -> dict[str, float]:
        """Runs minibatches x epochs updates over the prepared records.

        advantages: float64[records], in their order. Every loss is divided by a normaliser summed
            over all ranks.
        Returns metrics already reduced over ranks, at least: loss, grad_norm (before clipping),
        learning_rate, entropy, kl, clip_share, logprob_gap_max (rollout against trainer, of fresh
        records, before the first update), logprob_gap_mean. Raises NonFiniteLoss. Sets ``version``
        to step + 1.

        ``busy_s`` among them is this rank's own: seconds it worked, without waiting for other
        ranks; 0 when it cannot tell. Without it the processor time of the process is taken, which
        says nothing about an accelerator.
        """

    def weight_specs(self) -> list[TensorSpec]:
        """Every tensor ``export_weights`` will give, in its order."""

    def export_weights(self) -> Iterator[tuple[TensorSpec, np.ndarray]]:
        """Full tensors in Hugging Face layout, one at a time, flat uint8; empty arrays on ranks
        other than 0.
        """

    def save(self, directory: Path) -> None:
        """Everything needed to continue, in a format that other numbers of ranks can load."""

    def load(self, directory: Path) -> None: ...

    def save_pretrained(self, directory: Path) -> None:
        """Weights and tokenizer in Hugging Face layout (safetensors)."""

    def close(self) -> None: ...


@runtime_checkable
class SavesInBackground(Protocol):
    """Capability "save.background" of a trainer. One save at a time; the other calls go on between
    these two.
    """

    def begin_save(self, directory: Path) -> None:
        """Takes the state as it is now for ``save(directory)`` and returns as soon as training may
        go on.
        """

    def finish_save(self) -> None:
        """Waits until this rank's part is on the disk; raises what failed. Without a save under way
        it does nothing.
        """


@runtime_checkable
class Objective(Protocol):
    """The loss of one micro-batch. Actions of all its records lie flat, so padding cannot matter.

    ``columns`` (A actions in all, R records; tensors on the trainer's device): record int64[A]
        (0..R-1), mask bool[A], advantage float32[A] (a record's scalar repeated, or per action),
        rollout_logp float32[A], and what ``requires`` names: old_logp, ref_logp, values, returns
        (float32[A]). A column not required may be absent. ``old_logp`` is under the weights before
        this step's first update.
    ``current``: logp float32[A] with gradient; entropy float32[A] with gradient if "entropy" is
        required; values float32[A] with gradient if "values" is required.

    Returns (loss_sum, weight_sum, metrics): the gradient of the update is sum(loss_sum) /
    sum(weight_sum) over all micro-batches and ranks. Both are 0-d. weight_sum depends on masks and
    lengths, never on log-probs: a trainer asks for it with other ones before it goes forward.
    metrics: name -> (sum, weight), both 0-d and detached, added up the same way.
    """

    requires: frozenset[str]

    def loss(
        self, columns: Mapping[str, Tensor], current: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]: ...


# -- algorithms in controllers ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GroupScalars:
    """One group, in numbers. rewards float64[S]: weighted sum of the named rewards; lengths
    int64[S]: actions.

    scalars: per-record results of preparation, by name, float64[S] each (those the advantage's
        ``requires`` names).
    """

    rewards: np.ndarray
    lengths: np.ndarray
    scalars: Mapping[str, np.ndarray] = field(default_factory=dict)


@runtime_checkable
class Advantage(Protocol):
    """Level "record": rewards of groups to one number per record. Pure."""

    group_size: int
    requires: frozenset[str]

    def statistics(self, groups: Sequence[GroupScalars]) -> np.ndarray:
        """float64[K] summed over the shards before ``of``; length 0 when no batch statistics are
        needed.
        """

    def of(self, groups: Sequence[GroupScalars], statistics: np.ndarray) -> list[np.ndarray]:
        """float64[S] per group."""


@runtime_checkable
class ActionAdvantage(Protocol):
    """Level "action": runs on trainer ranks, where per-action values are. Pure."""

    group_size: int
    requires: frozenset[str]

    def per_action(
        self, rewards: np.ndarray, values: np.ndarray, mask: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns), float64[A] each, from per-action rewards and values of one
        record.
        """


@runtime_checkable
class Filter(Protocol):
    def keep(self, group: GroupScalars) -> tuple[bool, str]:
        """(teaches, named reason when it does not)."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is known of N records that are to be trained on.

    group int64[N]: equal where records have one prompt; they are neighbours. prompt, actions
    int64[N]: how many tokens, or denoising steps. extra float64[N]: what a record's producer said
    it costs besides, in tokens' worth; 0 where nothing was said. Raises ContractError unless it is
    finite and not negative.
    """

    group: np.ndarray
    prompt: np.ndarray
    actions: np.ndarray
    extra: np.ndarray

    def __post_init__(self) -> None:
        if not ((self.extra >= 0) & np.isfinite(self.extra)).all():
            raise ContractError("the cost of a record is negative or not finite", where="balance")

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def lengths(self) -> np.ndarray:
        """int64[N]: prompt and actions."""
        return np.asarray(self.prompt + self.actions)

    def take(self, indexes: np.ndarray | Sequence[int]) -> Work:
        """Some of the records, in that order."""
        at = np.asarray(indexes, np.int64)
        return Work(
            group=self.group[at],
            prompt=self.prompt[at],
            actions=self.actions[at],
            extra=self.extra[at],
        )


@runtime_checkable
class Balancer(Protocol):
    """Which records train on which data-parallel rank. Pure and deterministic, both of them."""

    def costs(self, work: Work) -> np.ndarray:
        """float64[N], finite and not negative: how long each record will take, in any unit."""

    def split(self, work: Work, bins: int) -> list[list[int]]:
        """Indexes of the records per bin, each exactly once. A bin may stay empty."""


@runtime_checkable
class LearnsCosts(Protocol):
    """Capability "costs.learned" of a balancer."""

    def observe(self, loads: Sequence[Work], seconds: np.ndarray) -> float | None:
        """What each data-parallel rank had in a step, and how long it worked: float64[ranks],
        finite and positive.

        Returns R2 of what it would have predicted of the latest steps, each before it saw that
        step; None while there is nothing to say. Not called in a run that is to repeat bit for bit.
        """


@runtime_checkable
class Dataset(Protocol):
    """Rows of prompts. Opened in every worker that reads it and in the supervisor, never in a
    controller.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Prompt: ...


@runtime_checkable
class Controller(Protocol):
    """One shard of the control program."""

    async def run(self) -> None: ...
