"""Judges pairs: compares the completions of a prompt with each other, every pair in both orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

import numpy as np

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.scorer import REASON_CHARACTERS, Score, ScoredRecord, failure
from gcore_rewards.genrm.config import PairwiseConfig
from gcore_rewards.genrm.judges import Judged
from gcore_rewards.genrm.panel import Case, Panel, combined, media_of, question_seed
from gcore_rewards.genrm.patterns import SlowPattern, timed_out
from gcore_rewards.genrm.templates import MissingField, text_of


@dataclass(frozen=True)
class _Pair:
    """Two records of a group that are compared.

    first, second: their indexes in the group.
    cases: the question in both orders; empty for equal completions, which are a tie.
    """

    first: int
    second: int
    cases: tuple[Case, ...]


class PairwiseJudge:
    """See ``gcore_core.contract.scorer.AsyncScorer``; a provider of level "group"."""

    def __init__(self, config: PairwiseConfig, context: WorkerContext) -> None:
        self._config = config
        self._form = config.make_form()
        self._judged = Judged(config.completion_pattern)
        self._seed = context.seed
        read = config.reader()

        def preference(text: str) -> float | None:
            share: float | None = read(text)
            return share if share is not None and 0 <= share <= 1 else None

        self._panel = Panel(config, context, preference)

    async def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        groups = [list(group) for _, group in groupby(records, key=lambda record: record.ordinal)]
        # For each group: the pairs to compare, or the score of all its records where it cannot be
        # judged.
        drawn: list[list[_Pair] | Score] = []
        for group in groups:
            try:
                drawn.append(self._pairs(group))
            except MissingField as error:
                drawn.append(failure(f"row {group[0].prompt.row}: {error}"[:REASON_CHARACTERS]))
            except SlowPattern as error:
                drawn.append(timed_out(error))
        pairs = [
            pair for group_pairs in drawn if isinstance(group_pairs, list) for pair in group_pairs
        ]
        # All groups' questions are asked at once; the rulings come in the order of the cases, so
        # each pair below takes the next ones.
        rulings = iter(await self._panel.ask([case for pair in pairs for case in pair.cases]))
        scores: list[Score] = []
        for group, group_pairs in zip(groups, drawn, strict=True):
            if isinstance(group_pairs, Score):
                scores += [group_pairs] * len(group)
                continue
            won = np.full((len(group), len(group)), np.nan)
            why = "a prompt with one completion has nothing to compare"
            for pair in group_pairs:
                both_orders = [next(rulings) for _ in pair.cases]
                why = next((ruling.failure for ruling in both_orders if ruling.failure), why)
                if not any(ruling.failure for ruling in both_orders):
                    shares = [
                        combined(ruling.votes, self._config.combine) for ruling in both_orders
                    ] or [0.5, 0.5]
                    # The second ruling is about the other order, so its share is the other's.
                    share = (shares[0] + 1 - shares[1]) / 2
                    won[pair.first, pair.second] = share
                    won[pair.second, pair.first] = 1 - share
            scores += self._scores(won, group_pairs, why)
        return scores

    def _pairs(self, group: Sequence[ScoredRecord]) -> list[_Pair]:
        """Returns the pairs to compare.

        Raises MissingField where the template names one, and SlowPattern where a completion uses up
        the pattern's time.
        """
        texts = [
            part if (part := self._judged.find(record.text)) is not None else record.text
            for record in group
        ]
        media = [media_of(record, self._config.images) for record in group]
        prompt = group[0].prompt
        seed = question_seed(self._seed, group[0].ordinal)
        pairs = []
        for i, j in tournament(len(group), self._config.opponents, seed):
            cases = []
            differ = (texts[i], media[i]) != (texts[j], media[j])
            for a, b in ((i, j), (j, i)) if differ else ():
                values = {"prompt": text_of(prompt), "first": texts[a], "second": texts[b]}
                numbers = (group[0].ordinal, group[a].sample, group[b].sample)
                shown = {f"first_{n}": ref for n, ref in media[a].items()}
                shown |= {f"second_{n}": ref for n, ref in media[b].items()}
                images = [shown[name] for name in self._form.shown]
                cases.append(
                    Case(
                        prompt=self._form.fill(values, prompt.fields),
                        numbers=numbers,
                        images=images,
                    )
                )
            pairs.append(_Pair(i, j, tuple(cases)))
        return pairs

    def _scores(self, won: np.ndarray, pairs: Sequence[_Pair], why: str) -> list[Score]:
        """Returns the scores of a group's N records by win rate or strength.

        A record fails when fewer than half of its comparisons were decided.

        won: float64[N, N], share that the row won against the column; NaN where nothing was
            decided.
        why: the reason that failures give.
        """
        met = np.bincount(
            [i for pair in pairs for i in (pair.first, pair.second)], minlength=len(won)
        )
        decided = (~np.isnan(won)).sum(1)
        known = (decided > 0) & (2 * decided >= met)
        values = np.nansum(won, 1) / np.maximum(decided, 1)
        if self._config.method == "bradley_terry":
            values = strengths(won, self._config.prior)
        return [
            Score(value=float(value)) if ok else failure(why)
            for value, ok in zip(values, known.tolist(), strict=True)
        ]


def tournament(players: int, opponents: int | None, seed: int) -> Iterator[tuple[int, int]]:
    """Yields the pairs of players that meet: all of them, or at least ``opponents`` for each.

    In the second case players stand in a circle, in an order drawn by the seed, and meet their
    nearest on both sides. So all have the same number of opponents: one more than asked for where
    players and opponents are both odd. With two or more opponents each, any two players are
    connected through others.
    """
    if opponents is None or opponents >= players - 1:
        yield from combinations(range(players), 2)
        return
    circle = np.random.default_rng(seed).permutation(players).tolist()
    reach, half = divmod(opponents, 2)
    if half and players % 2:
        reach, half = reach + 1, 0
    ends = [(i, i + step) for step in range(1, reach + 1) for i in range(players)]
    ends += [(i, i + players // 2) for i in range(players // 2)] if half else []  # the one across
    for i, j in ends:
        a, b = circle[i], circle[j % players]
        yield min(a, b), max(a, b)


def strengths(won: np.ndarray, prior: float) -> np.ndarray:
    """Returns log-strengths t, float64[N], whose mean is 0, of the Bradley-Terry model.

    In this model i beats j with probability 1 / (1 + exp(tj - ti)) (Bradley and Terry, 1952). The
    result is the posterior's mode under a normal prior; without the prior, one who won all would be
    infinitely strong. It is found by Newton's method, in steps of at most 1, which converges
    because the function is strictly concave.

    won: float64[N, N], share that the row won against the column; NaN where they did not meet.
    prior: precision of the normal prior, whose mean is 0.
    """
    met = ~np.isnan(won)
    theta = np.zeros(len(won))
    for _ in range(100):
        expected = np.where(met, 1 / (1 + np.exp(theta[None] - theta[:, None])), 0.0)
        spread = expected * (1 - expected) * met
        gradient = (np.where(met, won, 0.0) - expected).sum(1) - prior * theta
        hessian = np.diag(spread.sum(1) + prior) - spread
        step = np.linalg.solve(hessian, gradient)
        theta += step / max(1.0, np.abs(step).max(initial=0.0))
        if np.abs(step).max(initial=0.0) < 1e-10:
            break
    centred: np.ndarray = theta - theta.mean()
    return centred
