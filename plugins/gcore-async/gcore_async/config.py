"""Defines the settings of the step program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from gcore_core.controllers.config import SyncConfig


@dataclass(frozen=True, kw_only=True)
class AsyncConfig(SyncConfig):
    """Holds the settings of ``async``: those of ``core/sync``, and how far generation runs ahead.

    ahead: how many steps generation may run ahead of training; 0 is a synchronous run.
    age: the most versions between the weights that began a record and the step that trains on it;
        at least ``ahead``. Equal to it, steps take groups nearly in order and wait for slow ones.
        Above it, a slow group may be taken by a later step, up to this age.
    midway: what a push does with samples that run. "wait": it waits for them, so a sample has one
        version. "recompute": they pause, the generator reads again what they have so far under the
        new weights, and they go on; a sample may have several versions.
    unfinished: what a checkpoint holds of samples that run. "redraw": nothing, so a resumed run
        draws them again. "keep": what they have so far, and a resumed run goes on from there.
    """

    #: Values that are gone: key -> value -> what to do in its place.
    GONE_VALUES: ClassVar[dict[str, dict[str, str]]] = {
        "midway": {
            "keep": "set it to recompute: samples go on through a push, and what they have so far "
            "is read again"
        }
    }

    ahead: int = 1
    age: int = 4
    midway: Literal["wait", "recompute"] = "wait"
    unfinished: Literal["redraw", "keep"] = "redraw"

    GONE_KEYS: ClassVar[dict[str, str]] = {
        **SyncConfig.GONE_KEYS,
        "order": "remove it: a deterministic run takes groups in order and repeats itself",
        "replay": "remove it: a run repeats itself with run.deterministic: true and midway: wait",
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
        if self.keeps_unfinished() and self.midway == "wait":
            raise ValueError(
                "unfinished: keep needs midway: recompute; with midway: wait no sample runs when a "
                "checkpoint is made, so leave unfinished out"
            )

    def cuts_samples(self) -> bool:
        """Returns whether a push comes while samples run."""
        return self.midway != "wait"

    def keeps_unfinished(self) -> bool:
        """Returns whether a resumed run goes on with unfinished samples."""
        return self.unfinished == "keep"
