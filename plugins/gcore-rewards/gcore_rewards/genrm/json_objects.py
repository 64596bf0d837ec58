"""Finds the JSON object that holds a judge's verdict.

A judge may copy what a completion says into a string of its object, and forget to escape it. So a
text is given up when any of its objects is broken, or when a brace is closed that nothing opened:
what is whole in such a text may be the completion's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from gcore_rewards.genrm.parser_config import plain

# Braces that stand for something else, as in formulas, have no quotation mark behind them.
_BEGINNING = re.compile(r'\{\s*["}]')
_BRACE = re.compile(r"[{}]")


def find_object(text: str, keys: Collection[str]) -> dict[str, Any] | None:
    """Returns the JSON object in a text that has all keys; None where there is none.

    An object counts before those inside it. Where several have the keys, all must say the same, or
    there is none: any of them may be a quotation.

    keys: names as ``plain`` gives them; those of the result are such names too.
    """
    bearers = [bearer for outer in _outer_objects(text) for bearer in _bearers(outer, keys)]
    values = [[bearer[key] for key in keys] for bearer in bearers]
    return bearers[0] if bearers and values.count(values[0]) == len(values) else None


def _outer_objects(text: str) -> list[dict[str, Any]]:
    """Returns the objects that are in no other one; none where the text is to be given up.

    The time is linear in the text: every character is decoded once, and the first object that is
    broken ends the search.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_unambiguous)
    objects = []
    outside = []
    end = 0
    while match := _BEGINNING.search(text, end):
        outside.append(text[end : match.start()])
        try:
            value, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            return []
        objects.append(value)
    outside.append(text[end:])
    return [] if _closes_too_many("".join(outside)) else objects


def _closes_too_many(text: str) -> bool:
    """Whether a brace is closed that was not opened."""
    depth = 0
    if "}" not in text:
        return False
    for brace in _BRACE.finditer(text):
        depth += 1 if brace[0] == "{" else -1
        if depth < 0:
            return True
    return False


def _unambiguous(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object by plain keys, with None for a key that stands there with two values."""
    by_name: dict[str, Any] = {}
    for key, value in pairs:
        name = plain(key)
        by_name[name] = None if name in by_name and by_name[name] != value else value
    return by_name


def _bearers(outer: dict[str, Any], keys: Collection[str]) -> list[dict[str, Any]]:
    """Returns the objects that have all keys and are nearest to the outside: ``outer``, or inner
    ones.
    """
    level: list[Any] = [outer]
    while level:
        bearers = [x for x in level if isinstance(x, dict) and all(key in x for key in keys)]
        if bearers:
            return bearers
        level = [inner for value in level for inner in _inside(value)]
    return []


def _inside(value: Any) -> list[Any]:
    """Returns the objects and lists directly inside an object or a list."""
    inner = value.values() if isinstance(value, dict) else value
    return [x for x in inner if isinstance(x, dict | list)]
