"""Chooses which pair a rater compares next, and takes the judgement."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gcore_rewards.human.answers import Answer, Pair
from gcore_rewards.human.judgements import Judgement, Verdict
from gcore_rewards.human.raters import Refusal, SaidByRaters
from gcore_rewards.human.tasks import Choice, Progress, Shown, seconds_of

#: What the form of the page sends -> the verdict.
_VERDICTS: Mapping[str, Verdict] = {
    "left": "better",
    "right": "better",
    "tie": "tie",
    "bad": "bad",
    "skip": "skip",
}
_CHOICES = (
    Choice(value="left", text="Left is better", key="ArrowLeft", shown_key="←"),
    Choice(value="tie", text="Equally good", key="t"),
    Choice(value="bad", text="Both bad", key="b"),
    Choice(value="right", text="Right is better", key="ArrowRight", shown_key="→"),
    Choice(value="skip", text="Skip", key="s"),
)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Says which pair comes next.

    raters: by how many raters a pair is judged.
    twice: whether a rater compares a pair once more, in the other order, to see whether the place
        on the page decides.
    seed: of left and right, and of the order among pairs with equally few judgements.
    """

    raters: int = 2
    twice: bool = False
    seed: int = 0


class Comparing:
    """The task of comparing pairs, for all raters of one page.

    The next pair is the one that the fewest raters have judged or have open, and among those the
    first in an order of the rater's own, drawn by the seed. A pair that enough raters have judged
    is not shown to others. No rater is shown a pair twice in one order.

    Raises ConfigError when another process writes ``path``, DataError for a bad line in it.
    """

    template: ClassVar[str] = "compare.html"
    title: ClassVar[str] = "Which answer is better?"

    def __init__(self, pairs: Sequence[Pair], path: Path, rules: Rules) -> None:
        self._pairs = {pair.digest: pair for pair in pairs}
        self._rules = rules
        self._said = SaidByRaters(
            path,
            Judgement,
            todo="end the other `g-core human rate`, or write to another file by --to",
        )
        self._open: dict[str, str] = {}  # rater -> the pair that the rater's page shows

    def close(self) -> None:
        self._said.journal.close()

    def next(self, rater: str) -> Shown | None:
        digest = self._next_digest(rater)
        if digest is None:
            self._open.pop(rater, None)
            return None
        self._open[rater] = digest
        pair = self._pairs[digest]
        left, right = self._in_order(pair, rater)
        return Shown(
            key=digest,
            prompt=pair.prompt,
            answers=(left.text, right.text),
            order=self._order_name(pair, rater),
            choices=_CHOICES,
        )

    def answer(self, rater: str, form: Mapping[str, str]) -> None:
        """Takes a judgement: ``key``, ``order``, ``choice`` and ``seconds`` of the page's form."""
        pair = self._pairs.get(form.get("key", ""))
        if pair is None:
            raise Refusal(404, "there is no such pair.")
        choice = form.get("choice", "")
        if choice not in _VERDICTS:
            raise Refusal(422, f"{choice!r} is no judgement.")
        if not self._may_see(pair.digest, rater):
            raise Refusal(409, "you have judged this pair before.")
        if form.get("order") != self._order_name(pair, rater):
            raise Refusal(409, "you have judged this pair in this order before.")
        left, right = self._in_order(pair, rater)
        is_better = _VERDICTS[choice] == "better"
        chosen, rejected = (left, right) if choice == "left" else (right, left)
        seconds = seconds_of(form)
        self._said.add(
            lambda number, now_s: Judgement(
                number=number,
                pair=pair.digest,
                prompt=pair.prompt,
                verdict=_VERDICTS[choice],
                chosen=chosen.text if is_better else None,
                rejected=rejected.text if is_better else None,
                tie=choice in ("tie", "bad"),
                answers=(left.text, right.text),
                origins=(left.origin, right.origin),
                rater=rater,
                seconds=seconds,
                time_unix_s=now_s,
            )
        )

    def last(self, rater: str) -> int:
        return self._said.last(rater)

    def undo(self, rater: str, number: int) -> None:
        self._said.undo(rater, number)

    def progress(self, rater: str) -> Progress:
        own = sum(bool(self._said.of(digest, rater)) for digest in self._pairs)
        made = sum(min(self._said.count(d), self._rules.raters) for d in self._pairs)
        return Progress(
            own=own,
            own_of=own + sum(not self._said.of(d, rater) for d in self._waiting(rater)),
            made=made,
            made_of=self._rules.raters * len(self._pairs),
        )

    # -- which pair, in which order ----------------------------------------------------------------

    def _next_digest(self, rater: str) -> str | None:
        again = self._said.again.get(rater)
        if again is not None and again in self._pairs:
            return again
        waiting = self._waiting(rater)
        return min(waiting, key=lambda digest: self._rank(digest, rater), default=None)

    def _waiting(self, rater: str) -> list[str]:
        return [digest for digest in self._pairs if self._may_see(digest, rater)]

    def _may_see(self, digest: str, rater: str) -> bool:
        """Whether this rater may still be shown the pair, in an order that is new to them."""
        before = self._said.of(digest, rater)
        if not before:
            enough = self._said.count(digest, without=rater) >= self._rules.raters
            return not enough or self._open.get(rater) == digest
        is_skipped = before[-1].verdict == "skip"
        return self._rules.twice and len(before) == 1 and not is_skipped

    def _rank(self, digest: str, rater: str) -> tuple[int, int, bytes]:
        """Orders pairs; the lowest comes next."""
        views = len(self._said.of(digest, rater))
        elsewhere = sum(
            shown == digest for other, shown in self._open.items() if other != rater
        ) + self._said.count(digest)
        return views, elsewhere, _drawn(self._rules.seed, "next", rater, digest)

    def _in_order(self, pair: Pair, rater: str) -> tuple[Answer, Answer]:
        """Returns the answers as this rater is shown them next: left, right."""
        first, second = pair.answers
        before = self._said.of(pair.digest, rater)
        if before:
            # The other way round than before, whatever the seed was then.
            is_swapped = before[-1].answers[0] == first.text
        else:
            is_swapped = bool(_drawn(self._rules.seed, "order", rater, pair.digest)[0] & 1)
        return (second, first) if is_swapped else (first, second)

    def _order_name(self, pair: Pair, rater: str) -> str:
        """Names the order for the form; it tells nothing about the answers' origin."""
        left, _ = self._in_order(pair, rater)
        return "ab" if left is pair.answers[0] else "ba"


def _drawn(*parts: Any) -> bytes:
    """Draws eight bytes that depend on the parts alone."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
