"""Holds the records of one generator: samples that run, records that are finished, requests that
wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gcore_core.contract.columns import (
    SEQUENCES,
    VERSION,
    token_columns_problem,
    version_problem,
)
from gcore_core.contract.errors import ContractError, RecordMismatch
from gcore_core.contract.generator import Finished
from gcore_core.contract.lineage import UNSEALED, name_of, seal_of
from gcore_core.contract.records import (
    FAILED,
    FINISHED,
    HEADER_LIMIT_BYTES,
    STATUSES,
    TRUNCATED,
    Header,
    Lease,
)
from gcore_core.runtime.messages import short_reason
from gcore_core.runtime.step_digests import digests_of_columns
from gcore_core.store.client import StoreWriter
from gcore_core.wire.service import Call, encode
from gcore_core.workers.rounds import Rounds
from gcore_core.workers.row_digest import prompt_digest

#: (ordinal, sample). An evaluation uses ordinals below zero, so no two purposes share a key.
Key = tuple[int, int]


@dataclass
class Listener:
    """Waits for the records of one open ``generate`` request.

    waiting: keys of the records that it has not been given yet.
    call: the request's, whose deadline is extended when records end.
    inbox: lists of finished headers; an empty list says that the engine failed.
    """

    waiting: set[Key]
    call: Call
    inbox: asyncio.Queue[list[Header]] = field(default_factory=asyncio.Queue)

    def take(self, headers: Sequence[Header]) -> list[Header]:
        """Returns the headers that it waits for, and waits for them no longer."""
        awaited = [header for header in headers if header.key in self.waiting]
        self.waiting.difference_update(header.key for header in awaited)
        return awaited


class DrawnRecords:
    """Knows what runs and what is finished, stores columns, tells those who wait.

    A sample that is asked for again gets the record that it has made, and is not drawn again, until
    its step is over. A later step that asks for it has given that record up, and wants another one
    of the weights of then.

    replica: number of the generator's replica, which its records name.
    """

    def __init__(self, store: StoreWriter, rounds: Rounds, shards: int, replica: int = 0) -> None:
        self._replica = replica
        self._store = store
        self._rounds = rounds
        self._shards = shards
        self._running: dict[Key, int] = {}  # -> the step for which it is drawn
        self._finished: dict[Key, tuple[int, Header]] = {}  # -> (step, header)
        self._listeners: list[Listener] = []
        self._ending = set[Key]()  # of those that run: they have ended and are being stored
        self.over = 0  # records of earlier steps are gone

    def __len__(self) -> int:
        """Samples that run."""
        return len(self._running)

    @contextlib.contextmanager
    def listen(self, keys: Sequence[Key], step: int, call: Call) -> Iterator[Listener]:
        """Gives a listener these records as they finish, inside the block.

        Those that are finished for the step already it gets at once.
        """
        listener = Listener(set(keys), call)
        self._listeners.append(listener)
        try:
            if headers := [self._finished[key][1] for key in keys if self._is_finished(key, step)]:
                listener.inbox.put_nowait(headers)
            yield listener
        finally:
            self._listeners.remove(listener)

    def begin(self, lease: Lease, step: int) -> list[int]:
        """Returns the samples of a lease that neither run nor are finished for the step.

        From here on they run.
        """
        keys = [(lease.ordinal, sample) for sample in lease.samples]
        keys_to_draw = [key for key in keys if not self._is_finished(key, step)]
        fresh = [key for key in keys_to_draw if key not in self._running]
        for key in keys_to_draw:
            # One that still runs for an earlier step goes on, and is stored for this one.
            self._running[key] = max(step, self._running.get(key, step))
        return [sample for _, sample in fresh]

    def give_up(self) -> list[Key]:
        """Forgets the samples that run and that no open request waits for; returns their keys.

        Who asks for one of them later has it drawn from the start. To be called while the engine
        makes no step, and what is returned is then to be ended there.
        """
        awaited = self._ending.union(*(listener.waiting for listener in self._listeners))
        keys = sorted(self._running.keys() - awaited)
        for key in keys:
            del self._running[key]
        return keys

    def has_all(self, keys: Sequence[Key], step: int) -> bool:
        """Returns whether each of these samples runs or is finished for the step."""
        return all(key in self._running or self._is_finished(key, step) for key in keys)

    def _is_finished(self, key: Key, step: int) -> bool:
        return key in self._finished and self._finished[key][0] >= step

    async def keep_finished(self, finished: list[Finished], stamp: int = UNSEALED) -> None:
        """Stores the records among these that run here, and tells those who wait for them.

        stamp: of the weights that the backend holds.
        """
        records = self._ended(finished)
        headers = self._headers(records, stamp)
        await self._keep_all(records, headers)
        for key, header in headers.items():
            _check_size(header)
            self._finished[key] = self._running.pop(key), header
        self._tell_listeners(headers)

    def _ended(self, finished: list[Finished]) -> list[Finished]:
        """Returns the records that run here; they are being stored from here on."""
        records = []
        for record in finished:
            key = _key(record)
            if key not in self._running:
                continue
            self._ending.add(key)
            _check_columns(record)
            records.append(record)
        return records

    def _headers(self, records: list[Finished], stamp: int) -> dict[Key, Header]:
        # The records of a group share their prompt.
        prompts = {id(record.request.prompt): record.request.prompt for record in records}
        digests = {name: prompt_digest(prompt) for name, prompt in prompts.items()}
        headers = {
            _key(record): _header(record, digests[id(record.request.prompt)]) for record in records
        }
        for header in headers.values():
            header.stamp = stamp
            header.replica = self._replica
        return headers

    async def _keep_all(self, records: list[Finished], headers: dict[Key, Header]) -> None:
        """Stores records for the steps that have asked for them; fills in where they are."""
        unkept = [record for record in records if record.status != FAILED]
        while unkept:
            step = max(self._running[_key(record)] for record in unkept)
            await self._keep(step, unkept, headers)
            # Meanwhile a later step may have asked for some (``begin``): what was stored for
            # ``step`` is not held for that one.
            unkept = [record for record in unkept if self._running[_key(record)] > step]
        self._ending.difference_update(headers)

    def _tell_listeners(self, headers: Mapping[Key, Header]) -> None:
        for listener in self._listeners:
            if awaited := [header for header in headers.values() if header.key in listener.waiting]:
                listener.inbox.put_nowait(awaited)

    def progress(self) -> None:
        """Extends the deadline of every open request."""
        for listener in self._listeners:
            listener.call.progress()

    def fail(self) -> None:
        """Wakes every open request, since the engine failed: each looks why."""
        for listener in self._listeners:
            listener.inbox.put_nowait([])

    def release(self, before: int) -> None:
        """Forgets the records of steps before ``before``.

        Every replica hears of it by a push, or as it falls asleep, also one that some shards never
        speak to. So it is told for all shards.
        """
        self.over = max(self.over, before)
        self._store.release(dict.fromkeys(range(self._shards), (0, self.over)))
        self._finished = {
            key: record for key, record in self._finished.items() if record[0] >= self.over
        }
        self._rounds.forget(self.over)

    async def _keep(self, step: int, records: list[Finished], headers: dict[Key, Header]) -> None:
        """Stores columns and media for all shards that have asked for records of the step.

        Together, so that they share slabs. Fills in where they are.
        """
        shards = self._rounds.shards_of(step)
        if step < self.over:
            return  # nobody waits for them any more
        ref = await self._store.put(step, shards, [record.columns for record in records])
        arrays = [array for record in records for array in record.media.values()]
        blobs = iter(await self._store.put_blobs(step, shards, arrays))
        for slot, record in enumerate(records):
            header = headers[_key(record)]
            header.columns = ref
            header.slot = slot
            header.media = {name: next(blobs) for name in record.media}


def _key(record: Finished) -> Key:
    return record.request.ordinal, record.request.sample


def _check_columns(record: Finished) -> None:
    """Raises ContractError for a record that is not what its contract says.

    Nobody behind the generator could tell: a reward that finds no text reads an empty one.
    """
    problem = token_columns_problem(record.columns)
    if record.status not in STATUSES:
        problem = f"its status is {record.status!r}, it must be one of {', '.join(STATUSES)}"
    elif record.status == FAILED and record.columns:
        problem = f"it has failed, and has columns: {', '.join(sorted(record.columns))}"
    if problem:
        raise ContractError(
            f"record {name_of(*_key(record))}: {problem}",
            where="generate",
            why="what the generator gave is no record of its contract",
            todo="see the table of columns in gcore_core.contract.records, and test the generator "
            "with g-core conformance",
        )
    _check_version_column(record)


def _check_version_column(record: Finished) -> None:
    """Raises ContractError for a record whose column of versions is not what a record may have."""
    column = record.columns.get(VERSION)
    if column is None:
        return
    actions = record.columns["action_ids"].size
    sequences = record.columns.get(SEQUENCES, column[:0])  # each row begins with its first action
    begins = [begin for begin, *_ in sequences.tolist()]
    if problem := version_problem(column, actions, record.versions, begins):
        raise ContractError(
            f"record {name_of(*_key(record))}: {problem}",
            where="generate",
            why="objectives weigh actions by the age that this column gives them",
            todo="look at what the generator notes of a sample when a push comes (SampledBy)",
        )


def _check_size(header: Header) -> None:
    nbytes = len(encode(header))
    if nbytes > HEADER_LIMIT_BYTES:
        raise ContractError(
            f"the header of a record has {nbytes} bytes, the limit is {HEADER_LIMIT_BYTES}",
            where=f"ordinal {header.ordinal}, sample {header.sample}",
            why=f"it names {len(header.media)} media: {', '.join(header.media)}"[:200],
            todo="give fewer media with shorter names, or put them into one array",
        )


def _header(record: Finished, digest: int | None = None) -> Header:
    """Makes a record's header, but for what its replica knows.

    digest: of its row, where it is known already.
    """
    request = record.request
    columns = record.columns
    mask = columns.get("action_mask", np.zeros(0, np.uint8))
    row_digest = prompt_digest(request.prompt) if digest is None else digest
    return Header(
        ordinal=request.ordinal,
        sample=request.sample,
        row=request.prompt.row,
        seed=request.seed,
        attempt=request.attempt,
        versions=record.versions,
        n_prompt=columns["prompt_ids"].size if "prompt_ids" in columns else 0,
        n_actions=mask.size,
        n_given=int((mask == 0).sum()),
        status=record.status,
        reason=short_reason(record.reason),
        cost=record.cost,
        prompt_digest=row_digest,
        digests=digests_of_columns(record),
        seal=seal_of(request.ordinal, request.sample, row_digest, columns),
    )


#: At least so many answers of the largest length, and half of all of that length, must end with
#: tokens that end no shorter one; and these tokens must be so many.
_CUT = 16
_TOKENS = 4
#: Each token that ends shorter answers must have ended so many of them on average.
_EACH = 4


class EndReasons:
    """Counts with which tokens the answers of one generator end.

    It looks at answers that are "finished" without a reason. One with a reason, such as the text
    that ended it, may end with any token. It stops looking when the generator reports an answer as
    truncated: such a generator says when it cuts one off.
    """

    def __init__(self) -> None:
        self._longest = 0
        self._at_longest: Counter[int] = Counter()  # last token -> answers of the largest length
        self._shorter: Counter[int] = Counter()  # last token -> shorter answers
        self._tells = False

    def add(self, finished: Iterable[Finished]) -> None:
        """Counts answers. Raises RecordMismatch when the longest were cut off."""
        for record in finished:
            if self._tells:
                return
            actions = record.columns.get("action_ids")
            if actions is None or not len(actions):
                continue
            self._tells = record.status == TRUNCATED
            if record.status == FINISHED and not record.reason:
                self._count(len(actions), int(actions[-1]))
                self._check(record)

    def _count(self, length: int, last: int) -> None:
        if length > self._longest:
            self._longest = length
            self._shorter += self._at_longest
            self._at_longest = Counter()
        (self._at_longest if length == self._longest else self._shorter)[last] += 1

    def _check(self, record: Finished) -> None:
        """Raises RecordMismatch, naming ``record``, when what was counted shows cut answers."""
        shorter = self._shorter.total()
        if shorter < _EACH * max(len(self._shorter), 1):
            return
        cut = [token for token in self._at_longest if token not in self._shorter]
        count = sum(self._at_longest[token] for token in cut)
        total = self._at_longest.total()
        if count < _CUT or len(cut) < _TOKENS or count < total / 2:
            return
        request = record.request
        raise RecordMismatch(
            f"{count} answers of {self._longest} actions, the most of all, are told as finished "
            "and were cut off",
            where="generate",
            why=f"they end with {len(cut)} different tokens; {shorter} shorter ones end with "
            f"{len(self._shorter)}. One of them is record "
            f"{name_of(request.ordinal, request.sample)}",
            todo='see how the generator tells why an answer ended: status "truncated" where it '
            "ran into a limit",
            ordinal=request.ordinal,
            sample=request.sample,
        )
