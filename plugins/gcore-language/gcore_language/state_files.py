"""Saves a trainer's state as safetensors and one JSON file.

Any trainer of the same model can load it, on any number of ranks.

A file holds tensors named ``<part>/<Hugging Face name>``. The parts are weight, and AdamW's exp_avg
and exp_avg_sq. All are float32 in Hugging Face layout. Either a tensor is whole in one file, or its
rows are in several: those of the first file, then those of the next, in the order of the files'
names (``state-<rank>-...``).

The JSON file names its format, as that of every format does. The format of this module is called
whole.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gcore_core.contract.errors import CheckpointError, DataError
from gcore_language.weights import spec_of, to_bytes

#: The format of this module, by the word that a trainer's ``config.checkpoint`` has for it.
WHOLE = "whole"
#: AdamW's state of one parameter.
MOMENTS = ("exp_avg", "exp_avg_sq")
#: When this many bytes of whole tensors are held, they are written to a file.
_FILE_BYTES = 2**31
_WRITE_BYTES = 1 << 24
# Written bytes are synced to disk this often: progress then means that they are there, and few of
# them wait in memory.
_SYNC_BYTES = 1 << 28
_NUMBERS = "state.json"


# -- numbers ---------------------------------------------------------------------------------------


def write_numbers(directory: Path, numbers: Mapping[str, Any], form: str = WHOLE) -> None:
    """Writes the JSON file of a state in the format ``form``.

    Raises CheckpointError when the system refuses to write.
    """
    file = directory / _NUMBERS
    try:
        file.write_text(json.dumps({"format": form, **numbers}), encoding="utf-8")
    except OSError as error:
        raise refused(file, error) from error


def read_numbers(directory: Path) -> tuple[str, dict[str, Any]]:
    """Returns the format of a saved state and its numbers.

    Raises DataError when the JSON file cannot be read.
    """
    file = directory / _NUMBERS
    try:
        numbers: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError("trainer state cannot be read.", where=str(file), why=str(error)) from error
    return numbers.pop("format", WHOLE), numbers


def load_numbers(directory: Path) -> dict[str, Any]:
    """Returns the numbers of a state in this module's format.

    Raises DataError for a state in another format, or when the JSON file cannot be read.
    """
    form, numbers = read_numbers(directory)
    if form != WHOLE:
        raise DataError(
            f"this state is in the format {form}, which this trainer cannot load.",
            where=str(directory),
            why=(
                f"It was saved with config.checkpoint: {form}; every trainer loads what {WHOLE} "
                "saves."
            ),
            todo=(
                "Go on for a step with the trainer that saved it and config.checkpoint: "
                f"{WHOLE}, then with this one."
            ),
        )
    return numbers


def take_steps(numbers: dict[str, Any], directory: Path) -> int:
    """Removes AdamW's step counts from the numbers, and returns the one count of all tensors.

    It is for optimizers that have a single count. Raises DataError when the counts differ.
    """
    steps = set(numbers.pop("optimizer_steps").values())
    if len(steps) > 1:
        raise DataError(
            f"the tensors of this state have {len(steps)} different step counts, but this "
            "trainer keeps one for all tensors.",
            where=str(directory / _NUMBERS),
        )
    return int(max(steps, default=0))


# -- writing ---------------------------------------------------------------------------------------


def save_state(
    directory: Path,
    parts: Iterable[tuple[str, Tensor]],
    numbers: Mapping[str, Any],
    *,
    writes: bool,
) -> None:
    """Writes ("part/name", whole tensor) pairs and ``numbers``.

    Every rank calls it, because making a tensor whole may need all of them; one rank ``writes``.

    Raises CheckpointError on a rank that could not write or not make ``directory``, and only after
    the last tensor, so that the other ranks are not left waiting for it.
    """
    files = _Files(directory)
    for key, whole in parts:
        if writes:
            files.add(key, whole)
    files.end()
    if writes:
        write_numbers(directory, numbers)


class _Files:
    """Writes tensors to files of limited size, one file after the other.

    It makes their directory. After that or a file has failed, nothing more is written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self._tensors: dict[str, Tensor] = {}
        self._error: CheckpointError | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._error = refused(directory, error)

    def add(self, key: str, whole: Tensor) -> None:
        if self._error is not None:
            return
        self._tensors[key] = whole.detach().cpu().contiguous().clone()
        if sum(tensor.nbytes for tensor in self._tensors.values()) >= _FILE_BYTES:
            self._write()

    def end(self) -> None:
        """Writes the tensors that are left. Raises the first error, if there was one."""
        if self._tensors:
            self._write()
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        tensors = self._tensors
        self._tensors = {}
        try:
            write_tensors(self._directory / f"state-{self._count:05d}.safetensors", tensors)
        except CheckpointError as error:
            self._error = error
        self._count += 1


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], wrote: Callable[[], None] | None = None
) -> None:
    """Writes a safetensors file.

    With ``wrote`` the file is on the disk when this returns. Without it syncing is left to whoever
    commits the file, who can hash it at the same time. Rejected: the library's own writer, which
    holds a second copy of all tensors.

    wrote: called after each piece that is written.

    Raises CheckpointError when the system refuses to write.
    """
    # dtypes with larger items first, as the library orders them, so that each tensor is aligned
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    try:
        with file.open("wb", buffering=0) as stream:
            _write_all(stream.fileno(), memoryview(_header(ordered)))
            since_sync = 0
            for part in _parts(ordered):
                _write_all(stream.fileno(), part)
                if wrote is not None:
                    since_sync += len(part)
                    if since_sync >= _SYNC_BYTES:
                        os.fdatasync(stream.fileno())
                        since_sync = 0
                    wrote()
            if wrote is not None:
                os.fsync(stream.fileno())
    except OSError as error:
        raise refused(file, error) from error


def refused(file: Path, error: OSError) -> CheckpointError:
    """Returns the error of a file that the system refuses to write."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return CheckpointError(
        "trainer state could not be written.",
        where=str(file),
        why=f"the system says: {error.strerror}",
        todo="free some space" if full else "see to that directory",
        full_disk=full,
    )


def _header(ordered: list[tuple[str, Tensor]]) -> bytes:
    """Makes the header: its length in 8 bytes, then JSON, padded to a multiple of 8 bytes."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        spec = spec_of(name, tensor)
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def _parts(ordered: list[tuple[str, Tensor]]) -> Iterator[memoryview]:
    """Yields the bytes of all tensors in order, in pieces of at most ``_WRITE_BYTES``."""
    for _, tensor in ordered:
        view = to_bytes(tensor).data
        for start in range(0, len(view), _WRITE_BYTES):
            yield view[start : start + _WRITE_BYTES]


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


# -- reading ---------------------------------------------------------------------------------------


def load_parts(
    directory: Path, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (part, name, whole tensor), one at a time.

    shapes: Hugging Face name -> shape of each tensor of the model.

    Raises DataError when a file cannot be read, for a tensor that the model does not have so, and
    after the last tensor when a weight is missing.
    """
    missing = set(shapes)
    for key, whole in _stored(directory):
        part, _, name = key.partition("/")
        if tuple(whole.shape) != shapes.get(name):
            expected = f"shape {shapes[name]}" if name in shapes else "no such tensor"
            raise DataError(
                (
                    f"trainer state is of another model: {name} has shape {tuple(whole.shape)}, "
                    "the "
                    f"model {expected}."
                ),
                where=str(directory),
            )
        if part == "weight":
            missing.discard(name)
        yield part, name, whole
    if missing:
        raise DataError(
            f"trainer state lacks weight/{min(missing)}.",
            where=str(directory),
            why=f"{len(missing)} in all",
        )


def _stored(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields (key, whole tensor), in the order of the first file.

    A tensor whose rows are in several files is joined.
    """
    holders: dict[str, list[Any]] = {}
    with ExitStack() as stack:
        for path in sorted(directory.glob("state-*.safetensors")):
            try:
                file = stack.enter_context(safe_open(path, "pt"))
            except (OSError, SafetensorError) as error:
                raise DataError(
                    "trainer state cannot be read.", where=str(path), why=str(error)
                ) from error
            for key in file.keys():  # noqa: SIM118 (not a dict)
                holders.setdefault(key, []).append(file)
        for key, files in holders.items():
            rows = [file.get_tensor(key) for file in files]
            yield key, rows[0] if len(rows) == 1 else torch.cat(rows)
