"""Defines every message between processes, and the endpoints that they are for.

Messages are encoded as msgspec arrays. ``shard`` says which controller asks.

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
from gcore_core.contract.remote_store import MirrorRequest
from gcore_core.contract.sentinel import Finding
from gcore_core.contract.step_check import Held
from gcore_core.contract.weight_transfer import SHM, Bucket, Offers
from gcore_core.runtime.named_files import NamedFile
from gcore_core.runtime.worker_settings import AnySettings
from gcore_core.wire.service import RemoteFailure

RESTART_EXIT_CODE = 75  # a worker that ends with it asks to be started again
# Why records are drawn (``purpose``): to train on, or for one of the two modes of an evaluation.
TRAIN = "train"
GREEDY = "greedy"
SAMPLED = "sampled"
_REASON_LIMIT_BYTES = 128
_PLACE = re.compile(r" \([^()\s]+:\d+\)$")


class Message(msgspec.Struct, array_like=True):
    pass


class Nothing(Message):
    pass


def short_reason(text: str) -> str:
    """Returns the beginning of a reason, short enough for a header.

    A ``(file:line)`` at its end stays.
    """
    place = _PLACE.search(text)
    end = place[0].encode("utf-8", "replace") if place else b""
    room = max(0, _REASON_LIMIT_BYTES - len(end))
    beginning = text.encode("utf-8", "replace")[: -len(end) or None][:room]
    return beginning.decode("utf-8", "ignore") + end[:_REASON_LIMIT_BYTES].decode("utf-8", "ignore")


# -- generation and rewarding ----------------------------------------------------------------------


class GenerateRequest(Message):
    """Asks a replica for samples.

    step: names the round, together with ``round`` and ``purpose``. The samples' memory is held for
        this step.
    round: counts the rounds of a step.
    shard: which shard asks.
    purpose: why records are drawn: TRAIN, GREEDY or SAMPLED.
    leases: what to draw; empty when this shard has no part in the round.
    least: the oldest version of the weights that may begin these samples.
    exact: no newer version may draw them either, since the run is to repeat.
    awake, awake_version: as of ``ScoreRequest``, for the roles that an environment asks.
    """

    step: int
    round: int
    shard: int
    purpose: str
    leases: list[Lease]
    least: int
    exact: bool = False
    awake: dict[str, list[int]] = {}
    awake_version: int = 0


class ScoreRequest(Message):
    """Asks a scorer worker for rewards of records.

    purpose: why the records were drawn: TRAIN, GREEDY or SAMPLED.
    headers: the records; empty for a request that only tells who is awake.
    rewards: names of rewards that the worker hosts; empty for all of them.
    awake: generator role -> numbers of the replicas that rewards may ask from now on. Nothing
        changes for a role that is not named; until a request names it, all of it may be asked.
    awake_version: of ``awake``; where the worker knows a newer one, this ``awake`` changes nothing.
    """

    purpose: str
    headers: list[Header]
    rewards: list[str] = []
    awake: dict[str, list[int]] = {}
    awake_version: int = 0


class SleepRequest(Message):
    """Asks a replica to sleep.

    release_before: no shard needs records of earlier steps. A push says so too, but a replica that
        sleeps gets none.
    """

    release_before: int = 0


class WakeReply(Message):
    version: int  # of the weights it holds


class TrainerSlept(Message):
    """Says how many seconds a trainer's rank took to sleep and to wake.

    A rank that sleeps already says the same numbers again: its first reply may have been lost.

    sleep_s: to give its memory back.
    wake_s: to take it again after the sleep before; 0.0 where it has not done so.
    """

    sleep_s: float
    wake_s: float


class QuestionItem(Message):
    """Holds a question of a reward.

    index: its number in the request; its answers name it by that.
    prompt: what is asked.
    seed: of the sampling.
    samples: numbers of the answers that are wanted.
    greedy: whether the likeliest token is taken each time.
    images: media that the question shows, behind the images of the prompt.
    """

    index: int
    prompt: Prompt
    seed: int
    samples: list[int]
    greedy: bool
    images: list[Ref] = []


class AskRequest(Message):
    """Asks a generator to answer questions of a reward or an environment."""

    questions: list[QuestionItem]


class AnswerItem(Message):
    """Holds one answer to such a question.

    index: of the question in the request.
    sample: which answer to it this is.
    status, reason: how it ended, and why, as in a header.
    n_prompt: tokens of the question.
    n_actions: tokens of the answer.
    """

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


class Extra(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Says where further columns of a record lie.

    columns: a chunk of columns.
    slot: the record's place in it.
    """

    columns: Ref
    slot: int


class TrainItem(Message, gc=False):
    """Describes a record as a worker of the trainer or of an annotator gets it.

    ordinal, sample: which record it is.
    minibatch: in which minibatch of the step it trains.
    columns: the chunk that holds its columns.
    slot: its place in that chunk.
    media: name -> further bytes of the record.
    version: of the weights that sampled its first action.
    extras: the columns that annotators gave the record.
    tile: the part of its minibatch that trains on one rank as a whole.
    prompt_digest, seal, stamp: as in the header.
    last_version: of the weights that sampled its last action.
    replica: number of the generator's replica that sampled it.
    truncated: as of ``TrainRecord``.
    masked: whether none of its actions is trained on, whatever its own mask says.
    """

    ordinal: int
    sample: int
    minibatch: int
    columns: Ref
    slot: int
    media: dict[str, Ref] = {}
    version: int = 0
    extras: list[Extra] = []
    tile: int = 0
    prompt_digest: int = 0
    seal: int = 0
    stamp: int = 0
    last_version: int = 0
    replica: int = 0
    truncated: bool = False
    masked: bool = False


class AnnotateRequest(Message):
    """Asks a role for its columns of one shard's records.

    items: the records; ``minibatch`` and ``extras`` mean nothing to an annotator.
    purpose: TRAIN, or what else the records are for. In one step an annotator may be asked once for
        each purpose, a rank of a trainer only once.
    """

    step: int
    shard: int
    items: list[TrainItem]
    purpose: str = "train"


class AnnotateReply(Message):
    version: int  # of the weights that gave the columns
    columns: Ref  # a chunk with the records in the order of the request


class ReleaseSteps(Message):
    before: int  # no shard needs the records of earlier steps, or their columns


class RelayRequest(Message):
    """Carries what one shard has for some neighbouring ranks.

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
    """Names what every shard asks of every data-parallel rank at once, through relays.

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
        """Takes a shard's parts for some ranks; gives those ranks' answers to this shard."""
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
    """Asks a rank to prepare records: one shard's part of that.

    A rank gets a list with the parts of all shards.

    items: the shard's records that train on this rank.
    scalars: names of the numbers that it gives for each record.
    """

    step: int
    items: list[TrainItem]
    scalars: list[str]


class TrainRequest(Message):
    """Asks a rank for the updates of a step: one shard's part of that.

    A rank gets a list with the parts of all shards.

    advantages: (ordinal, sample, advantage) of the shard's records that train on this rank.
    minibatches: into how many the step's records are divided.
    epochs: how often the step goes over its records.
    """

    step: int
    advantages: list[tuple[int, int, float]]
    minibatches: int
    epochs: int


class EvaluateRequest(Message):
    """Asks a rank for the objective on records, without an update: one shard's part of that.

    A rank gets a list with the parts of all shards.

    step: version of the weights that are evaluated.
    items: the shard's records that this rank computes.
    advantages: of each of them.
    """

    step: int
    items: list[TrainItem]
    advantages: list[float]


class GroupNumbers(msgspec.Struct, frozen=True, array_like=True):
    """Holds what a rank's sentinel measured of a group, summed over those records of it that the
    rank has.

    ordinal: of the group.
    replica, version: who sampled these records, and under which weights.
    numbers: as of ``Sentinel.measure``.
    """

    ordinal: int
    replica: int
    version: int
    numbers: list[float]


class TrainReply(Message):
    """Holds what a rank says after the updates of a step.

    The lead gets all of it, another shard only the groups that are its own.

    metrics: name -> value, as the ranks agreed on them.
    version: of the weights after the step.
    busy_s: seconds of this rank's own work; 0 when it cannot tell.
    trained: actions of this rank's records that the step trained on.
    masked: actions of these records that it did not, because their ``action_mask`` is 0.
    groups: what the sentinel measured of the shard's groups.
    """

    metrics: dict[str, float]
    version: int
    busy_s: float = 0.0
    trained: int = 0
    masked: int = 0
    groups: list[GroupNumbers] = []


class DiagnoseRequest(Message):
    """Asks a rank what its records of a step say of the cause of an alarm.

    To SHOW_COMPARED it asks for some of these records.

    replicas: those that alarms name; none: all.
    """

    step: int
    replicas: list[int]


class ShownRecord(Message):
    """Holds ``Compared`` in plain values: one that an alarm is about, or that is scored again.

    key: ordinal, sample, step, replica, version. Of one that is scored again, step and version are
        both that of the weights that score it, and the replica is -1.
    ids: of the prompt and of the actions.
    logps: the rollout's and the trainer's; of one that the trainer scored again both are its own.
    """

    key: tuple[int, int, int, int, int]
    ids: list[list[int]]
    logps: list[list[float]]
    mask: list[bool]
    temperature: float


class ExplainRequest(Message):
    """Asks a generator why its log-probs of these records are not the trainer's."""

    records: list[ShownRecord]


class ScoreLast(Message):
    """Asks a rank to score some of the records that it trained on last, under its present weights.

    version: of these weights.
    count: how many records, over all ranks.
    ranks: how many data-parallel ranks there are.
    """

    version: int
    count: int
    ranks: int


class ScoreAgain(Message):
    """Asks a generator to score records under the weights of a version."""

    version: int
    records: list[ShownRecord]


class SkipStep(Message):
    """Tells a rank that a step has nothing to train on."""

    step: int


ANNOTATE = Endpoint("annotate", AnnotateRequest, AnnotateReply, Wait.WORK)
ANNOTATE_RANKS = RelayedEndpoint("annotate_ranks", list[AnnotateRequest], list[AnnotateReply])
RELEASE_STEPS = Endpoint("release_steps", ReleaseSteps, Nothing)
PREPARE_RANKS = RelayedEndpoint("prepare", list[PrepareRequest], list[list[list[float]]])
TRAIN_RANKS = RelayedEndpoint("train", list[TrainRequest], list[TrainReply | None])
EVALUATE_RANKS = RelayedEndpoint(
    "evaluate", list[EvaluateRequest], list[dict[str, tuple[float, float]]]
)
TRAINER_SLEEP = Endpoint("trainer_sleep", Nothing, TrainerSlept, Wait.MOVE)
SKIP_STEP = Endpoint("skip_step", SkipStep, Nothing)
DIAGNOSE = Endpoint("diagnose", DiagnoseRequest, list[Finding])
SHOW_COMPARED = Endpoint("show_compared", DiagnoseRequest, list[ShownRecord])
EXPLAIN = Endpoint("explain", ExplainRequest, list[Finding], Wait.WORK)
SCORE_LAST = Endpoint("score_last", ScoreLast, list[ShownRecord], Wait.WORK)
SCORE_AGAIN = Endpoint("score_again", ScoreAgain, list[list[float]], Wait.WORK)


# -- weights ---------------------------------------------------------------------------------------


class BeginPush(Message):
    """Asks rank 0 of the trainer to begin a push; it has the other ranks take part.

    version: of the weights to push.
    bucket_bytes: memory for all its buckets together.
    receivers: how many generators take part.
    attempt: another one at the same version begins the push again.
    transport: name of a transport, or "auto" to choose by what both sides can use.
    fan_out: to how many other nodes one node sends the push, at most.
    """

    version: int
    bucket_bytes: int
    receivers: int
    attempt: int = 0
    transport: str = SHM
    fan_out: int = 2


class PullWeights(Message):
    """Asks a generator to take part in a push.

    version: of the weights.
    receiver: this generator's number in the push, from 0.
    source: peer name of trainer rank 0.
    attempt: as of ``BeginPush``.
    release_before: no shard needs records of earlier steps.
    needed: it is for a generator that is behind this version; -1: it is for all. One that has this
        version by now, or a newer one, takes nothing: it may be sampling with it.
    """

    version: int
    receiver: int
    source: str
    attempt: int = 0
    release_before: int = 0
    needed: int = -1


class CatchUp(Message):
    """Asks the lead to push to a generator whose weights are older than those it is to draw with.

    The answer comes when that push is over, or the generator is lost.

    replica: its peer name.
    needed: the version that it is to have.
    """

    replica: str
    needed: int


class PlanRequest(Message):
    version: int
    attempt: int = 0


class BucketRequest(Message):
    """Asks for a bucket, and by that confirms earlier ones.

    Who asks for bucket ``index`` has read all before ``index - 1``; who asks for the one after the
    last has read all.
    """

    version: int
    receiver: int
    index: int
    attempt: int = 0
    offers: Offers = {}  # transports that the receiver speaks besides shared memory
    node: str = ""  # of the receiver; empty: the trainer's


class PushConfirmed(Message):
    """Says that a receiver has loaded a push.

    nbytes: of all its tensors.
    verified: the receiver hashed the weights it now holds, and they are the sender's.
    stamp: of these weights, see ``gcore_core.contract.lineage``.
    """

    version: int
    nbytes: int
    verified: bool
    stamp: int = 0


class SaveWeights(Message):
    """Asks a rank to write the final weights that shall lie in a directory, or to place them."""

    directory: str


class PlaceWeights(Message):
    """Asks a rank to move the weights that were written to their directory, or to remove them.

    whole: whether every rank has written its part; else they are removed.
    """

    directory: str
    whole: bool


class UnsavedWeights(Message):
    """Says why the final weights could not be written; it is tried again until they are."""

    error: str


# What each does is a table in ``gcore_core.workers.push``.
PUSH_BEGIN = Endpoint("push.begin", BeginPush, Nothing, Wait.PUSH)
PUSH_EXPORTED = Endpoint("push.exported", BeginPush, Nothing, Wait.PUSH)
CATCH_UP = Endpoint("push.catch_up", CatchUp, Nothing, Wait.PUSH)
PUSH_PULL = Endpoint("push.pull", PullWeights, PushConfirmed, Wait.SOON)
PUSH_PLAN = Endpoint("push.plan", PlanRequest, WeightPlan)
PUSH_BUCKET = Endpoint("push.bucket", BucketRequest, Bucket)
PUSH_HELD = Endpoint("push.held", Nothing, Held, Wait.SOON)
SAVE_PRETRAINED = Endpoint("save_pretrained", SaveWeights, Nothing, Wait.PUSH)
PLACE_WEIGHTS = Endpoint("place_weights", PlaceWeights, Nothing, Wait.PUSH)
UNSAVED_WEIGHTS = Endpoint("unsaved_weights", UnsavedWeights, Nothing)


# -- checkpoints -----------------------------------------------------------------------------------


class OpenCheckpoint(Message):
    step: int


class Carried(Message):
    """Carries the records that a shard keeps for the next step.

    step: how many steps have ended.
    shard: whose records these are.
    headers: the records of whole groups.
    """

    step: int
    shard: int
    headers: list[Header]


class CheckpointPlace(Message):
    path: str  # of the checkpoint; empty: there is none, and a person has been told why


class SaveState(Message):
    """Asks a rank to begin to save into ``directory``, or to finish the save begun for ``step``.

    urgent: of a request to finish: the process may be ended within seconds, so what can be left out
        is left out.
    """

    step: int
    directory: str
    urgent: bool = False


class SavedState(Message):
    """Says that a rank has saved.

    weights_sha256: of the weights that were saved, by rank 0, see
        ``gcore_core.contract.weights_hash``; "" from others, and where it was left out.
    """

    weights_sha256: str = ""


class CommitCheckpoint(Message):
    """Says that every rank has begun to save, that all have saved, or that one could not.

    step: of the checkpoint.
    state: what a resumed run of the controller needs.
    metrics: of the step.
    failed: why a rank could not save, so that the unfinished checkpoint is deleted; "" if all have.
    weights_sha256: as in ``SavedState``.
    """

    step: int
    state: dict[str, Any]
    metrics: dict[str, float]
    failed: str = ""
    weights_sha256: str = ""


CARRIED = Endpoint("carried", Carried, Nothing, Wait.MEETING)
OPEN_CHECKPOINT = Endpoint("open_checkpoint", OpenCheckpoint, CheckpointPlace, Wait.MEETING)
SAVE_STATE = Endpoint("save_state", SaveState, Nothing, Wait.MEETING)
FINISH_SAVE = Endpoint("finish_save", SaveState, SavedState, Wait.MEETING)
BEGIN_CHECKPOINT = Endpoint("begin_checkpoint", CommitCheckpoint, Nothing, Wait.MEETING)
COMMIT_CHECKPOINT = Endpoint("commit_checkpoint", CommitCheckpoint, Nothing, Wait.MEETING)


# -- agreements ------------------------------------------------------------------------------------


class Agreement(Message):
    """Is what one shard sends for an agreement.

    key: names the agreement, the same on all shards, see ``gcore_core.runtime.agreements``.
    """

    key: str
    shard: int


class SumRequest(Agreement):
    values: list[float]


class CollectRequest(Agreement):
    payload: bytes


class DealRequest(Agreement):
    parts: list[bytes]  # one per shard from the lead, empty from the others


AGREE_SUM = Endpoint("agree.sum", SumRequest, list[float], Wait.MEETING)
AGREE_SHARE = Endpoint("agree.share", CollectRequest, list[bytes], Wait.MEETING)
AGREE_COLLECT = Endpoint("agree.collect", CollectRequest, list[bytes], Wait.MEETING)
AGREE_DEAL = Endpoint("agree.deal", DealRequest, bytes, Wait.MEETING)
AGREE_ASK = Endpoint("agree.ask", CollectRequest, bytes, Wait.MEETING)


# -- supervision -----------------------------------------------------------------------------------


class Versions(Message):
    """Says what one side of a handshake runs.

    python: path of the interpreter.
    core: version of the core.
    plugins: distribution -> version, "" where it has none.
    """

    python: str
    core: str
    plugins: dict[str, str]


class StorePlace(msgspec.Struct, frozen=True):
    """Says where a worker finds the store.

    directory: where its files are.
    node: name of the worker's node.
    agent: name of the peer that serves it.
    """

    directory: str
    node: str
    agent: str


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Tells a worker process all that it must know.

    It comes through a file descriptor, never through argv or the environment.

    rank, ranks: its number among the workers of its role, from 0, and how many there are. A
        controller has the number of its shard, and ranks 1.
    peers: name -> address of everybody as seen from the worker's node, this worker included.
    public: a further address at which this worker serves those on other machines; "" for none.
    identity: of the run, for TLS between machines; empty where the run has one machine. As secret
        as ``secret``.
    factories: name -> what to build ("backend", "objective", "reward/exact", "dataset/train", ...).
    settings: what a worker of its kind needs to know.
    versions: the supervisor's, of everything that this worker builds.
    python: path of its interpreter; "": the agent's own.
    log: path of the file to which its output goes.
    restarts: how often the agent may start it again after it ended.
    restarted: it takes the place of a process that ended.
    was_held: its agent ended that process, since a reward held it beyond its time limit.
    shared_memory: how files are called that it may make in shared memory, see ``Provider``.
    meeting: the directory in which the workers of its role meet, which its agent makes; "": none.
    files: config key -> what the worker opens of it, as it was when the run began.
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
    was_held: bool = False
    shared_memory: tuple[str, ...] = ()
    meeting: str = ""
    identity: bytes = b""
    public: str = ""
    files: dict[str, NamedFile] = {}

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


class TimeOfDay(Message):
    """Tells the time of day on the supervisor's machine, since clocks of machines differ.

    unix_s: when it answered.
    """

    unix_s: float


class Answered(Message):
    """Reports that a process which took a lost one's place has answered its first request."""

    name: str


class Hung(Message):
    """Reports that a deadline expired.

    name: of the process that did not answer in time.
    waiter: of the process that waited.
    what: what the waiter saw, as a text.
    """

    name: str
    waiter: str
    what: str


class KillRequest(Message):
    name: str


class StepEnd(Message):
    """Reports a step that has ended.

    report: what observers get.
    ledger: what a resumed run needs of the ledger.
    notes: lines for a person.
    """

    report: StepReport
    ledger: dict[str, Any]
    notes: list[str] = []


class Published(Message):
    """Says that a version of the weights is published."""

    version: int


class SpawnRequest(Message):
    workers: list[WorkerSpec]


class WorkerExit(Message):
    """Tells how a worker ended.

    code: its exit code; a negative one is the number of the signal that ended it.
    restarted: whether it is started again.
    tail: last lines of its log.
    running: for a scorer that was ended at a reward's limit or ended by itself in a call, which
        reward ran; for one that was ended because it stayed stopped, how long it was; else empty.
    """

    name: str
    pid: int
    code: int
    restarted: bool
    tail: str
    running: str = ""


class UsageReply(Message):
    cpu_s: dict[str, float]  # process name -> user and system seconds so far
    memory_mib: dict[str, float]  # process name -> peak of its resident memory
    notes: list[str] = []  # what the person who runs it should read, each once


class MeterRequest(Message):
    """Asks how long devices were in use.

    meter: the factory of the ``Meter`` that reads it; the agent makes one at the first request.
    workers: name of a worker -> the indexes of its devices.
    """

    meter: str
    workers: dict[str, list[int]]


class MeterReply(Message):
    """Tells how long devices were in use.

    used_s: device index -> seconds of full use, see ``Meter.used_s``. Devices that have no living
        worker on this node, or that cannot be read, are left out.
    clock_s: the node's clock at the reading; differences alone mean something.
    """

    used_s: dict[int, float]
    clock_s: float


# of the supervisor
HELLO = Endpoint("hello", Hello, Nothing, Wait.EVER)
FAILED = Endpoint("failed", RemoteFailure, Nothing)
TIME_OF_DAY = Endpoint("time_of_day", Nothing, TimeOfDay)
ANSWERED = Endpoint("answered", Answered, Nothing)
HUNG = Endpoint("hung", Hung, Nothing)
STEP_END = Endpoint("step_end", StepEnd, Nothing, Wait.MOVE)
PUBLISHED = Endpoint("published", Published, Nothing)
# of a node's agent
SPAWN = Endpoint("spawn", SpawnRequest, Nothing)
EXITS = StreamEndpoint("exits", Nothing, WorkerExit, Wait.EVER)
USAGE = Endpoint("usage", Nothing, UsageReply)
METER = Endpoint("meter", MeterRequest, MeterReply)
KILL = Endpoint("kill", KillRequest, Nothing)
# of the lead
STOP_RUN = Endpoint("stop_run", Nothing, Nothing)
SAVE_RUN = Endpoint("save_run", Nothing, Nothing)


# -- the store -------------------------------------------------------------------------------------

# Shard -> (epoch, the first step whose records it still needs). An epoch would count how often
# the shard began again, at an earlier step; every caller gives 0.
Released = dict[int, tuple[int, int]]


class SlabRequest(Message):
    """Asks for the name of a slab to write.

    owner: who writes it.
    nbytes: room that it needs.
    held: shard -> step of the records that come into it.
    """

    owner: str
    nbytes: int
    held: dict[int, int]


class ReleaseRequest(Message):
    """Says that ``owner`` writes no more into slabs whose holders have released them.

    released: what each shard has released; empty when the owner writes into no slab any more.
    """

    owner: str
    released: Released


class BlobRequest(Message):
    """Asks to hold blobs with the content of ``refs``, which were just made.

    held: shard -> step of the records that have them.
    refs: the blobs that were written.
    """

    held: dict[int, int]
    refs: list[Ref]


SLAB = Endpoint("slab", SlabRequest, str)
RELEASE = Endpoint("release", ReleaseRequest, Nothing)
BLOB = Endpoint("blob", BlobRequest, list[Ref])
FETCH = Endpoint("fetch", Ref, Ref)
MIRROR = Endpoint("mirror", MirrorRequest, str)
