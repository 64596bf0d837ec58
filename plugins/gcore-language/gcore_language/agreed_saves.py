"""Lets all ranks of a trainer end a save in the same way, where the disk of one of them is full.

A rank that raises alone does not come to the next collective: the others wait for it there, or
meet it in another one. So an error of writing is put off until the ranks meet; then all raise it.

    rank 0                          rank 1
    with agreed(...):               with agreed(...):
        torch.save: no space            torch.save
    (exchange of errors)            (exchange of errors)
    CheckpointError                 the same CheckpointError
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import CheckpointError
from gcore_language.prompts import first_lines
from gcore_language.ranks import Ranks
from gcore_language.state_files import refused

# torch.save writes zip files in C++, where the system's error becomes a RuntimeError. Only its text
# tells it from errors of another kind, such as those of a device.
_TORCH_WRITES = ("inline_container.cc", "PytorchStreamWriter failed", "iostream error")


@contextlib.contextmanager
def agreed(ranks: Ranks, directory: Path) -> Iterator[None]:
    """Runs a part of a save that writes to ``directory``; all ranks meet at its end.

    Each rank must come to the end of the block or to an error of writing, whatever the others do.

    Raises the same CheckpointError on every rank when one of them could not write: that of the
    first such rank. Any other error is raised at once, on its rank alone.
    """
    own: CheckpointError | None = None
    try:
        yield
    except (CheckpointError, OSError, RuntimeError) as error:
        own = _of_writing(error, directory)
        if own is None:
            raise
    told = None if own is None else [own.what, own.where, own.why, own.todo, own.facts]
    for first in ranks.gather(told):
        if first is not None:
            what, where, why, todo, facts = first
            raise CheckpointError(what, where=where, why=why, todo=todo, **facts)


@contextlib.contextmanager
def errors_put_off(*writes: tuple[Any, str]) -> Iterator[None]:
    """Has functions of a library return None where they could not write, and raises at the end.

    It is for functions that write on some ranks between the collectives of all.

    writes: (the object that has a function, its name).

    Raises the first error of writing that one of them raised.
    """
    errors: list[Exception] = []

    def careful(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except (OSError, RuntimeError) as error:
                if not _is_of_writing(error):
                    raise
                errors.append(error)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in writes:
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:  # its class has the function
                stack.callback(delattr, owner, name)
            setattr(owner, name, careful(getattr(owner, name)))
        yield
    if errors:
        raise errors[0]


def _is_of_writing(error: Exception) -> bool:
    """Whether the system refused to write."""
    return isinstance(error, OSError) or any(text in str(error) for text in _TORCH_WRITES)


def _of_writing(error: Exception, directory: Path) -> CheckpointError | None:
    """Returns an error of writing as CheckpointError; None for an error of another kind."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError):
        return refused(Path(error.filename or directory), error)
    if not _is_of_writing(error):
        return None
    return CheckpointError(
        "trainer state could not be written.",
        where=str(directory),
        why=f"torch says: {first_lines(error)}",
        todo="see that there is space, and that this user may write there",
    )
