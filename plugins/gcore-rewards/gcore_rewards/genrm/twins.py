"""Makes a judge's settings fit a random model, whose answers follow no instruction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: A digit stands somewhere in most answers; after so many questions in almost every one.
_RETRIES = 40


def twin_of_judge(node: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns settings by which any digit in an answer is a score.

    The questions, votes and weights stay, so that the judge is asked as often as in the job.
    """
    config = {
        "parser": {"pattern": r"(?P<score>\d)", "line": None, "key": None, "choices": None},
        "scale": [0, 9],
        "retries": _RETRIES,
        "stop_after": 0,
        "accept_truncated": True,
        "greedy": None,
        "completion_pattern": None,
    }
    return {"config": config}


def twin_of_rubric(node: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the same for a rubric, whose criteria are asked for one by one."""
    judge = twin_of_judge(node, directory)
    return {"config": {**judge["config"], "together": False}}
