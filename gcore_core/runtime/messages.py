"""Every message between processes, as msgspec arrays, and the endpoints that they are for.

``shard`` says which controller asks.

A request that changes something carries a key (step, round, ...) under which its receiver runs it
once: a repeated request gets the reply of the first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec

from gcore_core.contract.deadlines import Wait
from gcore_core.contract.factories import FactorySpec
from gcore_core.contract.launching import Endpoint, StreamEndpoint
from gcore_core.contract.records import (
    Header,
    Lease,
    Prompt,
    RecordScore,
    Ref,
    StepReport,
    WeightPlan,
)
from gcore_core.contract.weight_transfer import SHM, Bucket, Offers
from gcore_core.runtime.rpc.service import RemoteFailure
from gcore_core.runtime.worker_settings import AnySettings

RESTART_EXIT_CODE = 75  # a worker that ends with it asks to be started again
TRAIN, GREEDY, SAMPLED = (
    "train",
    "greedy",
    "sampled",
)  # why records are drawn; the last two are evaluation
_REASON_LIMIT_BYTES = 128
_PLACE = re.compile(r" \([^()\s]+:\d+\)$")


class Message(msgspec.Struct, array_like=True):
    pass


class Nothing(Message):
    pass


def short_reason(text: str) -> str:
    """The beginning of a reason, short enough for a header; a ``(file:line)`` at its end stays."""
    place = _PLACE.search(text)
    end = place[0].encode("utf-8", "replace") if place else b""
    room = max(0, _REASON_LIMIT_BYTES - len(end))
    beginning = text.encode("utf-8", "replace")[: -len(end) or None][:room]
    return beginning.decode("utf-8", "ignore") + end[:_REASON_LIMIT_BYTES].decode("utf-8", "ignore")


# -- generation and rewarding ----------------------------------------------------------------------


class GenerateRequest(Message):
    """Asks a replica for samples.

    step: names the round, together with ``round`` and ``purpose``; the samples' memory is held for
        this step.
    round: counts the rounds of a step.
    leases: what to draw; perhaps nothing, which says that this shard has no part in the round.
    least: the oldest version of the weights that may begin these samples.
    """

    step: int
    round: int
    shard: int
    purpose: str
    leases: list[Lease]
    least: int


class ScoreRequest(Message):
    """Asks a scorer worker for rewards of records.

    rewards: of those that the worker hosts; none named: all.
    awake: generator role -> its replicas that may be asked; of a role that is not named, all.
    awake_version: of ``awake``; what an older version says is void.
    """

    purpose: str
    headers: list[Header]
    rewards: list[str] = []
    awake: dict[str, list[int]] = {}
    awake_version: int = 0


class SleepRequest(Message):
    """``release_before`` as of a push, which one that sleeps does not hear."""

    release_before: int = 0


class WakeReply(Message):
    version: int  # of the weights it holds


class QuestionItem(Message):
    """A question of a reward; its answers name it by ``index``; ``samples``: which of them are
    wanted.
    """

    index: int
    prompt: Prompt
    seed: int
    samples: list[int]
    greedy: bool
    images: list[Ref] = []


class AskRequest(Message):
    questions: list[QuestionItem]


class AnswerItem(Message):
    index: int
    sample: int
    text: str
    status: str
    reason: str
    n_prompt: int
    n_actions: int


GENERATE = StreamEndpoint("generate", GenerateRequest, list[Header], Wait.WORK)
SCORE = Endpoint("score", ScoreRequest, list[RecordScore], Wait.WORK)
SLEEP = Endpoint("sleep", SleepRequest, Nothing, Wait.MOVE)
WAKE = Endpoint("wake", Nothing, WakeReply, Wait.MOVE)
ASK = StreamEndpoint("ask", AskRequest, list[AnswerItem], Wait.MOVE)


# -- preparation and training ----------------------------------------------------------------------


class Extra(msgspec.Struct, frozen=True, array_like=True):
    """Further columns of a record: a chunk, and the record's place in it."""

    columns: Ref
    slot: int


class TrainItem(Message):
    """extras: the columns that annotators gave the record."""

    ordinal: int
    sample: int
    minibatch: int
    columns: Ref
    slot: int
    media: dict[str, Ref] = {}
    version: int = 0  # of the weights that sampled it
    extras: list[Extra] = []


class AnnotateRequest(Message):
    """The records of one shard for which a role is to give its columns; ``minibatch`` and
    ``extras`` of the items say nothing here.
    """

    step: int
    shard: int
    items: list[TrainItem]


class AnnotateReply(Message):
    version: int  # of the weights that gave the columns
    columns: Ref  # a chunk with the records in the order of the request


class ReleaseSteps(Message):
    before: int  # no shard needs the columns of records of earlier steps


class RelayRequest(Message):
    """What one shard has for some neighbouring ranks.

    A relay passes it on together with what the other shards have.

    step: of the run; with the endpoint it is the request's key.
    shard: whose parts these are.
    workers: for each of the ranks, the peer names of its workers.
    parts: for each of the ranks, the shard's part, encoded.
    """

    step: int
    shard: int
    workers: list[list[str]]
    parts: list[msgspec.Raw]


Part = TypeVar("Part")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class RelayedEndpoint(Generic[Part, Answer]):
    """What every shard asks of every data-parallel rank at once, through relays.

    A rank runs it once, with the parts of all shards in shard order, and answers with a list as
    long.

    name: how it is called on the wire.
    parts: type of what a rank gets: a list with one part for each shard.
    answers: type of what a rank gives: a list with one answer for each shard.
    """

    name: str
    parts: type[list[Part]]
    answers: type[list[Answer]]

    @cached_property
    def of_relay(self) -> Endpoint[RelayRequest, list[Answer]]:
        """A shard's parts for some ranks in, those ranks' answers to this shard out."""
        return Endpoint(f"relay.{self.name}", RelayRequest, self.answers, Wait.WORK)

    @cached_property
    def of_rank(self) -> Endpoint[list[Part], list[Answer]]:
        return Endpoint(self.name, self.parts, self.answers, Wait.SHARDS)

    @cached_property
    def of_rank_encoded(self) -> Endpoint[list[msgspec.Raw], list[msgspec.Raw]]:
        """``of_rank`` as a relay calls it: the same bytes, which it does not decode."""
        raw = list[msgspec.Raw]
        return Endpoint(self.of_rank.name, raw, raw, self.of_rank.wait)


class PrepareRequest(Message):
    """One shard's part for one rank, like the next; a rank gets a list with those of all shards."""

    step: int
    items: list[TrainItem]
    scalars: list[str]


class TrainRequest(Message):
    step: int
    advantages: list[tuple[int, int, float]]  # (ordinal, sample, advantage)
    minibatches: int
    epochs: int


class TrainReply(Message):
    metrics: dict[str, float]
    version: int
    busy_s: float = 0.0  # of this rank alone; 0 when it cannot tell


ANNOTATE = Endpoint("annotate", AnnotateRequest, AnnotateReply, Wait.WORK)
RELEASE_STEPS = Endpoint("release_steps", ReleaseSteps, Nothing)
PREPARE_RANKS = RelayedEndpoint("prepare", list[PrepareRequest], list[list[list[float]]])
TRAIN_RANKS = RelayedEndpoint("train", list[TrainRequest], list[TrainReply | None])


# -- weights ---------------------------------------------------------------------------------------


class BeginPush(Message):
    """Another ``attempt`` at the same version begins the push anew. ``bucket_bytes``: memory for
    all its buckets.
    """

    version: int
    bucket_bytes: int
    receivers: int
    attempt: int = 0
    transport: str = SHM  # or "auto": by what the sides speak


class PullWeights(Message):
    version: int
    receiver: int
    source: str  # peer name of trainer rank 0
    attempt: int = 0
    release_before: int = 0  # no shard needs records of earlier steps


class PlanRequest(Message):
    version: int
    attempt: int = 0


class BucketRequest(Message):
    """Asking for bucket ``index`` confirms that those before ``index - 1`` have been read, asking
    for one after the last that all have been.
    """

    version: int
    receiver: int
    index: int
    attempt: int = 0
    offers: Offers = {}  # transports that the receiver speaks besides shared memory


class PushConfirmed(Message):
    version: int
    nbytes: int
    verified: bool  # the receiver hashed the weights it now holds and they are the sender's


class SaveWeights(Message):
    directory: str


# What each does is a table in ``gcore_core.runtime.push``.
PUSH_BEGIN = Endpoint("push.begin", BeginPush, Nothing, Wait.PUSH)
PUSH_PULL = Endpoint("push.pull", PullWeights, PushConfirmed, Wait.SOON)
PUSH_PLAN = Endpoint("push.plan", PlanRequest, WeightPlan)
PUSH_BUCKET = Endpoint("push.bucket", BucketRequest, Bucket)
SAVE_PRETRAINED = Endpoint("save_pretrained", SaveWeights, Nothing, Wait.PUSH)


# -- checkpoints -----------------------------------------------------------------------------------


class OpenCheckpoint(Message):
    step: int


class Carried(Message):
    """What a shard keeps for the next step, when ``step`` of them have ended."""

    step: int
    shard: int
    headers: list[Header]


class CheckpointPlace(Message):
    path: str  # where trainers save; empty: there is none, and a person has been told why


class SaveState(Message):
    """To a rank: begin to save into ``directory``, or finish what was begun for ``step``."""

    step: int
    directory: str


class CommitCheckpoint(Message):
    """Every rank has saved. ``failed``: why one could not, so that what there is goes."""

    step: int
    state: dict[str, Any]
    metrics: dict[str, float]
    failed: str = ""


CARRIED = Endpoint("carried", Carried, Nothing, Wait.MEETING)
OPEN_CHECKPOINT = Endpoint("open_checkpoint", OpenCheckpoint, CheckpointPlace, Wait.MEETING)
SAVE_STATE = Endpoint("save_state", SaveState, Nothing, Wait.MEETING)
FINISH_SAVE = Endpoint("finish_save", SaveState, Nothing, Wait.MEETING)
COMMIT_CHECKPOINT = Endpoint("commit_checkpoint", CommitCheckpoint, Nothing, Wait.MEETING)


# -- agreements ------------------------------------------------------------------------------------


class Agreement(Message):
    key: str
    shard: int


class SumRequest(Agreement):
    values: list[float]


class CollectRequest(Agreement):
    payload: bytes


class DealRequest(Agreement):
    parts: list[bytes]  # one per shard from the lead, empty from the others


AGREE_SUM = Endpoint("agree.sum", SumRequest, list[float], Wait.MEETING)
AGREE_COLLECT = Endpoint("agree.collect", CollectRequest, list[bytes], Wait.MEETING)
AGREE_DEAL = Endpoint("agree.deal", DealRequest, bytes, Wait.MEETING)
AGREE_ASK = Endpoint("agree.ask", CollectRequest, bytes, Wait.MEETING)


# -- supervision -----------------------------------------------------------------------------------


class Versions(Message):
    """What one side of a handshake runs. plugins: distribution -> version, empty where it has
    none.
    """

    python: str
    core: str
    plugins: dict[str, str]


class StorePlace(msgspec.Struct, frozen=True):
    """Where a worker finds the store: its directory, the node's name, and the peer that serves
    it.
    """

    directory: str
    node: str
    agent: str


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker process is told; it comes through a file descriptor, never through argv or
    the environment.

    peers: name -> address of everybody, this worker included.
    factories: name -> what to build ("backend", "objective", "reward/exact", "dataset/train", ...).
    settings: what a worker of its kind needs to know.
    versions: the supervisor's, of everything that this worker builds.
    restarts: how often the agent may start it again after it ended.
    restarted: it takes the place of a process that ended.
    """

    role: str
    rank: int
    ranks: int
    peers: dict[str, str]
    factories: dict[str, FactorySpec]
    secret: bytes
    settings: AnySettings
    store: StorePlace
    versions: Versions
    python: str = ""
    log: str = ""
    restarts: int = 0
    restarted: bool = False

    @property
    def kind(self) -> str:
        return self.settings.kind

    @property
    def name(self) -> str:
        return f"{self.role}.{self.rank}"


class Hello(Message):
    name: str
    pid: int
    versions: Versions


class Hung(Message):
    """A deadline expired: ``waiter`` saw ``what`` of ``name``."""

    name: str
    waiter: str
    what: str


class KillRequest(Message):
    name: str


class StepEnd(Message):
    report: StepReport
    ledger: dict[str, Any]


class Published(Message):
    version: int


class SpawnRequest(Message):
    workers: list[WorkerSpec]


class WorkerExit(Message):
    name: str
    pid: int
    code: int
    restarted: bool
    tail: str  # last lines of its log


class UsageReply(Message):
    cpu_s: dict[str, float]  # process name -> user and system seconds so far
    memory_mib: dict[str, float]  # peak resident
    notes: list[str] = []  # what the person who runs it should read, each once


# of the supervisor
HELLO = Endpoint("hello", Hello, Nothing, Wait.EVER)
FAILED = Endpoint("failed", RemoteFailure, Nothing)
HUNG = Endpoint("hung", Hung, Nothing)
STEP_END = Endpoint("step_end", StepEnd, Nothing, Wait.MOVE)
PUBLISHED = Endpoint("published", Published, Nothing)
# of a node's agent
SPAWN = Endpoint("spawn", SpawnRequest, Nothing)
EXITS = StreamEndpoint("exits", Nothing, WorkerExit, Wait.EVER)
USAGE = Endpoint("usage", Nothing, UsageReply)
KILL = Endpoint("kill", KillRequest, Nothing)
# of the lead
STOP_RUN = Endpoint("stop_run", Nothing, Nothing)


# -- the store -------------------------------------------------------------------------------------

Released = dict[
    int, tuple[int, int]
]  # shard -> (its epoch, the first step of which it still needs records)


class SlabRequest(Message):
    """Asks for the name of a slab to write. ``held``: shard -> step of the records that come into
    it.
    """

    owner: str
    nbytes: int
    held: dict[int, int]


class ReleaseRequest(Message):
    """From here on ``owner`` writes into no slab whose holders have released it; into none when it
    names nobody.
    """

    owner: str
    released: Released


class BlobRequest(Message):
    """Holds blobs like those of ``refs``, which were just made, for ``held``."""

    held: dict[int, int]
    refs: list[Ref]


class ReadRequest(Message):
    """Asks for the bytes of what ``ref`` names from ``offset`` on, in parts."""

    ref: Ref
    offset: int


SLAB = Endpoint("slab", SlabRequest, str)
RELEASE = Endpoint("release", ReleaseRequest, Nothing)
BLOB = Endpoint("blob", BlobRequest, list[Ref])
FETCH = Endpoint("fetch", Ref, Ref)
READ = StreamEndpoint("read", ReadRequest, bytes)
