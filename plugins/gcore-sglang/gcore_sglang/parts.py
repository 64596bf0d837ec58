"""Joins what SGLang sampled of one sample in several requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
