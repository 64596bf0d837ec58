"""Joins what SGLang sampled of one sample in several requests, and reads whose weights did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def joined(before: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one answer of SGLang for two that follow each other.

    before: of the request that was aborted: ``output_ids`` and ``meta_info``.
    later: of the one that went on from there, or an empty mapping. Its end is that of both.
    """
    first, second = before["meta_info"], later.get("meta_info", {})
    lists = {
        name: [*first.get(name, []), *second.get(name, [])]
        for name in ("output_token_logprobs", "weight_versions")
    }
    return {
        "output_ids": [*before["output_ids"], *later.get("output_ids", [])],
        "meta_info": {**first, **second, **lists},
    }


def action_versions(answer: Mapping[str, Any], held: int) -> np.ndarray:
    """Returns the weights version of each action of an answer, int32[A].

    It is shorter than the answer where SGLang names the versions of some actions alone.

    held: the version that SGLang holds, for an answer in which it names none.
    """
    count = len(answer.get("output_ids", []))
    spans = answer.get("meta_info", {}).get("weight_versions", [])
    if not spans:
        return np.full(count, held, np.int32)
    # Of a sample that was cut the places of each part count from 0, so only lengths are read.
    lengths = [max(span["end"] - span["start"], 0) for span in spans]
    return np.repeat(np.array([int(span["version"]) for span in spans], np.int32), lengths)[:count]
