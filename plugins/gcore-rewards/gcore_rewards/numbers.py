r"""Reads one plain number, exactly: the one reader of rows, completions and judges' answers.

Plain are integers, decimals, fractions, mixed numbers and powers of ten, with a sign, thousands
separators, a percent sign, a currency sign or a degree sign: ``-1,234.5``, ``7/2``,
``\frac{7}{2}``, ``2 1/2``, ``3½``, ``1e-07``, ``1.5 \times 10^{3}``, ``$5``, ``30\%``, ``45°``.

Everything else is no number, and so is what may mean two numbers: ``1,5``, ``1.234,5``, ``1_000``,
``12:30``, ``1.2.3``, ``10-12``, ``0x1F``, digits of other scripts. A wrong number would be a wrong
reward that nobody sees; a number that is missing is seen.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

#: Most digits, and the largest exponent, of a number that is read.
MOST_DIGITS = 1000
#: Code points that people write for a character of numbers -> what they stand for. What has no
#: width is left out.
_AS_WRITTEN = {
    **dict.fromkeys(map(ord, "\u02d7\u2010\u2011\u2012\u2013\u2212\u2796\ufe63\uff0d"), "-"),
    **dict.fromkeys([0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000], " "),
    **dict.fromkeys(map(ord, "\u2044\u2215"), "/"),
    **dict.fromkeys(map(ord, "\ufe6a\uff05"), "%"),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u200e\u200f\u2060\ufeff")),
}
#: A space that breaks no line, between thousands of one number.
_FIXED_SPACE = re.compile(
    r"(?<=[0-9])[\u00a0\u2007\u2008\u2009\u202f](?=[0-9]{3}(?![0-9]|[ .,][0-9]))"
)
_VULGAR = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")


@dataclass(frozen=True, kw_only=True)
class Number:
    """A plain number as it was written.

    value: what stands before the percent sign, if there is one.
    text: as it was written, without separators, spaces, currency and degrees; its minus is "-", its
        percent sign "%", and a power of ten has the form "1.5e3".
    is_percent: whether there is a percent sign.
    is_exact: whether it is an integer or a fraction, which are never rounded.
    """

    value: Fraction
    text: str
    is_percent: bool = False
    is_exact: bool = False

    @property
    def share(self) -> Fraction:
        """What the number stands for where 50% is a half."""
        return self.value / 100 if self.is_percent else self.value

    def is_near(self, expected: Number, tolerance: Fraction) -> bool:
        """Returns whether this number differs from the expected one at most by the tolerance.

        50% is near 50% and 0.5. It is near 50, too: who is asked for a percentage may leave the
        sign out. It is not so at most at 1: 0.5 may be half a percent or a half, and is a half.
        An expected number that is smaller than the tolerance, and not 0, must be met to
        this share of it: 0 would be near it otherwise, whatever it is.
        """
        if self.is_percent == expected.is_percent:
            return _is_near(self.value, expected.value, tolerance)
        if _is_near(self.share, expected.share, tolerance):
            return True
        without_sign = expected if self.is_percent else self
        may_lack_sign = abs(without_sign.value) > 1
        return may_lack_sign and _is_near(self.value, expected.value, tolerance)

    def latex(self) -> str:
        r"""Returns the number as digits, or as a ``\frac`` where digits cannot say it."""
        sign = "-" if self.value < 0 else ""
        value = abs(self.value)
        rest = value.denominator
        places = max(_power_of(2, rest), _power_of(5, rest))
        if 10**places % rest:
            body = rf"\frac{{{value.numerator}}}{{{rest}}}"
        else:
            digits = str(value.numerator * 10**places // rest).rjust(places + 1, "0")
            body = f"{digits[:-places]}.{digits[-places:]}" if places else digits
        return sign + body + (r"\%" if self.is_percent else "")


def _is_near(value: Fraction, expected: Fraction, tolerance: Fraction) -> bool:
    if 0 < abs(expected) <= tolerance:
        tolerance *= min(Fraction(1), abs(expected))
    return abs(value - expected) <= tolerance


def _power_of(prime: int, number: int) -> int:
    power = 0
    while number % prime == 0:
        number //= prime
        power += 1
    return power


def plain_characters(text: str) -> str:
    """Returns a text with one minus, one space, one slash and one percent sign."""
    return _FIXED_SPACE.sub("~", text).translate(_AS_WRITTEN)


def number_of(value: object) -> Number | None:
    r"""Reads a value of a row, or a text that is nothing but a number; None: it is none.

    In a text the number may stand in dollar signs, a box or a command for type such as ``\text``,
    and a full stop may follow it. Of a worked solution that ends with a line ``#### 42`` the text
    behind the marks counts.
    """
    if isinstance(value, str):
        text = plain_characters(value).rpartition("####")[2]
        return number_in_match(NUMBER.fullmatch(_unwrapped(text)))
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    is_finite = isinstance(value, int) or math.isfinite(value)
    if not is_finite or abs(value) >= 10**MOST_DIGITS:
        return None
    return number_in_match(NUMBER.fullmatch(str(value)))


def decimal_of(text: str) -> Fraction | None:
    """Reads a number of digits with a decimal point, an exponent and a sign; None: it is none.

    This is what a form asks for, where a fraction, a percent sign or a separator is a mistake.
    """
    text = text.strip().replace("\u2212", "-")
    if len(text) > MOST_DIGITS or not _DECIMAL.fullmatch(text):
        return None
    exponent = re.split("[eE]", text)[1:]
    return None if exponent and abs(int(exponent[0])) > MOST_DIGITS else Fraction(text)


_DECIMAL = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")

# -- the form of a number --------------------------------------------------------------------------

CURRENCY = r"(?:\\\$|US\$|[$€£¥₹])"
PERCENT = (
    r"(?:\\?%|per(?:[ -]?cents?|centage)\b(?! +points?\b)|pct\b|prozent\b|por ?cien(?:to)?\b|"
    r"por ?cento\b|pour[ -]?cent\b|per ?cento\b|процент(?:а|ов)?\b)"
)
DEGREES = r"(?:°|\^ *\\circ\b|\^ *\{ *\\circ *\}|\\degrees?\b)"
#: What stands between thousands: "1,234", "1 234", "1'234", "1{,}234", "1\,234", "1,\!234".
_SEPARATOR = r"(?:,(?:\\!)?|\{,\}|\\[,;:! ]|~| |['’])"
#: What stands between the whole and the fraction of a mixed number.
_GAP = r"(?: *|~|\\[,;:! ])"


def _decimal(name: str) -> str:
    """Returns the pattern of an unsigned decimal; all thousands of it have one separator."""
    thousands = rf"(?P<{name}>{_SEPARATOR})[0-9]{{3}}(?:(?P={name})[0-9]{{3}})*(?![0-9])"
    whole = rf"(?<![0-9])(?:[1-9][0-9]{{0,2}}{thousands}|[0-9]++)"
    return rf"(?:{whole}(?:\.[0-9]++)?|(?<!\.)\.[0-9]++)"


def _part(name: str) -> str:
    r"""Returns the pattern of one argument of ``\frac``: in braces, or a single digit."""
    in_braces = rf"\{{ *(?P<{name}>-? *{_decimal(name + '_separator')}) *\}}"
    return rf" *(?:{in_braces}|(?P<{name}_digit>[0-9]))"


#: One plain number. Text around it must be looked at by whoever searches for it.
NUMBER = re.compile(
    rf"(?:(?P<sign>[+-]) *)?(?:{CURRENCY} *(?P<inner_sign>-?) *)?"
    r"(?P<body>"
    rf"(?:(?P<whole>(?<![0-9])[0-9]++){_GAP})?(?:"
    rf"\\(?P<command>[dtcx]?frac|nicefrac|sfrac){_part('top')}{_part('bottom')}"
    rf"|(?P<vulgar>[{_VULGAR}]))"
    r"|(?:(?P<before>(?<![0-9])[0-9]++)(?: +|~|\\[,;: ]))?"
    rf"(?P<over>{_decimal('over_separator')}) */ *(?P<under>{_decimal('under_separator')})"
    rf"|(?:(?P<factor>{_decimal('factor_separator')}) *(?:×|x|\*|·|⋅|\\times|\\cdot) *)?"
    r"(?<![0-9])10 *(?:(?:\^|\*\*) *(?:\{ *(?P<in_braces>[+-]?[0-9]+) *\}|(?P<power>[+-]?[0-9]+))"
    r"|(?P<raised>[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+))"
    rf"|(?P<plain>{_decimal('plain_separator')})(?:[eE](?P<exponent>[+-]?[0-9]+))?"
    r")"
    rf"(?: *(?:{CURRENCY}|{DEGREES}))?(?: *(?P<percent>{PERCENT}))?",
    re.IGNORECASE,
)


def number_in_match(match: re.Match[str] | None) -> Number | None:
    """Returns the number of a match of ``NUMBER``; None where it is too long, or divided by 0."""
    if match is None or sum(map(str.isnumeric, match[0])) > MOST_DIGITS:
        return None
    if _MAY_BE_SEVERAL.search(match[0]) or _MAY_BE_THOUSANDS.search(match[0]):
        return None
    read = _read_body(match)
    if read is None:
        return None
    value, text, is_exact = read
    is_negative = "-" in (match["sign"], match["inner_sign"])
    return Number(
        value=-value if is_negative else value,
        text=("-" if is_negative else "") + text + ("%" if match["percent"] else ""),
        is_percent=bool(match["percent"]),
        is_exact=is_exact,
    )


#: Numbers of three digits with spaces between, as in "120 150". A group that begins with 0, as in
#: "120 000", is no number of its own.
_MAY_BE_SEVERAL = re.compile(r"(?<![0-9])(?<![0-9] )[1-9][0-9]{2}(?: [1-9][0-9]{2})+(?![0-9]| 0)")
#: Euros with three places behind the point, which are thousands in most countries that have them.
_MAY_BE_THOUSANDS = re.compile(
    r"€ *-? *[1-9][0-9]{0,2}\.[0-9]{3}$|(?<![0-9.,])[1-9][0-9]{0,2}\.[0-9]{3} *€"
)


def _read_body(match: re.Match[str]) -> tuple[Fraction, str, bool] | None:
    """Returns value, text and whether it is exact."""
    if match["command"]:
        top = _digits(match["top"] or match["top_digit"])
        bottom = _digits(match["bottom"] or match["bottom_digit"])
        text = rf"{match['whole'] or ''}\{match['command']}{{{top}}}{{{bottom}}}"
        return _mixed(match["whole"], top, bottom, text)
    if match["vulgar"]:
        value = Fraction(unicodedata.numeric(match["vulgar"])).limit_denominator(10)
        text = (match["whole"] or "") + match["vulgar"]
        return _mixed(match["whole"], str(value.numerator), str(value.denominator), text)
    if match["over"]:
        top, bottom = _digits(match["over"]), _digits(match["under"])
        whole = match["before"]
        return _mixed(whole, top, bottom, f"{whole} {top}/{bottom}" if whole else f"{top}/{bottom}")
    if match["plain"]:
        factor, power = _digits(match["plain"]), match["exponent"]
        if power is None:
            return Fraction(factor), factor, "." not in factor
    else:
        factor = _digits(match["factor"] or "1")
        power = match["in_braces"] or match["power"] or match["raised"].translate(_SUPERSCRIPT)
    if len(power) > 5 or abs(int(power)) > MOST_DIGITS:
        return None
    return Fraction(factor) * Fraction(10) ** int(power), f"{factor}e{power}", False


def _mixed(
    whole: str | None, top: str, bottom: str, text: str
) -> tuple[Fraction, str, bool] | None:
    """Returns what a fraction is; behind a whole it must be a proper one of integers."""
    if Fraction(bottom) == 0:
        return None
    value = Fraction(top) / Fraction(bottom)
    is_exact = "." not in top + bottom
    if whole is None:
        return value, text, is_exact
    return (int(whole) + value, text, True) if is_exact and 0 < value < 1 else None


def _digits(decimal: str) -> str:
    """Returns a decimal without its thousands separators."""
    return re.sub(r"[^0-9.-]", "", decimal)


# -- what may stand around a number that is all of a text ------------------------------------------

#: LaTeX that shows what is in it as it is: opening and closing mark.
WRAPPERS = (
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    *(
        (rf"\{command}{{", "}")
        for command in (
            *("boxed", "fbox", "text", "textbf", "textit", "textrm", "textnormal", "mbox"),
            *("mathrm", "mathbf", "mathit", "mathsf", "bm", "boldsymbol"),
        )
    ),
)
_SPACES = " \t\r\n"


def _unwrapped(text: str) -> str:
    """Returns a text without white space, wrappers and a full stop in and behind each of them."""
    while True:
        text = text.strip(_SPACES)
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip(_SPACES)
        for opening, closing in WRAPPERS:
            if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening):
                text = text[len(opening) : len(text) - len(closing)]
                break
        else:
            return text
