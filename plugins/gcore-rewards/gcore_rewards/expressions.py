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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.records import Prompt
from gcore_core.contract.scorer import REASON_CHARACTERS, Score, ScoredRecord, failure
from gcore_rewards.answers import boxes, last_number, number_within, only_number
from gcore_rewards.config import MathConfig
from gcore_rewards.interpreter import library_path
from gcore_rewards.letters import (
    Measure,
    core,
    has_other_primes,
    is_of_letters,
    measure,
    said,
    same_letters,
    with_names,
)
from gcore_rewards.math_input import (
    FINAL_ANSWER,
    PERCENT_BEHIND_BOX,
    bare,
    has_decimal_comma,
    is_misread,
    marked,
    numeric_expression,
    repeating_as_fractions,
    words_as_text,
    written_out,
)
from gcore_rewards.numbers import Number, number_of, plain_characters
from gcore_rewards.patterns import Pattern, SlowPattern, timed_out
from gcore_rewards.verifiers import answer_of, no_answer, unreadable

#: Seconds by the clock in which a process must have started.
_START_S = 120.0
#: Seconds by the clock, for each second of CPU time, after which a process counts as stuck.
_PATIENCE = 20.0
#: A process is replaced after so many comparisons: caches of its libraries grow.
_MOST_COMPARISONS = 1000
#: Answers of rows of which it is remembered whether all of them is read.
_MOST_ANSWERS = 1 << 16


class Verdict(enum.Enum):
    """What came of a comparison.

    EXCEEDED: the completion's expression took more time or memory than it may.
    UNREADABLE: the expected answer cannot be read within the limits, or does not equal itself.
    """

    EQUAL = enum.auto()
    DIFFERENT = enum.auto()
    EXCEEDED = enum.auto()
    UNREADABLE = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Found:
    """What math-verify says of a completion.

    span: where the part that it compared begins and ends; None where there are several or none.
    is_latex: whether it read that part as LaTeX.
    is_several: whether there are several parts.
    is_whole: without a completion: whether all of the expected answer is read.
    """

    verdict: Verdict
    span: tuple[int, int] | None = None
    is_latex: bool = False
    is_several: bool = False
    is_whole: bool = True


def _verdict(is_equal: bool) -> Verdict:
    return Verdict.EQUAL if is_equal else Verdict.DIFFERENT


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

    def reads_whole(self, expected: Sequence[str]) -> bool:
        """Returns whether an expected answer with any other digit or letter would be another one.

        Raises Stuck as ``find`` does.
        """
        return self.find(expected, None).is_whole

    def can_read(self, expected: Sequence[str]) -> bool:
        """Returns whether an expected answer can be read. Raises Stuck as ``find`` does."""
        return self.find(expected, None).verdict is not Verdict.UNREADABLE

    def find(self, expected: Sequence[str], completion: str | None) -> Found:
        """Compares what math-verify finds in a completion; None: only reads the expected answer.

        expected: the ways in which the answer may be read.
        Raises Stuck when the process does not answer.
        """
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
                return Found(verdict=Verdict.UNREADABLE)
            ended = Verdict.EXCEEDED
            found = self._receive(process, limit_s)
            if completion is None:
                return Found(verdict=Verdict.DIFFERENT, is_whole=found["whole"])
        except _Ended:
            exit_code = process.wait()
            self.close()
            if exit_code not in _BY_EXPRESSIONS:
                raise Stuck(f"the process that compares ended with {exit_code}") from None
            return Found(verdict=ended)
        verdict = Verdict.EQUAL if found["equal"] else Verdict.DIFFERENT
        span = None if found["span"] is None else (found["span"][0], found["span"][1])
        return Found(
            verdict=verdict,
            span=span,
            is_latex=found["is_latex"],
            is_several=span is None and found["is_latex"],
        )

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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A row's answer.

    texts: the ways in which math-verify may read it.
    bare: its letters without spaces and marks of LaTeX around them.
    number: where it is one plain number.
    is_numeric: whether it is a number, plain or as an expression such as ``2^{10}``.
    core: what it says, without words and marks around it; "" for a plain number.
    measure: where it is a number with a unit, which math-verify drops.
    by_letters: whether it is compared by its letters, since math-verify does not read all of it.
    """

    texts: tuple[str, ...]
    bare: str
    number: Number | None
    is_numeric: bool
    core: str = ""
    measure: Measure | None = None
    by_letters: bool = False


def _of_measure(found: Measure, what: str) -> Answer:
    number = number_of(found.number)
    return Answer(
        texts=(f"${number.latex()}$",) if number else marked(found.number),
        bare=bare(what),
        number=number,
        is_numeric=True,
        core=what,
        measure=found,
    )


class MathReward:
    """Scores 1 when a completion's last expression equals the row's answer, else 0.

    Plain numbers are read and compared here. math-verify is asked about expressions, and to find
    the answer where nothing is in a box; what it has found must be what stands there.

    See ``gcore_core.contract.scorer.Scorer``. Raises ConfigError where math-verify cannot be run.
    """

    def __init__(self, config: MathConfig, context: WorkerContext) -> None:
        self._config = config
        self._tolerance = Fraction(1, 2 * 10**config.digits)
        self._pattern = Pattern(config.pattern, config.pattern_s)
        self._pool = ThreadPoolExecutor(config.parallel)
        self._whole: dict[tuple[str, ...], bool] = {}
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

    def read_answer(self, prompt: Prompt) -> Answer:
        """Returns what completions are compared with.

        Raises DataError where there is none, and Stuck where no process can read it.
        """
        answer = self._answer(prompt)
        if answer.number is None and not answer.by_letters:
            with self._comparer() as comparer:
                if not comparer.can_read(answer.texts):
                    raise self._unreadable(prompt)
        return answer

    def _answer(self, prompt: Prompt) -> Answer:
        """Returns a row's answer. Raises Stuck where no process can say how it is read."""
        value = answer_of(prompt, self._config.answer)
        number = number_of(value)
        found = measure(value) if number is not None and isinstance(value, str) else None
        if found is not None and found.unit.startswith("degree"):
            return _of_measure(found, value)
        if number is not None:
            return Answer(texts=(f"${number.latex()}$",), bare="", number=number, is_numeric=True)
        if not isinstance(value, str) or is_misread(value):
            raise self._unreadable(prompt)
        value = repeating_as_fractions(value)
        what = core(value)
        answer = Answer(
            texts=marked(value),
            bare=bare(value),
            number=None,
            is_numeric="=" not in value and numeric_expression(bare(value)) is not None,
            core=what,
        )
        if is_of_letters(what):
            return replace(answer, by_letters=True)
        if not what or self._reads_whole(marked(what)):
            return answer
        found = measure(what)
        if found is None:
            return replace(answer, by_letters=True)
        return _of_measure(found, what)

    def _reads_whole(self, texts: tuple[str, ...]) -> bool:
        """Asks once for each answer: completions of a group have the same."""
        if texts not in self._whole:
            with self._comparer() as comparer:
                whole = comparer.reads_whole(texts)
            if len(self._whole) >= _MOST_ANSWERS:
                self._whole.clear()
            self._whole[texts] = whole
        return self._whole[texts]

    def _score(self, record: ScoredRecord) -> Score:
        if self._config.answer not in record.prompt.fields:
            return no_answer(record, self._config.answer)
        try:
            completion = self._pattern.part(record.text)
        except SlowPattern as error:
            return timed_out(error)
        try:
            answer = self._answer(record.prompt)
            if completion is None:
                return Score(value=0.0)
            verdict = self._compare(answer, plain_characters(completion))
        except (Stuck, OSError) as error:
            return failure(f"expressions could not be compared: {error}"[:REASON_CHARACTERS])
        if verdict is Verdict.UNREADABLE:
            raise self._unreadable(record.prompt)
        return Score(value=float(verdict is Verdict.EQUAL))

    def _compare(self, answer: Answer, completion: str) -> Verdict:
        completion = repeating_as_fractions(completion)
        in_boxes = list(boxes(completion))
        if not in_boxes or FINAL_ANSWER.search(completion, in_boxes[-1].end):
            rest = completion[in_boxes[-1].end + 1 :] if in_boxes else completion
            return self._compare_found(answer, written_out(rest))
        box = in_boxes[-1]
        if not box.content:
            return Verdict.DIFFERENT
        percent = PERCENT_BEHIND_BOX.match(completion, box.end)
        content = box.content + (r"\%" if percent and number_of(box.content) else "")
        verdict = self._compare_content(answer, content)
        is_list = answer.number is None and not answer.by_letters and len(in_boxes) > 1
        if verdict is Verdict.DIFFERENT and is_list:
            # Several boxes may be one answer: a list.
            return self._ask(answer, written_out(completion)).verdict
        return verdict

    def _compare_content(self, answer: Answer, content: str) -> Verdict:
        """Compares what is in a box, or a formula."""
        if answer.bare and bare(content) == answer.bare:
            return Verdict.EQUAL
        if answer.by_letters:
            return _verdict(same_letters(answer.core, content))
        if answer.core and has_other_primes(answer.core, content):
            return Verdict.DIFFERENT
        if answer.measure is not None:
            without_unit = answer.measure.number_of(content)
            if without_unit is None:
                return Verdict.DIFFERENT
            content = without_unit
        content = with_names(answer.core, content)
        number = number_of(content)
        if number is None and answer.is_numeric:
            number = only_number(content)
        if number is not None and answer.number is not None:
            return self._compare_numbers(number, answer.number)
        formula = number.latex() if number else content
        if answer.is_numeric:
            expression = numeric_expression(formula)
            if expression is None:
                return Verdict.DIFFERENT
            formula = expression
        return self._ask(answer, rf"\boxed{{{written_out(words_as_text(formula))}}}").verdict

    def _compare_found(self, answer: Answer, completion: str) -> Verdict:
        """Compares what math-verify finds in a completion without a box."""
        if answer.bare and bare(completion) == answer.bare:
            return Verdict.EQUAL
        if answer.by_letters:
            return _verdict(any(same_letters(answer.core, text) for text in said(completion)))
        found = self._ask(answer, completion)
        if answer.number is None and found.verdict is not Verdict.EQUAL:
            return found.verdict
        if found.span is None:
            number = None if found.is_several else last_number(completion)
            if answer.number is None or number is None:
                return found.verdict
            return self._compare_numbers(number, answer.number)
        content = completion[slice(*found.span)]
        if answer.measure is not None and not answer.measure.allows_behind(
            completion[found.span[1] :]
        ):
            return Verdict.DIFFERENT
        if found.is_latex and number_of(content) is None:
            return self._compare_content(answer, content)
        number = number_within(completion, *found.span)
        if number is None:
            is_decimal = has_decimal_comma(completion, *found.span)
            return found.verdict if is_decimal else Verdict.DIFFERENT
        if answer.number is None:
            return found.verdict
        return self._compare_numbers(number, answer.number)

    def _compare_numbers(self, number: Number, expected: Number) -> Verdict:
        """Compares numbers: fractions and integers exactly, others to so many decimal places."""
        is_exact = number.is_exact and expected.is_exact
        return _verdict(number.is_near(expected, Fraction(0) if is_exact else self._tolerance))

    def _ask(self, answer: Answer, completion: str) -> Found:
        with self._comparer() as comparer:
            return comparer.find(answer.texts, completion)

    @contextlib.contextmanager
    def _comparer(self) -> Iterator[Comparer]:
        comparer = self._comparers.get()
        try:
            yield comparer
        finally:
            self._comparers.put(comparer)

    def _unreadable(self, prompt: Prompt) -> DataError:
        return unreadable(
            prompt,
            self._config.answer,
            "is no expression that can be compared",
            why="math-verify cannot read it in time, or reads something else than it says",
            todo="correct or drop the row, or compare with rewards/exact-match",
        )
