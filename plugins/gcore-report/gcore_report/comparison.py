"""Finds where two runs part, and why: ``g-core diff``.

A run writes a digest of each stage of each step into ``metrics.jsonl``. The first one that differs
names the step and the stage. The records in the trace and the tensors in ``tensors.jsonl`` then
name the record and the tensor. What differs in the two configurations, versions, machines and files
is ranked by how directly it acts on that stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract.errors import ConfigError, GcoreError
from gcore_core.contract.run_files import (
    CONFIG,
    DIGESTS,
    METRICS,
    UPDATE_METRICS,
    GroupAdvantages,
    RecordTrace,
    read_environment,
    read_metrics,
    read_tensors,
    read_trace,
    read_weights_sha256,
)
from gcore_core.kits.runs import read_settings

#: The stage before the first step: the weights that a run begins with.
START = "start"
#: The stage after the last step: the files of the final weights.
SAVED = "saved"
#: Kinds of causes, the most telling first.
SEED = "seed"
CONFIGURATION = "configuration"
DATA = "data"
CODE = "code"
VERSIONS = "versions"
HARDWARE = "hardware"
LAYOUT = "layout"
LENGTH = "length"
UNKNOWN = "unknown"
_KINDS = (SEED, CONFIGURATION, DATA, CODE, VERSIONS, HARDWARE, LAYOUT)

#: Stage -> sections of the configuration that act on it, the most direct first.
_SECTIONS = {
    START: ("roles.policy.model", "roles.policy", "run.seed"),
    "generation": (
        "run.seed",
        "data",
        "advantage.config.group_size",
        "roles.rollout",
        "filter",
    ),
    "rewarding": ("rewards", "data"),
    "preparation": ("advantage", "rewards", "objective", "roles.policy"),
    "training": ("objective", "roles.policy", "controller.config", "run", "balance"),
    "weights": ("roles.policy", "objective", "controller.config", "run", "balance"),
}
#: Keys that do not change what a run computes; of ``run.steps`` see ``_of_schedule``.
_NEUTRAL = (
    "run.name",
    "run.dir",
    "run.steps",
    "run.patience_s",
    "launcher",
    "checkpoint",
    "evaluation",
    "observers",
    "plugins",
    "local",
)
#: Keys that change where a run computes; whether that changes a result is the backend's promise.
_LAYOUT = ("controller.shards", "controller.replicas", "cluster", "placement", "balance")
_LAYOUT_WORDS = (
    *("slots", "least", "engine", "python", "threads"),
    *("device", "workers", "max_batch"),
)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Names a record.

    row: of the dataset, in either run; None where that run has no such record.
    """

    ordinal: int
    sample: int
    row: tuple[int | None, int | None] = (None, None)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Is something that differs between two runs besides what they computed.

    kind: "seed", "configuration", "data", "code", "versions", "hardware", "layout", "length" or
        "unknown".
    what: the key or the name of it.
    values: in either run, as text.
    """

    kind: str
    what: str
    values: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        values = f" {self.values[0] or '-'} | {self.values[1] or '-'}" if any(self.values) else ""
        return f"{self.kind}: {self.what}{values}"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Says whether two runs are the same, and else where they part.

    runs: their directories.
    same: every stage of every step is the same in both, both have as many steps, and where both
        have final weights these are the same.
    steps: how many steps each has finished.
    weights_sha256: of the final weights; "" of a run that has none.
    step: the step at which they part, counted from 0; None where they do not part. For "saved" and
        "length": how many steps both have.
    stage: "start", "generation", "rewarding", "preparation", "training" or "weights"; "saved" where
        only the files of the final weights differ, "length" where one run has more steps.
    record: the first record that differs, by ordinal and sample; None where none does.
    tensor: the first tensor that differs, in the order of a push; "" where none is known.
    details: lines for a person about what differs there.
    cause: the likely cause; None where they do not part.
    differences: everything else that differs between the runs, the most likely cause first.
    """

    runs: tuple[str, str]
    same: bool
    steps: tuple[int, int]
    weights_sha256: tuple[str, str]
    step: int | None = None
    stage: str = ""
    record: Place | None = None
    tensor: str = ""
    details: tuple[str, ...] = ()
    cause: Difference | None = None
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class _Run:
    """Holds what is read of a run at once.

    rows: of metrics, by steps finished.
    """

    directory: Path
    config: dict[str, Any]
    rows: dict[int, dict[str, Any]]

    @property
    def steps(self) -> int:
        return max(self.rows)


def compare(first: Path, second: Path) -> Comparison:
    """Compares two runs.

    Raises ConfigError for a directory that holds no run, or one whose steps have no digests.
    """
    runs = _read(first), _read(second)
    hashes = read_weights_sha256(first), read_weights_sha256(second)
    found = Comparison(
        runs=(str(first), str(second)),
        same=False,
        steps=(runs[0].steps, runs[1].steps),
        weights_sha256=hashes,
    )
    parting = _parting(runs)
    if parting is None:
        return _never_parted(found, runs)
    row, stage = parting
    step = max(0, row - 1)
    record, details = _first_record(runs, step, stage)
    tensor, more = _first_tensor(runs, row) if stage in (START, "training", "weights") else ("", [])
    updates = _updates(runs, row) if stage == "training" else []
    unsorted = [*_differences(runs, step), *_of_schedule(runs, row)]
    differences = sorted(unsorted, key=lambda one: _rank(one, stage))
    return msgspec.structs.replace(
        found,
        step=step,
        stage=stage,
        record=record,
        tensor=tensor,
        details=(*details, *updates, *more),
        cause=_cause(runs, stage, details, differences),
        differences=tuple(differences),
    )


# -- reading ---------------------------------------------------------------------------------------


def _read(directory: Path) -> _Run:
    """Reads a run's configuration and metrics.

    Raises ConfigError for a directory without a run, and for a run whose steps have no digests.
    """
    if not directory.is_dir():
        raise ConfigError(
            "no such run directory.", where=str(directory), todo="runs are in runs/<name>/<NNN>"
        )
    missing = [name for name in (CONFIG, METRICS) if not (directory / name).exists()]
    if missing:
        raise ConfigError(
            "this directory holds no run.",
            where=str(directory),
            why=f"it has no {' and no '.join(missing)}",
            todo="name a directory such as runs/<name>/<NNN>",
        )
    config = {key: value for key, value in read_settings(directory).items() if value != {}}
    rows = {row["step"]: row for row in read_metrics(directory)}
    if not rows or not all(row.get("digests") for row in rows.values()):
        raise ConfigError(
            "the steps of this run have no digests to compare.",
            where=str(directory / METRICS),
            why=(
                "no step has ended yet"
                if not rows
                else "it was written by an earlier version, or by a step program that reports none"
            ),
            todo="compare final weights: g-core hash RUN/weights",
        )
    return _Run(directory, config, rows)


def _parting(runs: tuple[_Run, _Run]) -> tuple[int, str] | None:
    """Returns the first row (steps finished) and stage that differ; None where none does."""
    for row in sorted(runs[0].rows.keys() & runs[1].rows.keys()):
        first, second = (run.rows[row]["digests"] for run in runs)
        for stage in DIGESTS:
            if first.get(stage) != second.get(stage) and not _other_kind(runs, row, stage):
                return row, stage if row else START
    return None


def _other_kind(runs: tuple[_Run, _Run], row: int, stage: str) -> bool:
    """Whether digests of weights cannot be compared: two transports have two kinds of them."""
    if stage != "weights":
        return False
    transports = {read_tensors(run.directory, row)[0] for run in runs}
    return len(transports) > 1 or any(stage not in run.rows[row]["digests"] for run in runs)


def _never_parted(found: Comparison, runs: tuple[_Run, _Run]) -> Comparison:
    """Compares runs whose common steps are the same: by their length and their final weights."""
    differences = tuple(_differences(runs, 0))
    shorter = min(found.steps)
    if found.steps[0] != found.steps[1]:
        planned = str(runs[0].config.get("run.steps")), str(runs[1].config.get("run.steps"))
        steps = str(found.steps[0]), str(found.steps[1])
        cause = Difference(kind=LENGTH, what="steps that have ended", values=steps)
        if planned[0] != planned[1]:
            cause = Difference(kind=CONFIGURATION, what="run.steps", values=planned)
        details = (f"the {shorter} steps that both have are the same",)
        stage = LENGTH
    elif all(found.weights_sha256) and len(set(found.weights_sha256)) > 1:
        cause = Difference(kind=UNKNOWN, what="the files are not what the last step left")
        details = ("every stage of all steps is the same, the saved weights are not",)
        stage = SAVED
    else:
        return msgspec.structs.replace(found, same=True, differences=differences)
    return msgspec.structs.replace(
        found, step=shorter, stage=stage, details=details, cause=cause, differences=differences
    )


# -- the record ------------------------------------------------------------------------------------


def _first_record(runs: tuple[_Run, _Run], step: int, stage: str) -> tuple[Place | None, list[str]]:
    """Returns the first record in which a stage differs, and what differs in it."""
    if stage not in _TELL:
        return None, []
    tell = _TELL[stage]
    read = _advantages if stage == "preparation" else _records
    first, second = (read(run, step) for run in runs)
    for key in sorted(first.keys() | second.keys()):
        ours, theirs = first.get(key), second.get(key)
        lines = tell(ours, theirs) if ours is not None and theirs is not None else [_only_in(ours)]
        if lines:
            rows = _row(ours), _row(theirs)
            return Place(ordinal=key[0], sample=key[1], row=rows), lines
    return None, ["no record of the trace shows it"]


def _row(record: Any) -> int | None:
    return record.row if isinstance(record, RecordTrace) else None


def _records(run: _Run, step: int) -> dict[tuple[int, int], Any]:
    """Returns the records that a step took: it drew them, or the step before left them over."""
    records: dict[tuple[int, int], Any] = {}
    for line in _trace(run):
        if isinstance(line, RecordTrace):
            took = line.step == step and line.verdict != "surplus"
            if took or (line.step == step - 1 and line.verdict == "surplus"):
                records[line.ordinal, line.sample] = line
    return records


def _advantages(run: _Run, step: int) -> dict[tuple[int, int], Any]:
    return {
        (line.ordinal, sample): value
        for line in _trace(run)
        if isinstance(line, GroupAdvantages) and line.step == step
        for sample, value in line.values.items()
    }


def _trace(run: _Run) -> Iterator[Any]:
    try:
        yield from read_trace(run.directory)
    except GcoreError:  # it was removed, or is damaged: the record then stays unknown
        return


def _only_in(first: Any) -> str:
    return f"only the {'first' if first is not None else 'second'} run has this record"


def _drawn_differently(first: RecordTrace, second: RecordTrace) -> list[str]:
    """Says how two samples differ, by the first of: row, prompt, answer, log-probs, weights."""
    if first.row != second.row:
        return [f"another prompt: row {first.row} | {second.row} of the dataset"]
    prompts, sampled, logps = zip(first.digests, second.digests, strict=True)
    if prompts[0] != prompts[1]:
        return [f"the prompt has another content: row {first.row} of the dataset"]
    if sampled[0] != sampled[1]:
        return [
            f"another answer to the same prompt: {first.n_actions} | {second.n_actions} actions, "
            f"{first.status} | {second.status}"
        ]
    if logps[0] != logps[1]:
        return ["the same answer with other log-probs"]
    if (first.version, first.status) != (second.version, second.status):
        return [
            f"weights of version {first.version} | {second.version}, "
            f"{first.status} | {second.status}"
        ]
    return []


def _scored_differently(first: RecordTrace, second: RecordTrace) -> list[str]:
    names = sorted(first.rewards.keys() | second.rewards.keys())
    lines = [
        f"reward {name}: {first.rewards.get(name, '-')} | {second.rewards.get(name, '-')}"
        for name in names
        if first.rewards.get(name) != second.rewards.get(name)
    ]
    statuses = sorted(first.reward_status.keys() | second.reward_status.keys())
    return lines + [
        f"reward {name}: {first.reward_status.get(name, 'ok')} | "
        f"{second.reward_status.get(name, 'ok')}"
        for name in statuses
        if first.reward_status.get(name) != second.reward_status.get(name)
    ]


def _differs(first: float, second: float) -> list[str]:
    return [f"advantage {first!r} | {second!r}"] if first != second else []


#: Stage of records -> says in lines how two of them differ; no line where they do not.
_TELL: dict[str, Callable[[Any, Any], list[str]]] = {
    "generation": _drawn_differently,
    "rewarding": _scored_differently,
    "preparation": _differs,
}


# -- the update and the tensors --------------------------------------------------------------------


def _updates(runs: tuple[_Run, _Run], row: int) -> list[str]:
    first, second = (run.rows[row]["metrics"] for run in runs)
    return [
        f"{name} {first.get(name)!r} | {second.get(name)!r}"
        for name in UPDATE_METRICS
        if first.get(name) != second.get(name)
    ]


def _first_tensor(runs: tuple[_Run, _Run], row: int) -> tuple[str, list[str]]:
    """Returns the first tensor that differs in the push after so many steps, and how many do."""
    (transport, first), (other_transport, second) = (
        read_tensors(run.directory, row) for run in runs
    )
    if transport != other_transport or not first:
        return "", []
    names = list(dict.fromkeys([*first, *second]))
    differing = [name for name in names if first.get(name) != second.get(name)]
    if not differing:
        return "", []
    return differing[0], [f"{len(differing)} of {len(names)} tensors differ"]


# -- the cause -------------------------------------------------------------------------------------


def _differences(runs: tuple[_Run, _Run], step: int) -> list[Difference]:
    """Returns what differs in configuration, versions, machine and files."""
    environments = [read_environment(run.directory, step) for run in runs]
    first, second = environments
    found = []
    files: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    if first is not None and second is not None:
        files = first.files, second.files
        found += [_of(VERSIONS, *one) for one in _changed(first.versions, second.versions)]
        found += [_of(HARDWARE, *one) for one in _changed(first.machine, second.machine)]
        found += [
            _of(DATA if _below(key, ("data",)) else CODE, f"the file of {key}", *values)
            for key, *values in _changed(*files)
            if not _below(key, _NEUTRAL)
        ]
    for key, ours, theirs in _changed(runs[0].config, runs[1].config):
        same_file = key in files[0] and key in files[1]
        if not same_file and not _below(key, _NEUTRAL):
            found.append(_of(_kind(key), key, ours, theirs))
    return found


def _of_schedule(runs: tuple[_Run, _Run], row: int) -> list[Difference]:
    """Returns the planned lengths of the runs, where they made the learning rates of a step differ.

    A schedule counts the updates of the whole run. Else ``run.steps`` acts on no step.
    """
    planned = [run.config.get("run.steps") for run in runs]
    rates = [run.rows[row]["metrics"].get("learning_rate") for run in runs]
    if planned[0] == planned[1] or rates[0] == rates[1]:
        return []
    return [_of(CONFIGURATION, "run.steps", *planned)]


def _changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted(first.keys() | second.keys()):
        if first.get(key) != second.get(key):
            yield key, first.get(key, ""), second.get(key, "")


def _of(kind: str, what: str, first: Any, second: Any) -> Difference:
    return Difference(kind=kind, what=what, values=(str(first), str(second)))


def _kind(key: str) -> str:
    word = key.rpartition(".")[2]
    if word == "seed":
        return SEED
    if _below(key, _LAYOUT) or word in _LAYOUT_WORDS or ".engine." in key:
        return LAYOUT
    return CONFIGURATION


def _below(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _rank(difference: Difference, stage: str) -> tuple[int, int]:
    """Returns how likely a difference is the cause, the likeliest lowest.

    The first number is the place in ``_SECTIONS`` of what acts on the stage. Versions, hardware and
    layout act on every stage, so they follow; last comes what acts on no part of it.
    """
    sections = _SECTIONS[stage]
    key = difference.what.removeprefix("the file of ")
    acting = [i for i, section in enumerate(sections) if _below(key, (section,))]
    is_weak = difference.kind in (VERSIONS, HARDWARE, LAYOUT)
    place = min(acting, default=len(sections) + (0 if is_weak else 1))
    return place, _KINDS.index(difference.kind)


def _cause(
    runs: tuple[_Run, _Run], stage: str, details: Sequence[str], differences: Sequence[Difference]
) -> Difference:
    """Returns the likely cause.

    It is the data where a prompt differs, else the likeliest difference that can act on the stage,
    unless that is the layout alone. Then a run that is not deterministic is the cause, else
    whatever differs.

    details: what was said of the first record that differs.
    differences: the likeliest first.
    """
    if any("prompt has another content" in line for line in details):
        data = [one for one in differences if one.kind == DATA]
        return data[0] if data else Difference(kind=DATA, what="the rows of the dataset")
    likely = [one for one in differences if _rank(one, stage)[0] <= len(_SECTIONS[stage])]
    if likely and likely[0].kind != LAYOUT:
        return likely[0]
    if not all(run.config.get("run.deterministic") for run in runs):
        first, second = (str(run.config.get("run.deterministic")) for run in runs)
        what = "without run.deterministic the order of work may differ:"
        return Difference(kind=CONFIGURATION, what=what, values=(first, second))
    if differences:
        return differences[0]
    what = "nothing that a run writes down differs: a fault, or code that does not repeat itself"
    return Difference(kind=UNKNOWN, what=what)
