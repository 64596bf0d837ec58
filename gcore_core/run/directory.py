"""Makes a run's directory and writes the plain files in it.

``gcore_core.contract.run_files`` has the layout, the names of the files and their readers.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract.errors import ConfigError, RunExists
from gcore_core.contract.records import StepReport
from gcore_core.contract.run_files import (
    CHECKPOINTS,
    CONFIG,
    EARLIER,
    LATEST,
    LOCK,
    LOGS,
    METRICS,
    ORIGINS,
    PLACEMENT,
    POSITION,
    SAMPLES,
    SUMMARY,
    TENSORS,
    TOKENS,
    TRACE,
    TRACE_UNDONE,
    WEIGHTS,
    read_metrics,
    samples_path,
)
from gcore_core.run.checkpoints import Checkpoints
from gcore_core.run.manifest import KEY
from gcore_core.run.supervised import run_goes_on
from gcore_core.runtime.files import replacing
from gcore_core.runtime.journal import Journal

log = logging.getLogger(__name__)
_ROW_END = b"}\n"


# -- making one ------------------------------------------------------------------------------------


def create(root: Path, name: str, explicit: str | None = None) -> Path:
    """Makes a new run directory and returns its absolute path.

    The path is ``explicit`` if that is given, and otherwise ``root/<name>/<NNN>``. NNN is the
    highest number present plus one. It is claimed by mkdir, so runs that start together get
    different numbers. Warns where the latest run can go on. Raises RunExists when ``explicit``
    already holds a run, and ConfigError when a directory cannot be written.
    """
    try:
        if explicit is None:
            _tell_unfinished(root / name / LATEST)
            directory = numbered(root, name)
        else:
            directory = _explicit(Path(explicit).expanduser())
        (directory / SAMPLES).mkdir(exist_ok=True)
        (directory / LOGS).mkdir(exist_ok=True)
    except OSError as error:
        raise _refusal(error, root / name if explicit is None else Path(explicit)) from error
    return directory.absolute()


def _tell_unfinished(latest: Path) -> None:
    """Warns of a run that has a checkpoint and was not ended well."""
    steps = Checkpoints(latest).steps()
    if steps and not (latest / WEIGHTS).exists() and not run_goes_on(latest):
        run = latest.parent / latest.resolve().name
        log.warning(
            "note: a new run begins; to go on with %s from step %d: g-core resume %s",
            *(run, steps[-1], run),
        )


def numbered(root: Path, name: str) -> Path:
    """Makes ``root/<name>/<NNN>`` with the next free number.

    Raises ConfigError for a name that is none, OSError where it cannot be made.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ConfigError(
            f"{name!r} cannot name a directory.",
            where="run.name",
            todo="use letters, digits, '-', '_' and '.'",
        )
    parent = root / name
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        numbers = [int(child.name) for child in parent.iterdir() if child.name.isdecimal()]
        directory = parent / f"{max(numbers, default=0) + 1:03d}"
        try:
            directory.mkdir()
        except FileExistsError:
            continue  # another run took this number between the listing and here
        _point_latest(parent, directory.name)
        return directory


def _explicit(directory: Path) -> Path:
    """Makes the directory that the user named. Raises RunExists when it holds a run."""
    # With another run's checkpoints, this one would go on from them after a fault.
    of_a_run = (CONFIG, METRICS, CHECKPOINTS, KEY, WEIGHTS)
    existing_files = [file for file in of_a_run if (directory / file).exists()]
    if existing_files:
        raise RunExists(
            f"{directory} already holds a run.",
            where="run.dir",
            why=f"found in it: {', '.join(existing_files)}",
            todo="name another directory, or leave run.dir out for a fresh numbered one",
        )
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _point_latest(parent: Path, target: str) -> None:
    """Points the symlink ``latest`` to the new run.

    It is a convenience. Where symlinks are not possible, or the name is taken by a directory, a
    warning is logged and the run goes on.
    """
    try:
        with replacing(parent / LATEST) as fresh:
            fresh.symlink_to(target)
    except OSError as error:
        log.warning("%s was not updated: %s", parent / LATEST, error.strerror)


def _refusal(error: OSError, path: Path) -> ConfigError:
    """Returns the error that a user sees when ``path`` cannot be made or written."""
    where = "run.dir"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"no space is left to write {path}."
        todo = "free some space, or set run.dir to another disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        what = f"{path} is not writable."
        todo = "set run.dir to a directory you may write"
    else:
        what = f"{path} cannot be made or written."
        todo = "set run.dir to another directory"
    return ConfigError(
        what, where=where, why=f"the system says: {error.strerror} ({error.filename})", todo=todo
    )


# -- writing ---------------------------------------------------------------------------------------


def write_config(run_dir: Path, text: str) -> None:
    """Writes the resolved configuration. Raises ConfigError when it cannot be written.

    text: the configuration as YAML.
    """
    write_text(run_dir / CONFIG, text)


def write_origins(run_dir: Path, origins: Mapping[str, str]) -> None:
    """Writes where each value of the configuration was set. Raises ConfigError when it cannot.

    origins: dotted key -> a line of the job's file, an override, or whose default it is.
    """
    write_text(run_dir / ORIGINS, json.dumps(origins, indent=2, ensure_ascii=False) + "\n")


def write_lock(run_dir: Path, lock: Mapping[str, Mapping[str, str]]) -> None:
    """Writes the versions of the plugins. Raises ConfigError when they cannot be written.

    lock: plugin name -> facts ("distribution", "version", ...).
    """
    write_text(run_dir / LOCK, json.dumps(lock, indent=2, sort_keys=True) + "\n")


def write_samples(run_dir: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the evaluated answers of one step. A full disk is logged and does not end the run.

    Each of a row's ``arrays`` is saved as step_000020/<line>-<name>.npy next to the file. In the
    written row, ``arrays`` holds the names of these files, relative to ``samples/``.
    """
    path = samples_path(run_dir, step)
    lines = []
    for line, row in enumerate(rows):
        arrays = {name: f"{path.stem}/{line}-{name}.npy" for name in row.get("arrays", {})}
        try:
            if arrays:
                # Observers import this module, and few runs have pictures.
                import numpy as np
            for name, file in arrays.items():
                (path.parent / path.stem).mkdir(exist_ok=True)
                np.save(path.parent / file, row["arrays"][name], allow_pickle=False)
        except OSError as error:
            log.error("%s", _refusal(error, path.parent / path.stem))
            arrays = {}
        lines.append(
            {**row, "arrays": arrays} if arrays else {k: v for k, v in row.items() if k != "arrays"}
        )
    _write_or_log(path, "".join(_json(row).decode() + "\n" for row in lines))


def write_position(run_dir: Path, position: Mapping[str, Any]) -> None:
    """Replaces ``position.json``.

    On a full disk the earlier position stays. That is logged and does not end the run.
    """
    _write_or_log(run_dir / POSITION, _json(position).decode() + "\n")


def set_end_aside(run_dir: Path) -> None:
    """Moves what the run left at an earlier end, its weights and summary, to ``earlier/``.

    The run has gone on since, so nobody may take them for its own. They stay until it ends well
    again, as there may be no checkpoint that is as new. Where that is not possible, it is logged.
    """
    earlier = run_dir / EARLIER
    try:
        for path in (*run_dir.glob(WEIGHTS), *run_dir.glob(f"{WEIGHTS}-*"), run_dir / SUMMARY):
            if path.exists():
                earlier.mkdir(exist_ok=True)
                shutil.rmtree(earlier / path.name, ignore_errors=True)
                path.rename(earlier / path.name)
    except OSError as error:
        log.error("%s", _refusal(error, earlier))


def remove_earlier_end(run_dir: Path) -> None:
    """Removes what ``set_end_aside`` has moved, where the run has final weights of its own."""
    if (run_dir / WEIGHTS).exists():
        shutil.rmtree(run_dir / EARLIER, ignore_errors=True)


def _write_or_log(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except ConfigError as error:
        log.error("%s", error)


def write_text(path: Path, text: str) -> None:
    """Writes a file; no reader ever sees half of it.

    Raises ConfigError when it cannot be written.
    """
    try:
        with replacing(path) as fresh:
            fresh.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refusal(error, path) from error


def _json(value: Any) -> bytes:
    """Encodes a value as one line of JSON, without a newline.

    Numbers of numpy become floats. NaN and infinities become null, because JSON has neither.
    """
    return msgspec.json.encode(value, enc_hook=float)


class MetricsFile:
    """Appends to the file ``metrics.jsonl``, in which each step stands once.

    A run that goes on from a checkpoint makes the steps after it again. Their rows, which were
    written before, are moved to ``metrics.undone.jsonl``.

    When the disk is full, rows wait in memory, and ``alarm`` is called once for each time it fills
    up.

    resumed_from: the step whose checkpoint the run goes on from; None for a new run.
    """

    def __init__(
        self,
        run_dir: Path,
        alarm: Callable[[str], None] = log.error,
        resumed_from: int | None = None,
    ) -> None:
        self._path = run_dir / METRICS
        self._alarm = alarm
        self._journal = Journal(self._path, alarm, waits=True)
        #: The row of the step that the run goes on from, until another one follows.
        self._last: dict[str, Any] | None = None
        self._newest = -1  # step of the last row
        self._hashes: dict[int, str] = {}  # of steps that have no row yet
        #: Whether the run had made steps after the one it goes on from.
        self.went_back = False
        if resumed_from is not None:
            self.went_back = self._journal.go_back(resumed_from + 1)
            rows = read_metrics(run_dir)
            self._last = rows[-1] if rows and rows[-1]["step"] == resumed_from else None
        try:
            self._path.open("ab").close()
        except OSError as error:
            raise _refusal(error, self._path) from error

    @property
    def evaluated(self) -> bool:
        """Whether the step that the run goes on from was evaluated; False for a new run."""
        return self._last is not None and bool(self._last["evaluation"])

    def unwritten(self, report: StepReport) -> StepReport | None:
        """Returns what of a report the file does not have yet; None when that is nothing.

        The step that the run goes on from was reported before; an evaluation may be new.
        """
        if self._last is None or self._last["step"] != report.step:
            return report
        if not report.evaluation or self._last["evaluation"]:
            return None
        return msgspec.structs.replace(report, metrics={})

    def append(self, report: StepReport) -> None:
        """Adds the row of one finished step, or completes that of the step the run goes on from."""
        row = {
            "step": report.step,
            "version": report.version,
            "time_unix_s": time.time(),
            "metrics": report.metrics,
            "evaluation": report.evaluation,
        }
        if report.digests:
            row["digests"] = report.digests
        if weights_sha256 := self._hashes.pop(report.step, ""):
            row["weights_sha256"] = weights_sha256
        last = self._last
        self._last = None
        if last is not None and last["step"] == report.step and self._complete(last, row):
            return
        self._newest = report.step
        self._journal.append([row])

    def hashed(self, step: int, weights_sha256: str) -> None:
        """Adds the SHA-256 of a step's weights to its row, written already or yet to be.

        It often comes later than the row: the weights are hashed while the next step runs. Then it
        is written behind the row's other fields, and no byte before it changes.
        """
        if step != self._newest:
            self._hashes[step] = weights_sha256
            return
        self._newest = -1  # now its row is complete
        field = b"," + _json({"weights_sha256": weights_sha256})[1:] + b"\n"
        waiting = self._journal.waiting
        if waiting.endswith(_ROW_END):
            waiting[-len(_ROW_END) :] = field
        elif not waiting:
            self._extend_last_row(field)

    def _extend_last_row(self, field: bytes) -> None:
        """Writes a field over the end of the file's last row.

        A disk that does not take it leaves the row as it was.
        """
        try:
            with self._path.open("rb+", buffering=0) as file:
                start = file.seek(-len(_ROW_END), os.SEEK_END)
                if file.read() == _ROW_END:
                    self._overwrite_end(file, start, field)
        except OSError as error:
            self._alarm(f"{self._path} cannot be written ({error.strerror}).")

    def _overwrite_end(self, file: FileIO, start: int, field: bytes) -> None:
        """Writes ``field`` from ``start`` on, where the row's end is; undoes half of it.

        Raises OSError when the disk does not take it.
        """
        file.seek(start)
        n_written = 0
        try:
            while n_written < len(field):
                # The file is unbuffered, so one write may take only a part of the bytes.
                n_written += file.write(field[n_written:])
        except OSError:
            if n_written:
                waiting = self._journal.waiting
                waiting += b"\n"  # for the case that the row's end cannot be put back
                # It needs no space: the file had these bytes before.
                file.truncate(start + len(_ROW_END))
                file.seek(start)
                file.write(_ROW_END)
                waiting.clear()
            raise

    def _complete(self, last: dict[str, Any], row: dict[str, Any]) -> bool:
        """Replaces the last row of the file; returns whether that was possible."""
        try:
            earlier_lines = self._path.read_bytes().splitlines()[:-1]
            lines = [*earlier_lines, _json(_completed(last, row))]
            with replacing(self._path) as fresh:
                fresh.write_bytes(b"".join(line + b"\n" for line in lines))
        except OSError as error:
            self._alarm(f"{self._path} cannot be written ({error.strerror}).")
            return False
        return True

    def close(self) -> None:
        """Writes what still waits, or says how much is lost. Calling it twice is harmless."""
        waiting = self._journal.waiting
        self._journal.flush()
        if waiting:
            self._alarm(
                f"{len(waiting)} bytes of metrics could not be written to {self._path} and are "
                "lost."
            )
            waiting.clear()


def _completed(row: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with what a later one of the same step adds."""
    return {
        **row,
        "metrics": later["metrics"] | row["metrics"],
        "evaluation": row["evaluation"] | later["evaluation"],
    }


# -- going back ------------------------------------------------------------------------------------


def go_back(run_dir: Path, next_step: int, alarm: Callable[[str], None]) -> None:
    """Takes out of a run's journals the steps that are made again from a checkpoint.

    ``metrics.jsonl`` is not among them: see ``MetricsFile``.

    next_step: the first step that is made again, counted from 0.
    alarm: is told of a file that cannot be shortened.
    """
    for name in (PLACEMENT, TENSORS, TOKENS):
        Journal(run_dir / name, alarm).go_back(next_step)
    for path in sorted((run_dir / TRACE).glob("*.jsonl")):
        Journal(path, alarm).go_back(next_step, run_dir / TRACE_UNDONE / path.name)
