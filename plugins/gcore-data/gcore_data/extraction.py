"""Finds the answer in a text that explains it, by a named rule or by a text with a place."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gcore_core.contract.errors import ConfigError, did_you_mean
from gcore_core.kits.answers import last_box, last_number
from gcore_core.kits.numbers import number_of

PLACE = "{answer}"
_HASHES = "####"


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
    end = rest.rfind(after) if not before else rest.find(after)
    return rest[:end] if end >= 0 else None


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
