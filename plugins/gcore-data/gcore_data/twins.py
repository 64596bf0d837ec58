"""Makes small data sets with the columns of known ones, for jobs that are to be tried without them.

Their rows say nothing that the original says: sums of small numbers, in the original's form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gcore_data.config import HubConfig
from gcore_data.extraction import PLACE, RULES
from gcore_data.formats import places_of

_ROWS = 24
#: How a rule's answer is written.
_WRITTEN = {
    "gsm8k": "The sum is {answer}.\n#### {answer}",
    "boxed": r"The sum is $\boxed{{{answer}}}$.",
    "number": "The sum is {answer}",
}
#: What means the hub: it is left out with the name.
_OF_HUB = ("subset", "revision", "streaming")


def twin_of_hub(node: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Writes rows with the columns of a data set of the hub; returns the settings that read them.

    Files that lie here stay; only their first rows are used.
    """
    settings = dict(node.get("config") or {})
    if not settings.get("path"):
        return {}
    config = HubConfig(**settings)
    if config.is_local:
        return {"config": {"limit": min(_ROWS, config.limit or _ROWS)}}
    name = "--".join(filter(None, [config.path, config.subset, config.split.partition("[")[0]]))
    place = directory / name.replace("/", "--")
    place.mkdir(parents=True, exist_ok=True)
    make = _KNOWN.get(config.path) or (lambda number, sum_: _by_settings(config, number, sum_))
    rows = [make(number, f"{number}+{number % 7}") for number in range(_ROWS)]
    if config.images:
        _write_picture(place / "picture.ppm")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (place / "rows.jsonl").write_text(text, encoding="utf-8")
    left_out = {key: None for key in _OF_HUB if key in settings}
    return {
        "config": {
            **left_out,
            "path": str(place / "rows.jsonl"),
            "split": "train",
            "limit": min(_ROWS, config.limit or _ROWS),
        }
    }


def _sum(number: int) -> int:
    return number + number % 7


def _by_settings(config: HubConfig, number: int, asked: str) -> dict[str, Any]:
    """Returns a row with the columns that the settings name, for a data set that is not known."""
    fields = {*places_of(config.template), *config.columns, *config.extract}
    if not {"prompt", *places_of(config.template)} & fields:
        fields.add("prompt")
    row: dict[str, Any] = {}
    for field in sorted(fields):
        rule = config.extract.get(field, "")
        text = _written(rule, number) if rule else f"What is {asked}?"
        if not rule and field not in ("prompt", *places_of(config.template)):
            text = str(_sum(number))
        _put(row, config.columns.get(field, field), text)
    if config.images:
        row[config.images] = ["picture.ppm"]
    return row


def _written(rule: str, number: int) -> str:
    """Returns a text in which the rule finds the sum."""
    answer = str(_sum(number))
    return _WRITTEN[rule].format(answer=answer) if rule in RULES else rule.replace(PLACE, answer)


def _put(row: dict[str, Any], column: str, value: Any) -> None:
    """Puts a value at a column; dots lead into objects."""
    *path, last = column.split(".")
    for key in path:
        row = row.setdefault(key, {})
    row[last] = value


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _gsm8k(number: int, asked: str) -> dict[str, Any]:
    return {"question": f"What is {asked}?", "answer": _written("gsm8k", number)}


def _competition(number: int, asked: str) -> dict[str, Any]:
    return {
        "problem": f"Compute ${asked}$.",
        "level": "Level 1",
        "type": "Prealgebra",
        "solution": _written("boxed", number),
    }


def _preference(number: int, asked: str) -> dict[str, Any]:
    user = _turn("user", f"What is {asked}?")
    return {
        "chosen": [user, _turn("assistant", str(_sum(number)))],
        "rejected": [user, _turn("assistant", str(_sum(number) + 1))],
        "score_chosen": 8.0,
        "score_rejected": 3.0,
    }


def _asked(number: int, asked: str) -> dict[str, Any]:
    return {"prompt": [_turn("user", f"What is {asked}?")]}


def _geometry(number: int, asked: str) -> dict[str, Any]:
    return {
        "images": ["picture.ppm"],
        "problem": f"<image>Find {asked}.",
        "answer": str(_sum(number)),
    }


def _verified(number: int, asked: str) -> dict[str, Any]:
    return {
        "data_source": "sums",
        "prompt": [_turn("user", f"What is {asked}?")],
        "reward_model": {"style": "rule", "ground_truth": str(_sum(number))},
    }


#: Name on the hub -> a function that gives a row with its columns.
_KNOWN: Mapping[str, Callable[[int, str], dict[str, Any]]] = {
    "BytedTsinghua-SIA/AIME-2024": _verified,
    "BytedTsinghua-SIA/DAPO-Math-17k": _verified,
    "DigitalLearningGmbH/MATH-lighteval": _competition,
    "hiyouga/geometry3k": _geometry,
    "openai/gsm8k": _gsm8k,
    "trl-lib/ultrafeedback-prompt": _asked,
    "trl-lib/ultrafeedback_binarized": _preference,
}


def _write_picture(place: Path) -> None:
    """Writes a red diagonal on white as a portable pixmap, which needs no library to write."""
    size = 16
    rows = [[b"\xc8\0\0" if x == y else b"\xff\xff\xff" for x in range(size)] for y in range(size)]
    pixels = b"".join(b"".join(row) for row in rows)
    place.write_bytes(b"P6 %d %d 255\n" % (size, size) + pixels)
