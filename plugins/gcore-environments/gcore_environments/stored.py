"""Episodes as lines of JSON, so that other rewards can score them without drawing them again.

Each line has an episode's row, how it ended, and its trace (``gcore_environments.traces``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gcore_core.contract.errors import DataError, GcoreError
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import ScoredRecord
from gcore_environments.traces import columns_of_trace, trace_of

#: The folder in a run's directory; each process that scores has a file of its own there.
FOLDER = "episodes"
#: The folder in it with those of evaluations, whose rows are not to be trained on.
EVALUATION = "evaluation"


def line_of(record: ScoredRecord) -> str:
    """Returns an episode as a line."""
    told = {
        "ordinal": record.ordinal,
        "sample": record.sample,
        "status": record.status,
        "prompt": msgspec.to_builtins(record.prompt),
        "trace": trace_of(record.columns),
    }
    return json.dumps(told, ensure_ascii=False) + "\n"


def stored_episodes(path: str | Path) -> Iterator[ScoredRecord]:
    """Yields the episodes of a file, as rewards see them. One in which nobody spoke is not there.

    Raises DataError, naming the line, for one that is no episode.
    """
    with open(path, "rb") as file:  # a line that was cut may end in the middle of a character
        for number, line in enumerate(file, 1):
            try:
                record = _record_of(json.loads(line))
            except GcoreError as error:
                raise DataError(
                    error.what,
                    where=": ".join(filter(None, [f"{path}, line {number}", error.where])),
                    why=error.why,
                    todo=error.todo or "Take the line out.",
                ) from error
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"the line is no episode: {type(error).__name__}: {error}.",
                    where=f"{path}, line {number}",
                    why="A run that was killed may have left the last line unfinished.",
                    todo="Take the line out.",
                ) from error
            if record is not None:
                yield record


def _record_of(told: Any) -> ScoredRecord | None:
    if not told["trace"]["turns"]:
        return None
    columns = columns_of_trace(told["trace"])
    return ScoredRecord(
        ordinal=told["ordinal"],
        sample=told["sample"],
        prompt=msgspec.convert(told["prompt"], Prompt),
        text=columns["text"].tobytes().decode(),
        status=told["status"],
        columns=columns,
    )
