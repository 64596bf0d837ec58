"""Compares mathematical expressions for the process that started it: ``python math_child.py``.

Reads JSON objects from standard input, one a line, and writes such lines to standard output:

    {"path", "memory_mib", "digits", "time_s"}     the first: where modules are, and limits
                                                   -> {"ready": true}
    {"expected", "completion"}                     each further one: the ways in which the expected
                                                   answer may be read, and with what it is compared;
                                                   null where it is only to be read
                                                   -> {"readable"}: whether the expected answer is
                                                   -> {"whole"}, where it is and there is no
                                                   completion: whether every change of the
                                                   expected answer makes it another one
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
import string
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
            def verified(one: Any, other: Any) -> bool:
                return bool(verify(one, other, float_rounding=digits, timeout_seconds=None))

            if verified(expected, answer):
                return True
            of_complex = _complex(expected), _complex(answer)
            return of_complex != (expected, answer) and verified(*of_complex)

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

    def is_whole(self, text: str) -> bool:
        """Returns whether every change of an expected answer gives another one.

        Where a change gives the same one, what was changed is not read: the 8 of ``2516_8``.
        """
        value = self._value(text)
        return not any(
            all(self._value(other) == value for other in changed) for changed in _changed(text)
        )

    def _value(self, text: str) -> Any:
        """What a text is read as, with what can be computed at once; None: as nothing."""
        from sympy import Expr

        try:
            values = self.read(text)
            value = values[0] if values and not isinstance(values[0], str) else None
            return value.doit() if isinstance(value, Expr) else value
        except Exception:  # as in ``compare``
            return None

    def _expected(self, texts: tuple[str, ...]) -> Any:
        """The row's answer as it was read; None where it does not even equal itself."""
        expected = [value for text in texts for value in self.read(text)]
        return expected if expected and self.is_equal(expected, expected) else None


def _complex(values: Any) -> Any:
    """Returns values with the imaginary unit for a lone ``i``, a name to math-verify."""
    from sympy import Expr, I

    def with_unit(value: Any) -> Any:
        names = value.free_symbols if isinstance(value, Expr) else set()
        if [name.name for name in names] != ["i"]:
            return value
        return value.subs(dict.fromkeys(names, I)).doit()

    return [with_unit(value) for value in values]


#: Most changes of an answer that are tried.
_MOST_CHANGES = 12
#: The name in front of an equation is not asked for: ``x = 5`` is 5.
_NAME = re.compile(
    r"[\s$\\(\[]*[A-Za-z](?:_\w|_\{\w+\})?'*(?:\([A-Za-z, ]+\))? *(?:=|\\in(?![a-z]))"
)
#: What is changed: digits, letters, and signs of degrees. Names of commands are left.
_PARTS = re.compile(
    r"\\(?:begin|end|operatorname) *\{[^{}]*\}"
    r"|(?P<degrees>\^ *\{? *\\circ *\}?)|\\[A-Za-z]+|(?P<digits>[0-9]+)|(?P<letters>[A-Za-z]+)"
)
#: Letters that join answers.
_JOINTS = ("and", "or")
_NEXT_LETTER = str.maketrans(
    string.ascii_letters, string.ascii_lowercase[1:] + "a" + string.ascii_uppercase[1:] + "A"
)


def _changed(text: str) -> list[list[str]]:
    """Returns, for each part of a text, the text with other digits or letters in its place.

    Of digits there are two, since 5 over 2 is 5 over 3.
    """
    changes: list[list[str]] = []
    name = _NAME.match(text)
    first = name.end() if name else 0
    if text.count("=") > 1 and not re.search("[,;]|and|or", text):
        first = text.rindex("=")  # of a chain of equations the end counts
    for part in _PARTS.finditer(text, first):
        kind, found = part.lastgroup, part[0]
        before, behind = text[: part.start()], text[part.end() :]
        if kind == "digits":
            others = [found[:-1] + str((int(found[-1]) + step) % 10) for step in (1, 2)]
            changes.append([before + other + behind for other in others])
        elif kind == "letters" and found.lower() not in _JOINTS:
            changes.append([before + found.translate(_NEXT_LETTER) + behind])
        if kind == "degrees" or (kind == "letters" and before.rstrip()[-1:].isdecimal()):
            changes.append([before + behind])  # what is like a unit is left out
    # The last ones tell most: bases, moduli and units stand behind.
    return changes[-_MOST_CHANGES:]


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
        _limit_cpu(settings["time_s"])
        if expected is not None and record["completion"] is not None:
            answer(**comparison.compare(expected, record["completion"]))
        elif expected is not None:
            answer(whole=all(map(comparison.is_whole, record["expected"])))
        _limit_cpu(0)


if __name__ == "__main__":
    main()
