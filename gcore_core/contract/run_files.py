"""Describes what lies in the directory of a run, for observers and tools that read it.

The layout; ``latest`` is the run with the highest number:

    runs/<name>/<NNN>/
        config.yaml                the resolved configuration
        origins.json               dotted key of the configuration -> where its value was set
        plugins.lock.json          plugin -> distribution and version
        data.json                  how many rows the dataset has, and digests of some
        environment.jsonl          what each start of the run ran on: versions, machine, digests of the job's files
        metrics.jsonl              one JSON object a step: step, version, time_unix_s, metrics, evaluation, digests,
                                   weights_sha256 where a checkpoint was saved
        metrics.undone.jsonl       rows of steps that were undone when the run went back to a checkpoint, as they were
        position.json              the last committed step and the ledger's state after it
        placement.jsonl            what a placement policy decided and what it came to; only of policies that move devices
        placement.undone.jsonl     lines of steps that were undone, as they were
        tensors.jsonl              digests of the tensors of every push
        tensors.undone.jsonl       lines of steps that were undone, as they were
        tokens.jsonl               tokens and log-probs of a few trained records, of every tenth step
        tokens.undone.jsonl        lines of steps that were undone, as they were
        trace/controller.<k>.jsonl what shard k saw of every record and stage, with times
        trace.undone/              lines of steps that were undone, as they were
        samples/step_000020.jsonl  evaluated answers: {"prompt", "text", "rewards", "mode", "status"} a line; "arrays":
                                   files of their pictures, in samples/step_000020/
        logs/<process>.log
        logs/supervisor.pid        who supervises the run, and holds a lock on this file meanwhile
        checkpoint.key             the key by which checkpoints prove to be the run's own
        checkpoints/step-000120/   the state after so many steps; see ``gcore_core.run.manifest``
        save                       made to ask for a checkpoint at the end of the next step; the run removes it
        leave/<host>               made, empty, to ask a host to leave the run; the run writes the answer into it
        weights/                   the final policy in Hugging Face layout; absent until the run has ended
        earlier/                   weights and summary of an earlier end, after which the run goes on; removed when it ends well again
        weights-<role>/            the final weights of a role that is trained besides the policy
        summary.md, curves.png, tensorboard/; summary.md shows every other .md and .png there, too
    runs/<name>/latest -> <NNN>

A run writes these files while others may read them. A reader leaves out a last line that is only
half there, as a killed run may leave it.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gcore_core.contract.engine_profiles import EngineFit
from gcore_core.contract.errors import DataError

T = TypeVar("T")
CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
ORIGINS = "origins.json"
LOCK = "plugins.lock.json"
DATA = "data.json"
METRICS = "metrics.jsonl"
METRICS_UNDONE = "metrics.undone.jsonl"
ENVIRONMENT = "environment.jsonl"
TENSORS = "tensors.jsonl"
TOKENS = "tokens.jsonl"
POSITION = "position.json"
PLACEMENT = "placement.jsonl"
TRACE = "trace"
TRACE_UNDONE = "trace.undone"
SAMPLES = "samples"
LOGS = "logs"
WEIGHTS = "weights"
SUMMARY = "summary.md"
#: Begins the line of the summary that has the SHA-256 of the final weights.
WEIGHTS_SHA256 = "- weights_sha256: "
EARLIER = "earlier"
CURVES = "curves.png"
TENSORBOARD = "tensorboard"
LATEST = "latest"
SAVE = "save"
#: A directory: an empty file in it is named after a host that is to leave; the run writes into it.
LEAVE = "leave"

#: Metric below ``seconds/`` -> the stage's name in reports, in the order of a step. The table of
#: stages is at the head of ``gcore_core.controllers.step_program``.
STAGES = {"rollout": "rollout", "prepare": "preparation", "train": "training", "push": "push"}
# The sum of the stages, and what comes between two steps.
_NO_STAGES = ("step", "evaluation")

#: Metrics of an update that repeat where a run does. A trainer gives them, but for
#: ``masked_share``, which controllers add.
UPDATE_METRICS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "entropy",
    "kl",
    "clip_share",
    "logprob_gap_max",
    "logprob_gap_mean",
    "masked_share",
)
#: Begins the metrics that count an evaluation's failed answers, such as of "greedy" ones.
EVALUATION_FAILED = "evaluation_failed/"
#: Digests of a row of metrics, in the order of a step; that table says of which stage each is.
DIGESTS = ("generation", "rewarding", "preparation", "training", "weights")


def samples_path(run_dir: Path, step: int) -> Path:
    """Returns the file of a step's evaluated answers, ``samples/step_000020.jsonl``."""
    return run_dir / SAMPLES / f"step_{step:06d}.jsonl"


def log_path(run_dir: Path, process: str) -> Path:
    """Returns the log of a process, ``logs/<process>.log``.

    process: its name, such as ``controller.0`` or ``supervisor``.
    """
    return run_dir / LOGS / f"{process}.log"


# -- metrics, samples, versions of plugins ---------------------------------------------------------


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the rows of ``metrics.jsonl`` in order of steps, each step once.

    It is empty when there are none yet.

    The file has them so, too, but where a disk was full or where G-Core 0.1 wrote it: there a run
    that was resumed from step s may have rows of s and of the steps after it twice. A later row of
    the same step completes the earlier one; rows of the abandoned attempt are left out. A null (NaN
    when it was written) is read as NaN.

    Where the file has them, a row has ``digests`` (stage -> digest in hexadecimal, see ``DIGESTS``)
    and ``weights_sha256``.
    """
    rows: list[dict[str, Any]] = []
    for row in _rows(run_dir / METRICS, msgspec.json.Decoder(_MetricsRow).decode):
        while rows and rows[-1]["step"] > row.step:
            rows.pop()
        same = (
            rows.pop()
            if rows and rows[-1]["step"] == row.step
            else {"metrics": {}, "evaluation": {}}
        )
        rows.append(
            {
                "step": row.step,
                "version": row.version,
                "time_unix_s": row.time_unix_s,
                "metrics": same["metrics"] | _numbers(row.metrics),
                "evaluation": same["evaluation"] | _numbers(row.evaluation),
            }
        )
        if digests := row.digests | same.get("digests", {}):
            rows[-1]["digests"] = digests
        if weights_sha256 := row.weights_sha256 or same.get("weights_sha256"):
            rows[-1]["weights_sha256"] = weights_sha256
    return rows


def read_weights_sha256(run_dir: Path) -> str:
    """Returns the SHA-256 of the final weights that stands in a run's summary; "" without one."""
    try:
        lines = (run_dir / SUMMARY).read_text("utf-8").splitlines()
    except OSError:
        return ""
    hashes = [line for line in lines if line.startswith(WEIGHTS_SHA256)]
    return hashes[0].removeprefix(WEIGHTS_SHA256) if hashes else ""


class _MetricsRow(msgspec.Struct, frozen=True):
    step: int
    version: int
    time_unix_s: float
    metrics: dict[str, float | None]
    evaluation: dict[str, float | None] = {}
    digests: dict[str, str] = {}
    weights_sha256: str = ""


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float("nan") if value is None else value for name, value in values.items()}


def stage_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns stage -> seconds, in the order of a step.

    Stages that ``STAGES`` does not name come last.

    metrics: one row's. The whole step and an evaluation after it are left out.
    """
    seconds = {
        key.removeprefix("seconds/"): value
        for key, value in metrics.items()
        if key.startswith("seconds/")
    }
    ordered = [name for name in STAGES if name in seconds]
    unordered = [name for name in seconds if name not in STAGES]
    return {
        STAGES.get(name, name): seconds[name]
        for name in [*ordered, *unordered]
        if name not in _NO_STAGES
    }


def read_samples(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Returns the evaluated answers of one step, one dict a record; empty when there are none.

    prompt: a text, or a list of chat turns.
    text: the completion.
    mode: "greedy" or "sampled".
    status: how the record ended, as in its header.
    rewards: name -> value.
    arrays: name -> a ``.npy`` file, relative to ``samples/``; present only where a record has some.
    """
    try:
        lines = samples_path(run_dir, step).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]


def read_origins(run_dir: Path) -> dict[str, str]:
    """Returns dotted key of the configuration -> where its value was set; empty without them."""
    try:
        content = (run_dir / ORIGINS).read_bytes()
    except FileNotFoundError:
        return {}
    return msgspec.json.decode(content, type=dict[str, str])


def read_lock(run_dir: Path) -> dict[str, dict[str, str]]:
    """Returns plugin name -> facts ("distribution", "version", ...); empty when there are none."""
    try:
        content = (run_dir / LOCK).read_bytes()
    except FileNotFoundError:
        return {}
    return msgspec.json.decode(content, type=dict[str, dict[str, str]])


# -- the trace -------------------------------------------------------------------------------------


class Clock(msgspec.Struct, tag="clock", tag_field="what", frozen=True):
    """Says how far a shard's clock is from the time of day.

    Each controller process writes it before its other lines. So a file has one for each start of
    the shard, which holds for the lines up to the next one.

    shard: the shard's number.
    wall_s: what to add to a time of this process to get seconds since 1970.
    """

    shard: int
    wall_s: float


class Asked(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Measures one answer that a reward got about a record from a replica of a generator role.

    role, replica: who answered.
    n_prompt, n_actions: tokens of the question and of the answer.
    sent_s, finished_s: when.
    """

    role: str
    replica: int
    n_prompt: int
    n_actions: int
    sent_s: float
    finished_s: float


class RecordTrace(
    msgspec.Struct, tag="record", tag_field="what", kw_only=True, omit_defaults=True, gc=False
):
    """Traces one sampled record. A field that has its default is left out of the file.

    step: the step that drew it.
    ordinal, sample, attempt: as in ``gcore_core.contract.records.Header``.
    replica: the generator worker that drew it.
    sent_s: when its lease left for the replica.
    finished_s: when its header came.
    scored_s: when its last reward came; 0: never.
    version: the weights that sampled its last action.
    n_prompt, n_actions, status: as in the header.
    verdict: "trained", "filtered", "quarantined", or "surplus" of one that its step did not need.
    reason: why it was not trained on, or why it ended as it did.
    chunk_bytes: size of the chunk that holds its columns, and others'.
    media_bytes: size of its media.
    asked: what judges answered about it.
    row: row of the dataset.
    digests: in hexadecimal: of the prompt, of what was sampled, of the log-probs; "" for unknown.
    rewards: reward -> value.
    reward_status: reward -> how it ended, where that is not "ok".
    """

    step: int
    ordinal: int
    sample: int
    attempt: int
    replica: str
    sent_s: float
    finished_s: float
    scored_s: float = 0.0
    version: int = 0
    n_prompt: int = 0
    n_actions: int = 0
    status: str = ""
    verdict: str = ""
    reason: str = ""
    chunk_bytes: int = 0
    media_bytes: int = 0
    asked: list[Asked] = []
    row: int = -1
    digests: tuple[str, str, str] = ("", "", "")
    rewards: dict[str, float] = {}
    reward_status: dict[str, str] = {}


class GroupAdvantages(msgspec.Struct, tag="advantages", tag_field="what", frozen=True):
    """Traces the advantages of a group that a step trains on.

    values: sample -> advantage.
    """

    step: int
    ordinal: int
    values: dict[int, float]


class Stage(msgspec.Struct, tag="stage", tag_field="what", frozen=True):
    """Traces one stage of a step on one shard.

    name: "rollout", "prepare", "train", "push" or "evaluation".
    """

    step: int
    shard: int
    name: str
    start_s: float
    end_s: float


Line = Clock | RecordTrace | GroupAdvantages | Stage


def read_trace(run_dir: Path) -> Iterator[Line]:
    """Yields the trace's lines, one shard's file after the other; times are seconds since 1970.

    Raises DataError for a run without a trace, and for a line that is none.
    """
    files = sorted((run_dir / TRACE).glob("*.jsonl"))
    if not files:
        raise DataError(
            "the run has no trace.", where=str(run_dir), todo="give the directory of a run"
        )
    decode = msgspec.json.Decoder(Line).decode
    for path in files:
        ahead_s = 0.0
        for line in _rows(path, decode, broken="a line of the trace cannot be read."):
            if isinstance(line, Clock):
                ahead_s = line.wall_s
            yield _of_day(line, ahead_s)


def _of_day(line: Line, ahead_s: float) -> Line:
    """Returns a line with seconds since 1970 in place of a process's own; 0 is no time and stays.

    ahead_s: what to add; see ``Clock``.
    """
    times = {
        name: getattr(line, name)
        for name in line.__struct_fields__
        if name.endswith("_s") and name != "wall_s"
    }
    if isinstance(line, RecordTrace):
        line.asked = [
            msgspec.structs.replace(a, sent_s=a.sent_s + ahead_s, finished_s=a.finished_s + ahead_s)
            for a in line.asked
        ]
    return msgspec.structs.replace(
        line, **{name: value + ahead_s for name, value in times.items() if value}
    )


# -- digests of pushed tensors, and what a run ran on ----------------------------------------------


class TensorNames(msgspec.Struct, tag="names", tag_field="what", frozen=True):
    """Names the tensors of the lines behind it, in the order of a push."""

    names: list[str]


class PushedTensors(msgspec.Struct, tag="push", tag_field="what", frozen=True):
    """Holds the digests of the tensors of one push.

    step: version of the weights: how many steps are finished.
    transport: of the push; each may have digests of its own kind.
    digests: eight bytes for each tensor, big-endian; base64 in the file.
    """

    step: int
    transport: str
    digests: bytes


def read_tensors(run_dir: Path, step: int) -> tuple[str, dict[str, str]]:
    """Returns the digests of the tensors that were pushed after so many steps.

    Returns (transport of the push, tensor -> digest in hexadecimal), in the order of the push;
    ("", {}) where there are none.
    """
    decode = msgspec.json.Decoder(TensorNames | PushedTensors).decode
    names: list[str] = []
    pushed = "", dict[str, str]()
    for line in _rows(run_dir / TENSORS, decode):
        if isinstance(line, TensorNames):
            names = line.names
        elif line.step == step:
            parts = [line.digests[i : i + 8].hex() for i in range(0, len(line.digests), 8)]
            pushed = line.transport, dict(zip(names, parts, strict=False))
    return pushed


class TrainedTokens(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Shows one record that a step trained on, token by token.

    step: that trained on it, counted from 0.
    ordinal, sample: name it; records with one ordinal answer one prompt.
    replica, version: who sampled it, and under which weights.
    advantage: what it was trained with; of a job with advantages for each action its reward.
    prompt_ids: the last tokens of the prompt.
    action_ids: the first actions; ``actions`` says how many there were.
    rollout_logp, trainer_logp: in nats, of each action, at the record's temperature: as its
        generator gave it, and as the trainer had it before the step's first update. A NaN or an
        infinity is null in the file, and read as NaN.
    entropy: of the trainer's distribution at each action, in nats; empty where it was not computed.
    masked: places of the actions that were not trained on.
    """

    step: int
    ordinal: int
    sample: int
    replica: int
    version: int
    advantage: float
    prompt_ids: list[int]
    action_ids: list[int]
    actions: int
    rollout_logp: list[float]
    trainer_logp: list[float]
    entropy: list[float] = []
    masked: list[int] = []


def read_tokens(run_dir: Path) -> Iterator[TrainedTokens]:
    """Yields the records of ``tokens.jsonl`` in the order of steps; none where there is no file."""
    return _rows(run_dir / TOKENS, decode_tokens)


_decode_finite = msgspec.json.Decoder(TrainedTokens).decode


def decode_tokens(line: bytes) -> TrainedTokens:
    """Reads a line of ``tokens.jsonl``; a number that is null there is NaN.

    Raises msgspec.MsgspecError for what is no whole line.
    """
    try:
        return _decode_finite(line)
    except msgspec.ValidationError:
        row = msgspec.json.decode(line, type=dict[str, Any])
    return msgspec.convert({name: _with_nan(value) for name, value in row.items()}, TrainedTokens)


def _with_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_nan(each) for each in value]
    return math.nan if value is None else value


class Environment(msgspec.Struct, kw_only=True, frozen=True):
    """Says what a run ran on, from one of its starts on.

    step: how many steps were finished at that start.
    versions: distribution -> version, and "python"; "role/distribution" of a role's own
        interpreter.
    machine: processor, cores, accelerators and variables that libraries of numbers read.
    files: key of the configuration -> digest of the file that it names.
    """

    step: int
    versions: dict[str, str]
    machine: dict[str, str]
    files: dict[str, str]


def read_environment(run_dir: Path, step: int) -> Environment | None:
    """Returns what a run ran on when it made the step after ``step`` finished ones.

    It is None where that was not written.
    """
    latest = None
    for line in _rows(run_dir / ENVIRONMENT, msgspec.json.Decoder(Environment).decode):
        if latest is None or line.step <= step:
            latest = line
    return latest


def _rows(path: Path, decode: Callable[[bytes], T], broken: str = "") -> Iterator[T]:
    """Yields the rows of a file, one a line; none of a file that is not there.

    Half a row, as a killed run may leave it, is left out, and so is an empty line.

    broken: what a DataError says of a whole line that is no row; empty: it is left out, too.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line == b"\n":
                continue
            try:
                row = decode(line)
            except msgspec.MsgspecError as error:
                if not broken or not line.endswith(b"\n"):
                    continue
                raise DataError(broken, where=f"{path}:{number}", why=str(error)) from None
            yield row


# -- placement decisions ---------------------------------------------------------------------------


class Decided(
    msgspec.Struct, tag="decision", tag_field="what", kw_only=True, omit_defaults=True, frozen=True
):
    """Holds a ``gcore_core.contract.placement.Decision`` as plain values.

    step: the step that began with it.
    cells: role -> who is awake: a list of device indexes for each cell.
    engines: role -> the cells at which it has an engine, likewise; None: where it is awake.
    mode, chosen, predicted_s, reason, seen, state: as in the decision.
    took_s: how long the policy took to decide.
    rescued: the role for whose sake it took the place of the decision before, or "".
    rescues: filled by ``read_placement``: the decisions that took this one's place within the step.
    """

    step: int
    mode: str
    cells: dict[str, list[list[int]]]
    engines: dict[str, list[list[int]]] | None = None
    chosen: str = ""
    predicted_s: dict[str, float] = {}
    reason: str = ""
    seen: dict[str, Any] = {}
    state: dict[str, Any] = {}
    took_s: float = 0.0
    rescued: str = ""
    rescues: list[Decided] = []


class Measured(
    msgspec.Struct, tag="outcome", tag_field="what", kw_only=True, omit_defaults=True, frozen=True
):
    """Says what a decision came to.

    step: the step.
    measured_s: seconds of the rollout.
    work: actions that all roles sampled, so that steps can be compared.
    moved: cells that changed roles.
    switch_s: seconds of changing roles in all.
    turns_s: the part of ``switch_s`` within the rollout.
    training_s, pushing_s: seconds of training, and of the weight push.
    ran: first device of each generator's cell -> role -> seconds it ran anything in the rollout.
    waited: first device of each generator's cell -> seconds nothing ran there.
    monitoring_s: seconds of gathering what a policy sees, of deciding, and of telling the shards.
    engines: generator role -> its engine's profile as of this step, with standard errors, and the
        mean seconds of the step's requests, expected before and measured.
    """

    step: int
    measured_s: float
    work: float = 0.0
    moved: int = 0
    switch_s: float = 0.0
    turns_s: float = 0.0
    training_s: float = 0.0
    pushing_s: float = 0.0
    ran: dict[int, dict[str, float]] = {}
    waited: dict[int, float] = {}
    monitoring_s: float = 0.0
    engines: dict[str, EngineFit] = {}


def read_placement(run_dir: Path) -> tuple[dict[int, Decided], dict[int, Measured]]:
    """Returns the decisions and the outcomes of a run, by step.

    A step that was begun again after a crash has several lines of a kind; the last counts. Raises
    DataError for a run without ``placement.jsonl``, and for a line that is none.
    """
    path = run_dir / PLACEMENT
    if not path.is_file():
        raise DataError(
            "the run has no record of placement decisions.",
            where=str(path),
            why="it is written by runs whose placement policy moves devices between generators",
            todo="give the directory of such a run",
        )
    decisions: dict[int, Decided] = {}
    outcomes: dict[int, Measured] = {}
    decode = msgspec.json.Decoder(Decided | Measured).decode
    for line in _rows(path, decode, broken="a line cannot be read."):
        if isinstance(line, Decided) and line.rescued and line.step in decisions:
            decisions[line.step].rescues.append(line)
        elif isinstance(line, Decided):
            decisions[line.step] = line
        else:
            outcomes[line.step] = line
    return decisions, outcomes
