"""Reads which token ids end an answer, from the files that lie with a model's weights.

Every engine asks here, so that all end an answer at the same tokens, and what no vocabulary has is
refused before an engine meets it. Light: neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gcore_core.contract.errors import DataError

_CONFIG = "config.json"
#: The files that name ids.
FILES = (_CONFIG, "generation_config.json")
_END = "eos_token_id"
#: Ids that libraries read from these files as well, each one number or null.
_SINGLE = ("bos_token_id", "pad_token_id")


def end_ids(directory: Path, size: int | None, tokenizer: Any) -> list[int]:
    """Returns the ids that end an answer, in ascending order: the union of what all files name.

    A file that is missing, a key that is missing or null, and an empty list name none.

    directory: of the model.
    size: how many ids the model has; None where that is not known.
    tokenizer: the model's; its end-of-sequence token counts, too.

    Raises DataError for a file that is not JSON, and for an id that the model does not have.
    """
    ids = {found for file in FILES for found in _ids_in(directory / file, size)}
    own = tokenizer.eos_token_id
    if own is not None:
        ids.add(_required_id(own, size, f"the tokenizer in {directory}: {_END}"))
    return sorted(ids)


def _ids_in(file: Path, size: int | None) -> Iterator[int]:
    """Yields the end ids that a file names; checks its other ids."""
    for where, settings in _sections(file):
        for key in _SINGLE:
            value = settings.get(key)
            # -1 is how some say "none"
            if value is not None and not (_is_id(value) and value >= -1):
                raise _no_id(value, f"{where}: {key}", size)
            if value is not None and file.name == _CONFIG and size is not None and value >= size:
                # an embedding cannot be made with padding that it does not have
                raise _no_id(value, f"{where}: {key}", size)
        value = settings.get(_END)
        for one in value if isinstance(value, list) else [value]:
            if value is not None:
                yield _required_id(one, size, f"{where}: {_END}")


def refuse_unreadable(directory: Path) -> None:
    """Raises what ``end_ids`` raises for files of a model that are no mapping.

    Libraries that meet such a file later blame others for it.
    """
    for file in FILES:
        for _ in _sections(directory / file):
            pass


def _sections(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields a file's name and its settings; those of a text model within another, too."""
    if not file.is_file():
        return
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError("the file is not JSON.", where=str(file), why=str(error)) from error
    if not isinstance(settings, dict):
        raise DataError("the file holds no mapping.", where=str(file))
    yield str(file), settings
    if isinstance(settings.get("text_config"), dict):
        yield f"{file}: text_config", settings["text_config"]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _required_id(value: Any, size: int | None, where: str) -> int:
    if not _is_id(value) or value < 0 or (size is not None and value >= size):
        raise _no_id(value, where, size)
    return int(value)


def _no_id(value: Any, where: str, size: int | None) -> DataError:
    has = "" if size is None else f", and the model has the ids 0 to {size - 1}"
    return DataError(
        f"{json.dumps(value)[:60]} is no token's id{has}.",
        where=where,
        why="no answer would ever end with it" if where.endswith(_END) else "",
        todo="write the right number there, or remove it; it may be left from another vocabulary",
    )
