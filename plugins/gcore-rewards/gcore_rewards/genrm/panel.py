"""Asks the judge for votes and asks again for those that cannot be parsed.

It ends the run when nothing of what the judge wrote can be parsed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Generic, TypeVar

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.contract.questions import Answer, Question, Sampler
from gcore_core.contract.records import FAILED, TRUNCATED, Prompt, Ref
from gcore_core.contract.scorer import ScoredRecord
from gcore_rewards.genrm.config import JudgeConfig
from gcore_rewards.genrm.patterns import SlowPattern

T = TypeVar("T")
_SHOWN = 3
_RAW_CHARACTERS = 80  # what a record's header has room for
_PRINTED_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to be judged.

    prompt: the prompt for the judge.
    numbers: ordinal and sample of the record, then what else the seed depends on.
    images: one for each place of an image in the prompt, in order.
    """

    prompt: Prompt
    numbers: tuple[int, int, *tuple[int, ...]]
    images: Sequence[Ref] = ()


@dataclass(kw_only=True)
class Ruling(Generic[T]):
    """The outcome of a case.

    votes: the parsed values of the votes.
    failure: why there is no ruling; empty when there is one.
    """

    votes: list[T] = field(default_factory=list)
    failure: str = ""


class Panel(Generic[T]):
    """Asks a generator role for votes, and parses its answers.

    read: returns the value in an answer's text, None where it cannot parse it.
    """

    def __init__(
        self, config: JudgeConfig, context: WorkerContext, read: Callable[[str], T | None]
    ) -> None:
        self._config = config
        self._seed = context.seed
        self._read = read
        self._sampler = judge_of(context)
        # The first answers that could not be parsed, for the error; None once an answer was parsed,
        # or where such answers do not end the run.
        self._unparsed: list[str] | None = [] if config.stop_after else None
        self._cases = 0

    async def ask(self, cases: Sequence[Case]) -> list[Ruling[T]]:
        """Returns a ruling for each case; calls may overlap.

        Raises ConfigError when none of the first ``stop_after`` answers could be parsed.
        """
        config = self._config
        rulings: list[Ruling[T]] = [Ruling() for _ in cases]
        raw = ["" for _ in cases]
        # Every attempt asks for all votes that are still missing at once, each as (case, vote).
        left = [(i, vote) for i in range(len(cases)) for vote in range(config.votes)]
        for attempt in range(config.retries + 1):
            if not left:
                break
            answers = await self._answers([(cases[i], vote) for i, vote in left], attempt)
            again = []
            for (i, vote), answer in zip(left, answers, strict=True):
                if answer.status == FAILED:
                    rulings[i].failure = f"the judge failed: {answer.reason}"
                    continue
                value, why = self._parsed(answer)
                if value is not None:
                    rulings[i].votes.append(value)
                else:
                    raw[i] = why
                    again.append((i, vote))
            left = again
        self._watch(rulings, raw)
        for ruling, text in zip(rulings, raw, strict=True):
            ruling.failure = self._failure(ruling, text)
        return rulings

    async def _answers(self, votes: Sequence[tuple[Case, int]], attempt: int) -> list[Answer]:
        questions = [
            Question(
                prompt=case.prompt,
                seed=question_seed(self._seed, *case.numbers, vote, attempt),
                greedy=self._config.greedy and attempt == 0,
                about=(case.numbers[0], case.numbers[1]),
                images=case.images,
            )
            for case, vote in votes
        ]
        answers = await self._sampler.sample(questions)
        if [len(samples) for samples in answers] != [1] * len(questions):
            counts = sum(len(samples) for samples in answers)
            raise ContractError(f"the judge gave {counts} answers to {len(questions)} questions.")
        return [samples[0] for samples in answers]

    def _parsed(self, answer: Answer) -> tuple[T | None, str]:
        """Returns the score in an answer, or None and why there is none."""
        if answer.status == TRUNCATED and not self._config.accept_truncated:
            return None, _shown(answer)
        try:
            return self._read(answer.text), _shown(answer)
        except SlowPattern as error:
            return None, str(error)

    def _failure(self, ruling: Ruling[T], raw: str) -> str:
        """Returns why too few votes were parsed; empty when they are enough."""
        parsed = len(ruling.votes)
        votes = self._config.votes
        if parsed >= self._config.fewest:
            return ""
        what = f"unparsable: {raw[:_RAW_CHARACTERS]}" if raw else ruling.failure
        return what if votes == 1 else f"{parsed} of {votes} votes; {what}"

    def _watch(self, rulings: Sequence[Ruling[T]], raw: Sequence[str]) -> None:
        """Raises ConfigError, which ends the run, when none of the first answers could be parsed.

        The parser then does not fit what the judge writes.
        """
        if self._unparsed is None:
            return
        if any(ruling.votes for ruling in rulings):
            self._unparsed = None
            return
        self._unparsed += [text[:_PRINTED_CHARACTERS] for text in raw if text][
            : _SHOWN - len(self._unparsed)
        ]
        self._cases += sum(map(bool, raw))
        if self._cases >= self._config.stop_after:
            raise ConfigError(
                (
                    f"none of the first {self._cases} answers of the judge could be parsed; the "
                    "first are:"
                ),
                where="parser",
                why="\n".join(self._unparsed),
                todo="Change the parser, or ask for another form in the template.",
                answers=list(self._unparsed),
            )


def judge_of(context: WorkerContext) -> Sampler:
    """Returns the generator role that the reward asks. Raises ConfigError where it names none."""
    if context.sampler is None:
        raise ConfigError(
            "the reward asks a judge, but names no role that is one.",
            where="role",
            todo="role: judge",
        )
    return context.sampler


def media_of(record: ScoredRecord, names: Sequence[str]) -> dict[str, Ref]:
    """Returns name -> reference of the media that the judge is shown.

    Raises ConfigError where the record lacks one, or it is not uint8[height, width, 1 or 3].
    """
    for name in names:
        if name not in record.refs:
            raise ConfigError(
                f"the records have no medium {name!r}.",
                where="images",
                why=f"They have: {', '.join(record.refs) or 'none'}.",
                todo="A policy that makes images has it; its generator says what they are called.",
            )
        shape = record.media[name].shape
        dtype = record.media[name].dtype
        if dtype != "uint8" or len(shape) != 3 or shape[2] not in (1, 3):
            kind = f"{dtype}{list(shape)}, not uint8[height, width, 1 or 3]"
            raise ConfigError(f"the medium {name!r} is no image: it is {kind}.", where="images")
    return {name: record.refs[name] for name in names}


def question_seed(*numbers: int) -> int:
    """Returns a 63-bit seed: blake2b of run seed, ordinal, sample and so on, vote, retry."""
    text = ":".join(["judge", *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def combined(votes: Sequence[float], how: str) -> float:
    """Returns the mean, the median or the most frequent of the votes, as ``how`` says.

    Where several votes are equally frequent, their mean counts.
    """
    if how == "median":
        return median(votes)
    if how == "majority":
        counts = Counter(votes)
        most = max(counts.values())
        return fmean(vote for vote, count in counts.items() if count == most)
    return fmean(votes)


def _shown(answer: Answer) -> str:
    """Returns what the judge wrote, in one line, with a note where it was cut off."""
    cut = f"(cut off after {answer.n_actions} tokens) " if answer.status == TRUNCATED else ""
    return cut + repr(answer.text)
