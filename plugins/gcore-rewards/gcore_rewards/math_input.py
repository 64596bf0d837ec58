"""Writes text for math-verify so that it reads what stands there, and says where it would not.

math-verify reads 1e-07 as e - 7, 1 234 as 235, 2 1/2 as 3/2, 1_000 as 1, 7 \bmod 3 as 3, "yes" as
the product of its letters, and takes 5 for ``5 million``.
"""

from __future__ import annotations

import re

from gcore_rewards.number_words import SCALES
from gcore_rewards.numbers import (
    NUMBER,
    PERCENT,
    WRAPPERS,
    number_in_match,
    plain_characters,
)

#: "1,5": math-verify reads it as 1.5 in plain text, and as two numbers in LaTeX.
_DECIMAL_COMMA = re.compile(r"(?<![\d.,])[$€£¥₹]?[+-]?[0-9]+,[0-9]+(?![.,]?\d)")
PERCENT_BEHIND_BOX = re.compile(rf"\}}[\s$]*{PERCENT}", re.IGNORECASE)
#: The answer in the form of Minerva's prompts, for which math-verify looks first.
FINAL_ANSWER = re.compile(r"final answer is.{1,200}I hope", re.IGNORECASE | re.DOTALL)
_MATH_MARKS = ("$", r"\(", r"\[", r"\boxed")
_REPEATING = re.compile(
    r"(?<![\d.,])(?P<whole>[0-9]{1,20})\.(?P<once>[0-9]{0,20})"
    r"\\(?:overline|bar|dot) *\{(?P<again>[0-9]{1,20})\}(?![\d.]|\\(?:bar|dot))"
)
#: Letters that are one word, and no product.
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ -][A-Za-z]+)*")
_NO_WORDS = ("inf", "infinity", "sqrt", "pi")
_UPRIGHT_CONSTANT = re.compile(r"\\(?:mathrm|operatorname|text|rm) *\{ *([ei]) *\}")
#: What math-verify reads as another number: 1.5 of "1.5 million", 1 of 1_000, 3 of 7 mod 3.
_MISREAD = re.compile(
    r"[0-9](?:\s|~|\\[,;: ]|\\(?:text|mathrm|mbox) *\{)*(?:" + "|".join(sorted(SCALES)) + r")\b"
    r"|\.[0-9]+\.[0-9]|[0-9]_[0-9]{3}(?![0-9])|[0-9] *\\?b?mod *[0-9]",
    re.IGNORECASE,
)
#: What an expression that is one number consists of, besides numbers.
_COMMANDS = re.compile(
    r"\\(?:[dtc]?frac|sqrt(?: *\[ *N *\])?|pi|left|right|log(?:_ *(?:N|\{ *N *\}))?|ln|lg|exp|"
    r"(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|[dt]?binom|displaystyle|quad|circ|degree|[lr]vert|"
    r"[lr]floor|[lr]ceil)(?![a-zA-Z])|\\[,;:! %$]"
)
_TEXT = re.compile(
    r"\\(?:text|mathrm|mbox|textbf|mathbf|textnormal) *\{([^{}]*)\}(?:\^\{? *N *\}?)?"
)
_DIGITS = re.compile(r"(?<![\d.])(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)(?![\d.])")
_SIGNS = re.compile(r"[N{}()+\-*/^!|%$\s×·÷√πei]*")
_OPERATORS = re.compile(r"\\(?:cdot|times|div)(?![a-zA-Z])")
_NO_EXPRESSION = re.compile(r"[Ne]\s*N|[-+*/^]\s*[+*/^]|--|^\s*$")
#: Several equations, as in "x = 1, y = 2".
_SEVERAL = re.compile(r"[,;]|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])")
_APPROXIMATELY = re.compile(r"\\approx(?![a-zA-Z])|≈")
_EQUALS = re.compile(r"(?<![<>!/~:\\])(?<!\\not)=")


def marked(text: str) -> tuple[str, ...]:
    """Returns the ways in which a row's answer that is no plain number may be read.

    Without marks of LaTeX it gets them. A comma between two numbers may stand for a point, too.
    """
    text = plain_characters(text).strip()
    written = written_out(text)
    if any(mark in text for mark in _MATH_MARKS):
        return (written,)
    of_latex = f"${words_as_text(written)}$"
    return (of_latex, text) if has_decimal_comma(text, 0, len(text)) else (of_latex,)


def has_decimal_comma(text: str, start: int, end: int) -> bool:
    """Returns whether a part of a text is a decimal with a comma, or two numbers: "1,5"."""
    match = _DECIMAL_COMMA.search(text, start)
    return match is not None and text[match.start() : match.end()] == text[start:end].strip()


def repeating_as_fractions(text: str) -> str:
    r"""Returns a text with decimals such as ``0.\overline{3}`` as fractions: ``\frac{3}{9}``."""
    return _REPEATING.sub(_repeating_as_fraction, text)


def _repeating_as_fraction(match: re.Match[str]) -> str:
    once, again = match["once"], match["again"]
    ninths = int("9" * len(again) + "0" * len(once))
    digits = int(match["whole"] + once + again) - int(match["whole"] + once)
    return rf"\frac{{{digits}}}{{{ninths}}}"


def written_out(text: str) -> str:
    r"""Returns a text with numbers that math-verify reads as something else in digits or ``\frac``.

    text: as ``plain_characters`` gives it.
    """
    return _UPRIGHT_CONSTANT.sub(r"\1", NUMBER.sub(_number_written_out, text))


def _number_written_out(match: re.Match[str]) -> str:
    text = match.string
    before, behind = text[: match.start()][-1:], text[match.end() :][:1]
    is_part = before.isalnum() or before in ("\\", ".", "_", "^") or behind.isalnum()
    separator = match["plain_separator"] or match["factor_separator"] or ","
    is_read = not (match["exponent"] or match["vulgar"] or match["before"] or match["raised"])
    number = number_in_match(match)
    if number is None or is_part or (is_read and separator.startswith((",", "{"))):
        return match[0]
    start, end = match.span("body")
    sign = "-" if number.value < 0 else ""
    digits = number.latex().removeprefix(sign).removesuffix(r"\%")
    return text[match.start() : start] + digits + text[end : match.end()]


def words_as_text(text: str) -> str:
    r"""Returns words as ``\text``, and anything else as it is: "blue" is no product of letters."""
    words = _WORDS.fullmatch(text.strip())
    return rf"\text{{{words[0]}}}" if words and words[0].casefold() not in _NO_WORDS else text


def is_misread(text: str) -> bool:
    """Returns whether a text has something that math-verify reads as another number."""
    return bool(_MISREAD.search(text))


def numeric_expression(content: str) -> str | None:
    r"""Returns what a content such as ``x = 2 \cdot 3 \approx 6`` says a number is: ``2 \cdot 3``.

    None: it is no expression of numbers alone, although math-verify may find a number in it.
    """
    exact = next((part for part in _APPROXIMATELY.split(content) if part.strip()), "")
    *left, result = _EQUALS.split(exact)
    result = result.strip().removesuffix(".")
    signs = _DIGITS.sub(" N ", result)
    texts = [text for text in _TEXT.findall(signs) if text.strip()]
    signs = _COMMANDS.sub(" ", _OPERATORS.sub("*", _TEXT.sub(" ", signs)))
    is_numeric = (
        _SIGNS.fullmatch(signs)
        and not _SEVERAL.search(re.sub(r"\([^()]*\)", "", "=".join(left)))
        and not _NO_EXPRESSION.search(signs)
        and all(signs.count(a) == signs.count(b) for a, b in ("()", "{}"))
        and (signs.count("|") == 0 or re.fullmatch(r"\|[^|]*\|", signs.strip()))
        and not any(is_misread(f"1 {text}") or "N" in text for text in texts)
    )
    return result if is_numeric else None


def bare(text: str) -> str:
    """Returns the letters of a text, without spaces and without marks of LaTeX around them."""
    text = re.sub(r"\s|\\(?:left|right|[,;:! ])(?![a-zA-Z])", "", text).removesuffix(".")
    for opening, closing in WRAPPERS:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening):
            text = text[len(opening) : len(text) - len(closing)]
    return text
