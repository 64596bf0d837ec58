"""What may be set under ``config:`` of generative rewards."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from gcore_core.contract.errors import ConfigError
from gcore_genrm.templates import FIELDS, Form, Template, read_template

_NUMBER = r"[-+]?\d+(?:\.\d+)?"

_POINTWISE = """Judge how well the response answers the question. Think it through, then end with a line of this form:
Score: <a number from 0 (useless) to 10 (cannot be better)>

# Question
{prompt}

# Response
{completion}"""  # noqa: E501
_CRITERION = """Judge the response to the question by this criterion alone: {criterion}. {description}
Think it through, then end with a line of this form:
Score: <a number from 0 (not met at all) to 10 (fully met)>

# Question
{prompt}

# Response
{completion}"""  # noqa: E501
_RUBRIC = """Judge the response to the question by each of these criteria, from 0 (not met at all) to 10 (fully met):
{criteria}
Think it through, then end with one JSON object that has these criteria as keys and your scores as values.

# Question
{prompt}

# Response
{completion}"""  # noqa: E501
_PAIRWISE = """Which of two responses answers the question better? Think it through, then end with a line of this form:
Better: <A, B or tie>

# Question
{prompt}

# Response A
{first}

# Response B
{second}"""  # noqa: E501


def _require(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise ConfigError(what, where=where)


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{pattern!r} is not a regular expression: {error}.", where=where
        ) from error


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a chat with the judge."""

    role: Literal["system", "user", "assistant"] = "user"
    """Who speaks."""
    content: str = ""
    """What is said, with the places of a template."""


@dataclass(frozen=True, kw_only=True)
class ParserConfig:
    """How the score is found in what the judge wrote. Where it occurs more than once, the last one
    counts.
    """

    pattern: str = ""
    """Regular expression with a group named score, as in ``Score: (?P<score>\\d+)``."""
    key: str = ""
    """Instead: the key of a JSON object somewhere in the text."""
    choices: dict[str, float] = field(default_factory=dict)
    """Word -> score, capitals or not; without pattern and key, one of these words is looked for.
    Quote yes and no.
    """

    def __post_init__(self) -> None:
        _require(not (self.pattern and self.key), "parser", "takes a pattern or a key, not both.")
        groups = _compiled(self.pattern, "parser.pattern").groupindex
        _require(
            not self.pattern or "score" in groups, "parser.pattern", "has no group (?P<score>...)."
        )
        for word, score in self.choices.items():
            _require(bool(word.strip()), "parser.choices", "an empty word is no choice.")
            _require(
                math.isfinite(score),
                "parser.choices",
                f"{word!r} stands for {score}, which is no score.",
            )


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """What all judges have."""

    template: str = ""
    """What the judge is asked, with places such as {prompt}, {completion}, {fields[answer]}. Empty:
    a general one.
    """
    path: str = ""
    """Instead: a file that holds it; relative to the YAML's directory."""
    messages: list[Turn] = field(default_factory=list)
    """Instead: chat turns, each with its own places; for examples of good judgement."""
    system: str = ""
    """A system turn before the template."""
    form: Literal["chat", "text"] = "chat"
    """chat: the judge's own chat template is applied. text: it continues the template as it is."""
    images: list[str] = field(default_factory=list)
    """Media of the record that the judge is shown, such as image, each at a place of its name:
    {image}. They must be uint8[height, width, 1 or 3], and the role must take images.
    """
    completion_pattern: str = ""
    """Regular expression: its last match (its first group, where it has one) is judged, not the
    whole completion.
    """
    parser: ParserConfig = field(default_factory=ParserConfig)
    """How the score is found in the answer. Empty: as the general templates ask for it."""
    votes: int = 1
    """How often the judge is asked the same."""
    combine: Literal["mean", "median", "majority"] = "mean"
    """What becomes of the votes; of equal majorities the mean."""
    min_parsed: int | None = None
    """Fewest votes that must be parsed, or there is no reward. Empty: more than half."""
    retries: int = 2
    """How often a vote that cannot be parsed is asked for again, with a new seed."""
    greedy: bool = False
    """Take the likeliest answer. A retry samples: the likeliest would be the same again."""
    accept_truncated: bool = False
    """Parse answers that were cut off at the judge's max_new_tokens too."""
    stop_after: int = 32
    """Stop the run when none of the first so many answers could be parsed; 0: never."""

    def __post_init__(self) -> None:
        given = [name for name in ("template", "path", "messages") if getattr(self, name)]
        _require(
            len(given) < 2,
            given[-1] if given else "",
            f"{' and '.join(given)} are set; give one of them.",
        )
        _require(not (self.system and self.messages), "system", "make it the first of messages.")
        plain = self.form == "chat" or not (self.system or self.messages)
        _require(plain, "form", "text has no turns, so it takes neither system nor messages.")
        _require(
            not self.images or self.form == "chat",
            "form",
            "text has no places for images; use chat.",
        )
        _require(
            len({*self.images}) == len(self.images),
            "images",
            f"must differ: {', '.join(self.images)}.",
        )
        for name in self.images:
            free = re.fullmatch(r"\w+", name) and name not in self.places() | {FIELDS}
            _require(bool(free), "images", f"{name!r} cannot be the name of a place.")
        _require(self.votes >= 1, "votes", f"must be at least 1, is {self.votes}.")
        _require(
            not self.greedy or self.votes == 1, "votes", "are all alike when greedy; set votes: 1."
        )
        _require(
            1 <= self.fewest <= self.votes,
            "min_parsed",
            f"must be in 1..{self.votes}, is {self.min_parsed}.",
        )
        _require(self.retries >= 0, "retries", f"must not be negative, is {self.retries}.")
        _require(self.stop_after >= 0, "stop_after", f"must not be negative, is {self.stop_after}.")
        _compiled(self.completion_pattern, "completion_pattern")
        self.asked()

    @property
    def fewest(self) -> int:
        """Votes that must be parsed."""
        return self.votes // 2 + 1 if self.min_parsed is None else self.min_parsed

    def places(self) -> frozenset[str]:
        """What a template may name, besides {fields[...]}."""
        return frozenset({"prompt", "completion"})

    def needed(self) -> frozenset[str]:
        """What a template must name."""
        return self.pictures() or frozenset({"completion"})

    def pictures(self) -> frozenset[str]:
        """The places of images."""
        return frozenset(self.images)

    def shows_images(self) -> bool:
        """Whether the role that is asked must take images."""
        return bool(self.images)

    def general(self) -> str:
        """The template where none is given."""
        return self._showing(_POINTWISE)

    def _showing(self, template: str) -> str:
        """The template with every image before the completion."""
        return template.replace(
            "{completion}", "".join(f"{{{name}}}\n" for name in self.images) + "{completion}"
        )

    def asked(self) -> Form:
        """What the judge is asked. Raises ConfigError where a place is unknown or a needed one is
        missing.
        """
        if self.messages:
            turns = [
                (
                    turn.role,
                    Template(
                        turn.content, self.places(), f"messages[{i}].content", self.pictures()
                    ),
                )
                for i, turn in enumerate(self.messages)
            ]
            return Form(turns=turns).requiring(self.needed(), "messages")
        where = "path" if self.path else "template"
        told = read_template(self.path) if self.path else self.template or self.general()
        text = Template(told, self.places(), where, self.pictures())
        if self.form == "text":
            return Form(text=text).requiring(self.needed(), where)
        system = [("system", Template(self.system, self.places(), "system"))] if self.system else []
        return Form(turns=[*system, ("user", text)]).requiring(self.needed(), where)

    def parsed_by(self) -> ParserConfig:
        """The parser, or the one that fits the general template."""
        if self.parser != ParserConfig():
            return self.parser
        return ParserConfig(pattern=rf"(?i)score\W*?(?P<score>{_NUMBER})")


@dataclass(frozen=True, kw_only=True)
class PointwiseConfig(JudgeConfig):
    """One score for each completion. Places: {prompt}, {completion}, {fields[<name>]}."""

    scale: list[float] | None = None
    """The worst and the best score, which become 0 and 1. Empty: [0, 10], but with choices theirs
    as they are; []: the scores are taken as they are.
    """
    outside: Literal["fail", "clip"] = "fail"
    """What becomes of a score that is not on the scale: it cannot be parsed, or it is the nearest
    end.
    """
    unfit_score: float | None = None
    """Score, without asking, of a completion that was cut off or that completion_pattern is not in.
    Empty: the whole completion is judged.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = self.ends
        _require(len(ends) in (0, 2), "scale", f"must be the worst and the best score, is {ends}.")
        _require(
            len({*ends}) == len(ends) and all(map(math.isfinite, ends)),
            "scale",
            f"its ends are {ends}.",
        )
        fit = self.unfit_score is None or math.isfinite(self.unfit_score)
        _require(fit, "unfit_score", f"must be finite, is {self.unfit_score}.")

    @property
    def ends(self) -> list[float]:
        """The scale's worst and best score; empty where scores are taken as they are."""
        if self.scale is None:
            return [] if self.parser.choices else [0.0, 10.0]
        return list(self.scale)


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One criterion of a rubric."""

    name: str
    """What it is called; a key of the judge's answer."""
    description: str = ""
    """What the judge is told of it."""
    weight: float = 1.0
    """Its part in the mean."""


@dataclass(frozen=True, kw_only=True)
class RubricConfig(PointwiseConfig):
    """Scores by criteria. Together, the template has {criteria}, and the answer is JSON with a key
    for each, or the parser's pattern has a group ``name`` too; else the template has {criterion}
    and {description}.
    """

    criteria: list[Criterion]
    """What is judged: name, description, weight."""
    together: bool = True
    """All criteria in one answer; else an answer for each."""

    def places(self) -> frozenset[str]:
        own = {"criteria"} if self.together else {"criterion", "description"}
        return frozenset({"prompt", "completion", *own})

    def needed(self) -> frozenset[str]:
        return super().needed() | {"criteria" if self.together else "criterion"}

    def __post_init__(self) -> None:
        names = [criterion.name.strip().casefold() for criterion in self.criteria]
        _require(bool(names), "criteria", "a rubric needs at least one.")
        _require(
            all(names) and len({*names}) == len(names),
            "criteria",
            f"names must differ: {', '.join(names)}.",
        )
        for criterion in self.criteria:
            weight = criterion.weight
            _require(
                weight > 0 and math.isfinite(weight),
                f"criteria.{criterion.name}.weight",
                f"is {weight}.",
            )
        super().__post_init__()
        if self.together:
            _require(not self.parser.key, "parser.key", "the criteria are the keys; leave it out.")
            named = not self.parser.pattern or "name" in re.compile(self.parser.pattern).groupindex
            _require(
                named, "parser.pattern", "has no group (?P<name>...), which says whose score it is."
            )

    def general(self) -> str:
        return self._showing(_RUBRIC if self.together else _CRITERION)


@dataclass(frozen=True, kw_only=True)
class PairwiseConfig(JudgeConfig):
    """Comparisons of the completions of a prompt, each pair in both orders, so that a liking for a
    place cancels.

    Places: {prompt}, {first}, {second}, {fields[<name>]}. The score that is parsed is the first
    one's: 1 where it is better, 0 where the other is. Images have two places each: {first_image}
    and {second_image}.
    """

    opponents: int | None = None
    """Others that each completion is compared with at least, drawn by seed. Empty: all of them."""
    method: Literal["win_rate", "bradley_terry"] = "win_rate"
    """win_rate: share of comparisons won, a tie is half a win. bradley_terry: log-strength, their
    mean is 0; it allows for who the opponents were.
    """
    prior: float = 1.0
    """Of bradley_terry: how much strengths are drawn to 0, as precision; keeps one who won all
    finite.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.opponents is None or self.opponents >= 1,
            "opponents",
            f"must be at least 1, is {self.opponents}.",
        )
        _require(
            self.prior > 0 and math.isfinite(self.prior),
            "prior",
            f"must be positive, is {self.prior}.",
        )
        for word, score in self.parser.choices.items():
            _require(
                0 <= score <= 1,
                "parser.choices",
                f"{word!r} stands for {score}; it must be in 0..1.",
            )

    def places(self) -> frozenset[str]:
        return frozenset({"prompt", "first", "second"})

    def needed(self) -> frozenset[str]:
        return self.pictures() or frozenset({"first", "second"})

    def pictures(self) -> frozenset[str]:
        return frozenset(f"{place}_{name}" for place in ("first", "second") for name in self.images)

    def general(self) -> str:
        found = _PAIRWISE
        for place in ("first", "second"):
            shown = "".join(f"{{{place}_{name}}}\n" for name in self.images)
            found = found.replace(f"{{{place}}}", f"{shown}{{{place}}}")
        return found

    def parsed_by(self) -> ParserConfig:
        if self.parser != ParserConfig():
            return self.parser
        return ParserConfig(
            pattern=r"(?i)better\W*?(?P<score>a|b|tie)\b", choices={"a": 1.0, "b": 0.0, "tie": 0.5}
        )
