"""Begins, commits, finds and removes the checkpoints of a run; one is committed whole or not at all.

    checkpoints = Checkpoints(run_dir)
    directory = checkpoints.begin(120)          # step-000120.partial; all write their parts there
    checkpoints.commit(120, facts)              # every file on disk, the manifest on disk, then one rename
    opened = checkpoints.open()                 # the newest that is whole

A crash at any moment leaves the checkpoints of other steps as they were. Where one of the same step
is replaced, these stand in ``checkpoints`` one after the other:

    step-000120                     step-000120.partial     the old one, and the new one
    step-000120.replaced.partial    step-000120.partial     the old one is set aside
    step-000120.replaced.partial    step-000120             the new one has its place
    step-000120

``restore`` moves an old one back that a crash has left aside without a new one in its place. What a
checkpoint holds: ``gcore_core.run.manifest``.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import msgspec

from gcore_core.contract.errors import CheckpointError
from gcore_core.contract.run_files import CHECKPOINTS
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

_PARTIAL = ".partial"
_REPLACED = f".replaced{_PARTIAL}"  # a whole checkpoint, until another one has its place
_REMOVED = f".removed{_PARTIAL}"  # one that is being removed
_THREADS = 4  # one waits for the disk while others hash


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """Holds what a manifest has besides the step and the parts.

    lock: distribution -> version.
    config_hash: of the resolved configuration.
    metrics: the step's, by which ``Retention`` finds the best; only finite ones are saved.
    weights_sha256: of the policy's weights; "" where it was not taken.
    """

    run: str
    lock: Mapping[str, str] = field(default_factory=dict)
    config_hash: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    weights_sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class OpenedCheckpoint:
    """Holds a checkpoint that was verified.

    notes: one line for each newer one that failed, with a file and the reason.
    """

    path: Path
    manifest: Manifest
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Says which checkpoints stay.

    last: how many of the newest.
    every: each whose step is a multiple of this; 0: none.
    best: the one with the best value of this metric, the newest of equals; "": none.
    best_is: "higher" or "lower".
    """

    last: int = 3
    every: int = 0
    best: str = ""
    best_is: str = "higher"

    def steps_to_keep(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Returns the steps that stay; ``metrics`` has every step there is.

        At least the newest stays.
        """
        steps = sorted(metrics)
        selected = set(steps[-max(1, self.last) :])
        if self.every > 0:
            selected |= {step for step in steps if step % self.every == 0}
        sign = 1 if self.best_is == "higher" else -1
        measured = [
            (sign * metrics[step][self.best], step) for step in steps if self.best in metrics[step]
        ]
        if measured:
            _, best_step = max(measured)
            selected.add(best_step)
        return selected


class Checkpoints:
    """Reads and writes the checkpoints in ``run_dir/checkpoints``. Only one process may write
    there.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.directory = run_dir / CHECKPOINTS
        self._begun: set[int] = set()  # steps whose checkpoint is being written
        self._whole: set[int] = set()  # steps whose checkpoint this object has hashed

    # -- writing -----------------------------------------------------------------------------------

    def begin(self, step: int) -> Path:
        """Makes an empty directory for a step's parts; removes parts of saves that never ended,
        once ``restore`` is done.

        Raises CheckpointError when it cannot be made, or when the disk has less room than the
        newest checkpoint takes.
        """
        path = self.partial(step)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.restore()
            in_use = {self._partial_name(begun) for begun in self._begun - {step}}
            in_use |= {self._place_aside(begun).name for begun in self._begun}
            in_use |= {self._place_aside(aside).name for aside in self._left_aside()}
            for stale in self.directory.glob(f"*{_PARTIAL}"):
                if stale.name not in in_use:
                    shutil.rmtree(stale)
            self._key()
            self._check_room()
            path.mkdir()
        except OSError as error:
            raise self._refusal(error, path) from error
        self._begun.add(step)
        return path

    def commit(self, step: int, facts: CheckpointFacts) -> Path:
        """Hashes every part and makes them a checkpoint, which is on the disk when this returns.

        An earlier checkpoint of the same step is replaced. Raises CheckpointError when it cannot,
        as on a full disk; then the parts are removed, and the earlier one stays.
        """
        partial = self.partial(step)
        target = self.directory / name_of(step)
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
                weights_sha256=facts.weights_sha256 or msgspec.UNSET,
            )
            write_durably(partial / MANIFEST, seal(manifest, self._key()))
            sync(partial)
            # The run was resumed from an earlier step and came here again.
            if target.exists():
                shutil.rmtree(self._place_aside(step), ignore_errors=True)
                target.rename(self._place_aside(step))
                self._whole.discard(step)
            partial.rename(target)
            sync(self.directory)
        except OSError as error:
            self.abandon(step)
            self.restore()
            raise self._refusal(error, target) from error
        self._whole.add(step)
        if self._place_aside(step).exists():
            # One that cannot be removed now is removed by the next save.
            with contextlib.suppress(OSError):
                self._remove(self._place_aside(step))
        self._begun.discard(step)
        return target

    def abandon(self, step: int) -> None:
        """Removes the directory that ``begin`` made for that step."""
        shutil.rmtree(self.partial(step), ignore_errors=True)
        self._begun.discard(step)

    def keep(
        self,
        rule: Retention,
        measured: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
    ) -> list[int]:
        """Removes the checkpoints that the rule does not keep and returns their steps.

        measured: step -> metrics that were known only after its checkpoint was saved.

        Damaged ones are left alone. At least one of those that stay has been hashed by this
        process. If none has been, the newest that proves to be whole stays too; if no checkpoint is
        whole, nothing is removed.
        """
        metrics = {}
        for step in self.steps():
            manifest, problems = inspect(self.directory / name_of(step), hashes=False)
            if manifest is not None and not problems:
                metrics[step] = {**manifest.metrics, **measured.get(step, {})}
        steps_to_keep = rule.steps_to_keep(metrics)
        doomed = sorted(metrics.keys() - steps_to_keep)
        if doomed and not steps_to_keep & self._whole:
            whole = self._newest_whole(sorted(metrics))
            doomed = [step for step in doomed if step != whole] if whole is not None else []
        for step in doomed:
            self._remove(self.directory / name_of(step))
            self._whole.discard(step)
        return doomed

    def _newest_whole(self, steps: Sequence[int]) -> int | None:
        """Returns the last of these steps whose checkpoint is whole.

        All of each checkpoint that it tries is read.
        """
        for step in reversed(steps):
            if not self.verify(step):
                return step
        return None

    def _remove(self, checkpoint: Path) -> None:
        """Removes a checkpoint. Under another name: half removed, it must not look like one, nor
        like one that ``restore`` moves back.
        """
        removed = checkpoint.with_name(checkpoint.name.removesuffix(_REPLACED) + _REMOVED)
        shutil.rmtree(removed, ignore_errors=True)
        checkpoint.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    def restore(self) -> None:
        """Moves back the checkpoints that were set aside for new ones which never came.

        That is what a crash leaves that ends ``commit`` between its two renames. Only the process
        that writes here may call this: before any other it may be the ``commit`` that goes on. One
        that cannot be moved stays as it is.
        """
        for step in self._left_aside():
            with contextlib.suppress(OSError):
                self._place_aside(step).rename(self.directory / name_of(step))
                sync(self.directory)

    def _left_aside(self) -> list[int]:
        """Returns the steps whose checkpoint is set aside while its place is empty, and which this
        object is not saving.
        """
        return [step for step in self.steps() if step not in self._begun and self._is_aside(step)]

    def _is_aside(self, step: int) -> bool:
        return self._place_aside(step).exists() and not (self.directory / name_of(step)).exists()

    # -- reading -----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Returns the steps that have a committed checkpoint, whole or not, in order.

        One that ``restore`` would move back is counted.
        """
        files = os.listdir(self.directory) if self.directory.is_dir() else []
        names = {file.removesuffix(_REPLACED) for file in files}
        return sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))

    def newest_saved(self) -> tuple[Path, str] | None:
        """Returns the newest checkpoint that looks whole, and the version of the core in its lock.

        No part is read. None where there is none; the version is "" where it is not known.
        """
        for step in reversed(self.steps()):
            path = self.directory / name_of(step)
            manifest, problems = inspect(path, hashes=False)
            if manifest is not None and not problems:
                return path, manifest.lock.get("gcore-core", "")
        return None

    def verify(self, step: int) -> list[str]:
        """Returns every problem of a checkpoint; none when it is whole. All of it is read."""
        _, problems = inspect(self.directory / name_of(step))
        if problems:
            self._whole.discard(step)
        else:
            self._whole.add(step)
        return problems

    def open(self, step: int | None = None) -> OpenedCheckpoint:
        """Returns the checkpoint of ``step``, or the newest one that is whole.

        Raises CheckpointError when there is none.
        """
        notes: list[str] = []
        candidates = [step] if step is not None else list(reversed(self.steps()))
        for candidate in candidates:
            path = self.directory / name_of(candidate)
            manifest, problems = inspect(path)
            if self._is_aside(candidate):
                problems = ["it was being replaced when the run ended; g-core resume moves it back"]
            if manifest is not None and not problems:
                self._whole.add(candidate)
                return OpenedCheckpoint(path=path, manifest=manifest, notes=tuple(notes))
            more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
            notes.append(f"{path.name} is refused: {problems[0]}{more}")
        if step is None:
            problem = "there is no checkpoint that is whole."
        else:
            problem = f"the checkpoint of step {step} is not whole."
        raise CheckpointError(
            problem,
            where=str(self.directory),
            why="\n".join(notes[:3]),
            todo=f"every problem: g-core checkpoint verify {self._run_dir}",
            notes=notes,
        )

    # -- the directory -----------------------------------------------------------------------------

    def _partial_name(self, step: int) -> str:
        return name_of(step) + _PARTIAL

    def partial(self, step: int) -> Path:
        """Returns the directory that ``begin`` makes for a step."""
        return self.directory / self._partial_name(step)

    def _place_aside(self, step: int) -> Path:
        return self.directory / (name_of(step) + _REPLACED)

    def _key(self) -> bytes:
        try:
            return ensure_key(self._run_dir)
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from error

    def _check_room(self) -> None:
        """Raises OSError when the disk has less room than the newest checkpoint takes."""
        steps = self.steps()
        if not steps:
            return
        newest, _ = inspect(self.directory / name_of(steps[-1]), hashes=False)
        if newest is not None and newest.nbytes > shutil.disk_usage(self.directory).free:
            raise OSError(
                errno.ENOSPC, f"the one before has {newest.nbytes} bytes, and fewer are free"
            )

    def _refusal(self, error: OSError, path: Path) -> CheckpointError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        steps = self.steps()
        if steps:
            newest = f"the newest one that is there: {name_of(steps[-1])}"
        else:
            newest = "there is none before it"
        name = path.name.removesuffix(_PARTIAL)
        if full:
            problem = f"no space is left for {name}."
            todo = f"free some space, or keep fewer checkpoints; {newest}"
        else:
            problem = f"{name} could not be written."
            todo = f"see to that directory; {newest}"
        file = f" ({error.filename})" if error.filename else ""
        return CheckpointError(
            problem,
            where=str(self.directory),
            why=f"the system says: {error.strerror}{file}",
            todo=todo,
            full_disk=full,
        )


def _settle(partial: Path) -> dict[str, Part]:
    """Returns each part's size and hash by name, once all parts and folders are on the disk."""
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
        for future in synced:
            future.result()  # raises when it failed
    return parts
