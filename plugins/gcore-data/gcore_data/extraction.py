"""Finds the answer in a text that explains it, by a named rule or by a text with a place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from gcore_core.contract.errors import ConfigError, did_you_mean

PLACE = "{answer}"
_HASHES = "####"
_BOXED = "\\boxed{"
#: A number as people write it: sign, thousands separators, decimals.
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


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
    """Returns what follows the last ``####``, without thousands separators, as GSM8K has it."""
    _, mark, answer = text.rpartition(_HASHES)
    return answer.replace(",", "") if mark else None


def _boxed(text: str) -> str | None:
    """Returns what the braces of the last ``\\boxed{}`` hold, whose braces may be nested."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    first = start + len(_BOXED)
    for position in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return text[first:position]
    return None


def _number(text: str) -> str | None:
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


#: Name of a rule -> what finds the answer.
RULES: Mapping[str, Callable[[str], str | None]] = {
    "gsm8k": _gsm8k,
    "boxed": _boxed,
    "number": _number,
}
