"""What can be set under ``config`` of this plugin's advantages, objectives and reward."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.traits import Traits

# -- advantages ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RewardKlConfig:
    """A penalty on leaving the reference, which is subtracted from the reward first of all."""

    coefficient: float = 0.0
    """The reward loses coefficient x the record's KL, summed over its actions, in nats. 0: no
    reference is needed.
    """
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Which estimate of the KL. k1 is the one whose gradient is right in a reward; see
    ``gcore_algorithms.kl``.
    """

    def __post_init__(self) -> None:
        _check_kl(self.coefficient, "advantage.config.kl.coefficient")


@dataclass(frozen=True, kw_only=True)
class RecordAdvantageConfig:
    """Settings of every estimator of level "record".

    smallest_group: the least group_size that the estimator can work with.
    """

    smallest_group: ClassVar[int] = 2

    group_size: int = 8
    """Records sampled for each prompt."""
    kl: RewardKlConfig = field(default_factory=RewardKlConfig)
    """KL penalty in the reward."""
    clip: float | None = None
    """Above 0: advantages are clamped to [-clip, clip], last of all. None: they are not."""

    def __post_init__(self) -> None:
        _check_group_size(self.group_size, self.smallest_group)
        _check_clip(self.clip)

    def traits(self) -> Traits:
        # A scalar of preparation, which the penalty reads.
        penalty = {f"kl_{self.kl.estimator}"} if self.kl.coefficient else set()
        return Traits(requires=frozenset(penalty))

    @property
    def compares_samples(self) -> bool:
        """Whether the baseline is of the group: then one of equal records teaches nothing."""
        return self.smallest_group > 1


@dataclass(frozen=True, kw_only=True)
class StandardisedConfig(RecordAdvantageConfig):
    """Settings of an estimator that divides by a standard deviation."""

    eps: float = 1e-4
    """Added to the standard deviation, in units of the reward. 0 is safe: rewards that differ by
    rounding alone have advantage 0.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_eps(self.eps)


@dataclass(frozen=True, kw_only=True)
class BatchConfig(StandardisedConfig):
    """Settings of an estimator that takes its standard deviation over the whole batch."""

    normalise_over: Literal["record", "action"] = "record"
    """What counts once in the batch's mean and standard deviation. record: each record, whatever
    its length. action: each action, so that long records count more, as in verl and OpenRLHF.
    """


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(StandardisedConfig):
    pass


@dataclass(frozen=True, kw_only=True)
class DrGrpoConfig(RecordAdvantageConfig):
    pass


@dataclass(frozen=True, kw_only=True)
class RlooConfig(RecordAdvantageConfig):
    pass


@dataclass(frozen=True, kw_only=True)
class ReinforcePpConfig(BatchConfig):
    smallest_group: ClassVar[int] = 1  # the batch is the baseline


@dataclass(frozen=True, kw_only=True)
class ReinforcePpBaselineConfig(BatchConfig):
    pass


@dataclass(frozen=True, kw_only=True)
class GdpoConfig:
    """Settings of GDPO. It has no KL in the reward, which the paper does not define: a penalty
    belongs in the loss.
    """

    group_size: int = 8
    """Records sampled for each prompt."""
    eps: float = 1e-4
    """Added to each standard deviation: that of a reward in its group, in units of the reward, and
    that of the batch. 0 is safe: rewards that differ by rounding alone count as equal.
    """
    normalise_over: Literal["record", "action"] = "record"
    """What counts once in the batch's mean and standard deviation. record: each record, whatever
    its length. action: each action, so that long records count more.
    """
    clip: float | None = None
    """Above 0: advantages are clamped to [-clip, clip], last of all. None: they are not."""

    def __post_init__(self) -> None:
        _check_group_size(self.group_size, 2)
        _check_eps(self.eps)
        _check_clip(self.clip)

    @property
    def compares_samples(self) -> bool:
        """Each reward is normalised in its group."""
        return True


@dataclass(frozen=True, kw_only=True)
class GaeConfig:
    """Settings of generalised advantage estimation."""

    group_size: int = 8
    """Records sampled for each prompt; the estimate of one does not depend on the others."""
    gamma: float = 1.0
    """Discount per action, 0 to 1."""
    lam: float = 0.95
    """Lambda, 0 to 1: 0 trusts the values alone (one-step error), 1 the rewards alone (Monte Carlo
    return).
    """
    kl: float = 0.0
    """What an action costs for each nat by which its log-prob exceeds the reference's, at least 0;
    above 0 a role must give ``ref_logp``.
    """
    bootstrap: bool = True
    """Whether the value after the last action counts where a record was cut; else it is 0 there, as
    where the policy ended the record.
    """
    whiten: bool = False
    """Whether the policy gets advantages of mean 0 and variance 1 over all trained actions of the
    step, on all ranks.
    """

    def __post_init__(self) -> None:
        _check_group_size(self.group_size, 1)
        if not 0.0 <= self.kl < math.inf:
            raise ConfigError(
                f"{self.kl} is no cost",
                where="advantage.config.kl",
                why="an action must not be paid for leaving the reference",
                todo="set kl to 0 or more",
            )
        for name in ("gamma", "lam"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(
                    f"{getattr(self, name)} is not between 0 and 1",
                    where=f"advantage.config.{name}",
                    why="the sum of discounted errors would grow with the length of the record",
                    todo=f"set {name} between 0 and 1",
                )

    def traits(self) -> Traits:
        columns = {"values", "next_values"} if self.bootstrap else {"values"}
        return Traits(requires=frozenset(columns | {"ref_logp"} if self.kl else columns))


def _check_eps(eps: float) -> None:
    if not 0 <= eps < math.inf:
        raise ConfigError(
            f"{eps} is negative" if eps < 0 else f"{eps} is no finite number",
            where="advantage.config.eps",
            why="it is added to a standard deviation, and rewards are divided by the sum",
            todo="set eps to 0 or more",
        )


def _check_kl(coefficient: float, where: str) -> None:
    """Raises ConfigError for a coefficient that pays for leaving the reference, or is none."""
    if not 0.0 <= coefficient < math.inf:
        raise ConfigError(
            f"{coefficient} is no penalty",
            where=where,
            why="the policy must not be paid for leaving the reference",
            todo="set coefficient to 0, which needs no reference, or to more",
        )


def _check_clip(clip: float | None) -> None:
    if clip is not None and not clip > 0:
        raise ConfigError(
            f"{clip} is not above 0",
            where="advantage.config.clip",
            why="advantages are clamped to [-clip, clip], which must leave something of them",
            todo="set clip above 0, or leave it out",
        )


def _check_group_size(group_size: int, smallest: int) -> None:
    """Raises ConfigError for a group that is smaller than ``smallest``."""
    if group_size >= smallest:
        return
    if group_size == 1:
        raise ConfigError(
            "a group of 1 has no baseline",
            where="advantage.config.group_size",
            why=(
                "this estimator compares the records of one prompt; alone, each has advantage 0 "
                "and teaches nothing"
            ),
            todo=(
                f"set group_size to {smallest} or more, or use algorithms/reinforce-pp, whose "
                "baseline is the batch"
            ),
        )
    raise ConfigError(
        f"{group_size} is not a number of records",
        where="advantage.config.group_size",
        why="it says how many records are sampled for each prompt",
        todo=f"set group_size to {smallest} or more",
    )


# -- objectives ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LossKlConfig:
    """A penalty on leaving the reference, as a term of the loss."""

    coefficient: float = 0.0
    """The loss gains coefficient x KL of each action, in nats. 0: no reference is needed."""
    estimator: Literal["k1", "k2", "k3"] = "k2"
    """On policy, the gradient of k2 is that of KL(policy || reference), the gradient of k3 (GRPO's
    choice) that of KL(reference || policy), and the gradient of k1 is zero in expectation: as a
    loss, k1 adds nothing but noise.
    """

    def __post_init__(self) -> None:
        _check_kl(self.coefficient, "objective.config.kl.coefficient")


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Importance weights exp(old_logp - rollout_logp), for generators whose log-probs differ from
    the trainer's, and for actions that older weights sampled. With ``old_logprobs: interpolate``
    old_logp is what is interpolated.
    """

    kind: Literal["none", "truncate", "mask"] = "none"
    """truncate: weights are clamped to [floor, cap]. mask: actions whose weight lies outside get
    weight 0.
    """
    level: Literal["token", "sequence", "geometric"] = "token"
    """token: a weight per action. sequence: the product over the record. geometric: the product's
    mean per action.
    """
    cap: float | None = None
    """Largest weight, at least 1. None: 2 with truncate (TIS), 5 with mask (IcePop)."""
    floor: float | None = None
    """Smallest weight, 0 to 1. None: 0 with truncate, 0.5 with mask (IcePop). 0 bounds nothing from
    below, so that a mask is one-sided.
    """

    def __post_init__(self) -> None:
        floor, cap = self.bounds()
        if not 0.0 <= floor <= 1.0 <= cap:
            raise ConfigError(
                f"the weights [{floor}, {cap}] do not contain 1",
                where="objective.config.correction",
                why="weight 1 is where generator and trainer agree",
                todo="set floor between 0 and 1, and cap to 1 or more",
            )

    def bounds(self) -> tuple[float, float]:
        """Returns the smallest and the largest weight, as set or as the kind has them."""
        floor, cap = (0.5, 5.0) if self.kind == "mask" else (0.0, 2.0)
        return (
            floor if self.floor is None else self.floor,
            cap if self.cap is None else self.cap,
        )


@dataclass(frozen=True, kw_only=True)
class StaleMaskConfig:
    """A mask of whole records that are old and that the policy has moved away from.

    Their actions have weight 0 in the surrogate, and still count in ``normalise``.
    """

    older_than: int | None = None
    """A record may be masked if one of its actions was sampled by weights that are more than so
    many versions older than the step's, 0 or more. None: no record is masked.
    """
    floor: float = 0.5
    """It is masked if the geometric mean of policy / rollout over its actions is below this, 0 to
    1. The policy is old_logp with ``old_logprobs: recompute``, else the one that is trained.
    """
    cap: float = 2.0
    """Or if the mean is above this, at least 1."""

    def __post_init__(self) -> None:
        where = "objective.config.stale_mask"
        if self.older_than is not None and self.older_than < 0:
            raise ConfigError(
                f"{self.older_than} is not a number of versions",
                where=f"{where}.older_than",
                why="weights are 0 or more versions older than the step's",
                todo="set older_than to 0 or more, or leave it out",
            )
        if not 0.0 <= self.floor <= 1.0 <= self.cap:
            raise ConfigError(
                f"the ratios [{self.floor}, {self.cap}] do not contain 1",
                where=where,
                why="the ratio is 1 where the policy has not moved",
                todo="set floor between 0 and 1, and cap to 1 or more",
            )


@dataclass(frozen=True, kw_only=True)
class EntropyTargetConfig:
    """Raises the entropy coefficient while the policy's entropy is below a target, and lowers it
    otherwise. The defaults but for the target are Skywork-OR1's.
    """

    target: float | None = None
    """Entropy to keep, mean per action, in nats: Skywork-OR1 takes 0.2. None: the coefficient stays
    at ``entropy_coefficient``.
    """
    change: float = 1e-4
    """By how much a step raises or lowers the coefficient."""
    smallest: float = 0.0
    """The coefficient does not fall below this."""
    largest: float = 5e-3
    """The coefficient does not rise above this."""

    def __post_init__(self) -> None:
        where = "objective.config.entropy"
        if self.target is not None and not self.target > 0:
            raise ConfigError(
                f"{self.target} is not above 0",
                where=f"{where}.target",
                why="an entropy is never negative, so the coefficient would never be raised",
                todo="set target to a share of the entropy that the run begins with",
            )
        if not self.change > 0:
            raise ConfigError(
                f"{self.change} is not above 0",
                where=f"{where}.change",
                why="each step raises or lowers the coefficient by it",
                todo="set change above 0, such as 1e-4",
            )
        if not 0 <= self.smallest <= self.largest:
            raise ConfigError(
                f"[{self.smallest}, {self.largest}] is no range of coefficients",
                where=where,
                why="the coefficient stays between smallest and largest, from 0 on",
                todo="set smallest to 0 or more, and largest to no less",
            )


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Settings of every objective; only the surrogate differs between them."""

    normalise: Literal["token", "sequence", "constant"] = "token"
    """token: the mean over all actions of the update (DAPO). sequence: the mean over a record's
    actions, then over records (GRPO). constant: the sum over actions, divided by records x
    constant_length (Dr.GRPO).
    """
    constant_length: int | None = None
    """Actions per record that ``normalise: constant`` divides by; the longest completion allowed is
    usual.
    """
    kl: LossKlConfig = field(default_factory=LossKlConfig)
    """KL penalty in the loss."""
    entropy_coefficient: float = 0.0
    """The loss loses entropy_coefficient x entropy of each action, in nats."""
    entropy: EntropyTargetConfig = field(default_factory=EntropyTargetConfig)
    """With a target, ``entropy_coefficient`` is where the coefficient begins."""
    old_logprobs: Literal["rollout", "recompute", "interpolate"] = "rollout"
    """Log-probs that the ratio is taken against. rollout: the generator's, which saves a forward
    pass. recompute: the trainer's own, under the weights before the step's first update.
    interpolate: between the generator's and the policy's by the age of each action, which saves the
    pass too; needs a correction.
    """
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Off-policy correction; needs ``old_logprobs: recompute`` or ``interpolate``."""
    stale_mask: StaleMaskConfig = field(default_factory=StaleMaskConfig)
    """Which records are too old to teach."""

    def __post_init__(self) -> None:
        if self.normalise == "constant" and (
            self.constant_length is None or self.constant_length < 1
        ):
            raise ConfigError(
                (
                    "normalise: constant needs a length, and constant_length is "
                    f"{self.constant_length}"
                ),
                where="objective.config.constant_length",
                why="the loss is divided by records x constant_length",
                todo="set constant_length, usually to the longest completion allowed",
            )
        if self.old_logprobs == "interpolate" and self.correction.kind == "none":
            raise ConfigError(
                "old_logprobs: interpolate needs a correction",
                where="objective.config.correction.kind",
                why=(
                    "its ratio is policy / proximal policy, which leaves out how far that one is "
                    "from the weights that sampled: the correction's weight is the rest"
                ),
                todo="set correction.kind: truncate or mask, or old_logprobs: rollout",
            )
        if self.correction.kind != "none" and self.old_logprobs == "rollout":
            raise ConfigError(
                f"correction {self.correction.kind!r} needs the trainer's own log-probs",
                where="objective.config.old_logprobs",
                why=(
                    "its weights compare them with the generator's; with 'rollout' the ratio has "
                    "that difference in it"
                ),
                todo="set old_logprobs: recompute, or correction.kind: none",
            )

        bounds = self.entropy
        if self.adapts and not bounds.smallest <= self.entropy_coefficient <= bounds.largest:
            raise ConfigError(
                f"{self.entropy_coefficient} is not in [{bounds.smallest}, {bounds.largest}]",
                where="objective.config.entropy_coefficient",
                why="with entropy.target the coefficient begins there and stays in that range",
                todo="set it within entropy.smallest and entropy.largest",
            )

    @property
    def adapts(self) -> bool:
        """Whether steps change the entropy coefficient."""
        return self.entropy.target is not None

    def traits(self) -> Traits:
        masks_stale = self.stale_mask.older_than is not None
        needed = {
            "age": self.old_logprobs == "interpolate" or masks_stale,
            "old_logp": self.old_logprobs == "recompute",
            "ref_logp": self.kl.coefficient != 0,
            "entropy": self.entropy_coefficient != 0 or self.adapts,
        }
        return Traits(
            requires=frozenset(name for name, is_needed in needed.items() if is_needed),
            # The ratio, or the correction's weights, divide by the probability under the weights
            # that sampled.
            takes_stale=self.old_logprobs == "rollout" or self.correction.kind != "none",
            weighs_rows=True,
        )


@dataclass(frozen=True, kw_only=True)
class ClipConfig(ObjectiveConfig):
    """Settings of an objective whose ratio is clipped to [1 - clip_low, 1 + clip_high]."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip_low", "clip_high"):
            if not getattr(self, name) >= 0:  # NaN too: it would switch the clip off
                raise ConfigError(
                    f"{getattr(self, name)} is negative",
                    where=f"objective.config.{name}",
                    why=(
                        "the ratio is clipped to [1 - clip_low, 1 + clip_high], which must "
                        "contain 1"
                    ),
                    todo=f"set {name} to 0 or more",
                )


@dataclass(frozen=True, kw_only=True)
class PpoClipConfig(ClipConfig):
    clip_low: float = 0.2
    """The ratio may fall to 1 - clip_low before a negative advantage stops teaching."""
    clip_high: float = 0.2
    """The ratio may rise to 1 + clip_high before a positive advantage stops teaching; DAPO uses
    0.28.
    """
    dual_clip: float | None = None
    """Above 1: the ratio beyond which a negative advantage stops teaching, too; 3 is usual. None:
    no such bound.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(
                f"{self.dual_clip} is not above 1",
                where="objective.config.dual_clip",
                why=(
                    "it bounds the ratio of negative advantages from above, and on policy the "
                    "ratio is 1"
                ),
                todo="set dual_clip above 1 (3 is usual), or leave it out",
            )


@dataclass(frozen=True, kw_only=True)
class GspoConfig(ClipConfig):
    normalise: Literal["token", "sequence", "constant"] = "sequence"
    """What a record weighs, all of whose actions have one ratio. sequence: as much as any other, as
    in the paper. token: as many times as it has actions. constant: the same, over records x
    constant_length.
    """
    clip_low: float = 3e-4
    """The sequence's ratio (a mean per action) may fall to 1 - clip_low."""
    clip_high: float = 4e-4
    """The sequence's ratio may rise to 1 + clip_high."""


@dataclass(frozen=True, kw_only=True)
class CispoConfig(ClipConfig):
    clip_low: float = 1.0
    """The weight is at least 1 - clip_low; 1: no lower bound, as in the paper."""
    clip_high: float = 4.0
    """The weight is at most 1 + clip_high."""


@dataclass(frozen=True, kw_only=True)
class SapoConfig(ObjectiveConfig):
    """Settings of SAPO, which has a gate in place of a clip."""

    normalise: Literal["token", "sequence", "constant"] = "sequence"
    """sequence: the mean over a record's actions, then over records, as in the paper. token: the
    mean over all actions. constant: the sum over actions, over records x constant_length.
    """
    temperature_positive: float = 1.0
    """How fast the gate closes around the ratio 1 where the advantage is positive: the larger, the
    faster.
    """
    temperature_negative: float = 1.05
    """The same where it is not positive. The paper takes a larger one here, since a negative
    advantage raises the probability of all the tokens that were not sampled.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("temperature_positive", "temperature_negative"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"{getattr(self, name)} is not above 0",
                    where=f"objective.config.{name}",
                    why="the gate is a sigmoid of temperature x (ratio - 1), over temperature",
                    todo=f"set {name} above 0, usually close to 1",
                )


# -- rewards ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """The penalty of long completions: 0 up to max_actions - soft_actions, -1 from max_actions on,
    and a straight line between.
    """

    max_actions: int
    """Actions at which the penalty is whole; the rollout's max_new_tokens is usual."""
    soft_actions: int
    """Over how many of the last actions the penalty grows, 1 to max_actions; DAPO takes 4096 of
    20480.
    """

    def __post_init__(self) -> None:
        if not 1 <= self.soft_actions <= self.max_actions:
            raise ConfigError(
                f"{self.soft_actions} is not between 1 and max_actions, {self.max_actions}",
                where="soft_actions",
                why="the penalty grows over the last soft_actions of max_actions",
                todo="set soft_actions to a part of max_actions, such as a fifth",
            )


@dataclass(frozen=True, kw_only=True)
class RepetitionConfig:
    """The penalty of repeated n-grams: 0 for a completion without any, and at worst -scale."""

    ngram: int = 4
    """Tokens of an n-gram, at least 1."""
    scale: float = 1.0
    """The penalty is -scale x the share of a completion's n-grams that stood before in it."""

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise ConfigError(
                f"{self.ngram} is not a number of tokens",
                where="ngram",
                why="runs of so many tokens are compared",
                todo="set ngram to 1 or more; 3 to 40 is usual",
            )
        if not self.scale > 0:
            raise ConfigError(
                f"{self.scale} is not above 0",
                where="scale",
                why="the reward is minus scale x the share of repeated n-grams: a penalty",
                todo="set scale above 0",
            )
