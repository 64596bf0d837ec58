"""Judges single completions by one score, or by one for each criterion of a rubric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import TRUNCATED
from gcore_core.contract.scorer import REASON_CHARACTERS, Score, ScoredRecord, failure
from gcore_rewards.genrm.config import PointwiseConfig, RubricConfig
from gcore_rewards.genrm.panel import Case, Panel, Ruling, combined, media_of
from gcore_rewards.genrm.parsers import on_scale
from gcore_rewards.genrm.patterns import Pattern, SlowPattern, timed_out
from gcore_rewards.genrm.templates import MissingField, text_of


class Judged:
    """Finds the part of completions that a judge sees: a pattern's last match, or the whole."""

    def __init__(self, pattern: str) -> None:
        self._pattern = Pattern(pattern, "completion_pattern") if pattern else None

    def find(self, text: str) -> str | None:
        """Returns the part that is judged; None where the pattern is not in the text.

        Raises SlowPattern when the pattern uses up its time.
        """
        if self._pattern is None:
            return text
        matches = self._pattern.matches(text)
        return matches[-1][1 if self._pattern.groups else 0] if matches else None


class PointwiseJudge:
    """Scores a completion by what the judge says, put on the configured scale.

    See ``gcore_core.contract.scorer.AsyncScorer``.
    """

    def __init__(self, config: PointwiseConfig, context: WorkerContext) -> None:
        self._config = config
        self._form = config.make_form()
        self._judged = Judged(config.completion_pattern)
        self._panel = self._make_panel(context)

    async def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        scores: dict[int, Score] = {}
        cases_of: dict[int, list[Case]] = {}  # record's index -> questions about it
        for i, record in enumerate(records):
            try:
                completion = self._judged.find(record.text)
            except SlowPattern as error:
                scores[i] = timed_out(error)
                continue
            unfit = completion is None or record.status == TRUNCATED
            if unfit and self._config.unfit_score is not None:
                scores[i] = Score(value=self._config.unfit_score)
                continue
            try:
                part = record.text if completion is None else completion
                cases_of[i] = self._cases(record, part)
            except MissingField as error:
                scores[i] = failure(f"row {record.prompt.row}: {error}"[:REASON_CHARACTERS])
        # All records' cases are asked at once; the rulings come in the same order.
        rulings = iter(await self._panel.ask([x for cases in cases_of.values() for x in cases]))
        for i, cases in cases_of.items():
            scores[i] = self._scored([next(rulings) for _ in cases])
        return [scores[i] for i in range(len(records))]

    def _make_panel(self, context: WorkerContext) -> Panel[Any]:
        read = self._config.reader()

        def score(text: str) -> float | None:
            raw = read(text)
            return None if raw is None else self._on_scale(raw)

        return Panel(self._config, context, score)

    def _on_scale(self, score: float) -> float | None:
        return on_scale(score, self._config.ends, clip=self._config.outside == "clip")

    def _cases(self, record: ScoredRecord, completion: str) -> list[Case]:
        return [self._case(record, completion, {}, ())]

    def _case(
        self,
        record: ScoredRecord,
        completion: str,
        values: Mapping[str, str],
        numbers: tuple[int, ...],
    ) -> Case:
        prompt = record.prompt
        filled = self._form.fill(
            {"prompt": text_of(prompt), "completion": completion, **values}, prompt.fields
        )
        media = media_of(record, self._config.images)
        images = [media[name] for name in self._form.shown]
        return Case(prompt=filled, numbers=(record.ordinal, record.sample, *numbers), images=images)

    def _scored(self, rulings: Sequence[Ruling[Any]]) -> Score:
        ruling = rulings[0]
        return (
            failure(ruling.failure)
            if ruling.failure
            else Score(value=combined(ruling.votes, self._config.combine))
        )


class RubricJudge(PointwiseJudge):
    """Scores a completion by the weighted mean of its scores by criteria.

    A record fails when one of its criteria cannot be parsed.
    """

    _config: RubricConfig

    def __init__(self, config: RubricConfig, context: WorkerContext) -> None:
        self._names = [criterion.name for criterion in config.criteria]
        self._weights = [criterion.weight for criterion in config.criteria]
        super().__init__(config, context)

    def _make_panel(self, context: WorkerContext) -> Panel[Any]:
        if not self._config.together:
            return super()._make_panel(context)
        read = self._config.reader()

        def scores(text: str) -> list[float] | None:
            raw = read(text) or []
            scaled = [share for score in raw if (share := self._on_scale(score)) is not None]
            return scaled if len(scaled) == len(self._names) else None

        return Panel(self._config, context, scores)

    def _cases(self, record: ScoredRecord, completion: str) -> list[Case]:
        criteria = self._config.criteria
        if self._config.together:
            lines = [
                f"- {c.name}: {c.description}" if c.description else f"- {c.name}" for c in criteria
            ]
            return [self._case(record, completion, {"criteria": "\n".join(lines)}, ())]
        return [
            self._case(
                record, completion, {"criterion": c.name, "description": c.description}, (number,)
            )
            for number, c in enumerate(criteria)
        ]

    def _scored(self, rulings: Sequence[Ruling[Any]]) -> Score:
        how = self._config.combine
        if self._config.together:
            if rulings[0].failure:
                return failure(rulings[0].failure)
            values = [combined(votes, how) for votes in zip(*rulings[0].votes, strict=True)]
        else:
            for name, ruling in zip(self._names, rulings, strict=True):
                if ruling.failure:
                    return failure(f"{name}: {ruling.failure}")
            values = [combined(ruling.votes, how) for ruling in rulings]
        total = sum(weight * value for weight, value in zip(self._weights, values, strict=True))
        return Score(value=total / sum(self._weights))
