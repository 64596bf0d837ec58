"""Provides ``sglang/deterministic``: a sample's seed decides its tokens, and nothing beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gcore_core.contract.context import WorkerContext
from gcore_sglang.config import SglangGeneratorConfig
from gcore_sglang.engine import SglangGenerator

#: Keys and values that another request left are not read: what decoding wrote may have other bits
#: than what reading a prompt writes.
_ARGUMENTS: dict[str, Any] = {"enable_deterministic_inference": True, "disable_radix_cache": True}
#: A prompt is read whole, whatever stands beside it. The fraction is then not found by itself; the
#: cache takes less, see `kv_cache_tokens`.
_ON_CPU: dict[str, Any] = {"chunked_prefill_size": -1, "mem_fraction_static": 0.5}


class DeterministicSglangGenerator(SglangGenerator):
    """A generator whose samples are repeated bit for bit from their seeds.

    On a CPU it is slower, since rows are multiplied one by one (see ``gcore_sglang.invariant``).
    """

    def __init__(self, config: SglangGeneratorConfig, context: WorkerContext) -> None:
        import torch

        arguments = _ARGUMENTS if torch.cuda.is_available() else _ARGUMENTS | _ON_CPU
        super().__init__(config, replace(context, engine={**context.engine, **arguments}))
