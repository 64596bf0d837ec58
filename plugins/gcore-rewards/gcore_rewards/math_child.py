"""Compares mathematical expressions for the process that started it: ``python math_child.py``.

Reads JSON objects from standard input, one a line, and writes such lines to standard output:

    {"path", "memory_mib", "digits", "time_s"}     the first: where modules are, and limits
                                                   -> {"ready": true}
    {"expected", "completion"}                     each further one: the ways in which the expected
                                                   answer may be read, and with what it is compared;
                                                   null where it is only to be read
                                                   -> {"readable"}: whether the expected answer is
                                                   -> {"equal", "span", "is_latex"}, where it is
                                                   and there is a completion: where the compared
                                                   part stands in it, null where it is of several
                                                   parts; and whether it was read as LaTeX

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
from itertools import groupby
from typing import Any


class Comparison:
    """Compares by math-verify with the settings that all records share."""

    def __init__(self, digits: int) -> None:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
        from math_verify.parser import extract_match, get_extraction_regexes

        # A box is what a completion means, wherever else formulas stand.
        forms = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
        patterns = [
            (priority, pattern, form)
            for expressions, form in get_extraction_regexes(forms)
            for pattern, priority in expressions
        ]
        patterns.sort(key=lambda item: item[0])

        def read(text: str) -> Any:
            return parse(text, forms, parsing_timeout=None)

        def find(text: str) -> tuple[Any, re.Match[str] | None]:
            """Reads a text as ``parse`` does, which does not say what it has read."""
            first = ""
            for _, group in groupby(patterns, key=lambda item: item[0]):
                matches = [
                    (match, form) for _, pattern, form in group for match in pattern.finditer(text)
                ]
                matches.sort(key=lambda item: (item[0].end(), -item[0].start()), reverse=True)
                for match, form in matches:
                    value, said = extract_match(match, form)
                    first = first or said
                    if value is not None:
                        return [value, *filter(None, [first])], match
            return list(filter(None, [first])), None

        def is_equal(expected: Any, answer: Any) -> bool:
            return bool(verify(expected, answer, float_rounding=digits, timeout_seconds=None))

        self.read: Callable[[str], Any] = read
        self.find: Callable[[str], tuple[Any, re.Match[str] | None]] = find
        self.is_equal: Callable[[Any, Any], bool] = is_equal
        self.expected: Callable[[tuple[str, ...]], Any] = lru_cache(256)(self._expected)

    def compare(self, expected: Any, completion: str) -> dict[str, Any]:
        """Returns what is answered about a completion."""
        try:
            values, match = self.find(completion)
        except Exception:  # the library counts whatever it raises as nothing that can be read
            values, match = [], None
        parts = [name for name, part in match.groupdict().items() if part] if match else []
        of_latex = [name for name in parts if "latex" in name]
        of_text = [name for name in parts if name.startswith(("integer", "decimal", "expr"))]
        span = None
        if match is not None and len(of_latex) == 1:
            span = match.span(of_latex[0])
        elif match is not None and of_text:
            starts, ends = zip(*map(match.span, of_text), strict=True)
            span = (min(starts), max(ends))
        equal = self.is_equal(expected, values)
        return {"equal": equal, "span": span, "is_latex": bool(of_latex)}

    def _expected(self, texts: tuple[str, ...]) -> Any:
        """The row's answer as it was read; None where it does not even equal itself."""
        expected = [value for text in texts for value in self.read(text)]
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
    comparison.expected(("$1$",))  # what parsers load at first is not charged to a record
    output = _silence()

    def answer(**values: Any) -> None:
        os.write(output, json.dumps(values).encode() + b"\n")

    answer(ready=True)
    for line in sys.stdin:
        record = json.loads(line)
        _limit_cpu(settings["time_s"])
        expected = comparison.expected(tuple(record["expected"]))
        answer(readable=expected is not None)
        if expected is not None and record["completion"] is not None:
            _limit_cpu(settings["time_s"])
            answer(**comparison.compare(expected, record["completion"]))
        _limit_cpu(0)


if __name__ == "__main__":
    main()
