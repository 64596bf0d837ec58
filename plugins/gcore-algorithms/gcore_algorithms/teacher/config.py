"""What may be set under ``config:`` of the plugin's roles, objectives and advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gcore_language.settings import AUTO, check_threads

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.traits import Traits

#: Columns of a teacher's likeliest tokens at each action, [A, k]: ids and log-probs, likeliest
#: first.
TOP_IDS = "teacher_topk_ids"
TOP_LOGP = "teacher_topk_logp"


def _require(holds: bool, where: str, what: str) -> None:
    """Raises ConfigError for the setting ``where`` unless it ``holds``."""
    if not holds:
        raise ConfigError(what, where=where)


@dataclass(frozen=True, kw_only=True)
class FrozenModelConfig:
    """Settings of ``roles.reference.config`` and ``roles.teacher.config``."""

    top_k: int = 0
    """Number of the likeliest tokens at each action whose ids and log-probs a teacher gives, at
    most its vocabulary; 0 gives none. The objective teacher/jsd needs them.
    """
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of weights and arithmetic. Log-probs are always computed in float32."""
    budget_tokens: int = 16384
    """Most tokens of one forward pass, padding included, at least 1; a longer record gets a pass of
    its own.
    """
    packing: Literal["auto", "shared_prompt", "padded"] = "auto"
    """How records share a forward pass, as in a trainer's ``packing``."""
    attn_implementation: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention of transformers; auto: its own choice for the model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto: cuda where torch sees a CUDA device, else cpu."""
    rest: Literal["device", "host"] = "device"
    """Where the weights lie between two steps' records. device: where they work. host: in host
    memory, so that an accelerator which the role shares is free meanwhile; each step copies them
    once to the accelerator. On a CPU both are the same.
    """
    threads: int | str = AUTO
    """Number of CPU threads of one worker, at least 1; auto: as in a generator."""
    trust_remote_code: bool = False
    """Whether Python code that lies in the model directory may be run."""

    def __post_init__(self) -> None:
        _require(self.top_k >= 0, "top_k", f"must not be negative, is {self.top_k}")
        _require(
            self.budget_tokens > 0, "budget_tokens", f"must be positive, is {self.budget_tokens}"
        )
        check_threads(self.threads)

    def traits(self) -> Traits:
        widths = {TOP_IDS: self.top_k, TOP_LOGP: self.top_k} if self.top_k else {}
        return Traits(column_widths=widths)


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Settings of every objective that draws the policy to a teacher."""

    teacher_weight: float = 1.0
    """Factor of the teacher's part; at least 0."""
    reward_weight: float = 0.0
    """Factor of the part that comes from rewards: the advantage of the job; at least 0. 0 learns
    from the teacher alone, and with the advantage teacher/no-reward the job needs no reward.
    """
    clip_low: float = 0.2
    """The ratio of an action is clipped below at 1 - clip_low; in 0..1."""
    clip_high: float = 0.2
    """The ratio of an action is clipped above at 1 + clip_high; at least 0."""
    normalise: Literal["token", "sequence"] = "token"
    """token: the mean over all actions of the update. sequence: the mean over a record's actions,
    then over records.
    """
    old_logprobs: Literal["rollout", "recompute"] = "rollout"
    """What ratios, and the teacher's log-probs, are compared with. rollout: the generator's
    log-probs. recompute: the trainer's own, under the weights before the step's first update.
    """

    def __post_init__(self) -> None:
        _require(
            self.teacher_weight >= 0,
            "teacher_weight",
            f"must not be negative, is {self.teacher_weight}",
        )
        _require(
            self.reward_weight >= 0,
            "reward_weight",
            f"must not be negative, is {self.reward_weight}",
        )
        _require(
            self.teacher_weight + self.reward_weight > 0,
            "teacher_weight",
            "with reward_weight 0 it must be positive, or nothing is learned",
        )
        _require(0 <= self.clip_low <= 1, "clip_low", f"must be in 0..1, is {self.clip_low}")
        _require(self.clip_high >= 0, "clip_high", f"must not be negative, is {self.clip_high}")

    @property
    def behaviour(self) -> str:
        """The column of the log-probs that ratios compare with."""
        return "old_logp" if self.old_logprobs == "recompute" else "rollout_logp"


@dataclass(frozen=True, kw_only=True)
class ReverseKlConfig(DistillationConfig):
    """Settings of ``objective.config`` for teacher/reverse-kl."""

    largest_gap: float = 20.0
    """What teacher and policy may differ by at one action, in nats, above 0; a larger difference
    counts as this one. It keeps an action that the teacher finds impossible from outweighing all
    others.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.largest_gap > 0, "largest_gap", f"must be positive, is {self.largest_gap}")

    def traits(self) -> Traits:
        own = {"old_logp"} if self.old_logprobs == "recompute" else set()
        return Traits(
            requires=frozenset({"teacher_logp"} | own),
            # The ratio divides by the probability under the weights that sampled.
            takes_stale=self.old_logprobs == "rollout",
            weighs_rows=True,
        )


@dataclass(frozen=True, kw_only=True)
class JensenShannonConfig(DistillationConfig):
    """Settings of ``objective.config`` for teacher/jsd."""

    beta: float = 0.5
    """Weight of the teacher in the mixture, in 0..1. 0 is KL(teacher || policy), which covers all
    that the teacher does; 1 is KL(policy || teacher), which seeks what it does most.
    """
    tail: Literal["bucket", "renormalise"] = "bucket"
    """What is made of the probability of tokens outside the teacher's top_k. bucket: all of them
    count as one further token, so that the divergence is a lower bound of that over the whole
    vocabulary. renormalise: both distributions are conditioned on the top_k, and the rest is not
    learned from.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 <= self.beta <= 1, "beta", f"must be in 0..1, is {self.beta}")

    def traits(self) -> Traits:
        recomputes = self.reward_weight and self.old_logprobs == "recompute"
        own = {"old_logp"} if recomputes else set()
        needed = frozenset({TOP_IDS, TOP_LOGP, f"logp@{TOP_IDS}"} | own)
        return Traits(requires=needed, weighs_rows=True)


@dataclass(frozen=True, kw_only=True)
class NoRewardConfig:
    """Settings of ``advantage.config`` for teacher/no-reward."""

    group_size: int = 4
    """How many samples are drawn of each prompt, at least 1."""

    def __post_init__(self) -> None:
        _require(self.group_size >= 1, "group_size", f"must be at least 1, is {self.group_size}")

    def traits(self) -> Traits:
        return Traits(works_without_rewards=True)
