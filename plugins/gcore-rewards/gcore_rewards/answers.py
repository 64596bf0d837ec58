r"""Finds the answer in a text that explains it: the last number, and the last box.

``last_number`` reads the number at the end of a text, and gives none where what stands around it
makes it another one: ``sqrt(16)``, ``1.5 million``, ``10-12``, ``7 mod 3``, ``2x``, ``not 5``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gcore_rewards.number_words import (
    changes_before,
    changes_behind,
    is_english,
    is_harmless_before,
    is_harmless_behind,
    is_label,
)
from gcore_rewards.numbers import (
    CURRENCY,
    MOST_DIGITS,
    NUMBER,
    PERCENT,
    WRAPPERS,
    Number,
    number_in_match,
    plain_characters,
)

#: How far around its last digit a number, with its separators, may reach.
_MOST_CHARACTERS = 4 * MOST_DIGITS
#: How far to each side what stands around a number is looked at.
_AROUND = 300
#: How far before a number a text shows its language.
_CONTEXT = 2000


def last_number(text: str) -> Number | None:
    """Reads the number at the end of a text; None where what stands there is no plain number.

    The last digit counts, of whatever script. No earlier number takes the place of one that cannot
    be read.
    """
    return number_within(plain_characters(text), 0, len(text))


def number_within(text: str, start: int, end: int) -> Number | None:
    """Reads the last number of a part of a text, by what stands around it in the whole.

    text: as ``plain_characters`` gives it.
    """
    text = _UNIT_POWER.sub(lambda match: _POWER * len(match[0]), text)
    position = _last_digit(text, start, min(end, len(text)))
    if position is None or _is_in_open_box(text, position):
        return None
    line_start = max(text.rfind("\n", 0, position) + 1, position - _MOST_CHARACTERS)
    line = text[line_start : position + _MOST_CHARACTERS].partition("\n")[0]
    for match in NUMBER.finditer(line):
        if match.start() <= position - line_start < match.end():
            is_one_line = "\n" not in text.strip()
            in_english = is_english(text[max(0, position - _CONTEXT) : position + _AROUND])
            return _read_in_place(line, match, is_one_line, in_english)
    return None


def _read_in_place(
    line: str, match: re.Match[str], is_one_line: bool, in_english: bool
) -> Number | None:
    """Returns the number of a match unless what stands around it makes it another one."""
    number = number_in_match(match)
    before = line[: match.start()][-_AROUND:]
    if number is None:
        return None
    if match["sign"] and match[0][1:2] == " ":
        # A sign, an operator as in "price - 5", or the mark of an item in a list.
        if before.rstrip()[-1:].isalnum() or not (before.strip() or is_one_line):
            return None
    elif match["sign"] == "-" and _BEFORE_HYPHEN.search(before):
        before += " "  # the hyphen of "step-5", which is known to be no sign
        in_english = True
        number = replace(number, value=-number.value, text=number.text[1:])
    behind = line[match.end() :][:_AROUND]
    is_pair = "," in match[0] and _OPENED.search(before) and _CLOSED.match(behind)
    if is_pair or not _is_plain_before(before, in_english):
        return None
    if behind[:1] in ("'", "’") and not re.search(r"['’‘]", before):
        return None  # minutes of an angle, or feet
    name = _WORD_BEFORE.search(before.rstrip())
    if name and is_label(name[0]) and not _COUNTED.match(behind):
        return None
    if _MAY_BE_THOUSANDS.search(match[0]) and not in_english and _WORD.search(before + behind):
        return None
    return _read_behind(number, match[0], behind, in_english)


def only_number(text: str) -> Number | None:
    """Reads the one number of a text such as ``5 apples`` or ``x = 5``; None: there are more.

    Of a chain of equations, what stands behind the last sign counts.
    """
    number = last_number(text)
    rest = _UNIT_POWER.sub("", plain_characters(text)).rpartition("=")[2]
    is_only = number is not None and _digits(rest) <= _digits(number.text)
    return number if is_only else None


def _is_in_open_box(text: str, position: int) -> bool:
    """Returns whether a box that is never closed stands before a place: it may lack digits."""
    box = last_box(text) if "box" in text else None
    return box is not None and box.content is None and box.start <= position


def _digits(text: str) -> int:
    return sum(map(str.isdecimal, text))


def _last_digit(text: str, start: int, end: int) -> int | None:
    for position in range(end - 1, start - 1, -1):
        letter = text[position]
        if letter.isdecimal() if letter.isascii() else letter.isnumeric() and not letter.isalpha():
            return position
    return None


# -- boxes -----------------------------------------------------------------------------------------

_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\[{}]|(?P<opening>\{)|(?P<closing>\})")


@dataclass(frozen=True, kw_only=True)
class Box:
    r"""A ``\boxed{}`` or ``\fbox{}`` of a text.

    start, end: where its content begins and ends.
    content: without spaces around it; None where the box is never closed.
    """

    start: int
    end: int
    content: str | None


def last_box(text: str) -> Box | None:
    """Finds the last box that is in no other; None where there is none."""
    found = boxes(text)
    return found[-1] if found else None


def boxes(text: str) -> list[Box]:
    """Finds the boxes that are in no other one, in their order.

    A box in a box marks the same answer, so its marks are no part of the content.
    """
    open_braces: list[re.Match[str]] = []
    closed: list[tuple[int, int, int]] = []  # begin of the mark, begin and end of the content
    for brace in _BRACE.finditer(text):
        if brace["box"] or brace["opening"]:
            open_braces.append(brace)
        elif brace["closing"] and open_braces:
            mark = open_braces.pop()
            if mark["box"]:
                closed.append((mark.start(), mark.end(), brace.start()))
    found = [
        Box(start=mark.end(), end=len(text), content=None) for mark in open_braces if mark["box"]
    ]
    for start, end, marks in _outer_boxes(closed):
        ends = [start, *sorted(place for mark in marks for place in mark), end]
        content = "".join(text[a:b] for a, b in zip(ends[::2], ends[1::2], strict=True))
        found.append(Box(start=start, end=end, content=content.strip()))
    return sorted(found, key=lambda box: box.start)


def _outer_boxes(
    closed: Iterable[tuple[int, int, int]],
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yields begin and end of the content of boxes that are in no other, and the marks inside."""
    outer: tuple[int, int, list[tuple[int, int]]] | None = None
    for mark_start, start, end in sorted(closed):
        if outer is not None and mark_start < outer[1]:
            outer[2].extend([(mark_start, start), (end, end + 1)])
            continue
        if outer is not None:
            yield outer
        outer = (start, end, [])
    if outer is not None:
        yield outer


# -- words and marks around a number ---------------------------------------------------------------


def _patterns(*texts: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(text, re.IGNORECASE) for text in texts)


#: Words that say what a number before them comes to.
_COMES_TO = (
    "is|are|was|equals?|gives?|makes?|made|yields?|leaves?|leaving|left|gets?|means?|becomes?|costs?|"
    "totals?|that|so|then|has|have|had|we|the|remain|remains|ist|sind|ergibt|macht|es|son|est|sont|"
    "donne|fait|font|è|fa|é|são|равно|это|будет"
)
#: Numbers in words.
_FEW = "one|two|three|four|five|six|seven|eight|nine|ten|hundred|thousand|million"
#: Texts at the beginning of what stands behind a number that make another number of it.
_CHANGING_PHRASES = _patterns(
    # another number follows: "5 out of 6", "5 to the third"
    rf"(?:out +of|to +the|to +(?:a|an|{_FEW}))\b",
    # more is added: "5 and a half"
    rf"and +(?:an? |half|up|above|more|{_FEW}\b)",
    # it is compared: "5 more than"
    r"(?:(?:less|more|fewer|greater) +than|at +(?:most|least))\b",
    # a scale or another base: "5 in thousands"
    r"in +(?:base|binary|hex|octal|hundreds|thousands|millions)\b",
    r"(?:basis +points?|percentage|per[ -]?cent +points?)\b",
    # points of a percentage, or a thousandth: "5 puntos porcentuales", "5 por mil"
    r"[^\W\d_]+ +(?:de +)?p(?:or|our|er)cen|(?:[^\W\d_]+ +)?(?:por|pour|per|pro) +"
    r"(?:mil|thousand|hundred)",
    # one word joins it to a number: "3 bis 5"
    rf"(?!(?:{_COMES_TO})\b)[^\W\d_]+ +[$*]*[0-9]",
    # below zero
    r"[^\W\d_]+ +(?:below|under|unter|sous|bajo|sotto|abaixo) +(?:zero|null|zéro|cero)\b",
    # not exactly
    r"give +or +take\b",
    # a time of day
    r"час\w* +(?:утра|дня|вечера|ночи)",
    # it is denied: "5 is wrong"
    r"(?:is|was|would be) +(?:not|wrong|incorrect|false|too)\b",
)
#: The greater part of a measure in two units, as in "5 ft 3 in" and "5 hours and 30 minutes".
_GREATER_UNIT = re.compile(
    r"[0-9½¼¾] *-?(?:°|(?:years?|months?|weeks?|days?|d|hours?|hrs?|h|minutes?|mins?|m|feet|foot|"
    r"ft|yards?|yds?|miles?|kilometers?|kilometres?|km|meters?|metres?|pounds?|lbs?|stones?|degrees?|"
    r"kilograms?|kg|dollars?|euros?|gallons?|quarts?|pints?|cups?|liters?|litres?)\b\.?) *,?"
    r" *(?:and)?$",
    re.IGNORECASE,
)
#: Texts at the end of what stands before a number that make another number of it.
_CHANGING_TEXTS = (
    _GREATER_UNIT,
    *_patterns(
        # it belongs to a number before it: "3 or 5"
        rf"(?:[0-9%°)}}\]½¼¾$*]|\b(?:{_FEW}))"
        r" *\W* *(?:and|or|and/or|is to|to|till|until|through|thru|by|of|out of|per|from|vs|into|"
        r"in|choose|x)$",
        # one word joins it to a number before it, and does not say what that comes to: "3 bis 5"
        rf"[0-9%½¼¾][$*)]* +(?!(?:{_COMES_TO})$)[^\W\d_]+$",
        # it is one end of a range, or one of two: "between x and 5"
        r"\b(?:between\b[^.;]*\band|from\b[^.;]*\bto|either\b[^.;]*\bor|neither\b[^.;]*\bnor)$",
        # something is taken from it: "half of 10"
        r"\b(?:half|halves|thirds?|quarters?|fourths?|fifths?|[a-z]+ths?|roots?|upwards|loss|deficit|decrease|reduction|debt|maximum|minimum|bound|square|cube|"
        r"sqrt|log\w*|ln|factorial|out|percent\w*|multiples?|powers?|factors?|divisors?|inverse|"
        r"reciprocal|negative|opposite|double|twice|triple|sum|product|difference|quotient|"
        r"remainder|absolute +value|base|logarithm|sine|cosine|tangent|instead|dozens?|hundreds|"
        r"thousands|millions|billions|none|any|some|all|most|each|one|two|three|four|five|short|"
        r"north|south|excess) +of$",
        # something is done with it: "divided by 5"
        r"\b(?:(?:divided|multiplied) +by|(?:raised|added|subtracted|up|close|next|near|prior) +to"
        r"|subtract\w*(?: +from)?|to +the|power(?: +of)?)$",
        # it is taken away, or a time of day
        r"\b(?:(?:decreased|reduced|dropped|fell|less|fewer|short|down) +by|(?:quarter|half) +to)$",
        # it is denied at most three words before, in the same clause: "not equal to 5"
        r"(?:\b(?:not|never|cannot|neither|nor)|n['’]t|\brather +than|\binstead +of)"
        r"(?:\s+(?!(?:but|and|so|hence|thus)\b)[^\W\d_][\w'’-]*){0,3}$",
    ),
)
#: Letters of scripts that need no space before a number: Thai, kana and Han.
_UNSPACED = r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
_HANGUL = r"[\uac00-\ud7a3]"
#: The end of a word of them or of Hangul, which may do without a space, too.
_BEHIND_EASTERN = re.compile(rf"(?:{_UNSPACED}|{_HANGUL})$")
#: Words of these scripts that say what something comes to. A number that sticks to another word may
#: be an ordinal, a factor, or one end of a range.
_SAYS_RESULT = re.compile(
    r"(?:(?<![就还還])是|(?<!因)[为為]|等[于於]|得[到出]?|[算求]出|(?<![回问問])答案?|答え|[はが]|[은는]|답이?"
    r"|คือ|เท่ากับ|คำตอบ)$"
)
#: Words of these scripts with which a clause says another number than its last, or none.
_DOUBTFUL = re.compile(
    r"[不非没沒或]|要么|至少|至多|最多|最少|[大小多少高低][于於]|超|ない|また|ไม่|หรือ|또는|않|아니"
)
#: What a hyphen may join to a number. Scripts that have no spaces have no hyphens either.
_BEFORE_HYPHEN = re.compile(rf"[^\W\d_](?!{_UNSPACED}|{_HANGUL})[^\W\d_]$")
_CLAUSE_END = re.compile(r"[.!?;:,。！？；：，、]")
_ABBREVIATED_LABEL = re.compile(
    r"\b(?:eqs?|figs?|secs?|nos?|ch|pp?|vol|ver?|v|nr|n|art|abb|kap|cap|chap|bzw|resp|min|max|vs|rev|abs|ex|s|с|стр|"
    r"гл|рис|п)\.$",
    re.IGNORECASE,
)
#: The greater part of a measure, abbreviated: "5 ft. 3 in."
_UNIT_BEFORE = re.compile(r"[0-9] ?[^\W\d_]{1,4}\.$")
#: Two assignments to names of one or two letters, as in ``x = 1, y = 2``: two numbers, not one.
_SEVERAL_VARIABLES = re.compile(
    r"(?<![^\W_])[a-zA-Z]{1,2}(?:_\{?\w+\}?)? *=[^=,;]*(?:,|;|\band\b|\bor\b)[\s\\$]*"
    r"[a-zA-Z]{1,2}(?:_\{?\w+\}?)? *=[^=]*$"
)
_WORD_BEFORE = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*$")
#: Stands for the power of a unit and the index of a compound, which are no numbers: "20 cm^2".
_POWER = "\u02e2"
_WORD = re.compile(r"[^\W\d_]{2}")
#: Of Latin and Cyrillic letters: of words of other scripts nothing is known.
_KNOWN_LETTERS = re.compile(rf"[{_POWER}A-Za-zªºµÀ-ɏḀ-ỿЀ-ӿ.'’]+")
#: What is a decimal in English, and thousands in many other languages: "1.234", "€ 1.234".
_MAY_BE_THOUSANDS = re.compile(r"(?<![\d.,])[1-9][0-9]{0,2}\.[0-9]{3}(?![\d.,eE])")
#: What is counted, in small letters.
_COUNTED = re.compile(r" [a-z]+s\b")
_WORD_BEHIND = re.compile(r"(?:[^\W\d_]\.){2,}|[^\W\d_]+(?:['’][^\W\d_]+)*")

#: Marks of quoting, of type and of LaTeX's spacing, which change nothing.
_MARKS = (
    r"[\s\"“”‘«»`*_#~∼&∴•']"
    r"|\\(?:[,;:!> ]|(?:left|right|displaystyle|quad|qquad|big|Big)(?![a-zA-Z]))"
)
_MARKS_BEFORE = re.compile(rf"(?:{_MARKS}|\\\\|\$|\\[(\[])+$")
_MARKS_BEHIND = re.compile(rf"(?:{_MARKS}|’|\$|\\[)\]])+")
#: Marks that are no quoting where they stick to what stands before them: "x_5", "rate*5".
_STUCK_BEFORE = re.compile(rf"(?!{_UNSPACED})[^\W_][*_#'’]+$|[^\s*] +\*+ +$|&#$")
_STUCK_BEHIND = re.compile(r" +\*|[*_]+[^\W_]|[*_]+[(\\]")
_OPENING_COMMAND = re.compile(
    "(?:" + "|".join(re.escape(opening) for opening, _ in WRAPPERS if opening[-1] == "{") + ")$"
)
#: A sign in front of a result.
_RESULT = re.compile(
    r"(?:(?<![<>!/≠\\])=|≈|⇒|⟹|=>"
    r"|\\(?:approx|implies|Rightarrow|Longrightarrow|therefore))$"
)
#: The same where nothing but words stands before it; else it says from what to what.
_ARROW = re.compile(r"(?:->|→|⟶|\\(?:rightarrow|to))$")
#: Brackets around what may be a pair, as in "(1,234)".
_OPENED = re.compile(r"[(\[] *$")
_CLOSED = re.compile(r" *(?:\\right)?[)\]]")
_TAG_BEFORE = re.compile(r"(?:</?[a-zA-Z][^<>]*>|<\|[^<>]*\|>|<<[^<>]*>>)$")
_TAG_BEHIND = re.compile(r"</?[a-zA-Z][^<>]*>|<\|[^<>]*\|>|<<[^<>]*>>")
_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox) *\{(?P<inner>[^{}]*)"
_TEXT_BEFORE = re.compile(_TEXT + r"\}$")
_TEXT_BEHIND = re.compile(_TEXT)
#: The label of a choice, as in "(B) 5", and words in brackets, as in "half (the total) 5".
_ASIDE_BEFORE = re.compile(r"(?:\(|(?<![^\W_]))[a-zA-Z]\)$|(?:^|\s)\([^\W\d_][^()=+*/^<>\d]+\)$")
_CURRENCY_BEHIND = re.compile(CURRENCY)
_PERCENT_BEHIND = re.compile(PERCENT, re.IGNORECASE)
_DOTS = re.compile(r"\.\.|…|\\[lcd]?dots")
_DOTS_TO = re.compile(r"(?:\.|…|\\[lcd]?dots|\s)+[-+\d]")
_END_OF_SENTENCE = re.compile(r"[.!?](?=[\s\"'”’)\]}*_<$]|\\(?![a-zA-Z])|\\end\b|$)")
#: The power of a unit and the index of a compound.
_UNIT_POWER = re.compile(
    r"(?<=[^\W\d_]{2})[²³₀-₉]+|(?<=[\d ]m)[²³]"
    r"|(?:(?<=[ {\d][ckmd]m)|(?<=[ {\d](?:ft|in|yd|mi))|(?<=units)"
    r"|(?<=[ckmd]m\})|(?<=[ {]m\})|(?<=ft\})|(?<=in\})|(?<=units\}))\^(?:[23](?!\d)|\{[23]\})"
)
#: Units that may stick to their number, and letters that are units behind a space.
_STUCK_UNIT = re.compile(
    rf"(?:[kcmdµμ]m{_POWER}*|m{_POWER}|[kmµμ]g|ms|[mc]l|km/h|mph|kph|lbs?|ft|in|yd|oz|[kmg]?hz|kwh?|"
    r"kj|kn|mv|[kmgt]b|usd|eur|hrs?|min|sec)(?![^\W_])",
    re.IGNORECASE,
)
_LETTER_UNITS = re.compile(r"(?:[mglL]/(?:s|h|min|l|L|m)|[smghlL](?! *[-+*/^=<>(\\]))(?![^\W_])")


def _is_plain_before(left: str, in_english: bool) -> bool:
    """Returns whether what stands before a number leaves it what it is.

    Marks and brackets are taken off until something decides.
    in_english: whether the text is known to be English.
    """
    while True:
        if _STUCK_BEFORE.search(left):
            return False
        bare = _MARKS_BEFORE.sub("", left)
        is_stuck = bare == left
        if not bare:
            return True
        command = _OPENING_COMMAND.search(bare)
        if command:
            left = bare[: command.start()]
            continue
        sign = _RESULT.search(bare)
        if sign:
            return _is_result(bare[: sign.start()])
        last = bare[-1]
        if last in "([{":
            if _is_argument(bare, len(bare) - 1):
                return False
            left = bare[:-1]
        elif last == "}" and (text := _TEXT_BEFORE.search(bare)):
            left = text["inner"] + " "
        elif last == "-":
            return bare.strip() == "-" and left.lstrip().startswith("- ")  # an item of a list
        else:
            return _is_plain_at(bare, last, is_stuck, in_english)


def _is_plain_at(left: str, last: str, is_stuck: bool, in_english: bool) -> bool:
    """The same for text without marks at its end.

    last: its last character. is_stuck: whether the number follows at once.
    """
    before = left[:-1].rstrip()
    if _ARROW.search(left):
        rest = _ARROW.sub("", left).rstrip()
        return not rest or bool(re.search(r"[^\W\d_]{2}$|[.:]$", rest))
    if last in ",;":
        is_list = re.search(r"[\d)\]}%$½]$", before) or _GREATER_UNIT.search(left)
        is_decimal = is_stuck and not before[-1:].isalpha()  # ",5"
        return not is_list and not is_decimal and _opened(left) is None
    if last in ":：":
        return not re.search(r"[\d:：]$", before)
    if last == "—":
        has_no_space = before == left[:-1]
        return before[-1:].isalpha() and has_no_space == is_stuck
    if last in ".!?…":
        is_after_number = before.rstrip(" .…")[-1:].isdecimal() or _UNIT_BEFORE.search(left)
        return not (is_stuck or is_after_number or _ABBREVIATED_LABEL.search(left))
    if last in ">)":
        return bool(_TAG_BEFORE.search(left) or _ASIDE_BEFORE.search(left))
    if _BEHIND_EASTERN.search(left):
        clause = _CLAUSE_END.split(left)[-1]
        return bool(_SAYS_RESULT.search(left)) and not _DOUBTFUL.search(clause)
    word = _WORD_BEFORE.search(left)
    return word is not None and not is_stuck and _is_plain_behind_word(left, word, in_english)


def _is_plain_behind_word(left: str, word: re.Match[str], in_english: bool) -> bool:
    name = word[0].casefold()
    if left[: word.start()].endswith("\\"):
        return False  # a command of LaTeX
    if changes_before(name) or any(pattern.search(left) for pattern in _CHANGING_TEXTS):
        return False
    if not in_english:
        return is_harmless_before(left, name)
    return len(name) > 1 or name == "a"


def _is_result(left: str) -> bool:
    """Returns whether a sign such as "=" behind a text says what it comes to."""
    opened = _opened(left)
    if opened is not None and _is_argument(left, opened):
        return False  # "P(X = 3)"
    return not left.endswith("\\not") and not _SEVERAL_VARIABLES.search(f"{left}=")


def _is_argument(text: str, opened: int) -> bool:
    """Returns whether a bracket opens what belongs to something before it: "f(", "x_{", "2("."""
    before = text[:opened].removesuffix("\\left")
    if _OPENING_COMMAND.search(text[: opened + 1]):
        return False
    return bool(re.search(r"[^\W_]$|[_^}\])\\]$", before))


def _opened(text: str) -> int | None:
    """Returns where the last bracket stands that is not closed; None: there is none."""
    closed = 0
    for position in range(len(text) - 1, -1, -1):
        if text[position - 1 : position] == "\\":
            continue
        if text[position] in ")]}":
            closed += 1
        elif text[position] in "([{":
            if not closed:
                return position
            closed -= 1
    return None


def _read_behind(number: Number, written: str, right: str, in_english: bool) -> Number | None:
    """Returns the number, with its percent sign, unless what stands behind it makes it another one.

    written: the number with its signs.
    """
    if right[:1] in ("!", "?", "(", "[") or re.match(r"['’]s\b", right):
        return None
    if written.endswith("°") and re.match(r"[CFK](?![^\W_])", right):
        right = right[1:]
    unit = _STUCK_UNIT.match(right)
    right = right[unit.end() :] if unit else right
    while not _STUCK_BEHIND.match(right):
        bare = _MARKS_BEHIND.sub("", right, count=1) if _MARKS_BEHIND.match(right) else right
        is_stuck = bare == right
        if _CURRENCY_BEHIND.search(written) and re.match(r"m\b", bare, re.IGNORECASE):
            return None  # millions
        percent = _PERCENT_BEHIND.match(bare)
        currency = _CURRENCY_BEHIND.match(bare)
        if percent and not number.is_percent:
            number = replace(number, is_percent=True, text=f"{number.text}%")
            right = bare[percent.end() :]
        elif currency:
            right = bare[currency.end() :]
        elif bare[:1] in (")", "]", "}"):
            right = bare[1:]
            if right[:1] in ("!", "("):
                return None
        else:
            return number if _is_plain_behind(number, bare, is_stuck, in_english) else None
    return None


def _is_plain_behind(number: Number, right: str, is_stuck: bool, in_english: bool) -> bool:
    """Returns whether text without marks at its beginning changes nothing of a number."""
    if not right or _TAG_BEHIND.match(right):
        return True
    if _DOTS.match(right):
        return number.is_exact and not _DOTS_TO.match(right)
    if right[0] == "—":
        return not re.match(r"— *[-+\d]", right)
    if right[0] in ".!?":
        word = _WORD_BEHIND.match(right[1:].lstrip())
        is_ordinal = right[0] == "." and word and changes_behind(word[0].casefold())  # "5. Mai"
        return bool(_END_OF_SENTENCE.match(right)) and not is_ordinal
    if right[0] in ",;:":
        return not re.match(r"[,;:](?:\s*[\d+\-]|\S)", right)
    if right[0] in "。，；":
        return not re.match(r". *\d", right)
    text = _TEXT_BEHIND.match(right)
    if text:
        return _are_plain_words(text["inner"].strip(" ~"), in_english, is_of_text=True)
    if right.startswith("("):
        word = _WORD_BEHIND.match(right, 1)
        name = word[0].casefold() if word else ""
        is_changed = changes_before(name) or changes_behind(name)
        return bool(name) and not is_changed and not _begins_with_change(right[1:])
    if right[0] == "\\":
        return bool(re.match(r"\\(?:\\|$|end\b)", right))
    return not is_stuck and _are_plain_words(right, in_english, is_of_text=False)


def _are_plain_words(right: str, in_english: bool, *, is_of_text: bool) -> bool:
    """Returns whether words behind a number name what is counted, and change nothing.

    is_of_text: whether they stand in a ``\\text{}``, where a letter is a unit.
    """
    word = _WORD_BEHIND.match(right)
    if word is None:
        return not right
    name = word[0].casefold().rstrip(".")
    if len(name) == 1:
        rest = right[1:]
        if is_of_text:
            return name not in ("k", "m", "b", "t") or word[0] == "m"
        is_article = name in ("a", "i") and re.match(r" +[^\W\d_]{2}", rest)
        return bool(is_article or _LETTER_UNITS.match(right))
    if not _KNOWN_LETTERS.fullmatch(word[0]) or word[0] == "MM" or changes_behind(name):
        return False
    return (in_english or is_harmless_behind(name.rstrip(_POWER))) and not _begins_with_change(
        right
    )


def _begins_with_change(right: str) -> bool:
    return any(pattern.match(right) for pattern in _CHANGING_PHRASES)
