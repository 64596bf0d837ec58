"""Rewards completions whose last expression equals the row's answer, as math-verify finds.

A comparison may take any time: ``9^{9^{9^9}}`` is a short expression. So expressions are compared
in processes of their own, which the kernel ends when a comparison has had its CPU time; see
``math_child``. CPU time is limited, not time by the clock, so that a busy machine does not change
scores.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.scorer import REASON_CHARACTERS, Score, ScoredRecord, failure
from gcore_rewards.config import MathConfig
from gcore_rewards.interpreter import library_path
from gcore_rewards.patterns import Pattern, SlowPattern, timed_out
from gcore_rewards.verifiers import no_answer, shortened

#: Seconds by the clock in which a process must have started.
_START_S = 120.0
#: Seconds by the clock, for each second of CPU time, after which a process counts as stuck.
_PATIENCE = 20.0
#: A process is replaced after so many comparisons: caches of its libraries grow.
_MOST_COMPARISONS = 1000


class Verdict(enum.Enum):
    """What came of a comparison.

    EXCEEDED: the completion's expression took more time or memory than it may.
    UNREADABLE: the expected answer cannot be read within the limits, or does not equal itself.
    """

    EQUAL = enum.auto()
    DIFFERENT = enum.auto()
    EXCEEDED = enum.auto()
    UNREADABLE = enum.auto()


class Stuck(Exception):
    """A process did not answer, and that is not the expressions' fault."""


class _Ended(Exception):
    """A process ended in place of an answer."""


#: How expressions end a process: by their CPU time, or by the end of its stack or its memory.
_BY_EXPRESSIONS = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT)


class Comparer:
    """One process that compares expressions; started when it is needed, again where it ended."""

    def __init__(self, config: MathConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._comparisons = 0

    def start(self) -> None:
        """Raises Stuck, with what the process wrote, when it cannot be started."""
        self.close()
        # -I: the process takes nothing from the environment or the directory it is started in. It
        # gets a session of its own so that Ctrl-C reaches the worker alone; it ends with its input.
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("math_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", **library_path()},
            start_new_session=True,
        )
        self._comparisons = 0
        config = self._config
        settings = {
            "path": [entry for entry in sys.path if entry],
            "memory_mib": config.memory_mib,
            "digits": config.digits,
            "time_s": config.time_s,
        }
        try:
            self._send(self._process, settings)
            self._receive(self._process, _START_S)
        except _Ended:
            assert self._process.stderr is not None
            lines = self._process.stderr.read().decode("utf-8", "replace").split("\n")
            why = next((line for line in reversed(lines) if line.strip()), "")
            self.close()
            raise Stuck(why or "it ended without a word") from None

    def compare(self, expected: str, completion: str) -> Verdict:
        """Raises Stuck when the process does not answer."""
        process = self._process
        if process is None or process.poll() is not None or self._comparisons >= _MOST_COMPARISONS:
            self.start()
            process = self._process
        assert process is not None
        self._comparisons += 1
        limit_s = _PATIENCE * self._config.time_s
        ended = Verdict.UNREADABLE
        try:
            self._send(process, {"expected": expected, "completion": completion})
            if not self._receive(process, limit_s)["readable"]:
                return Verdict.UNREADABLE
            ended = Verdict.EXCEEDED
            is_equal = self._receive(process, limit_s)["equal"]
        except _Ended:
            exit_code = process.wait()
            self.close()
            if exit_code not in _BY_EXPRESSIONS:
                raise Stuck(f"the process that compares ended with {exit_code}") from None
            return ended
        return Verdict.EQUAL if is_equal else Verdict.DIFFERENT

    def close(self) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _send(self, process: subprocess.Popen[bytes], values: dict[str, Any]) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(values).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise _Ended from None

    def _receive(self, process: subprocess.Popen[bytes], limit_s: float) -> dict[str, Any]:
        """The next line that the process writes."""
        assert process.stdout is not None
        output = process.stdout.fileno()
        poll = select.poll()
        poll.register(output, select.POLLIN)
        deadline = time.monotonic() + limit_s
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                self.close()
                raise Stuck(f"no answer within {limit_s:g} s")
            content = os.read(output, 1)
            if not content:
                raise _Ended
            line += content
        return dict(json.loads(line))


class MathReward:
    """Scores 1 when a completion's last expression equals the row's answer, else 0.

    See ``gcore_core.contract.scorer.Scorer``. Raises ConfigError where math-verify cannot be run.
    """

    def __init__(self, config: MathConfig, context: WorkerContext) -> None:
        self._config = config
        self._pattern = Pattern(config.pattern, config.pattern_s)
        self._pool = ThreadPoolExecutor(config.parallel)
        self._comparers: queue.SimpleQueue[Comparer] = queue.SimpleQueue()
        first = Comparer(config)
        try:
            first.start()
        except Stuck as error:
            raise ConfigError(
                "expressions cannot be compared here.",
                where="rewards/math",
                why=str(error)[:REASON_CHARACTERS],
                todo="install gcore-rewards[math], and leave it enough memory_mib",
            ) from error
        self._comparers.put(first)
        for _ in range(config.parallel - 1):
            self._comparers.put(Comparer(config))

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """Raises DataError for a row whose answer is no expression that can be compared."""
        return list(self._pool.map(self._score, records))

    def close(self) -> None:
        self._pool.shutdown()
        for _ in range(self._config.parallel):
            self._comparers.get().close()

    def _score(self, record: ScoredRecord) -> Score:
        answer = record.prompt.fields.get(self._config.answer)
        if answer is None:
            return no_answer(record, self._config.answer)
        try:
            completion = self._pattern.part(record.text)
        except SlowPattern as error:
            return timed_out(error)
        if completion is None:
            return Score(value=0.0)
        comparer = self._comparers.get()
        try:
            verdict = comparer.compare(str(answer), completion)
        except (Stuck, OSError) as error:
            return failure(f"expressions could not be compared: {error}"[:REASON_CHARACTERS])
        finally:
            self._comparers.put(comparer)
        if verdict is Verdict.UNREADABLE:
            raise DataError(
                f"field {self._config.answer!r} is no expression that can be compared: "
                f"{shortened(answer)}",
                where=f"row {record.prompt.row} of the dataset",
                why="math-verify cannot read it in time, or finds it different from itself",
                todo="correct or drop the row, or compare with rewards/exact-match",
            )
        return Score(value=float(verdict is Verdict.EQUAL))
