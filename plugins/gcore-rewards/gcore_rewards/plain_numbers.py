"""Reads one plain number from text, exactly, as people and LaTeX write it.

Plain are an integer, a decimal and a fraction of two of them, with a sign, thousands separators, a
percent sign or a currency sign. Nothing else is: no time, pair, root, power, product or variable.

``number_of`` reads a text that is nothing but a number; ``last_number`` finds the number at the
end of prose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

#: Most digits, and the largest exponent, of a number that is read.
_MOST_DIGITS = 1000
_MOST_CHARACTERS = 4 * _MOST_DIGITS
#: Code points of characters that people write for a minus or a space -> what they stand for.
_AS_WRITTEN = {
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-"),
    **dict.fromkeys([0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F], " "),
}
_CURRENCY = r"(?:\\\$|[$€£¥₹])"
_PERCENT = r"(?:\\?%|per ?cent\b|pct\b)"
#: What stands between thousands: "1,234", "1 234", "1{,}234", "1\,234", "1,\!234", "1~234".
_SEPARATOR = r"(?:,(?:\\!)?|\{,\}|\\[,;:! ]|~| )"


def _decimal(name: str) -> str:
    """The pattern of an unsigned decimal; all thousands of it have one separator."""
    grouped = rf"[1-9][0-9]{{0,2}}(?P<{name}>{_SEPARATOR})[0-9]{{3}}(?:(?P={name})[0-9]{{3}})*"
    return rf"(?:(?:{grouped}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"


def _part(name: str) -> str:
    r"""The pattern of one argument of ``\frac``: in braces, or a single digit."""
    in_braces = rf"\{{ *(?P<{name}>-? *{_decimal(name + '_sep')}) *\}}"
    return rf" *(?:{in_braces}|(?P<{name}_digit>[0-9]))"


_NUMBER = re.compile(
    rf"(?P<before>[+-]?) *(?:{_CURRENCY} *(?P<after>-?) *)?"
    r"(?:"
    rf"\\[dtc]?frac{_part('top')}{_part('bottom')}"
    rf"|(?P<over>{_decimal('over_sep')}) */ *(?P<under>{_decimal('under_sep')})"
    rf"|(?P<plain>{_decimal('plain_sep')})(?:[eE](?P<exponent>[+-]?[0-9]+))?"
    r")"
    rf" *{_CURRENCY}? *(?P<percent>{_PERCENT}?)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class PlainNumber:
    """A number as it was written.

    value: what stands before the percent sign, if there is one.
    percent: whether there is one.
    """

    value: Fraction
    percent: bool = False

    def is_near(self, other: PlainNumber, tolerance: Fraction) -> bool:
        """Whether two numbers differ at most by the tolerance.

        50% is near 50% and 0.5. It is near 50, too: who is asked for a percentage may leave the
        sign out.
        """
        if abs(self.value - other.value) <= tolerance:
            return True
        return self.percent != other.percent and abs(self._share - other._share) <= tolerance

    @property
    def _share(self) -> Fraction:
        return self.value / 100 if self.percent else self.value


def number_of(text: str) -> PlainNumber | None:
    """Reads a text that is one plain number; None where it is anything else.

    The number may stand in dollar signs or a box, and a full stop may follow it. Of a worked
    solution that ends with a line ``#### 42`` the text behind the marks counts.
    """
    text = text.translate(_AS_WRITTEN).rpartition("####")[2]
    return _read(_without_wrappers(text, _MATH_WRAPPERS, "", "."))


def last_number(text: str) -> PlainNumber | None:
    """Reads the number at the end of a text; None where what stands there is not plain.

    The last digit of the text is looked for. What stands around it on its line, up to the next
    words, is a formula; what follows its last equals sign must be one plain number.
    """
    text = text.translate(_AS_WRITTEN)
    position = max(map(text.rfind, "0123456789"))
    if position < 0:
        return None
    start = text.rfind("\n", 0, position) + 1
    line = text[start:].partition("\n")[0]
    formula = _formula_around(line, position - start)
    if formula is None or len(formula) > _MOST_CHARACTERS:
        return None
    before = line[: position - start][-_MOST_CHARACTERS:]
    if "=" in formula and _SEVERAL_VARIABLES.search(before):
        return None
    result = _RESULT_SIGN.split(_without_marks(formula))[-1]
    if not re.search(r"[\\$]", formula):
        result = _LONE_LETTER.sub("", result.strip())
    result = _without_marks(result)
    percent = "%" if result.endswith("%") else ""
    result = _without_marks(result.removesuffix("%").removesuffix("\\"))
    return _read(_HYPHENATED.sub("", result) + percent)


# -- the formula around a digit --------------------------------------------------------------------

#: What ends a formula on its line. Words have two letters or more and are no LaTeX commands, except
#: for commands that begin a text. A formula also ends with its sentence, and with a tag, such as
#: ``<answer>``, ``<|end|>`` or the ``<<2*3=6>>`` of a calculator.
_BOUNDARY = re.compile(
    r"(?P<words>\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|quad|qquad)(?![a-zA-Z])\*?)"
    r"|(?P<command>\\[a-zA-Z]+)"
    r"|(?P<tag></?[a-zA-Z][^<>]*>|<\|[^<>]*\|>|<<[^<>]*>>)"
    r"|(?P<word>[^\W\d_]+(?:['’][^\W\d_]+)+|[^\W\d_]{2,}|(?:[^\W\d_]\.){2,})"
    r"|(?P<stop>[.!?](?=[\"'”’)*_]*(?:\s|$)))"
)
#: What may stand before a number, and behind it, without being part of it.
_QUOTES = "\"'“”‘’«»`"
_MARKS_BEFORE = _QUOTES + "*_#,;:)]}&~—•∴"
_MARKS_BEHIND = _QUOTES + "*_#,;:([{./\\—…"
_RESULT_SIGN = re.compile(
    r"=|≈|→|⇒|:(?=\s)|\\(?:approx|to|implies|Rightarrow|rightarrow)(?![a-zA-Z])"
)
#: Two assignments to names of one or two letters, as in ``x = 1, y = 2``: two numbers, not one.
_SEVERAL_VARIABLES = re.compile(
    r"(?<![^\W_])[a-zA-Z]{1,2}(?:_\{?\w+\}?)? *=[^=,;]*(?:,|;|\band\b)[\s\\$]*"
    r"[a-zA-Z]{1,2}(?:_\{?\w+\}?)? *=[^=]*$"
)
#: A word of one letter before a number or behind it: "a 5", "(B) 5", "5 m".
_LONE_LETTER = re.compile(r"^\(?[a-zA-Z]\)? +(?=\(?\.?[0-9])|(?<=[0-9]) +[a-zA-Z]$")
#: The first half of "7-5": the minus behind a digit is a hyphen.
_HYPHENATED = re.compile(r"^[0-9]+-(?=[0-9]+$)")


def _formula_around(line: str, position: int) -> str | None:
    """The formula around a digit on a line.

    None where a letter sticks to the digit, as in "H2O", or a word is a term, as in "price + 5".
    """
    start = 0
    end = len(line)
    word_before = False
    word_behind = False
    for kind, left, right in _boundaries(line):
        if right <= position:
            start = right
            word_before = kind == "word"
        elif left > position:
            end = left
            word_behind = kind == "word"
            break
    formula = line[start:end]
    if word_before and formula[:1] == "-":
        formula = formula[1:]  # the hyphen of "step-5"
    elif word_before and re.match(r"[0-9_^/+]| *[+*] ", formula):
        return None
    if word_behind:
        percent = re.match(_PERCENT, line[end:], re.IGNORECASE)
        if percent:
            return f"{formula}%"
        if re.search(r"[0-9]$", formula):
            return None
    return formula


def _boundaries(line: str) -> Iterator[tuple[str, int, int]]:
    """Kind, start and end of what formulas on a line end at."""
    for match in _BOUNDARY.finditer(line):
        if match.lastgroup != "command":
            yield str(match.lastgroup), match.start(), match.end()


# -- one number ------------------------------------------------------------------------------------

#: LaTeX that shows what is in it as it is: opening and closing mark.
_MATH_WRAPPERS = (
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    (r"\boxed{", "}"),
    (r"\fbox{", "}"),
)
_SPACES = " \t\r\n"
_WRAPPERS = (
    *_MATH_WRAPPERS,
    (r"\left(", r"\right)"),
    ("(", ")"),
    ("[", "]"),
    ("{", "}"),
)


def _without_marks(formula: str) -> str:
    """Strips from a formula in prose what is no part of its number."""
    return _without_wrappers(formula, _WRAPPERS, _MARKS_BEFORE, _MARKS_BEHIND)


def _without_wrappers(
    text: str, wrappers: tuple[tuple[str, str], ...], before: str, behind: str
) -> str:
    """Strips white space, marks and wrappers until none is left.

    In prose the other half of a wrapper may be outside of the formula, so half of one goes, too.
    """
    while True:
        stripped = text.lstrip(_SPACES + before).rstrip(_SPACES + behind)
        for opening, closing in wrappers:
            stripped = _unwrapped(stripped, opening, closing, halves=wrappers is _WRAPPERS)
        if stripped == text:
            return text
        text = stripped


def _unwrapped(text: str, opening: str, closing: str, *, halves: bool) -> str:
    """The text without one wrapper around it; with ``halves``, also without one half of it.

    A brace without a command belongs to any command, so half of ``\\boxed{...}`` is never its end.
    """
    opened = text.startswith(opening)
    closed = text.endswith(closing) and len(text) >= len(opening) + len(closing)
    if opened and closed:
        return text[len(opening) : -len(closing)]
    if halves and opened and closing not in text[len(opening) :]:
        return text[len(opening) :]
    is_command = opening.endswith("{") and opening != "{"
    if halves and closed and not is_command and opening not in text:
        return text[: -len(closing)]
    return text


def _read(text: str) -> PlainNumber | None:
    """Reads a plain number without anything around it; None where it is none, or is too long."""
    match = _NUMBER.fullmatch(text)
    if match is None or sum(letter.isdigit() for letter in text) > _MOST_DIGITS:
        return None
    if match["plain"]:
        exponent = int(match["exponent"] or 0)
        if abs(exponent) > _MOST_DIGITS:
            return None
        value = _fraction(match["plain"]) * Fraction(10) ** exponent
    else:
        top = match["over"] or match["top"] or match["top_digit"]
        bottom = _fraction(match["under"] or match["bottom"] or match["bottom_digit"])
        if bottom == 0:
            return None
        value = _fraction(top) / bottom
    if "-" in (match["before"], match["after"]):
        value = -value
    return PlainNumber(value, percent=bool(match["percent"]))


def _fraction(digits: str) -> Fraction:
    """The value of a decimal with its thousands separators."""
    return Fraction(Decimal(re.sub(r"[^0-9.-]", "", digits)))
