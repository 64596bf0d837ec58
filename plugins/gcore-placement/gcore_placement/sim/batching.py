"""Computes continuous batching: which sequences run, which wait, how long the next tokens take.

Nothing here waits or reads a clock.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass

from gcore_placement.sim.config import EngineProfile

Key = tuple[int, int]  # ordinal, sample


@dataclass(frozen=True)
class _Sequence:
    """A sequence that runs.

    group: the ordinal of its prompt.
    cached: tokens in the cache before its first token.
    begun: the batch's count of decoding steps at its first token.
    end: the batch's count of decoding steps after its last token.
    """

    group: int
    cached: int
    begun: int
    end: int


@dataclass(frozen=True)
class _Waiting:
    """A sequence that waits for a place.

    group: the ordinal of its prompt.
    cached: tokens to prefill: the prompt, and what it had sampled before the cache was dropped.
    remaining: tokens still to be sampled.
    """

    group: int
    cached: int
    remaining: int


class ContinuousBatch:
    """Emulates an engine that decodes all running sequences together.

    A decoding step gives each running sequence a token and takes ``profile.step_s(running,
    cached)``. Between two ends of sequences nothing changes but the cache, so n steps are taken at
    once: n * step_s(b, C) + cached_s * b * n (n - 1) / 2 for b running sequences and C cached
    tokens.
    """

    def __init__(self, profile: EngineProfile, prefix_cache: bool) -> None:
        self._profile = profile
        self._prefix_cache = prefix_cache
        self._waiting: dict[Key, _Waiting] = {}
        self._running: dict[Key, _Sequence] = {}
        self._sampled: Counter[Key] = Counter()  # tokens of sequences that wait again
        # A heap of (end, order of admission, key). An entry whose sequence was removed stays until
        # it comes up.
        self._ends: list[tuple[int, int, Key]] = []
        self._groups: Counter[int] = Counter()
        self._steps = 0  # decoding steps so far
        # Every running sequence grows by one token a step, so `cached` is `_offset` + running *
        # `_steps`, and a step need not touch each sequence.
        self._offset = 0
        self._prefill_s = 0.0  # still to be spent
        self._order = 0

    @property
    def running(self) -> int:
        """The number of sequences that run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """The number of sequences that wait for a place."""
        return len(self._waiting)

    @property
    def cached(self) -> int:
        """The number of tokens in the cache."""
        return self._offset + len(self._running) * self._steps

    def add(self, key: Key, prompt: int, answer: int) -> None:
        """Lets a sequence of ``answer`` tokens after ``prompt`` tokens wait for a place.

        Its group is the key's ordinal.
        """
        self._waiting[key] = _Waiting(key[0], prompt, answer)

    def done(self, key: Key) -> int:
        """Returns how many tokens a sequence has so far."""
        sequence = self._running.get(key)
        return self._sampled[key] + (self._steps - sequence.begun if sequence else 0)

    def remove(self, key: Key) -> None:
        """Removes a sequence, whether it runs or waits; an unknown key is ignored."""
        self._waiting.pop(key, None)
        self._sampled.pop(key, None)
        if key in self._running:
            self._leave(key)

    def forget_cache(self) -> None:
        """Drops the cache: running sequences wait again, first in line, to be prefilled whole."""
        waiting_again = {}
        for key, sequence in list(self._running.items()):
            sampled = self._steps - sequence.begun
            waiting_again[key] = _Waiting(
                sequence.group, sequence.cached + sampled, sequence.end - self._steps
            )
            self._leave(key)
            self._sampled[key] += sampled
        self._waiting = {**waiting_again, **self._waiting}
        self._prefill_s = 0.0

    def advance(self, limit_s: float) -> tuple[float, list[Key]]:
        """Goes on until the next sequence ends, or for about ``limit_s``.

        Returns the seconds that it took and the sequences that ended. Whole tokens are decoded, at
        least one unless prefilling took time.
        """
        self._admit()
        seconds = min(self._prefill_s, limit_s)
        self._prefill_s -= seconds
        if self._prefill_s or not self._running:
            return seconds, []
        steps_to_end = self._steps_to_end()
        steps = max(min(steps_to_end, self._steps_within(limit_s - seconds)), 0 if seconds else 1)
        seconds += self._decode_s(steps)
        self._steps += steps
        ended = []
        while self._ends and self._ends[0][0] <= self._steps:
            end, _, key = heapq.heappop(self._ends)
            if key in self._running and self._running[key].end == end:
                self._leave(key)
                self._sampled.pop(key, None)
                ended.append(key)
        return seconds, ended

    def seconds_to_end(self) -> float:
        """Returns the seconds until the next sequence ends; infinite where none runs or waits."""
        self._admit()
        if not self._running:
            return math.inf
        return self._prefill_s + self._decode_s(self._steps_to_end())

    def _steps_to_end(self) -> int:
        """Returns the decoding steps until the next of the running sequences ends."""
        # Drops entries of sequences that were removed, or that run again with another end.
        while (
            self._ends[0][2] not in self._running
            or self._running[self._ends[0][2]].end != self._ends[0][0]
        ):
            heapq.heappop(self._ends)
        return self._ends[0][0] - self._steps

    def _admit(self) -> None:
        """Lets waiting sequences run, in order, while there are places and room in the cache."""
        profile = self._profile
        waiting = deque(self._waiting.items())
        while waiting and len(self._running) < profile.max_running:
            key, new = waiting.popleft()
            if self._running and self.cached + new.cached > profile.cache_tokens:
                return
            del self._waiting[key]
            # A prompt that another running sequence of its group has in the cache costs nothing.
            is_cached = self._prefix_cache and self._groups[new.group] and not self._sampled[key]
            self._prefill_s += 0.0 if is_cached else profile.prefill_s * new.cached
            self._running[key] = _Sequence(
                new.group, new.cached, self._steps, self._steps + new.remaining
            )
            self._groups[new.group] += 1
            self._offset += new.cached - self._steps
            self._order += 1
            heapq.heappush(self._ends, (self._steps + new.remaining, self._order, key))

    def _leave(self, key: Key) -> None:
        """Takes a sequence out of the running ones, and its tokens out of the cache."""
        sequence = self._running.pop(key)
        self._groups[sequence.group] -= 1
        if not self._groups[sequence.group]:
            del self._groups[sequence.group]
        self._offset -= sequence.cached - sequence.begun

    def _decode_s(self, steps: int) -> float:
        """Returns the seconds of ``steps`` decoding steps in which no sequence starts or ends.

        Step i has i tokens more in the cache for each running sequence; the sum over i is steps
        (steps - 1) / 2.
        """
        running = len(self._running)
        growth = self._profile.cached_s * running * steps * (steps - 1) / 2
        return steps * self._profile.step_s(running, self.cached) + growth

    def _steps_within(self, seconds: float) -> int:
        """Returns the most decoding steps that take at most ``seconds``.

        It is the positive root n of half * n^2 + first * n = seconds, which is what ``_decode_s``
        computes, rounded down.
        """
        half = self._profile.cached_s * len(self._running) / 2
        first = self._profile.step_s(len(self._running), self.cached) - half
        seconds += 1e-9  # a limit of exactly n steps allows n
        if half == 0:
            return int(seconds / first) if first else 1 << 60
        return int((math.sqrt(first * first + 4 * half * seconds) - first) / (2 * half))
