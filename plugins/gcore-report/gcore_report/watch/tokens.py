"""Finds trained records of a run, token by token, in its file, however many there are.

Of each record it keeps its name and where it stands in ``tokens.jsonl``. A search reads all records
once, has their texts from the run's tokenizer, and remembers which match.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from gcore_core.contract.run_files import TOKENS, TrainedTokens, decode_tokens
from gcore_report.page.runs import Run
from gcore_report.page.tokens import as_json, open_tokenizer, texts_of, tokenizer_of

RULE = (
    "A run writes the first records of every tenth step while a sentinel compares log-probs. The "
    "ratio is exp(trainer - generator), before the step's first update. Records are read and "
    "searched by g-core watch, as you ask for them."
)
#: Records of one page of the list, at most.
MOST_ROWS = 500
_KEPT_SEARCHES = 8


class Asked(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which records are asked for.

    search: a part of the record's name ("ordinal/sample") or, where the run's tokenizer can be
        read, of its answer, in any case; "" takes all.
    step: that trained on them; None takes all.
    start, count: the part of the list that is given.
    """

    search: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    step: int | None = None
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)] = 100


class _Name(NamedTuple):
    """Names a record. A record that two steps trained on has two names."""

    step: int
    ordinal: int
    sample: int


class _Place(NamedTuple):
    """Says where a record stands in the file, in bytes, and its advantage."""

    start: int
    length: int
    advantage: float


class AllTokens:
    """Finds and reads the trained records of one run. Several threads may ask at once."""

    def __init__(self, run_dir: Path) -> None:
        self._run = Run(run_dir, "")
        self._path = run_dir / TOKENS
        self._lock = threading.Lock()
        self._records: dict[_Name, _Place] = {}
        self._inode = 0
        self._end = 0  # of the file, as far as it was read
        self._searches: dict[tuple[str, int | None], list[_Name]] = {}
        self._tokenizers: dict[Path | None, Any] = {}

    def facts(self) -> dict[str, Any]:
        """Returns what the page's fields offer: total, steps; and the rule."""
        with self._lock:
            self._look()
            steps = sorted({name.step for name in self._records})
            return {"total": len(self._records), "steps": steps, "rule": RULE}

    def find(self, asked: Asked) -> dict[str, Any]:
        """Returns a part of the list of records that match.

        matches: how many there are in all.
        items: of ``count`` of them from ``start`` on: step, ordinal, sample, advantage.
        """
        with self._lock:
            self._look()
            key = (asked.search, asked.step)
            if key not in self._searches:
                if len(self._searches) >= _KEPT_SEARCHES:
                    self._searches.pop(next(iter(self._searches)))
                self._searches[key] = self._searched(asked)
            names = self._searches[key]
            items = [
                {**name._asdict(), "advantage": self._records[name].advantage}
                for name in names[asked.start : asked.start + asked.count]
            ]
            return {"matches": len(names), "items": items}

    def read(self, step: int, ordinal: int, sample: int) -> dict[str, Any]:
        """Returns one record as ``page.tokens`` has them, whole, and the texts of its tokens.

        Raises KeyError where there is none.
        """
        with self._lock:
            self._look()
            record = self._record(_Name(step, ordinal, sample))
            texts = texts_of(self._tokenizer(), [record])
        return {"record": as_json(0, record, most=None), "texts": texts}

    def _look(self) -> None:
        """Reads what was written since; a file that a run put in its place is read anew."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._forget(0)
            return
        if status.st_ino != self._inode or status.st_size < self._end:
            self._forget(status.st_ino)
        if status.st_size > self._end:
            self._read()

    def _forget(self, inode: int) -> None:
        self._records.clear()
        self._searches.clear()
        self._inode = inode
        self._end = 0

    def _read(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                start = self._end
                self._end += len(line)
                try:
                    record = decode_tokens(line)
                except msgspec.MsgspecError:
                    continue  # half a line, as a killed run may leave it
                name = _Name(record.step, record.ordinal, record.sample)
                self._records[name] = _Place(start, len(line), record.advantage)
                self._searches.clear()

    def _record(self, name: _Name) -> TrainedTokens:
        place = self._records[name]
        with self._path.open("rb") as file:
            file.seek(place.start)
            return decode_tokens(file.read(place.length))

    def _tokenizer(self) -> Any:
        """Returns the run's tokenizer, which is read once; a run gets one of its own at its end."""
        path = tokenizer_of(self._run)
        if path not in self._tokenizers:
            self._tokenizers[path] = open_tokenizer(self._run)
        return self._tokenizers[path]

    def _searched(self, asked: Asked) -> list[_Name]:
        names = sorted(n for n in self._records if asked.step is None or n.step == asked.step)
        text = asked.search.lower()
        if not text:
            return names
        tokenizer = self._tokenizer()
        return [name for name in names if self._has(name, text, tokenizer)]

    def _has(self, name: _Name, text: str, tokenizer: Any) -> bool:
        if text in f"{name.ordinal}/{name.sample}":
            return True
        if tokenizer is None:
            return False
        answer: str = tokenizer.decode(self._record(name).action_ids, skip_special_tokens=False)
        return text in answer.lower()
