"""Continuous batching as arithmetic: who runs, who waits, and how long the next tokens take.
Pure.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass

from gcore_sim.config import EngineProfile

Key = tuple[int, int]  # ordinal, sample


@dataclass(frozen=True)
class _Sequence:
    """``begun`` and ``end``: what the batch's count of decoding steps is at its first token and
    after its last.
    """

    group: int
    cached: int  # tokens in the cache before its first token
    begun: int
    end: int


@dataclass(frozen=True)
class _Waiting:
    group: int
    cached: int
    left: int


class ContinuousBatch:
    """Every decoding step gives each running sequence a token and takes ``profile.step_s(running,
    cached)``.

    Between two ends of sequences nothing changes but the cache, so n steps are taken at once:
    n * step_s(b, C) + cached_s * b * n (n - 1) / 2 for b running sequences and C cached tokens.
    """

    def __init__(self, profile: EngineProfile, prefix_cache: bool) -> None:
        self._profile, self._prefix_cache = profile, prefix_cache
        self._waiting: dict[Key, _Waiting] = {}
        self._running: dict[Key, _Sequence] = {}
        self._given: Counter[Key] = Counter()  # tokens of sequences that wait again
        self._ends: list[
            tuple[int, int, Key]
        ] = []  # a heap; those that were removed stay until they come up
        self._groups: Counter[int] = Counter()
        self._steps = 0  # decoding steps so far
        self._offset = 0  # cached tokens = offset + running * steps
        self._prefill_s = 0.0  # still to be spent
        self._order = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def cached(self) -> int:
        return self._offset + len(self._running) * self._steps

    def add(self, key: Key, prompt: int, answer: int) -> None:
        """A sequence of ``answer`` tokens after a prompt of ``prompt``; the group is the key's
        ordinal.
        """
        self._waiting[key] = _Waiting(key[0], prompt, answer)

    def done(self, key: Key) -> int:
        """Tokens that a sequence has so far."""
        sequence = self._running.get(key)
        return self._given[key] + (self._steps - sequence.begun if sequence else 0)

    def remove(self, key: Key) -> None:
        self._waiting.pop(key, None)
        self._given.pop(key, None)
        if key in self._running:
            self._leave(key)

    def forget_cache(self) -> None:
        """The memory is given back: what runs waits again, and all of it is to be prefilled."""
        again = {}
        for key, sequence in list(self._running.items()):
            given = self._steps - sequence.begun
            again[key] = _Waiting(
                sequence.group, sequence.cached + given, sequence.end - self._steps
            )
            self._leave(key)
            self._given[key] += given
        self._waiting = {**again, **self._waiting}
        self._prefill_s = 0.0

    def advance(self, limit_s: float) -> tuple[float, list[Key]]:
        """(seconds, who ended) until the next sequence ends, or for about ``limit_s``: whole
        tokens, at least one.
        """
        self._admit()
        seconds = min(self._prefill_s, limit_s)
        self._prefill_s -= seconds
        if self._prefill_s or not self._running:
            return seconds, []
        while (
            self._ends[0][2] not in self._running
            or self._running[self._ends[0][2]].end != self._ends[0][0]
        ):
            heapq.heappop(self._ends)
        left = self._ends[0][0] - self._steps
        steps = max(min(left, self._steps_within(limit_s - seconds)), 0 if seconds else 1)
        seconds += self._decode_s(steps)
        self._steps += steps
        ended = []
        while self._ends and self._ends[0][0] <= self._steps:
            end, _, key = heapq.heappop(self._ends)
            if key in self._running and self._running[key].end == end:
                self._leave(key)
                self._given.pop(key, None)
                ended.append(key)
        return seconds, ended

    def _admit(self) -> None:
        profile = self._profile
        waiting = deque(self._waiting.items())
        while waiting and len(self._running) < profile.max_running:
            key, new = waiting.popleft()
            if self._running and self.cached + new.cached > profile.cache_tokens:
                return
            del self._waiting[key]
            known = self._prefix_cache and self._groups[new.group] and not self._given[key]
            self._prefill_s += 0.0 if known else profile.prefill_s * new.cached
            self._running[key] = _Sequence(
                new.group, new.cached, self._steps, self._steps + new.left
            )
            self._groups[new.group] += 1
            self._offset += new.cached - self._steps
            self._order += 1
            heapq.heappush(self._ends, (self._steps + new.left, self._order, key))

    def _leave(self, key: Key) -> None:
        sequence = self._running.pop(key)
        self._groups[sequence.group] -= 1
        if not self._groups[sequence.group]:
            del self._groups[sequence.group]
        self._offset -= sequence.cached - sequence.begun

    def _decode_s(self, steps: int) -> float:
        running = len(self._running)
        growth = self._profile.cached_s * running * steps * (steps - 1) / 2
        return steps * self._profile.step_s(running, self.cached) + growth

    def _steps_within(self, seconds: float) -> int:
        """The most decoding steps that take no longer: the root of the quadratic that ``_decode_s``
        is.
        """
        half = self._profile.cached_s * len(self._running) / 2
        first = self._profile.step_s(len(self._running), self.cached) - half
        seconds += 1e-9  # a limit of exactly n steps allows n
        if half == 0:
            return int(seconds / first) if first else 1 << 60
        return int((math.sqrt(first * first + 4 * half * seconds) - first) / (2 * half))
