"""Defines what is known of an engine's speed, as plain data: no numpy is needed to read it.

A placement policy may fit it to the requests of a rollout; gcore-placement's do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Says how long a replica's engine takes for its work.

    A round of decoding, which gives each running sequence one token, takes
    ``base_s + running_s * running sequences + cached_s * cached tokens``.

    base_s: seconds of a round, whatever runs.
    running_s: further seconds of a round for each sequence that runs.
    cached_s: further seconds of a round for each token in the cache.
    prefill_s: seconds for each token of a prompt; nothing else runs meanwhile.
    max_running: how many sequences may run at once; further requests wait in the engine.
    cache_tokens: how many tokens the cache holds.

    The defaults are a roofline, not a measurement: a dense model of 32e9 parameters in bfloat16 on
    four devices of 80 GB, 3.35 TB/s and 989 TFLOP/s.
    """

    base_s: float = 0.012
    running_s: float = 3.0e-5
    cached_s: float = 2.8e-8
    prefill_s: float = 6.25e-5
    max_running: int = 256
    cache_tokens: int = 750_000

    def seconds(self, prompt: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Estimates each request's share of the engine's time, in seconds: float64[N].

        The batch is as full as memory allows.
        """
        import numpy as np  # here: who reads a profile from a file has no arrays

        cached = prompt + actions / 2
        batch = np.clip(self.cache_tokens / np.maximum(cached, 1), 1, self.max_running)
        decode = actions * (self.base_s / batch + self.running_s + self.cached_s * cached)
        return np.asarray(decode + prompt * self.prefill_s)


@dataclass(frozen=True, kw_only=True)
class EngineFit:
    """Holds the profile that was fitted to the requests of a rollout, and how sure it is.

    profile: the profile.
    errors: term of the profile -> its standard error, in seconds.
    requests: how many requests were fitted; 0: the profile is a prior.
    expected_s: mean seconds of these requests as the profile before this fit expected them.
    measured_s: mean seconds that they took.
    """

    profile: Profile
    errors: Mapping[str, float] = field(default_factory=dict)
    requests: int = 0
    expected_s: float = 0.0
    measured_s: float = 0.0
