"""The arithmetic of continuous batching equals the same engine stepped token by token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gcore_placement.sim.batching import ContinuousBatch, Key
from gcore_placement.sim.config import EngineProfile
from hypothesis import given, settings
from hypothesis import strategies as st

PROFILE = EngineProfile(
    base_s=0.01, running_s=0.003, cached_s=1e-5, prefill_s=1e-4, max_running=3, cache_tokens=90
)
SEQUENCES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=9)


def token_by_token(
    profile: EngineProfile, sequences: list[tuple[int, int]]
) -> Iterator[tuple[Key, float]]:
    """(who ended, when): every decoding step is taken for itself."""
    waiting = [((n, 0), prompt, answer) for n, (prompt, answer) in enumerate(sequences)]
    running: dict[Key, list[int]] = {}  # -> cached tokens, tokens to come
    now_s = 0.0
    while waiting or running:
        while waiting and len(running) < profile.max_running:
            key, prompt, answer = waiting[0]
            if (
                running
                and sum(cached for cached, _ in running.values()) + prompt > profile.cache_tokens
            ):
                break
            del waiting[0]
            running[key] = [prompt, answer]
            now_s += profile.prefill_s * prompt
        now_s += profile.step_s(len(running), sum(cached for cached, _ in running.values()))
        for key, sequence in list(running.items()):
            sequence[0], sequence[1] = sequence[0] + 1, sequence[1] - 1
            if not sequence[1]:
                del running[key]
                yield key, now_s


def drained(batch: ContinuousBatch, limit_s: float) -> list[tuple[Key, float]]:
    now_s, ended = 0.0, []
    while batch.running or batch.waiting:
        seconds, keys = batch.advance(limit_s)
        now_s += seconds
        ended += [(key, now_s) for key in keys]
    return ended


@settings(max_examples=200, deadline=None)
@given(sequences=SEQUENCES, limit_s=st.sampled_from([0.001, 0.05, 0.7, 1e9]))
def test_a_batch_takes_as_long_as_its_tokens_one_by_one(
    sequences: list[tuple[int, int]], limit_s: float
) -> None:
    batch = ContinuousBatch(PROFILE, prefix_cache=False)
    for n, (prompt, answer) in enumerate(sequences):
        batch.add((n, 0), prompt, answer)
    expected = dict(token_by_token(PROFILE, sequences))
    found = dict(drained(batch, limit_s))
    assert found == pytest.approx(expected, abs=1e-9)
    assert batch.cached == batch.running == 0


def test_time_limits_are_rounded_to_whole_tokens() -> None:
    batch = ContinuousBatch(
        EngineProfile(base_s=0.1, running_s=0, cached_s=0, prefill_s=0), prefix_cache=False
    )
    batch.add((0, 0), 10, 100)
    assert batch.advance(0.5) == (pytest.approx(0.5), [])
    assert batch.advance(0.49) == (pytest.approx(0.4), [])
    assert batch.advance(0.01) == (pytest.approx(0.1), [])  # one at least, or it would never end
    assert batch.done((0, 0)) == 10


def test_a_prompt_is_prefilled_once_while_its_group_runs() -> None:
    profile = EngineProfile(base_s=0, running_s=0, cached_s=0, prefill_s=0.01)
    for known, seconds in ((True, 1.0), (False, 3.0)):
        batch = ContinuousBatch(profile, prefix_cache=known)
        for sample in range(3):
            batch.add((7, sample), 100, 5)
        assert max(at_s for _, at_s in drained(batch, 1e9)) == pytest.approx(seconds)


def test_sequences_are_prefilled_again_with_their_tokens_after_sleep() -> None:
    batch = ContinuousBatch(
        EngineProfile(base_s=1, running_s=0, cached_s=0, prefill_s=0.01), prefix_cache=True
    )
    batch.add((0, 0), 100, 10)
    assert batch.advance(4.5)[0] == pytest.approx(1 + 3)  # 100 tokens read, three written
    batch.forget_cache()
    assert batch.done((0, 0)) == 3
    assert drained(batch, 1e9) == [((0, 0), pytest.approx(1.03 + 7))]


def test_a_removed_sequence_does_not_affect_one_with_the_same_key() -> None:
    batch = ContinuousBatch(
        EngineProfile(base_s=1, running_s=0, cached_s=0, prefill_s=0), prefix_cache=True
    )
    batch.add((0, 0), 1, 2)
    batch.add((0, 1), 1, 9)
    assert batch.advance(1.0) == (1.0, [])
    batch.remove((0, 0))
    batch.add((0, 0), 1, 4)
    assert drained(batch, 1e9) == [((0, 0), 4.0), ((0, 1), 8.0)]
