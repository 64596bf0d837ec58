"""What the steps that ran in a mode have shown of it, and when a mode is tried again.

Profiles are fitted to the steps that ran. While cells take turns, batches are small, and what a
split's fuller ones cost is then a guess; no measurement corrects it, because no split runs. So each
mode is priced with the profiles of its own latest step and with a factor learned from its own
steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gcore_core.contract.engine_profiles import Profile

#: A mode is tried again only if it is expected to take less than this many times the least.
_WORTH_TRYING = 2.0
#: Largest logarithm of a mode's factor, either way: a single stalled step must not decide alone.
_FURTHEST = float(np.log(10.0))

#: The profiles of the policy and of the judge.
Profiles = tuple[Profile, Profile]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """What the steps of one mode have shown of it.

    profiles: as they were fitted after the mode's latest step.
    slower: logarithm of measured over replayed seconds, a mean over the mode's latest steps.
    weight: the sum of the discounts of those steps.
    idle: steps since the mode last ran.
    trials: trials in a row after which another mode was better.
    """

    profiles: Profiles
    slower: float = 0.0
    weight: float = 0.0
    idle: int = 0
    trials: int = 0

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Mode:
        """Returns the mode that ``plain`` has written."""
        policy, judge = (Profile(**profile) for profile in plain["profiles"])
        return cls(
            profiles=(policy, judge),
            slower=float(plain["slower"]),
            weight=float(plain["weight"]),
            idle=int(plain["idle"]),
            trials=int(plain["trials"]),
        )

    def plain(self) -> dict[str, Any]:
        """Returns the mode as plain values, which ``read`` takes."""
        return {
            "profiles": [dataclasses.asdict(profile) for profile in self.profiles],
            "slower": self.slower,
            "weight": self.weight,
            "idle": self.idle,
            "trials": self.trials,
        }


def after_step(
    modes: Mapping[str, Mode],
    ran: str,
    profiles: Profiles,
    measured_over_replayed: float,
    discount: float,
    was_trial: bool,
) -> dict[str, Mode]:
    """Returns what is known of the modes after a step.

    ran: the mode of the step.
    profiles: as fitted after it.
    measured_over_replayed: its measured seconds over those of its replay with these profiles.
    discount: what earlier steps of the mode count for from now on.
    was_trial: the step was a trial; what was learned of the mode before does not count any more.
    """
    before = modes.get(ran, Mode(profiles=profiles))
    weight = 1.0 if was_trial else discount * before.weight + 1
    factor = float(np.clip(np.log(max(measured_over_replayed, 1e-9)), -_FURTHEST, _FURTHEST))
    slower = before.slower + (factor - before.slower) / weight
    rest = {name: replace(mode, idle=mode.idle + 1) for name, mode in modes.items() if name != ran}
    return {
        **rest,
        ran: replace(before, profiles=profiles, slower=slower, weight=weight, idle=0),
    }


def to_try(
    modes: Mapping[str, Mode], chosen: str, expected_s: Mapping[str, float], patience: int
) -> str:
    """Returns the mode that the next step tries instead of the chosen one; "" for none.

    A mode that ran before is tried for one step after ``patience`` steps without it. Each trial
    after which another mode was better doubles the wait for the next one, so that trials become
    rare. A mode whose profiles are still those of the chosen mode is not tried: the model has not
    changed since it ran.

    expected_s: for each mode that is possible, the expected seconds of its best candidate.
    """
    if chosen not in modes or not expected_s:
        return ""
    limit_s = _WORTH_TRYING * min(expected_s.values())
    waiting = [
        name
        for name, mode in modes.items()
        if name != chosen
        and mode.profiles != modes[chosen].profiles
        and mode.idle >= patience * 2**mode.trials
        and expected_s.get(name, np.inf) < limit_s
    ]
    return min(waiting, key=lambda name: expected_s[name], default="")
