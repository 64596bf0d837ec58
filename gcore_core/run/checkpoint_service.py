"""Decides where a checkpoint is written, when it counts, and which stay; it is the supervisor's
part.

The lead of the controllers asks for a directory (``open``), has the trainers save into it, says so
(``begin``) and later commits it. When the run fails in between, ``finish`` commits what the
trainers have saved. Each shard sends the records that its step carries over (``carried``); they
are saved when the lead opens the checkpoint of that step.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gcore_core.config.plan import Plan, trained_roles
from gcore_core.contract.errors import CheckpointError, DataError, GcoreError, did_you_mean
from gcore_core.contract.launching import Peer, Site
from gcore_core.contract.records import Header, Ref, StepReport
from gcore_core.contract.run_files import read_metrics
from gcore_core.contract.site_files import OneDisk, SiteFiles
from gcore_core.run.checkpoints import CheckpointFacts, Checkpoints, OpenedCheckpoint, Retention
from gcore_core.run.manifest import name_of
from gcore_core.runtime.messages import (
    BEGIN_CHECKPOINT,
    CARRIED,
    COMMIT_CHECKPOINT,
    FINISH_SAVE,
    OPEN_CHECKPOINT,
    UNSAVED_WEIGHTS,
    Carried,
    CheckpointPlace,
    CommitCheckpoint,
    Nothing,
    OpenCheckpoint,
    SaveState,
    UnsavedWeights,
)
from gcore_core.store.client import StoreReader, StoreWriter
from gcore_core.store.columns import Chunk, pack
from gcore_core.wire.gathering import Gathering
from gcore_core.wire.service import Call, Service, decoded, encode

log = logging.getLogger(__name__)
#: Names of the parts in a checkpoint's directory.
STATE = "state.json"
CONFIG = "config.json"
SURPLUS = "surplus"
#: Files of the records that a step kept for the next one, below ``SURPLUS``: the headers, the
#: columns as one chunk, the media (images and the like) as another. A header's references are
#: replaced by positions in these files.
_HEADERS = "headers.msgpack"
_COLUMNS = "columns"
_MEDIA = "media"


class CheckpointService:
    """Serves the calls of controllers about checkpoints.

    note: called with a line for a person: when a save failed, which ends no run, and when
        ``finish`` has committed one.
    hashed: called with a step and the SHA-256 of its weights, as the policy's rank 0 has saved
        them.
    saved: called with the step and the directory of each checkpoint that is committed.
    """

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        note: Callable[[str], None],
        hashed: Callable[[int, str], None] = lambda step, weights_sha256: None,
        saved: Callable[[int, str], None] = lambda step, path: None,
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._trainers = trained_roles(plan)
        self._note = note
        self._hashed = hashed
        self._saved = saved
        self._checkpoints = Checkpoints(directory)
        self._requests = Gathering(1)  # a repeated request gets the first one's answer
        #: (step, shard) -> what it carries; steps before the latest are dropped.
        self._carried: dict[tuple[int, int], Carried] = {}
        self._store: StoreReader | None = None
        self._files: SiteFiles = OneDisk()
        # What every rank has begun to save, until it is committed.
        self._begun: CommitCheckpoint | None = None
        #: Step -> its metrics and its evaluation's, for the two latest that were reported.
        self._reported: dict[int, dict[str, float]] = {}
        #: Step -> the metric ``checkpoint.best``. A step may be evaluated long after its save.
        self._best: dict[int, dict[str, float]] = {}
        if best := plan.settings.checkpoint.best:
            for row in read_metrics(directory):
                self._note_best_metric(row["step"], best, row["metrics"] | row["evaluation"])
        self._has_sought_best = False
        # Why the final weights could not be written, as it was told last.
        self._unsaved = ""

    def register(self, service: Service) -> None:
        service.add(CARRIED, self.carried)
        service.add(OPEN_CHECKPOINT, self.open)
        service.add(BEGIN_CHECKPOINT, self.begin)
        service.add(COMMIT_CHECKPOINT, self.commit)
        service.add(UNSAVED_WEIGHTS, self.unsaved)

    async def enter(
        self,
        site: Site,
        resumed: Resumed | None,
        shards: int,
    ) -> Resumed | None:
        """Prepares a site for its workers: sends each trainer's part of the checkpoint to the disks
        of its ranks, and puts the carried records into the run's store.

        Returns ``resumed`` with the headers of these records.

        resumed: None for a new run, for which nothing is sent.
        """
        self._files = site.files
        if resumed is not None:
            ranks_of = {
                Path(resumed.path) / role: [
                    name for name in site.where if name.rpartition(".")[0] == role
                ]
                for role in self._trainers
            }
            await self._files.send(ranks_of)
        home = site.home_node
        self._store = StoreReader(home.store, site.home, site.secret, home.agent)
        if resumed is None:
            return None
        part = Path(resumed.path) / SURPLUS
        if not part.is_dir():
            return resumed
        writer = StoreWriter(home.store, site.home, site.secret, home.agent, "supervisor")
        to_shards = frozenset(range(shards))
        headers = await _restore_records(part, writer, resumed.step, to_shards)
        await writer.close()
        return msgspec.structs.replace(resumed, carried=headers)

    async def carried(self, request: Carried, call: Call) -> Nothing:
        """Keeps the records that a shard carries over from a step; drops earlier ones."""
        self._carried = {
            (step, shard): carried
            for (step, shard), carried in self._carried.items()
            if step >= request.step
        }
        self._carried[request.step, request.shard] = request
        return Nothing()

    async def open(self, request: OpenCheckpoint, call: Call) -> CheckpointPlace:
        """Makes the directory of a step's checkpoint, and saves the carried records into it.

        Each trained role has a directory in it. The path is empty where it cannot be made: ``note``
        then got the reason, and the run goes on.
        """

        async def act(_: list[None]) -> CheckpointPlace:
            try:
                path = await asyncio.to_thread(self._checkpoints.begin, request.step)
                headers = self._carried_at(request.step)
                if headers and self._store is not None:
                    # At once: after the next step the store may no longer have them.
                    await _save_records(headers, self._store, path / SURPLUS)
                # An attempt that was lost in this save has left its parts on other disks.
                await self._files.remove(path)
                for role in self._trainers:
                    (path / role).mkdir()
                    await self._files.make(path / role)
            except (CheckpointError, DataError, OSError) as error:
                self._checkpoints.abandon(request.step)
                self._note(str(error))
                return CheckpointPlace("")
            return CheckpointPlace(str(path))

        place: CheckpointPlace = await self._requests.run_once(("open", request.step), None, act)
        return place

    def _carried_at(self, step: int) -> list[Header]:
        """Returns the records that a step carries over, shard 0's first."""
        headers: list[Header] = []
        for (carried_step, _), part in sorted(self._carried.items(), key=lambda item: item[0]):
            if carried_step == step:
                headers += part.headers
        return headers

    def reported(self, report: StepReport) -> None:
        """Takes what a step has measured; the best checkpoint may be chosen by it.

        Rewards are known after the save of the step has begun.
        """
        best = self._plan.settings.checkpoint.best or ""
        self._note_best_metric(report.step, best, report.metrics | report.evaluation)
        self._reported = {
            step: metrics for step, metrics in self._reported.items() if step == report.step - 1
        }
        self._reported[report.step] = report.metrics | report.evaluation
        # The first report is that of the weights before any step.
        if len(self._reported) == 2 and not self._has_sought_best:
            self._has_sought_best = True
            self._seek_best(report.step)

    def _note_best_metric(self, step: int, best: str, metrics: Mapping[str, float | None]) -> None:
        value = metrics.get(best)
        if value is not None and math.isfinite(value):
            self._best[step] = {best: value}

    def _seek_best(self, step: int) -> None:
        """Tells where no step up to this one has the metric ``checkpoint.best``.

        Some metrics come later than with the first step, so that this ends no run.
        """
        best = self._plan.settings.checkpoint.best
        if not best:
            return
        names = set[str]().union(*self._reported.values())
        if best not in names:  # a run that was resumed may have evaluated long before
            for row in read_metrics(self._directory):
                names.update(row["metrics"], row["evaluation"])
        if best not in names:
            guess = did_you_mean(best, sorted(names))
            self._note(
                f"checkpoint.best: no step has a metric {best!r}{guess}, "
                f"up to step {step}; until one has it, no checkpoint stays for being the best"
            )

    async def begin(self, request: CommitCheckpoint, call: Call) -> Nothing:
        """Every rank has begun to save the step of the request."""

        async def act(_: list[None]) -> None:
            self._begun = request

        await self._requests.run_once(("begin", request.step), None, act)
        return Nothing()

    def saves(self, step: int) -> bool:
        """Whether the checkpoint of a step is being saved."""
        return self._begun is not None and self._begun.step == step

    async def finish(self, ranks: Sequence[Peer], within_s: float) -> None:
        """Commits the checkpoint that is being saved when a run fails, if there is one.

        Its step ended well, so what failed later does not cost it. Nothing is committed when a rank
        does not answer, or when that takes longer than ``within_s`` seconds.
        """
        begun = self._begun
        if begun is None:
            return
        finish = SaveState(begun.step, "")
        try:
            async with asyncio.timeout(within_s):
                saved = await asyncio.gather(*(rank.call(FINISH_SAVE, finish) for rank in ranks))
                weights_sha256 = saved[0].weights_sha256
                request = msgspec.structs.replace(begun, weights_sha256=weights_sha256)
                await self.commit(request, Call(lambda: None))
        except (GcoreError, TimeoutError):
            return
        self._note(f"the checkpoint of step {begun.step} was being saved and is whole")

    async def commit(self, request: CommitCheckpoint, call: Call) -> Nothing:
        """Makes a checkpoint of what the trainers have saved, or removes it where a save failed."""

        async def act(_: list[None]) -> None:
            self._begun = None
            collected = await self._collected(request)
            path = await asyncio.to_thread(self._commit, collected)
            if collected.weights_sha256:
                self._hashed(collected.step, collected.weights_sha256)
            if path is not None:
                self._saved(collected.step, str(path))

        await self._requests.run_once(("commit", request.step), None, act)
        return Nothing()

    async def unsaved(self, request: UnsavedWeights, call: Call) -> Nothing:
        """Tells a person that the run waits until its final weights can be written.

        The same error is told once.
        """
        if request.error != self._unsaved:
            self._unsaved = request.error
            steps = self._checkpoints.steps()
            whole = f"on the disk: {name_of(steps[-1])}" if steps else "no checkpoint is there"
            log.warning("%s", request.error)
            self._note(
                f"{request.error}\n"
                "  the run keeps the trained weights in memory, waits, and tries again every few "
                f"seconds; Ctrl-C ends it; {whole}"
            )
        return Nothing()

    async def _collected(self, request: CommitCheckpoint) -> CommitCheckpoint:
        """Brings home what ranks have saved on other disks.

        Returns the request, as a failed one where that was not possible.
        """
        partial = self._checkpoints.partial(request.step)
        try:
            if request.failed:
                await self._files.remove(partial)
            else:
                await self._files.collect(partial)
        except GcoreError as error:
            failed = request.failed or str(error)
            return msgspec.structs.replace(request, failed=failed, weights_sha256="")
        return request

    def _commit(self, request: CommitCheckpoint) -> Path | None:
        """Makes the parts a checkpoint, and removes those that need not stay.

        Returns its directory, or None where it failed; ``note`` then got the reason.
        """
        settings = self._plan.settings.checkpoint
        try:
            if request.failed:
                self._checkpoints.abandon(request.step)
                self._note(request.failed)
                return None
            partial = self._checkpoints.partial(request.step)
            (partial / STATE).write_bytes(_encode(request.state))
            (partial / CONFIG).write_bytes(_encode(self._plan.config))
            sorted_config = msgspec.json.encode(self._plan.config, order="sorted")
            facts = CheckpointFacts(
                run=self._plan.name,
                lock={item["distribution"]: item["version"] for item in self._plan.lock},
                config_hash=hashlib.sha256(sorted_config).hexdigest(),
                metrics=self._reported.get(request.step, {}) | request.metrics,
                weights_sha256=request.weights_sha256,
            )
            path = self._checkpoints.commit(request.step, facts)
        except (CheckpointError, OSError) as error:
            self._checkpoints.abandon(request.step)
            self._note(str(error))
            return None
        try:
            self._checkpoints.keep(
                Retention(
                    last=settings.last,
                    every=settings.keep_every,
                    best=settings.best or "",
                    best_is=settings.best_is,
                ),
                self._best,
            )
        except OSError as error:
            self._note(f"an earlier checkpoint cannot be removed, and stays: {error}")
        return path


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what a run goes on from.

    step: the step after which the checkpoint was saved.
    path: the checkpoint's directory.
    state: what the controllers saved.
    notes: one line for each newer checkpoint that was refused.
    carried: headers of the records that the step carried over, in the store of this run.
    evaluated: the run's metrics have an evaluation of the step.
    core: the version of gcore-core that saved it; "": unknown.
    """

    step: int
    path: str
    state: dict[str, Any]
    notes: tuple[str, ...] = ()
    carried: list[Header] = []
    evaluated: bool = False
    core: str = ""


def newest(directory: Path, step: int | None = None) -> Resumed:
    """Returns the state in the newest whole checkpoint of a run, or in that of ``step``.

    The run must have ended: one that was set aside when it ended is moved back first.
    Raises CheckpointError when there is none.
    """
    checkpoints = Checkpoints(directory)
    checkpoints.restore()
    opened: OpenedCheckpoint = checkpoints.open(step)
    return Resumed(
        step=opened.manifest.step,
        path=str(opened.path),
        state=_decode(opened.path / STATE),
        notes=opened.notes,
        core=opened.manifest.lock.get("gcore-core", ""),
    )


def saved_config(checkpoint: Path) -> dict[str, Any]:
    """Returns the configuration of the run that saved a checkpoint."""
    return _decode(checkpoint / CONFIG)


def _encode(values: Mapping[str, Any]) -> bytes:
    """Encodes plain values as JSON, with NaN and infinities as Python's own module writes them.

    msgspec writes null for them, and a run would go on with that.
    """
    return json.dumps(values, default=msgspec.to_builtins).encode()


def _decode(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_bytes()))


async def _save_records(
    headers: Sequence[Header],
    store: StoreReader,
    directory: Path,
) -> None:
    """Writes the records into a new directory.

    Raises OSError when it cannot, DataError for what the store lacks.
    """
    records = await store.records(headers)
    columns = [own_columns for own_columns, _ in records]
    media = {}  # each array once, also where several records refer to it
    for header, (_, own_media) in zip(headers, records, strict=True):
        for name, ref in header.media.items():
            media[ref] = own_media[name]
    position_of = {ref: position for position, ref in enumerate(media)}
    saved_headers = [
        msgspec.structs.replace(
            header,
            columns=None,
            slot=slot,
            media={name: _position(position_of[ref]) for name, ref in header.media.items()},
        )
        for slot, header in enumerate(headers)
    ]

    def write() -> None:
        directory.mkdir()
        (directory / _HEADERS).write_bytes(encode(saved_headers))
        _write_chunk(directory / _COLUMNS, columns)
        _write_chunk(directory / _MEDIA, [{array.dtype.str: array} for array in media.values()])

    await asyncio.to_thread(write)


async def _restore_records(
    directory: Path, store: StoreWriter, step: int, shards: frozenset[int]
) -> list[Header]:
    """Puts the saved records into this store, for ``step`` of these shards; returns their headers.

    Raises ContractError or DataError for a file that cannot be read.
    """
    raw = (directory / _HEADERS).read_bytes()
    headers = decoded(msgspec.msgpack.Decoder(list[Header]), raw, "headers", str(directory))
    columns = Chunk(memoryview((directory / _COLUMNS).read_bytes()))
    media = Chunk(memoryview((directory / _MEDIA).read_bytes()))
    chunk = await store.put(step, shards, [columns[header.slot] for header in headers])
    blobs = [array for position in range(len(media)) for array in media[position].values()]
    refs = await store.put_blobs(step, shards, blobs)
    for slot, header in enumerate(headers):
        header.columns = chunk
        header.slot = slot
        header.media = {name: refs[ref.offset] for name, ref in header.media.items()}
    return headers


def _position(position: int) -> Ref:
    """Makes a reference into the file of media; only its offset counts."""
    return Ref("", "", position, 0, 0, b"")


def _write_chunk(path: Path, rows: Sequence[Mapping[str, np.ndarray]]) -> None:
    with path.open("wb") as file:
        file.writelines(pack(rows))
