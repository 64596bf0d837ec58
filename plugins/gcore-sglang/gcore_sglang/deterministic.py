"""Provides ``sglang/deterministic``: a sample's seed decides its tokens, and nothing beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gcore_language.engine_arguments import with_own

from gcore_core.contract.context import WorkerContext
from gcore_sglang.config import SglangGeneratorConfig
from gcore_sglang.engine import SglangGenerator

#: Keys and values that another request left are not read: what decoding wrote may have other bits
#: than what reading a prompt writes.
_ARGUMENTS: dict[str, Any] = {"enable_deterministic_inference": True, "disable_radix_cache": True}
#: A prompt is read whole, whatever stands beside it.
_ON_CPU: dict[str, Any] = {"chunked_prefill_size": -1}
#: SGLang then does not find it by itself, so it is given unless the job gives one. The cache takes
#: less, see `kv_cache_tokens`.
_FRACTION: dict[str, Any] = {"mem_fraction_static": 0.5}


class DeterministicSglangGenerator(SglangGenerator):
    """A generator whose samples are repeated bit for bit from their seeds.

    On a CPU it is slower, since rows are multiplied one by one (see ``gcore_sglang.invariant``).
    """

    def __init__(self, config: SglangGeneratorConfig, context: WorkerContext) -> None:
        import torch

        engine, own = context.engine, _ARGUMENTS
        if not torch.cuda.is_available():
            engine, own = {**_FRACTION, **engine}, own | _ON_CPU
        engine = with_own(engine, own, context.role)
        super().__init__(config, replace(context, engine=engine))
