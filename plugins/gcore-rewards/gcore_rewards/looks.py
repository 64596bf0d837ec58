"""Tries a verifier on rows, in a helper process; see ``Look``.

An empty answer must not be right, and the row's own answer must be: else the reward says nothing of
what the policy does, or the rows are not what the verifier reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import GcoreError
from gcore_core.contract.looking import Note
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import Score, ScoredRecord
from gcore_rewards.checks import TRIED
from gcore_rewards.code import CodeReward
from gcore_rewards.config import CodeConfig, MathConfig, VerifierConfig
from gcore_rewards.expressions import MathReward
from gcore_rewards.verifiers import ExactMatch, Numeric, shortened

_MAKERS: dict[str, tuple[Any, Any]] = {
    "rewards/exact-match": (ExactMatch, VerifierConfig),
    "rewards/numeric": (Numeric, VerifierConfig),
    "rewards/math": (MathReward, MathConfig),
    "rewards/code": (CodeReward, CodeConfig),
}
#: Verifiers of which a row's own answer is a completion as it stands.
_READ_BARE = ("rewards/exact-match", "rewards/numeric")
_MOST_TOLD = 3


def problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for rows that a verifier does not judge as it should, at most a few.

    Notes how many rows rewards/math compares by their letters.

    arguments: ``where``: the reward's section; ``use`` and ``config``, as the section has them;
        ``rows``: each with the name of its ``dataset``, its number ``row``, its ``fields`` and its
        ``fault``: why its value is not among them.
    Raises what making the verifier raises.
    """
    use = arguments["use"]
    make, config_class = _MAKERS[use]
    config = msgspec.convert(arguments["config"], config_class)
    key = TRIED[use][0]
    field = getattr(config, key)
    context = WorkerContext(role="scorer")
    # A pattern says where in a completion the answer stands; no row's own answer stands so.
    of_own = make(replace(config, pattern=None), context) if use in _READ_BARE else None
    with ExitStack() as closing:
        verifier = make(config, context)
        if hasattr(verifier, "close"):
            closing.callback(verifier.close)
        told = [_fault(row, field, verifier, of_own) for row in arguments["rows"]]
        by_letters = [
            row
            for row, fault in zip(arguments["rows"], told, strict=True)
            if use == "rewards/math" and not fault and _is_by_letters(verifier, row)
        ]
    if by_letters:
        row = by_letters[0]
        yield Note(
            f"{arguments['where']}.config.{key}: {len(by_letters)} of {len(arguments['rows'])} "
            f"rows that were looked at are compared by their letters, since math-verify does not "
            f"read all of their answers; row {row['row']} of {row['dataset']}: "
            f"{shortened(row['fields'][field])!r}."
        )
    faults = list(filter(None, told))
    for fault in faults[:_MOST_TOLD]:
        yield f"{arguments['where']}.config.{key}: {fault}."
    if len(faults) > _MOST_TOLD:
        yield (
            f"{arguments['where']}.config.{key}: so it is in {len(faults)} of "
            f"{len(arguments['rows'])} rows that were looked at; correct or drop them, or leave "
            f"them out by {arguments['where']}.when."
        )


def _fault(row: Mapping[str, Any], field: str, verifier: Any, of_own: Any) -> str:
    """Returns what is wrong with a row or its verifier; "": nothing.

    of_own: judges the row's own answer; None: nothing does.
    """
    answer = row["fields"].get(field)
    place = f"row {row['row']} of {row['dataset']}"
    if row["fault"]:
        return f"{place}: {row['fault']}, which this reward cannot read"
    try:
        empty = _score(verifier, row, "")
        if answer is not None and hasattr(verifier, "read_answer"):
            verifier.read_answer(_record(row, "").prompt)
        text = answer if isinstance(answer, str) else json.dumps(answer)
        own = _score(of_own, row, text) if of_own and answer is not None else None
    except GcoreError as error:
        return error.sentence()
    except Exception as error:  # isolation point: whatever it is, a run would end by it
        return f"{place}: it raises {type(error).__name__}: {error}"
    if empty.value is None:
        return empty.reason
    if empty.value > 0:
        return f"{place}: an empty answer gets {empty.value:g}, since {field} is {answer!r}"
    if own is not None and not own.value:
        value = own.reason if own.value is None else f"{own.value:g}"
        return f"{place}: its own answer, {shortened(answer)!r}, gets {value}"
    return ""


def _is_by_letters(verifier: MathReward, row: Mapping[str, Any]) -> bool:
    return verifier.read_answer(_record(row, "").prompt).by_letters


def _score(verifier: Any, row: Mapping[str, Any], text: str) -> Score:
    scores: list[Score] = verifier.score([_record(row, text)])
    return scores[0]


def _record(row: Mapping[str, Any], text: str) -> ScoredRecord:
    return ScoredRecord(
        ordinal=0,
        sample=0,
        prompt=Prompt(row=row["row"], text="", fields=dict(row["fields"])),
        text=text,
        status="finished",
        columns={},
    )
