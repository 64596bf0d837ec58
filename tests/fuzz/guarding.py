"""What a decoder must not do, whatever it is given, and a fuzzer that goes on for as long as it is
told.

    python -m pytest tests/fuzz                          under a minute
    FUZZ_SECONDS=600 python -m pytest tests/fuzz         ten minutes, other examples each time

A decoder answers or raises one of its documented errors. It takes at most ``CPU_LIMIT_S``,
allocates at most ``BYTES_PER_BYTE`` for each byte it is given and ``BYTES_BESIDE`` more, and runs
nothing.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

T = TypeVar("T")
TARGETS = 15  # fuzzed, each for its share of the seconds
SECONDS = float(os.environ.get("FUZZ_SECONDS", "36"))
FIRST_SEED = int(
    os.environ.get("FUZZ_SEED", "0" if "FUZZ_SECONDS" not in os.environ else time.time_ns() % 2**32)
)
CPU_LIMIT_S = 2.0
BYTES_PER_BYTE = (
    128  # an empty list of one byte becomes an object of 56, and its header and pointer
)
BYTES_BESIDE = 1 << 20
_ROUND = 200  # examples under one seed

_RUNS = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "subprocess.Popen",
}
_RUNS |= {"pickle.find_class", "ctypes.dlopen", "socket.connect"}


class Broken(AssertionError):
    """A decoder did what it must not."""


class _Witness:
    """Sees what the interpreter is about to do while a decoder runs. Hooks of this kind cannot be
    taken back.
    """

    def __init__(self) -> None:
        self.watching = False
        self.seen: list[str] = []
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        if event in _RUNS:
            self.seen.append(event)
        elif event == "exec" and args[0].co_filename.startswith("<string"):
            self.seen.append("exec of a text")


_WITNESS = _Witness()


@contextmanager
def guarded(nbytes: int, beside: int = BYTES_BESIDE) -> Iterator[None]:
    """Around the decoding of ``nbytes``. Raises Broken."""
    tracemalloc.start()
    _WITNESS.seen.clear()
    _WITNESS.watching = True
    began_s = time.process_time()
    try:
        yield
    finally:
        took_s = time.process_time() - began_s
        _WITNESS.watching = False
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        if _WITNESS.seen:
            raise Broken(f"it ran something: {_WITNESS.seen}")
        if took_s > CPU_LIMIT_S:
            raise Broken(f"{nbytes} bytes took {took_s:.1f} s")
        if peak > nbytes * BYTES_PER_BYTE + beside:
            raise Broken(f"{nbytes} bytes made it allocate {peak}")


def fuzz(examples: st.SearchStrategy[T], check: Callable[[T], None]) -> None:
    """Draws examples for this target's share of the seconds; a failure is shrunk, and shown with
    its seed.
    """
    share_s = SECONDS / TARGETS
    end_s = time.monotonic() + share_s
    number = FIRST_SEED
    faulthandler.dump_traceback_later(share_s + 300, exit=True)  # a decoder that never comes back
    try:
        while True:
            _round(examples, check, number, end_s)
            number += 1
            if time.monotonic() >= end_s:
                return
    finally:
        faulthandler.cancel_dump_traceback_later()


def _round(
    examples: st.SearchStrategy[T], check: Callable[[T], None], number: int, end_s: float
) -> None:
    @seed(number)
    @settings(
        max_examples=_ROUND,
        deadline=None,  # CPU time is limited instead: others may use the machine
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(examples)
    def one(example: T) -> None:
        if time.monotonic() < end_s:
            check(example)

    try:
        one()
    except BaseException as error:
        error.add_note(f"FUZZ_SEED={number}")
        raise
