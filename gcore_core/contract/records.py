"""What flows between processes: prompts, headers, references, facts, reports.

Everything here is a msgspec struct, encoded as a msgpack array; no field may hold a tensor.
Controllers see only ``Header``, ``Facts`` and numbers. Arrays ("columns") stay in the store of the
node that made them and are named by a ``Ref``.

Columns of one record whose actions are tokens (P prompt tokens, A actions):

    prompt_ids   int32[P]    as the generator encoded them
    action_ids   int32[A]    as sampled, never re-encoded from text
    logp         float32[A]  log-prob of each action under the weights that sampled it, at the sampling temperature
    action_mask  uint8[A]    1 where the action is trained on
    temperature  float32[]   the temperature of ``logp``; 1 for a greedy record
    text         uint8[*]    UTF-8 of the completion
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import msgspec

HEADER_LIMIT_BYTES = 512
FACTS_LIMIT_BYTES = 64

#: status of a record
FINISHED, TRUNCATED, ABORTED, FAILED = "finished", "truncated", "aborted", "failed"
#: verdict on a group: a step trains on it, the filter dropped it, it could not be used
TRAINED, FILTERED, QUARANTINED = "trained", "filtered", "quarantined"
#: status of a reward
OK, REWARD_FAILED, REWARD_TIMEOUT, REWARD_SKIPPED = "ok", "failed", "timeout", "skipped"


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a dataset, as the workers that open it see it; it never travels through a
    controller.

    Exactly one of ``text`` and ``messages`` (chat turns, ``{"role", "content"}``) is set.
    ``images``: absolute paths of the images it shows, in the order of their places in the text, or
    of the parts ``{"type": "image"}`` of the turns. ``fields`` holds the row's other values (an
    answer to verify against, a source, ...).
    """

    row: int
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    images: list[str] = []
    fields: dict[str, Any] = {}


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """Names bytes in a node's store. Whoever opens it checks bounds, ``mac`` and ``digest``;
    controllers forward it.
    """

    node: str
    slab: str
    offset: int
    nbytes: int
    digest: int  # xxh3-64 of the content
    mac: bytes  # keyed blake2b over the other fields, 16 bytes
    dtype: str = "columns"  # "columns": a chunk of named arrays; else a numpy dtype
    shape: tuple[int, ...] = ()


class Header(msgspec.Struct, array_like=True):
    """The half of a record that controllers hold: at most 512 bytes encoded
    (``HEADER_LIMIT_BYTES``).

    ordinal: the prompt's place in the seeded order of the run.
    sample: 0 .. group size - 1.
    row: row of the dataset.
    seed: of this sample, blake2b of (run seed, ordinal, pass, sample).
    attempt: how many draws of it were lost before.
    versions: first and last weights version that sampled its actions.
    n_prompt, n_actions: lengths, in tokens or denoising steps.
    status, reason: how it ended, and why where that is no matter of course.
    columns: the chunk that holds its columns; None where it has none.
    slot: its place in that chunk.
    rewards: reward -> value, of those with status "ok".
    reward_status: reward -> "ok", "failed", "timeout" or "skipped".
    cost: ``Finished.cost`` of its generator.
    media: name -> bytes that scorers and trainers need besides.
    """

    ordinal: int
    sample: int
    row: int
    seed: int
    attempt: int = 0
    versions: tuple[int, int] = (0, 0)
    n_prompt: int = 0
    n_actions: int = 0
    status: str = FINISHED
    reason: str = ""
    columns: Ref | None = None
    slot: int = 0
    rewards: dict[str, float] = {}
    reward_status: dict[str, str] = {}
    cost: float = 0.0
    media: dict[str, Ref] = {}

    @property
    def key(self) -> tuple[int, int]:
        """(ordinal, sample): what the training batch is ordered by."""
        return self.ordinal, self.sample


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """One prompt that a shard owns: draw ``samples`` of it."""

    ordinal: int
    row: int
    turn: int  # which pass over the dataset
    samples: tuple[int, ...]
    attempt: int = 0


class Inquiry(msgspec.Struct, frozen=True, array_like=True):
    """One answer that a reward got about a record. Seconds are those before it was told, so that no
    clock is shared.
    """

    role: str
    replica: int
    n_prompt: int
    n_actions: int
    began_ago_s: float
    ended_ago_s: float


class RecordScore(msgspec.Struct, frozen=True, array_like=True):
    """What the rewards of one scorer worker said of a record."""

    ordinal: int
    sample: int
    values: dict[str, float]
    statuses: dict[str, str]  # reward name -> "ok" | "failed" | "timeout" | "skipped"
    reason: str = ""
    asked: list[Inquiry] = []


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """What the lead may know of a record: at most 64 bytes encoded. All fields are the header's."""

    ordinal: int
    sample: int
    n_prompt: int
    n_actions: int
    cost: float


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """Where one record trains: data-parallel ``rank`` and ``minibatch`` (drawn by seed, never by
    length).
    """

    ordinal: int
    sample: int
    rank: int
    minibatch: int


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a weight push, named as in a Hugging Face checkpoint; ``dtype`` as in
    safetensors (F32...).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class WeightPlan(msgspec.Struct, frozen=True, array_like=True):
    """First message of a push: every tensor that will come, in order, and the version they make."""

    version: int
    tensors: list[TensorSpec]


class StepReport(msgspec.Struct, kw_only=True):
    """One finished step, as observers and the metrics file see it. ``metrics`` keys are
    slash-separated paths.
    """

    step: int
    version: int
    metrics: dict[str, float]
    evaluation: dict[
        str, float
    ] = {}  # "greedy/<reward>", "sampled/<reward>", ...: filled at evaluation steps only
    samples: list[Header] = []  # a few evaluated records, to be opened by reference


class RunFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What observers learn about a run when it starts; ``config`` is the resolved tree."""

    name: str
    directory: str
    steps: int
    config: dict[str, Any]
    resumed_from: int = 0


class WorkerFailure(msgspec.Struct, kw_only=True, frozen=True):
    """A worker that ended or was lost; ``fatal`` when the run cannot go on without it."""

    role: str
    rank: int
    reason: str
    fatal: bool = True
