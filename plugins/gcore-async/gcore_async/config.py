"""Defines the settings of the step program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from gcore_core.contract.traits import Traits
from gcore_core.kits.programs import SyncConfig


@dataclass(frozen=True, kw_only=True)
class AsyncConfig(SyncConfig):
    """Holds the settings of ``async``: those of ``core/sync``, and how far generation runs ahead.

    ahead: how many steps generation may run ahead of training; 0 is a synchronous run.
    age: the most versions between the weights that began a record and the step that trains on it;
        at least ``ahead``. Equal to it, steps take groups nearly in order and wait for slow ones.
        Above it, a slow group may be taken by a later step, up to this age.
    midway: what a push does with samples that run. "wait": it waits for them, so a sample has one
        version. "recompute": they pause, the generator reads again what they have so far under the
        new weights, and they go on; a sample may have several versions. A push waits all the same
        in a deterministic run, and where a placement policy moves devices.
    """

    ahead: int = 1
    age: int = 4
    midway: Literal["wait", "recompute"] = "wait"

    #: Keys that are gone, and values as KEY=VALUE -> what to do in their place.
    GONE_KEYS: ClassVar[dict[str, str]] = {
        **SyncConfig.GONE_KEYS,
        "order": "remove it: a deterministic run takes groups in order and repeats itself",
        "unfinished": "remove it: a checkpoint holds complete groups, and others are drawn again",
        "replay": "remove it: a run repeats itself with run.deterministic: true and midway: wait",
        "midway=keep": "set it to recompute: samples go on through a push, and what they have so "
        "far is read again",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ahead < 0:
            raise ValueError(f"ahead must be at least 0, not {self.ahead}")
        if self.age < self.ahead:
            raise ValueError(
                f"age must be at least ahead, which is {self.ahead}, not {self.age}: records that "
                "are begun so far ahead are that old when they are trained on"
            )

    def traits(self) -> Traits:
        return replace(super().traits(), overlaps=True)
