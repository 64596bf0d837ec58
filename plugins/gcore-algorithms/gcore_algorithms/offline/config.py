"""What can be set under ``config`` of this plugin's providers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.traits import Traits
from gcore_core.kits.programs import SyncConfig


def _require(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise ConfigError(what, where=where)


# -- step programs ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(SyncConfig):
    """Settings of the step programs, which are those of ``core/sync``.

    prompts: rows that a step trains on, over all shards.

    Those of pushes and of ``logprob_band`` are not read: nothing is pushed and nothing is sampled.
    """


@dataclass(frozen=True, kw_only=True)
class PairsConfig(OfflineConfig):
    """Settings of the step program whose rows have two answers."""

    def traits(self) -> Traits:
        return replace(super().traits(), records_per_group=2)


# -- datasets --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RowsFileConfig:
    """Settings of a dataset of rows with answers."""

    path: str
    """File of JSON lines; relative to the YAML's directory."""
    limit: int | None = None
    """Number of rows to use, from the first on; at least 1. Empty: all rows."""

    def __post_init__(self) -> None:
        limit = self.limit
        _require(limit is None or limit >= 1, "limit", f"must be at least 1, is {limit}")


# -- readers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReaderConfig:
    """Settings of what turns rows into records."""

    max_tokens: int | None = None
    """Most tokens of a prompt and an answer together, at least 2; empty: as many as the model
    allows.
    """
    too_long: Literal["drop", "error"] = "drop"
    """What happens to a row with more tokens: it is dropped and counted, or the run stops."""
    equal: Literal["drop", "error"] = "drop"
    """What happens to a pair whose answers are the same tokens: it is dropped and counted, or the
    run stops.
    """
    batch: int = 64
    """Most rows that are encoded before their records are given away; at least 1."""
    trust_remote_code: bool = False
    """Whether Python code that lies in the model directory may be run."""

    def __post_init__(self) -> None:
        most = self.max_tokens
        _require(most is None or most >= 2, "max_tokens", f"must be at least 2, is {most}")
        _require(self.batch >= 1, "batch", f"must be at least 1, is {self.batch}")


@dataclass(frozen=True, kw_only=True)
class AnswersConfig(ReaderConfig):
    """Settings of the reader for policies."""

    turns: Literal["all", "last"] = "all"
    """Which turns of the assistant are trained on, of those in a row's answer."""
    add_end: bool = True
    """Whether an answer that does not end with the tokenizer's end-of-sequence token gets it."""


# -- objectives ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Settings of the loss of supervised fine-tuning."""

    normalise: Literal["token", "record"] = "token"
    """What the loss is a mean over: token weighs every trained token of the minibatch alike, record
    every record.
    """

    def traits(self) -> Traits:
        return Traits()


@dataclass(frozen=True, kw_only=True)
class DpoConfig:
    """Settings of direct preference optimisation."""

    variant: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Loss of h, by how much the policy's log-ratio of chosen to rejected exceeds the reference's:
    sigmoid (DPO), hinge (SLiC) or ipo (a square around 1 / (2 beta)).
    """
    beta: float = 0.1
    """How strongly the policy is held to the reference; positive."""
    label_smoothing: float = 0.0
    """Probability, 0 up to but not 0.5, that a label is wrong; for the variant sigmoid."""
    length_normalised: bool = False
    """Whether an answer's log-probs are averaged over its tokens, in place of summed."""

    def __post_init__(self) -> None:
        _require(0 < self.beta < math.inf, "beta", f"must be positive, is {self.beta}")
        smoothing = self.label_smoothing
        _require(
            0 <= smoothing < 0.5,
            "label_smoothing",
            f"must be at least 0 and below 0.5, is {smoothing}",
        )
        _require(
            not smoothing or self.variant == "sigmoid",
            "label_smoothing",
            f"has no meaning for the variant {self.variant}; set it to 0",
        )

    def traits(self) -> Traits:
        return Traits(requires=frozenset({"group", "sample", "ref_logp"}))


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """Settings that all losses of reward models have.

    pairwise: whether they compare the two answers of a row.
    """

    pairwise: ClassVar[bool] = False

    centring: float = 0.0
    """Weight, at least 0, of the squared mean reward that is added to the loss, so that rewards lie
    around 0; 0.01 is usual. 0 adds nothing.
    """

    def __post_init__(self) -> None:
        _require(
            0 <= self.centring < math.inf, "centring", f"must not be negative, is {self.centring}"
        )


@dataclass(frozen=True, kw_only=True)
class BradleyTerryConfig(RewardModelConfig):
    """Settings of the Bradley-Terry loss of pairs."""

    pairwise: ClassVar[bool] = True

    margin: float = 0.0
    """By how much of a row's margin the chosen answer's reward must exceed the other's, at least 0;
    1 takes the row's margin as it is, 0 does not look at it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 <= self.margin < math.inf, "margin", f"must not be negative, is {self.margin}")

    def traits(self) -> Traits:
        label = {"label"} if self.margin else set()
        return Traits(requires=frozenset({"values", "group", "sample"} | label))


@dataclass(frozen=True, kw_only=True)
class ScalarConfig(RewardModelConfig):
    """Settings of the loss that draws a reward to the score of its row."""

    loss: Literal["square", "logistic"] = "square"
    """square: half the squared difference to the score. logistic: the score is the probability that
    the answer is good, 0 to 1, and the reward its logit.
    """

    def traits(self) -> Traits:
        return Traits(requires=frozenset({"values", "label"}))
