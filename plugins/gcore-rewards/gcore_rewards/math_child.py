"""Compares mathematical expressions for the process that started it: ``python math_child.py``.

Reads JSON objects from standard input, one a line, and writes such lines to standard output:

    {"path", "memory_mib", "digits", "time_s"}     the first: where modules are, and limits
                                                   -> {"ready": true}
    {"expected", "completion"}                     each further one
                                                   -> {"readable"}: whether the expected answer is
                                                   -> {"equal"}, where it is

math-verify bounds its own time by an alarm that only a main thread can set, and whose exception
does not reach a computation inside of the interpreter. So its own limits are off, and the kernel
ends this process when a comparison has had its CPU time.

Imports nothing of the project: it runs with ``-I``.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

#: A number in plain text. Other text without marks of LaTeX is read as if it had them.
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:[, ][0-9]{3})+(?:\.[0-9]+)?|[0-9]*[.,]?[0-9]+) *%?")
_MATH_MARKS = ("$", r"\(", r"\[", r"\boxed")


class Comparison:
    """Compares by math-verify with the settings that all records share."""

    def __init__(self, digits: int) -> None:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

        # A box is what a completion means, wherever else formulas stand.
        forms = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

        def read(text: str) -> Any:
            return parse(text, forms, parsing_timeout=None)

        def is_equal(expected: Any, answer: Any) -> bool:
            return bool(verify(expected, answer, float_rounding=digits, timeout_seconds=None))

        self.read: Callable[[str], Any] = read
        self.is_equal: Callable[[Any, Any], bool] = is_equal
        self.expected: Callable[[str], Any] = lru_cache(256)(self._expected)

    def _expected(self, text: str) -> Any:
        """The row's answer as it was read; None where it does not even equal itself."""
        has_marks = any(mark in text for mark in _MATH_MARKS)
        marked = text if has_marks or _NUMBER.fullmatch(text.strip()) else f"${text.strip()}$"
        expected = self.read(marked)
        return expected if expected and self.is_equal(expected, expected) else None


def _limit_cpu(time_s: float) -> None:
    """Has the kernel end this process after so much CPU time; 0 takes the limit away."""
    signal.setitimer(signal.ITIMER_PROF, time_s)


def _silence() -> int:
    """Gives libraries /dev/null to print to; returns where standard output was."""
    output = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    return output


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    sys.path[:] = settings["path"]
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    memory = settings["memory_mib"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    comparison = Comparison(settings["digits"])
    comparison.expected("$1$")  # what parsers load at first is not charged to a record
    output = _silence()

    def answer(**values: bool) -> None:
        os.write(output, json.dumps(values).encode() + b"\n")

    answer(ready=True)
    for line in sys.stdin:
        record = json.loads(line)
        _limit_cpu(settings["time_s"])
        expected = comparison.expected(record["expected"])
        answer(readable=expected is not None)
        if expected is not None:
            _limit_cpu(settings["time_s"])
            answer(equal=comparison.is_equal(expected, comparison.read(record["completion"])))
        _limit_cpu(0)


if __name__ == "__main__":
    main()
