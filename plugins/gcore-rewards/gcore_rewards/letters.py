r"""Compares answers by their letters, where math-verify does not read all that they say.

It reads ``2516_8`` as 2516, ``10-12`` as -2, 12:30 as 0.4, and "no" as the product of n and o.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gcore_rewards.answers import boxes
from gcore_rewards.math_input import bare, numeric_expression
from gcore_rewards.numbers import plain_characters

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
#: Answers of digits that are no computation: dates, ranges, times, numbers of other bases.
_NO_COMPUTATION = re.compile(
    rf"{_NUMBER}(?:--?|\\text\{{-\}}){_NUMBER}|[0-9]+([-/.])[0-9]+\1[0-9]+"
    r"|[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?(?:[ap]\.?m\.?)?|[0-9]+(?::[0-9]+){2,}"
    r"|0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+",
    re.IGNORECASE,
)
#: Words, and letters of upper case with digits. Two small letters without a vowel are a product.
_WORDS = re.compile(
    r"[A-Za-z]|(?!(?:sqrt|inf|infinity|pi)$)[A-Za-z]{3,}(?:[ -][A-Za-z]+)*"
    r"|(?!pi$)(?:[a-z]?[aeiou][a-z]?(?<=^[a-z]{2})|[A-Z][A-Za-z]|[a-z][A-Z])"
    r"|(?=[0-9]*[A-Z])(?=[A-Z]*[0-9])[0-9A-Z]+"
)
_TYPE = re.compile(r"\\(?:text|textbf|textnormal|mathrm|mathbf|mbox|operatorname|rm) *\{([^{}]*)\}")
_SPACES = re.compile(r"(?:\s|~|\\(?:[,;:! ]|(?:left|right|quad)(?![a-zA-Z])))+")
_MODULUS = re.compile(r"\(?\\?[pb]?mod\{?(\w+)\}?\)?")
_INDEX = re.compile(r"_\{([0-9]+)\}")
_CHOICE = re.compile(r"\(([A-Za-z])\)")
_SAID = re.compile(r"(?:answer|solution|result)(?: *is|:)[\s:]*", re.IGNORECASE)
_END = re.compile(r"[.!?](?=\s|$)|\n")
#: What joins answers.
_BETWEEN = re.compile(r"[,;]|\\text *\{ *(?:and|or) *\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])")
_FORMULA = re.compile(r"(?<!\\)\$+([^$]+?)(?<!\\)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def core(answer: str) -> str:
    """Returns what a row's answer says: of a text with one box or formula, what stands in it.

    "": it is a worked solution without a box, of which the last formula counts, or its box is not
    closed.
    """
    text = plain_characters(answer).strip()
    in_boxes = boxes(text)
    if in_boxes:
        return in_boxes[-1].content or ""
    formulas = list(_FORMULA.finditer(text))
    if len(formulas) == 1 and not re.match(r"\s*[A-Za-z]", text[formulas[0].end() :]):
        groups: tuple[str | None, ...] = formulas[0].groups()
        return next(group for group in groups if group is not None)
    outside = _BETWEEN.sub("", _FORMULA.sub("", text))
    return "" if len(formulas) > 1 and re.search("[A-Za-z]{2}", outside) else text


def letters(text: str) -> str:
    r"""Returns the letters of a text without spaces, ``\text``, and braces that may be left out."""
    text = _SPACES.sub("", _TYPE.sub(r"\1", bare(text.replace(r"\$", "")).replace("$", "")))
    text = _INDEX.sub(r"_\1", _MODULUS.sub(r"(mod\1)", text)).replace("--", "-")
    choice = _CHOICE.fullmatch(text)
    return choice[1] if choice else text.removesuffix(".")


def same_letters(answer: str, completion: str) -> bool:
    """Returns whether two texts have the same letters. Yes is yes, and NO is no; Co is not CO."""
    one, other = letters(answer), letters(completion)
    if one == other or one.casefold() != other.casefold():
        return one == other
    count = sum(map(str.isalpha, one))
    return count > 2 or (count == 2 and (one.islower() or other.islower()))


def is_of_letters(answer: str) -> bool:
    """Returns whether an answer is no expression: a date, a word, a range.

    answer: as ``core`` gives it.
    """
    without = _TYPE.sub(r"\1", answer.replace("$", "")).strip().removesuffix(".")
    choice = _CHOICE.fullmatch(without)
    return bool(choice or _WORDS.fullmatch(without) or _NO_COMPUTATION.fullmatch(letters(answer)))


def said(completion: str) -> list[str]:
    """Returns what a completion without a box may give as its answer."""
    phrases = list(_SAID.finditer(completion))
    behind = completion[phrases[-1].end() :] if phrases else ""
    lines = completion.strip().splitlines()
    formulas = list(_FORMULA.finditer(completion))
    last = completion[formulas[-1].start() : formulas[-1].end()] if formulas else ""
    if phrases:
        return [_END.split(behind, maxsplit=1)[0]]
    return [completion, last, *lines[-1:]]


# -- units -----------------------------------------------------------------------------------------

_UNIT = re.compile(
    r"(?:(?:\s|~|\\[,;: ])*\^? *\\(?:text|mathrm|mbox|textnormal|rm) *"
    r"\{(?P<text>[^{}]*[A-Za-z][^{}]*)\}"
    r"|(?:\s|~|\\[,;: ])*(?P<word>[A-Za-z][A-Za-z ./]*))"
    r"(?:\^ *\{? *(?P<power>[0-9]) *\}?)?[\s.$]*$"
)
_DEGREES = re.compile(
    r"(?:\^ *\{? *\\circ *\}?|°|\\degree(?![a-z])) *(?:\\(?:text|mathrm) *\{ *([CFK]) *\}|([CFK]))?"
    r"[\s.$]*$"
)
#: Unit -> its other names.
_NAMES = {
    "cm": "centimeter centimetre",
    "mm": "millimeter millimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "g": "gram",
    "kg": "kilogram",
    "lb": "pound",
    "oz": "ounce",
    "l": "liter litre",
    "ml": "milliliter millilitre",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "degree": "deg",
    "radian": "rad",
    "unit": "",
    "km/h": "kph kmph",
    "mph": "",
    "m/s": "",
    "dollar": "",
    "euro": "",
    "cent": "",
}
_UNIT_OF = {name: unit for unit, names in _NAMES.items() for name in (unit, *names.split())}


@dataclass(frozen=True)
class Measure:
    """A number, plain or as an expression, and its unit; "": none."""

    number: str
    unit: str

    def number_of(self, content: str) -> str | None:
        """Returns a content without the same unit, which may be left out; None: it has another."""
        other = measure(content)
        if other is None:
            return content
        return other.number if other.unit == self.unit else None

    def allows_behind(self, text: str) -> bool:
        """Returns whether no other known unit stands at the beginning of a text."""
        word = re.match(r"[\s~$]*(?:\\(?:text|mathrm) *\{ *)?([A-Za-z/]+)", text)
        unit = _UNIT_OF.get(_singular(word[1])) if word else None
        return unit is None or unit == self.unit


def measure(text: str) -> Measure | None:
    """Reads a number with a unit; None: it is something else."""
    degrees = _DEGREES.search(text)
    if degrees:
        unit, start = f"degree{degrees[1] or degrees[2] or ''}", degrees.start()
    else:
        found = _UNIT.search(text)
        if found is None:
            return None
        name = _SPACES.sub("", found["text"] or found["word"]).removesuffix(".")
        name = _UNIT_OF.get(_singular(name), _singular(name))
        unit, start = name + (found["power"] or ""), found.start()
    number = text[:start].strip()
    return Measure(number, unit) if numeric_expression(bare(number)) is not None else None


def _singular(name: str) -> str:
    name = name if len(name) == 1 else name.casefold()
    return name if name in _UNIT_OF or len(name) < 3 else name.removesuffix("s")


# -- several equations -----------------------------------------------------------------------------

_EQUATION = re.compile(r"[\s$]*([A-Za-z](?:_\w|_\{\w+\})?)[\s$]*=([^=]+)")


def with_names(answer: str, content: str) -> str:
    """Returns values with the names of an answer such as ``a = 1, b = 2``, in their order.

    Without names they would be a set, in which 2, 1 is 1, 2.
    """
    equations = [_EQUATION.fullmatch(part) for part in _BETWEEN.split(answer)]
    names = [equation[1] for equation in equations if equation]
    if len(names) < len(equations) or not 1 < len(names) == len(set(names)) or "=" in content:
        return content
    values = _BETWEEN.split(bare(content).strip("()[]"))
    if len(values) != len(names):
        return content
    return ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def has_other_primes(answer: str, content: str) -> bool:
    """Returns whether one has a mark of a derivative that the other lacks; math-verify drops it.

    An equation is compared with its one side, too: then it may.
    """
    return answer.count("=") == content.count("=") and _primes(answer) != _primes(content)


def _primes(text: str) -> int:
    return text.count("'") + text.count("’") + text.count(r"\prime") + text.count("′")
