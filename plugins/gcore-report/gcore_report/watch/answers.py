"""Finds evaluated answers of a run in its files, however many there are.

The page of a file holds a part of a long run's answers. This reads the rest on demand. It keeps of
each answer where it stands in its file, its mode, its rewards and a digest of its prompt, some
forty bytes; texts are read from the files, a page of the list at a time. A search reads all texts
once and remembers which answers match.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from gcore_core.contract import run_files
from gcore_report.page import limits
from gcore_report.page.answers import plain, whole
from gcore_report.page.pictures import address_of
from gcore_report.page.runs import Run

RULE = "The texts are whole. They are read and searched by g-core watch, as you ask for them."
PICTURES_RULE = (
    "They are read by g-core watch as you ask for them, prompt by prompt, those of a prompt in the "
    f"order of steps. Their longer side has {limits.PICTURE_PIXELS} pixels at most."
)
#: Pictures of one page of the galleries, at most.
MOST_PICTURES = 240
#: Answers of one page of the list, at most.
MOST_ROWS = 500
#: Answers to one prompt that one may be compared with, at most.
MOST_OTHERS = 1000
_EXCERPT = 160  # characters
_KEPT_SEARCHES = 8

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Asked(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which answers are asked for.

    search: a part of the prompt or of the text, in any case; "" takes all.
    step, mode: of the evaluation; None and "" take all.
    order: "-NAME" begins with the lowest value of a reward, "+NAME" with the highest; "" has the
        order in which they were evaluated.
    start, count: the part of the list that is given.
    """

    search: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    step: int | None = None
    mode: str = ""
    order: str = ""
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)] = 60


class AskedPictures(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which pictures are asked for.

    search: a part of the prompt, in any case; "" takes all.
    step, mode: of the evaluation; None and "" take all.
    start, count: the part of the list that is given.
    """

    search: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    step: int | None = None
    mode: str = ""
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_PICTURES)] = 60


@dataclass(frozen=True, kw_only=True, eq=False)
class _File:
    """What is kept of the answers of one evaluation, in the order of their lines.

    stamp: of the file when it was read; another one means that it was written anew.
    places: int64[N + 1], where each line begins, and where the last one ends.
    modes: N texts.
    prompts: uint64[N], a digest each: equal prompts have the same, others hardly ever.
    rewards: name -> float64[N], NaN where an answer has none.
    pictures: of each answer that has any, its line -> the names of its pictures.
    """

    path: Path
    stamp: tuple[int, int, int]
    places: np.ndarray
    modes: Sequence[str]
    prompts: np.ndarray
    rewards: dict[str, np.ndarray]
    pictures: dict[int, tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.modes)

    def row(self, line: int) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(int(self.places[line]))
            return _decode(file.read(int(self.places[line + 1] - self.places[line])))

    def rows(self) -> Iterator[dict[str, Any]]:
        with self.path.open("rb") as file:
            for _ in range(len(self)):
                yield _decode(file.readline())


class AllAnswers:
    """Finds and reads the answers of one run. Several threads may ask at once."""

    def __init__(self, run_dir: Path) -> None:
        self._run = Run(run_dir, "")
        self._lock = threading.Lock()
        self._files: dict[int, _File] = {}
        self._searches: dict[tuple[Any, ...], np.ndarray] = {}
        self._galleries: dict[tuple[Any, ...], list[tuple[int, int, str]]] = {}

    def facts(self) -> dict[str, Any]:
        """Returns what the page's fields offer: total, steps, modes, rewards; and the rule."""
        with self._lock:
            self._look()
            files = self._files.values()
            return {
                "total": sum(map(len, files)),
                "steps": [step for step, file in self._files.items() if len(file)],
                "modes": sorted({mode for file in files for mode in file.modes}),
                "rewards": sorted({name for file in files for name in file.rewards}),
                "rule": RULE,
            }

    def find(self, asked: Asked) -> dict[str, Any]:
        """Returns a part of the list of answers that match.

        matches: how many there are in all.
        items: of ``count`` of them from ``start`` on: step, line, mode, rewards, status, excerpt.
        """
        with self._lock:
            self._look()
            matches = self._matches(asked)
            part = matches[asked.start : asked.start + asked.count]
            items = [self._item(int(step), int(line)) for step, line in part]
            return {"matches": len(matches), "items": items}

    def read(self, step: int, line: int) -> dict[str, Any]:
        """Returns one answer: step, line, mode, prompt, text, rewards, status, pictures, others.

        pictures: [name, address of the picture's data] each.
        others: [step, line] of the answers of the same mode to the same prompt.

        Raises KeyError where there is none.
        """
        with self._lock:
            self._look()
            file = self._files.get(step)
            if file is None or line >= len(file):
                raise KeyError(f"no answer {line} of step {step}")
            row = file.row(line)
            others = self._others(file, step, line)
        samples = self._run.directory / run_files.SAMPLES
        found = [(name, address_of(samples, at)) for name, at in row.get("arrays", {}).items()]
        return {
            "step": step,
            "line": line,
            "mode": row.get("mode", ""),
            "prompt": whole(row.get("prompt", "")),
            "text": whole(row.get("text", "")),
            "rewards": row.get("rewards", {}),
            "status": row.get("status", ""),
            "pictures": [[name, address] for name, address in found if address],
            "others": others,
        }

    def picture_facts(self) -> dict[str, Any]:
        """Returns what the gallery's fields offer: total, steps, modes; and the rule."""
        with self._lock:
            self._look()
            files = {step: file for step, file in self._files.items() if file.pictures}
            return {
                "total": sum(len(names) for f in files.values() for names in f.pictures.values()),
                "steps": list(files),
                "modes": sorted({f.modes[line] for f in files.values() for line in f.pictures}),
                "rule": PICTURES_RULE,
            }

    def find_pictures(self, asked: AskedPictures) -> dict[str, Any]:
        """Returns a part of the list of pictures that match, prompt by prompt, by steps.

        matches: how many there are in all.
        items: of ``count`` of them from ``start`` on: step, line, mode, prompt, name, rewards, and
            the address of the picture's data, "" where its file cannot be read.
        """
        with self._lock:
            self._look()
            matches = self._gallery(asked)
            part = matches[asked.start : asked.start + asked.count]
            rows = [self._files[step].row(line) for step, line, _ in part]
        samples = self._run.directory / run_files.SAMPLES
        items = [
            {
                "step": step,
                "line": line,
                "mode": row.get("mode", ""),
                "prompt": plain(row.get("prompt", "")),
                "name": name,
                "rewards": row.get("rewards", {}),
                "address": address_of(samples, row["arrays"][name]),
            }
            for (step, line, name), row in zip(part, rows, strict=True)
        ]
        return {"matches": len(matches), "items": items}

    def _gallery(self, asked: AskedPictures) -> list[tuple[int, int, str]]:
        """Returns step, line and name of each picture that matches, in their order."""
        key = (asked.search, asked.step, asked.mode)
        if key not in self._galleries:
            if len(self._galleries) >= _KEPT_SEARCHES:
                self._galleries.pop(next(iter(self._galleries)))
            # (prompt, name) -> its place: prompts come in the order in which they came first
            places: dict[tuple[int, str], int] = {}
            found: list[tuple[int, tuple[int, int, str]]] = []
            for step, file in self._files.items():
                if not file.pictures or asked.step not in (None, step):
                    continue
                lines = _lines(file, Asked(search=asked.search, mode=asked.mode), ("prompt",))
                for line in lines.tolist():
                    for name in file.pictures.get(line, ()):
                        of = (int(file.prompts[line]), name)
                        found.append((places.setdefault(of, len(places)), (step, line, name)))
            self._galleries[key] = [picture for _, picture in sorted(found)]
        return self._galleries[key]

    def _look(self) -> None:
        """Reads the files that are new or were written anew; forgets those that are gone."""
        files: dict[int, _File] = {}
        for step in self._run.sampled_steps():
            path = run_files.samples_path(self._run.directory, step)
            try:
                stamp = _stamp(path)
                old = self._files.get(step)
                files[step] = old if old and old.stamp == stamp else _read(path, stamp)
            except FileNotFoundError:
                continue  # a run that went back has removed it just now
        if files != self._files:
            self._files = files
            self._searches.clear()
            self._galleries.clear()

    def _matches(self, asked: Asked) -> np.ndarray:
        """Returns int64[M, 2], step and line of each answer that matches, in their order."""
        key = (asked.search, asked.step, asked.mode, asked.order)
        if key not in self._searches:
            if len(self._searches) >= _KEPT_SEARCHES:
                self._searches.pop(next(iter(self._searches)))
            self._searches[key] = self._searched(asked)
        return self._searches[key]

    def _searched(self, asked: Asked) -> np.ndarray:
        steps = [step for step in self._files if asked.step is None or step == asked.step]
        found = [_lines(self._files[step], asked) for step in steps]
        pairs = [
            np.stack([np.full(len(lines), step, np.int64), lines], 1)
            for step, lines in zip(steps, found, strict=True)
        ]
        matches = np.concatenate([np.empty((0, 2), np.int64), *pairs])
        if not asked.order:
            return matches
        values = np.concatenate(
            [
                _rewards(self._files[step], asked.order[1:])[lines]
                for step, lines in zip(steps, found, strict=True)
            ]
            or [np.empty(0)]
        )
        sign = -1.0 if asked.order[0] == "+" else 1.0
        return matches[np.argsort(sign * values, kind="stable")]  # NaN comes last either way

    def _item(self, step: int, line: int) -> dict[str, Any]:
        row = self._files[step].row(line)
        return {
            "step": step,
            "line": line,
            "mode": row.get("mode", ""),
            "rewards": row.get("rewards", {}),
            "status": row.get("status", ""),
            "excerpt": whole(row.get("text", ""))[:_EXCERPT],
        }

    def _others(self, file: _File, step: int, line: int) -> list[list[int]]:
        others: list[list[int]] = []
        for at, each in self._files.items():
            for place in np.flatnonzero(each.prompts == file.prompts[line]).tolist():
                is_own = (at, place) == (step, line)
                if not is_own and each.modes[place] == file.modes[line]:
                    others.append([at, place])
        return others[:MOST_OTHERS]


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read(path: Path, stamp: tuple[int, int, int]) -> _File:
    """Reads what is kept of a file's answers, up to the first line that is no whole row."""
    places = [0]
    modes: list[str] = []
    prompts: list[int] = []
    rewards: list[dict[str, Any]] = []
    pictures: dict[int, tuple[str, ...]] = {}
    with path.open("rb") as file:
        for line in file:
            try:
                row = _decode(line)
            except msgspec.MsgspecError:
                break  # half a line, as a killed run may leave it
            if row.get("arrays"):
                pictures[len(modes)] = tuple(row["arrays"])
            places.append(places[-1] + len(line))
            modes.append(str(row.get("mode", "")))
            prompts.append(_digest(row.get("prompt", "")))
            rewards.append(row.get("rewards") or {})
    names = sorted({name for each in rewards for name in each})
    return _File(
        path=path,
        stamp=stamp,
        places=np.array(places, np.int64),
        modes=modes,
        prompts=np.array(prompts, np.uint64),
        rewards={
            # A null is a value that was no number.
            name: np.array([each.get(name) for each in rewards], np.float64)
            for name in names
        },
        pictures=pictures,
    )


def _digest(prompt: Any) -> int:
    content = hashlib.blake2b(msgspec.json.encode(prompt), digest_size=8).digest()
    return int.from_bytes(content, "little")


def _lines(file: _File, asked: Asked, parts: Sequence[str] = ("prompt", "text")) -> np.ndarray:
    """Returns int64[M], the lines of a file that match.

    parts: the fields in which is searched.
    """
    fits = np.array([not asked.mode or mode == asked.mode for mode in file.modes], bool)
    text = asked.search.lower()
    if text and fits.any():
        fits &= np.array(
            [
                fit and any(text in whole(row.get(part, "")).lower() for part in parts)
                for fit, row in zip(fits, file.rows(), strict=True)
            ],
            bool,
        )
    return np.flatnonzero(fits).astype(np.int64)


def _rewards(file: _File, name: str) -> np.ndarray:
    return file.rewards.get(name, np.full(len(file), np.nan))
