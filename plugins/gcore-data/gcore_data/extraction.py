"""Finds the answer in a text that explains it, by a named rule or by a text with a place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from gcore_rewards.answers import last_box, last_number
from gcore_rewards.numbers import number_of

from gcore_core.contract.errors import ConfigError, did_you_mean

PLACE = "{answer}"
_HASHES = "####"
#: What may also stand within an answer: 3.5, 1,234, 4:30, St. Louis.
_MARKS = ".,;:!?"


def require_rule(rule: str, where: str) -> None:
    """Raises ConfigError for what is neither a rule's name nor a text with one place."""
    if rule in RULES:
        return
    if rule.count(PLACE) != 1:
        raise ConfigError(
            f"{rule!r} is no rule{did_you_mean(rule, list(RULES))}",
            where=where,
            why=f"there are: {', '.join(RULES)}; or a text with one {PLACE} in it",
        )
    if rule.strip() == PLACE:
        raise ConfigError("takes the whole text; leave it out", where=where)


def extracted(rule: str, text: str) -> str | None:
    """Returns the answer in a text, without spaces around it; None where there is none.

    rule: one that ``require_rule`` takes.
    """
    found = RULES[rule](text) if rule in RULES else _by_text(rule, text)
    found = (found or "").strip()
    return found or None


def _by_text(rule: str, text: str) -> str | None:
    """Returns what stands at the rule's place, where its text occurs last."""
    before, _, after = rule.partition(PLACE)
    start = text.rfind(before) if before else 0
    if start < 0:
        return None
    rest = text[start + len(before) :]
    if not after:
        return rest
    if before and after.strip() and after.strip() in _MARKS:
        return _before_mark(rest, after)
    end = rest.rfind(after) if not before else rest.find(after)
    return rest[:end] if end >= 0 else None


def _before_mark(rest: str, mark: str) -> str | None:
    """Returns what stands before a mark of sentences.

    A mark within a number or a word ends no answer. None where the answer is no number, and ends at
    one of several marks of its line: "St. Louis." looks like "Paris. Yes.".
    """
    answers: list[str] = []
    for found in re.finditer(re.escape(mark), rest):
        answer = rest[: found.start()]
        around = "" if mark != mark.strip() else answer[-1:] + rest[found.end() :][:1]
        if len(around) == 2 and around.isdecimal():
            continue
        if number_of(answer):
            return answer
        if answers and "\n" in answer[len(answers[0]) :]:
            break
        if not (len(around) == 2 and around.isalnum()):
            answers.append(answer)
    return answers[0] if len(answers) == 1 else None


def _gsm8k(text: str) -> str | None:
    """Returns what follows the last ``####``: its number without separators, else as it is."""
    _, mark, answer = text.rpartition(_HASHES)
    if not mark:
        return None
    number = number_of(answer)
    return number.text if number else answer


def _boxed(text: str) -> str | None:
    """Returns what the braces of the last ``\\boxed{}`` hold, whose braces may be nested."""
    box = last_box(text)
    return box.content if box else None


def _number(text: str) -> str | None:
    number = last_number(text)
    return number.text if number else None


#: Name of a rule -> what finds the answer.
RULES: Mapping[str, Callable[[str], str | None]] = {
    "gsm8k": _gsm8k,
    "boxed": _boxed,
    "number": _number,
}
