"""The checkpoints of a run: begun, committed all or not at all, found again, thrown away in time.

    checkpoints = Checkpoints(run_dir)
    directory = checkpoints.begin(120)          # step-000120.partial; whoever has a part writes it there
    checkpoints.commit(120, facts)              # every file on disk, the manifest on disk, then one rename
    opened = checkpoints.open()                 # the newest that is whole

A crash at any moment leaves the checkpoints before as they were. What a checkpoint holds:
``checkpoints_manifest``.
"""  # noqa: E501

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from gcore_core.contract.errors import CheckpointError
from gcore_core.run.manifest import (
    MANIFEST,
    NAME,
    Manifest,
    Part,
    ensure_key,
    files_below,
    inspect,
    name_of,
    part_of,
    seal,
    sync,
    write_durably,
)

CHECKPOINTS = "checkpoints"

_PARTIAL = ".partial"
_THREADS = 4  # one waits for the disk while others hash


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """What a manifest tells besides step and parts. lock: distribution -> version; metrics: of the
    step, by which ``Retention`` finds the best; those that are not finite are left out.
    """

    run: str
    lock: Mapping[str, str] = field(default_factory=dict)
    config_hash: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint that verified. notes: one line for each newer one that did not, with a file and
    the reason.
    """

    path: Path
    manifest: Manifest
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints stay: the ``last`` newest, every ``every``-th step (0: none), the best by a
    metric ("": none); of equally good ones the newest.
    """

    last: int = 3
    every: int = 0
    best: str = ""
    best_is: str = "higher"  # or "lower"

    def kept(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The steps that stay, of those that have ``metrics``; never empty unless there are
        none.
        """
        steps = sorted(metrics)
        found = set(steps[-max(1, self.last) :])
        if self.every > 0:
            found |= {step for step in steps if step % self.every == 0}
        sign = 1 if self.best_is == "higher" else -1
        measured = [
            (sign * metrics[step][self.best], step) for step in steps if self.best in metrics[step]
        ]
        if measured:
            found.add(max(measured)[1])
        return found


class Checkpoints:
    """Those in ``run_dir/checkpoints``. One process writes there."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self.directory = run_dir, run_dir / CHECKPOINTS
        self._begun: set[int] = set()
        self._whole: set[int] = set()  # hashed by this object, when they were committed or opened

    # -- writing -----------------------------------------------------------------------------------

    def begin(self, step: int) -> Path:
        """A new empty directory for the parts of a step; removes those of saves that never ended.

        Raises CheckpointError when it cannot be made, or when the disk has less room than the
        newest checkpoint takes.
        """
        path = self._partial(step)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for stale in self.directory.glob(f"*{_PARTIAL}"):
                if stale == path or stale.name not in map(self._partial_name, self._begun):
                    shutil.rmtree(stale)
            self._key()
            self._check_room()
            path.mkdir()
        except OSError as error:
            raise self._refusal(error, path) from error
        self._begun.add(step)
        return path

    def commit(self, step: int, facts: CheckpointFacts) -> Path:
        """Makes the parts of ``begin`` a checkpoint: when this returns it is on the disk. Hashes
        every part.

        Raises CheckpointError when it cannot, as on a full disk; then the parts are gone and
        nothing else is.
        """
        partial, target = self._partial(step), self.directory / name_of(step)
        try:
            parts = _settle(partial)
            manifest = Manifest(
                run=facts.run,
                step=step,
                saved_unix_s=time.time(),
                lock=dict(facts.lock),
                config_hash=facts.config_hash,
                metrics={
                    name: float(value)
                    for name, value in facts.metrics.items()
                    if math.isfinite(value)
                },
                parts=parts,
            )
            write_durably(partial / MANIFEST, seal(manifest, self._key()))
            sync(partial)
            before = (
                self._set_aside(step) if target.exists() else None
            )  # the run went back behind it
            partial.rename(target)
            sync(self.directory)
        except OSError as error:
            self.abandon(step)
            raise self._refusal(error, target) from error
        self._begun.discard(step)
        self._whole.add(step)
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
        return target

    def abandon(self, step: int) -> None:
        """Removes what ``begin`` of that step began."""
        shutil.rmtree(self._partial(step), ignore_errors=True)
        self._begun.discard(step)

    def keep(self, rule: Retention) -> list[int]:
        """Removes the checkpoints that the rule does not keep and returns their steps; damaged ones
        are left alone.

        Of those that stay one has been hashed by this process. If none has been, the newest that
        proves to be whole stays too, and without one nothing is removed.
        """
        found = {
            step: inspect(self.directory / name_of(step), hashes=False) for step in self.steps()
        }
        metrics = {
            step: told.metrics for step, (told, problems) in found.items() if told and not problems
        }
        kept = rule.kept(metrics)
        doomed = sorted(metrics.keys() - kept)
        if doomed and not kept & self._whole:
            whole = next(
                (step for step in sorted(metrics, reverse=True) if not self.verify(step)), None
            )
            doomed = [step for step in doomed if whole not in (step, None)]
        for step in doomed:
            shutil.rmtree(self._set_aside(step), ignore_errors=True)
        return doomed

    def _set_aside(self, step: int) -> Path:
        """What is half removed must not look like a checkpoint."""
        aside = self.directory / f"{name_of(step)}.removed{_PARTIAL}"
        shutil.rmtree(aside, ignore_errors=True)
        (self.directory / name_of(step)).rename(aside)
        self._whole.discard(step)
        return aside

    # -- reading -----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps that have a committed checkpoint, whole or not, in order."""
        names = os.listdir(self.directory) if self.directory.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))

    def verify(self, step: int) -> list[str]:
        """Every problem of a checkpoint; none when it is whole. Reads all of it."""
        problems = inspect(self.directory / name_of(step))[1]
        (self._whole.discard if problems else self._whole.add)(step)
        return problems

    def open(self, step: int | None = None) -> Opened:
        """The checkpoint of ``step``, or the newest one that is whole. Raises CheckpointError when
        there is none.
        """
        notes: list[str] = []
        for candidate in reversed(self.steps()) if step is None else [step]:
            path = self.directory / name_of(candidate)
            manifest, problems = inspect(path)
            if manifest is not None and not problems:
                self._whole.add(candidate)
                return Opened(path=path, manifest=manifest, notes=tuple(notes))
            more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
            notes.append(f"{path.name} is refused: {problems[0]}{more}")
        raise CheckpointError(
            "there is no checkpoint that is whole."
            if step is None
            else f"the checkpoint of step {step} is not whole.",
            where=str(self.directory),
            why="\n".join(notes[:3]),
            todo=f"every problem: g-core checkpoint verify {self._run_dir}",
            notes=notes,
        )

    # -- the directory -----------------------------------------------------------------------------

    def _partial_name(self, step: int) -> str:
        return name_of(step) + _PARTIAL

    def _partial(self, step: int) -> Path:
        return self.directory / self._partial_name(step)

    def _key(self) -> bytes:
        try:
            return ensure_key(self._run_dir)
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from error

    def _check_room(self) -> None:
        for step in self.steps()[-1:]:
            newest, _ = inspect(self.directory / name_of(step), hashes=False)
            if newest is not None and newest.nbytes > shutil.disk_usage(self.directory).free:
                raise OSError(
                    errno.ENOSPC, f"the one before has {newest.nbytes} bytes, and fewer are free"
                )

    def _refusal(self, error: OSError, path: Path) -> CheckpointError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        steps = self.steps()
        before = (
            f"the newest one that is there: {name_of(steps[-1])}"
            if steps
            else "there is none before it"
        )
        name = path.name.removesuffix(_PARTIAL)
        return CheckpointError(
            f"no space is left for {name}." if full else f"{name} could not be written.",
            where=str(self.directory),
            why=(
                "the system says: "
                f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
            ),
            todo=f"{'free some space, or keep fewer checkpoints' if full else 'see to that directory'}; {before}",  # noqa: E501
            full_disk=full,
        )


def _settle(partial: Path) -> dict[str, Part]:
    """Until every part and every directory is on the disk; sizes and hashes by name."""
    files = {name: Path(entry.path) for name, entry in files_below(partial)}
    if not files or any(file.is_symlink() or not file.is_file() for file in files.values()):
        raise OSError(
            errno.EINVAL, "a checkpoint has parts, and all are regular files", str(partial)
        )
    folders = {
        folder
        for file in files.values()
        for folder in file.parents
        if folder.is_relative_to(partial)
    }
    with ThreadPoolExecutor(_THREADS) as threads:
        synced = [threads.submit(sync, path) for path in [*files.values(), *folders]]
        parts = dict(zip(files, threads.map(part_of, files.values()), strict=True))
        for done in synced:
            done.result()
    return parts
