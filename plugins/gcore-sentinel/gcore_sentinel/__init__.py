"""The plugin ``sentinel`` watches whether generators compute what the trainer computes."""

from __future__ import annotations

from collections.abc import Iterable

from gcore_core import hookimpl
from gcore_core.contract.providers import CommandProvider, SentinelProvider
from gcore_core.contract.sentinel import BAND
from gcore_sentinel.config import BandConfig, SequentialConfig

CHECK = "gcore_sentinel.check:Searching"


@hookimpl
def gcore_sentinels() -> Iterable[SentinelProvider]:
    yield SentinelProvider(
        summary=(
            "a sequential test of log-probs per replica in low precision, the pair's band in "
            "float32"
        ),
        factory="gcore_sentinel.sequential:Sequential",
        config=SequentialConfig,
        check=CHECK,
    )
    yield SentinelProvider(
        name="band",
        summary=(
            "stops at the first action whose log-prob is off by more than the pair's band, and "
            "looks for the cause"
        ),
        factory=BAND,
        config=BandConfig,
        check=CHECK,
    )


@hookimpl
def gcore_commands() -> Iterable[CommandProvider]:
    yield CommandProvider(
        name="calibrate",
        summary="makes a table of healthy gaps from runs with sentinel.config.keep=true",
        factory="gcore_sentinel.calibrate:main",
    )
