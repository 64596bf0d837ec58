"""What may be set under ``config:`` of generative rewards."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gcore_core.contract.traits import Traits
from gcore_rewards.genrm.parser_config import ParserConfig, require
from gcore_rewards.genrm.parsers import make_reader, make_rubric_reader
from gcore_rewards.genrm.patterns import Pattern
from gcore_rewards.genrm.templates import FIELDS, Form, Template, read_template

# In a general template <line> becomes the form of the line that the parser reads, <scores> what a
# score may be.
_POINTWISE = """Judge how well the response answers the question. Think it through, then end with a line of this form:
<line>

# Question
{prompt}

# Response
{completion}"""  # noqa: E501
_CRITERION = """Judge the response to the question by this criterion alone: {criterion}. {description}
Think it through, then end with a line of this form:
<line>

# Question
{prompt}

# Response
{completion}"""  # noqa: E501
_RUBRIC = """Judge the response to the question by each of these criteria, <scores>:
{criteria}
Think it through, then end with one JSON object that has these criteria as keys and your scores as values.

# Question
{prompt}

# Response
{completion}"""  # noqa: E501
_PAIRWISE = """Which of two responses answers the question better? Think it through, then end with a line of this form:
<line>

# Question
{prompt}

# Response A
{first}

# Response B
{second}"""  # noqa: E501
_SCALE = (0.0, 10.0)
_BETTER = {"A": 1.0, "B": 0.0, "tie": 0.5}
# Read too: the general template calls the two by these names.
_BETTER_BY_NAME = {"Response A": 1.0, "Response B": 0.0}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a chat with the judge."""

    role: Literal["system", "user", "assistant"] = "user"
    """Who speaks."""
    content: str = ""
    """Text of the turn; may hold places, as a template does."""


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """Settings that all judges share."""

    template: str = ""
    """Prompt for the judge, with places such as {prompt}, {completion}, {fields[answer]}. Empty: a
    general template, which asks for what the parser reads.
    """
    path: str = ""
    """File that holds the template, instead of template; relative to the YAML's directory."""
    messages: list[Turn] = field(default_factory=list)
    """Chat turns, each with its own places, instead of template; for examples of good judgement."""
    system: str = ""
    """System turn before the template."""
    form: Literal["chat", "text"] = "chat"
    """chat: the judge's own chat template is applied. text: the judge continues the template."""
    images: list[str] = field(default_factory=list)
    """Media of the record that the judge is shown, such as image. Each has a place of its name:
    {image}. They must be uint8[height, width, 1 or 3], and the role must take images.
    """
    completion_pattern: str = ""
    """Regular expression whose last match (its first group, if it has one) is judged instead of the
    whole completion.
    """
    parser: ParserConfig = field(default_factory=ParserConfig)
    """How the score is found in the answer. Empty: on the line that general templates ask for."""
    votes: int = 1
    """Number of answers that the judge is asked for, each with a seed of its own."""
    combine: Literal["mean", "median", "majority"] = "mean"
    """How votes become one score. majority: the most frequent; the mean of several such."""
    min_parsed: int | None = None
    """Number of votes that must be parsed; with fewer the reward fails. Empty: more than half."""
    retries: int = 2
    """Number of times that the judge is asked again, with a new seed, for a vote that cannot be
    parsed.
    """
    greedy: bool = False
    """Take the likeliest answer. A retry samples, because the likeliest would be the same again."""
    accept_truncated: bool = False
    """Parse answers that were cut off at the judge's max_new_tokens too. A number at the very end
    may lack its last digits.
    """
    stop_after: int = 8
    """Stop the run when none of the first stop_after answers could be parsed; 0: never."""

    def __post_init__(self) -> None:
        self._check()
        self._check_fit()

    def _check(self) -> None:
        """Raises ConfigError where a setting is wrong or two do not go together."""
        given = [name for name in ("template", "path", "messages") if getattr(self, name)]
        require(
            len(given) < 2,
            given[-1] if given else "",
            f"{' and '.join(given)} are set; give one of them.",
        )
        require(not (self.system and self.messages), "system", "make it the first of messages.")
        plain = self.form == "chat" or not (self.system or self.messages)
        require(plain, "form", "text has no turns, so it takes neither system nor messages.")
        require(
            not self.images or self.form == "chat",
            "form",
            "text has no places for images; use chat.",
        )
        require(
            len({*self.images}) == len(self.images),
            "images",
            f"must differ: {', '.join(self.images)}.",
        )
        for name in self.images:
            free = re.fullmatch(r"\w+", name) and name not in self.places() | {FIELDS}
            require(bool(free), "images", f"{name!r} cannot be the name of a place.")
        require(self.votes >= 1, "votes", f"must be at least 1, is {self.votes}.")
        require(
            not self.greedy or self.votes == 1, "votes", "are all alike when greedy; set votes: 1."
        )
        require(
            1 <= self.fewest <= self.votes,
            "min_parsed",
            f"must be in 1..{self.votes}, is {self.min_parsed}.",
        )
        require(self.retries >= 0, "retries", f"must not be negative, is {self.retries}.")
        require(self.stop_after >= 0, "stop_after", f"must not be negative, is {self.stop_after}.")
        Pattern(self.completion_pattern, "completion_pattern")
        self.make_form()

    def _check_fit(self) -> None:
        """Raises ConfigError where the parser cannot read what the general template asks for."""
        name = "pattern" if self.parser.pattern else "key" if self.parser.key else ""
        if not name or not self.is_general:
            return
        read = self.reader()
        examples = self.examples()
        after = self.parser.after
        answers = [f"{after}{before}{x}" for x in examples for before in ("", "Reasons.\n")]
        require(
            any(read(answer) is not None for answer in answers),
            f"parser.{name}",
            f"does not read {examples[0]!r}, which the general template asks for; set a template "
            "that asks for what it reads.",
        )

    @property
    def fewest(self) -> int:
        """Number of votes that must be parsed."""
        return self.votes // 2 + 1 if self.min_parsed is None else self.min_parsed

    @property
    def is_general(self) -> bool:
        """Whether the judge is asked by the general template."""
        return not (self.template or self.path or self.messages)

    @property
    def label(self) -> str:
        """What the line of the general template begins with."""
        return self.parser.line or "Score"

    def places(self) -> frozenset[str]:
        """Places that a template may use, besides {fields[...]}."""
        return frozenset({"prompt", "completion"})

    def needed(self) -> frozenset[str]:
        """Places that a template must use."""
        return self.pictures() or frozenset({"completion"})

    def pictures(self) -> frozenset[str]:
        """Places of images."""
        return frozenset(self.images)

    def traits(self) -> Traits:
        return Traits(shows_images=bool(self.images))

    def general(self) -> str:
        """Returns the template that is used where none is set."""
        raise NotImplementedError

    def examples(self) -> list[str]:
        """Returns answers of the form that the general template asks for."""
        raise NotImplementedError

    def reader(self) -> Callable[[str], Any]:
        """Returns a function that reads an answer, and returns None where it cannot."""
        return make_reader(self.parsed_by())

    def _showing(self, template: str) -> str:
        """Returns a template with every image before the completion."""
        return template.replace(
            "{completion}", "".join(f"{{{name}}}\n" for name in self.images) + "{completion}"
        )

    def make_form(self) -> Form:
        """Returns the prompt for the judge, with its places unfilled.

        Raises ConfigError where a place is unknown or a needed one is missing.
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
        content = read_template(self.path) if self.path else self.template or self.general()
        text = Template(content, self.places(), where, self.pictures())
        if self.form == "text":
            return Form(text=text).requiring(self.needed(), where)
        system = [("system", Template(self.system, self.places(), "system"))] if self.system else []
        return Form(turns=[*system, ("user", text)]).requiring(self.needed(), where)

    def parsed_by(self) -> ParserConfig:
        """Returns the parser; where nothing else is set, it reads a line.

        Choices are on that line too when the general template asks for it.
        """
        parser = self.parser
        is_complete = parser.key or parser.pattern or (parser.choices and not self.is_general)
        return parser if is_complete else replace(parser, line=self.label)


@dataclass(frozen=True, kw_only=True)
class PointwiseConfig(JudgeConfig):
    """One score for each completion. Places: {prompt}, {completion}, {fields[<name>]}."""

    scale: list[float] | None = None
    """The worst and the best score, which become 0 and 1. []: scores stay as they are. Empty:
    [0, 10] without choices, [] with choices.
    """
    outside: Literal["fail", "clip"] = "fail"
    """What happens to a score outside the scale. fail: it counts as not parsed. clip: the nearest
    end replaces it.
    """
    unfit_score: float | None = None
    """Score of a completion that was cut off or does not match completion_pattern; the judge is not
    asked. Empty: the whole completion is judged.
    """

    def _check(self) -> None:
        ends = self.ends
        require(len(ends) in (0, 2), "scale", f"must be the worst and the best score, is {ends}.")
        require(
            len({*ends}) == len(ends) and all(map(math.isfinite, ends)),
            "scale",
            f"its ends are {ends}.",
        )
        fit = self.unfit_score is None or math.isfinite(self.unfit_score)
        require(fit, "unfit_score", f"must be finite, is {self.unfit_score}.")
        super()._check()  # last: the general template names the scale's ends

    @property
    def ends(self) -> list[float]:
        """The scale's worst and best score; empty where scores are taken as they are."""
        if self.scale is None:
            return [] if self.parser.choices else list(_SCALE)
        return list(self.scale)

    def general(self) -> str:
        return self._showing(_POINTWISE).replace(
            "<line>", self._line("a number from {} (useless) to {} (cannot be better)")
        )

    def examples(self) -> list[str]:
        words = [*self.parser.choices] or [f"{end:g}" for end in self._asked_ends]
        return [f"{self.label}: {word}" for word in words]

    def reader(self) -> Callable[[str], Any]:
        return make_reader(self.parsed_by(), self.ends)

    @property
    def _asked_ends(self) -> Sequence[float]:
        """The worst and the best score that the general template names."""
        return self.ends or _SCALE

    def _line(self, number: str) -> str:
        """The form of the line that the general template asks for.

        number: what a score is where it is no choice, with places for the scale's ends.
        """
        worst, best = self._asked_ends
        words = _either([*self.parser.choices])
        return f"{self.label}: <{words or number.format(f'{worst:g}', f'{best:g}')}>"


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One criterion of a rubric."""

    name: str
    """Name of the criterion, and its key in the judge's answer."""
    description: str = ""
    """Explanation for the judge."""
    weight: float = 1.0
    """Weight in the mean."""


@dataclass(frozen=True, kw_only=True)
class RubricConfig(PointwiseConfig):
    """Scores by criteria.

    With ``together``, the template uses {criteria}, and the answer is a JSON object with a key for
    each criterion, unless the parser has a pattern, which then has a group ``name`` too. Without
    it, the template uses {criterion} and {description}.
    """

    criteria: list[Criterion]
    """Criteria of the rubric: name, description, weight."""
    together: bool = True
    """Ask for all criteria in one answer, not for one answer each."""

    def places(self) -> frozenset[str]:
        criteria = {"criteria"} if self.together else {"criterion", "description"}
        return frozenset({"prompt", "completion", *criteria})

    def needed(self) -> frozenset[str]:
        return super().needed() | {"criteria" if self.together else "criterion"}

    def _check(self) -> None:
        names = [criterion.name.strip().casefold() for criterion in self.criteria]
        require(bool(names), "criteria", "a rubric needs at least one.")
        require(
            all(names) and len({*names}) == len(names),
            "criteria",
            f"names must differ: {', '.join(names)}.",
        )
        for criterion in self.criteria:
            weight = criterion.weight
            require(
                weight > 0 and math.isfinite(weight),
                f"criteria.{criterion.name}.weight",
                f"is {weight}.",
            )
        super()._check()
        if self.together:
            require(not self.parser.key, "parser.key", "the criteria are the keys; leave it out.")
            require(
                not self.parser.line,
                "parser.line",
                "one line cannot hold the scores of all criteria; leave it out, or set together: "
                "false.",
            )
            pattern = Pattern(self.parser.pattern, "parser.pattern")
            named = not self.parser.pattern or "name" in pattern.names
            require(
                named, "parser.pattern", "has no group (?P<name>...), which says whose score it is."
            )

    def general(self) -> str:
        if not self.together:
            return self._showing(_CRITERION).replace(
                "<line>", self._line("a number from {} (not met at all) to {} (fully met)")
            )
        worst, best = self._asked_ends
        numbers = f"from {worst:g} (not met at all) to {best:g} (fully met)"
        words = _either([*self.parser.choices])
        return self._showing(_RUBRIC).replace("<scores>", f"by {words}" if words else numbers)

    def examples(self) -> list[str]:
        if not self.together:
            return super().examples()
        scores: Sequence[object] = [*self.parser.choices] or self._asked_ends
        names = [criterion.name for criterion in self.criteria]
        return [json.dumps(dict.fromkeys(names, score)) for score in scores]

    def reader(self) -> Callable[[str], Any]:
        if not self.together:
            return super().reader()
        return make_rubric_reader(self.parser, [criterion.name for criterion in self.criteria])


@dataclass(frozen=True, kw_only=True)
class PairwiseConfig(JudgeConfig):
    """Comparisons of the completions of a prompt.

    Each pair is compared in both orders, so that a judge's preference for a place cancels. Places:
    {prompt}, {first}, {second}, {fields[<name>]}; images have two each: {first_image} and
    {second_image}. The parsed score is that of the first completion: 1 where it is better, 0 where
    the second is.
    """

    opponents: int | None = None
    """Least number of other completions that each is compared with, drawn by seed. Empty: all."""
    method: Literal["win_rate", "bradley_terry"] = "win_rate"
    """win_rate: share of comparisons won; a tie is half a win. bradley_terry: log-strength, with
    mean 0 in each group; it takes the opponents' strengths into account.
    """
    prior: float = 1.0
    """Precision of bradley_terry's normal prior, which has mean 0. It keeps the strength of a
    completion that won all comparisons finite.
    """

    def _check(self) -> None:
        super()._check()
        require(
            self.opponents is None or self.opponents >= 1,
            "opponents",
            f"must be at least 1, is {self.opponents}.",
        )
        require(
            self.prior > 0 and math.isfinite(self.prior),
            "prior",
            f"must be positive, is {self.prior}.",
        )
        for word, score in self.parser.choices.items():
            require(
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

    @property
    def label(self) -> str:
        return self.parser.line or "Better"

    def general(self) -> str:
        words = _either([*(self.parser.choices or _BETTER)])
        text = _PAIRWISE.replace("<line>", f"{self.label}: <{words}>")
        for place in ("first", "second"):
            shown = "".join(f"{{{place}_{name}}}\n" for name in self.images)
            text = text.replace(f"{{{place}}}", f"{shown}{{{place}}}")
        return text

    def examples(self) -> list[str]:
        return [f"{self.label}: {word}" for word in self.parser.choices or _BETTER]

    def parsed_by(self) -> ParserConfig:
        parser = super().parsed_by()
        if parser.line and not parser.choices:
            return replace(parser, choices=_BETTER | _BETTER_BY_NAME)
        return parser


def _either(words: Sequence[str]) -> str:
    """Returns words as a choice: "A, B or tie"."""
    return " or ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)
