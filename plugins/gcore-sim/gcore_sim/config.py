"""What may be set below ``config:``. Times are seconds of the emulated cluster; ``time_scale``
makes them shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from gcore_core.contract.errors import ConfigError
from gcore_core.kits.launching import LocalConfig

#: workload -> (prompt tokens, answer tokens: median and sigma of log-normal ones, most answer
#: tokens)
KINDS: dict[str, tuple[int, int, float, int]] = {
    "chat": (256, 350, 0.8, 3840),
    "rl16k": (512, 2500, 1.0, 16384),
    "rl64k": (512, 6000, 0.9, 65536),
}


def _require(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise ConfigError(what, where=where)


def _at_least_zero(settings: Any, *names: str) -> None:
    for name in names:
        _require(
            getattr(settings, name) >= 0,
            name,
            f"must not be negative, is {getattr(settings, name)}",
        )


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """How long an engine takes. The defaults are a roofline, not a measurement: a dense model of
    32e9 parameters in bfloat16 on four devices of 80 GB, 3.35 TB/s and 989 TFLOP/s.
    """

    base_s: float = 0.012
    """One decoding step, whatever the batch: the weights are read."""
    running_s: float = 3.0e-5
    """More for each sequence that runs."""
    cached_s: float = 2.8e-8
    """More for each token in the cache: it is read too."""
    prefill_s: float = 6.25e-5
    """Each token of a prompt. Nothing else runs meanwhile."""
    max_running: int = 256
    """Sequences that run at a time; others wait, first come first served."""
    cache_tokens: int = 750_000
    """A sequence is let in while the cache has room for its prompt; those that run then grow
    without limit.
    """

    def __post_init__(self) -> None:
        _at_least_zero(self, "base_s", "running_s", "cached_s", "prefill_s")
        _require(self.max_running >= 1, "max_running", f"must be at least 1, is {self.max_running}")

    def step_s(self, running: int, cached: float) -> float:
        """Seconds of one decoding step: a token for each of ``running`` sequences, ``cached``
        tokens in all.
        """
        return self.base_s + self.running_s * running + self.cached_s * cached


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What a record carries besides its tokens, as an image or a video would be: medium
    ``payload``, uint8.
    """

    nbytes: int = 0
    """Bytes of one record's payload; 0: it has none."""
    shared: bool = False
    """The records of a prompt carry the same bytes; else every record its own."""

    def __post_init__(self) -> None:
        _at_least_zero(self, "nbytes")


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """Answers end after as many tokens as their row says, see ``sim/prompts``."""

    profile: EngineProfile = field(default_factory=EngineProfile)
    prefix_cache: bool = True
    """The prompt of a group is prefilled once while one of its samples runs."""
    tick_s: float = 0.5
    """A step of the engine ends with the next answer, or after this time. New requests join
    then.
    """
    context_length: int = 131_072
    """Tokens of the longest prompt; a longer one fails."""
    answer_median: float = 12.0
    """Median tokens of answers to rows that do not say how long their answers are."""
    answer_sigma: float = 0.5
    """Standard deviation of the log-length of answers to such rows."""
    max_new_tokens: int = 65_536
    """Tokens at which an answer is truncated."""
    weights_gb: float = 64.0
    """Gigabytes whose push is emulated. What is really pushed is a table of letters."""
    push_s_per_gb: float = 0.1
    sleep_s: float = 1.0
    wake_s: float = 1.0
    payload: Payload = field(default_factory=Payload)
    time_scale: float = 1.0
    """All times are multiplied by it; 0 spends none."""

    def __post_init__(self) -> None:
        _at_least_zero(self, "weights_gb", "push_s_per_gb", "sleep_s", "wake_s", "time_scale")
        _require(self.tick_s > 0, "tick_s", f"must be positive, is {self.tick_s}")
        _require(
            self.max_new_tokens >= 1,
            "max_new_tokens",
            f"must be at least 1, is {self.max_new_tokens}",
        )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """A rank takes ``record_s + token_s L + token2_s L^2`` for a record of L tokens, forward and
    backward. The defaults are the arithmetic of the generator's model and devices, at 35% of their
    peak.

    A rank waits for no other between updates: a step takes as long as its longest rank.
    """

    record_s: float = 0.0
    token_s: float = 1.4e-4
    token2_s: float = 1.4e-9
    prepare_share: float = 0.55
    """Preparation, as a share of one epoch: forward passes of the policy and the reference."""
    update_s: float = 0.5
    """Each optimizer update."""
    learning_rate: float = 0.0
    """Of plain REINFORCE on a table of letters; 0 learns nothing."""
    micro_batch: int = 0
    """Records whose gradient is computed at once; 0 is all."""
    reads: bool = False
    """Go over every byte of what records show, as a model that sees it does."""
    time_scale: float = 1.0
    """All times are multiplied by it; 0 spends none."""

    def __post_init__(self) -> None:
        _at_least_zero(
            self, "record_s", "token_s", "token2_s", "prepare_share", "update_s", "time_scale"
        )

    def record_seconds(self, length: int) -> float:
        """Forward and backward of one record of ``length`` tokens, prompt and answer."""
        return self.record_s + self.token_s * length + self.token2_s * length * length


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """Judges that are always busy: each record takes its share of ``replicas`` engines that run
    ``running`` verdicts at a time. What one verdict waits for its last token is not emulated, since
    a scorer is asked one call at a time.
    """

    profile: EngineProfile = field(default_factory=EngineProfile)
    replicas: int = 1
    running: int = 128
    instructions: int = 1024
    """Tokens that a judge reads besides prompt and answer."""
    verdict_median: float = 600.0
    verdict_sigma: float = 0.5
    verdict_limit: int = 4096
    solved: float = 0.5
    """Chance of a reward of 1."""
    decided: float = 0.0
    """Share of prompts whose answers are all good or all bad: groups that do not teach."""
    reads: bool = False
    """Go over every byte of what records show, as a model that sees it does, and check that it is
    what was stored.
    """
    seed: int = 0
    time_scale: float = 1.0
    """All times are multiplied by it; 0 spends none."""

    def __post_init__(self) -> None:
        _at_least_zero(self, "verdict_median", "time_scale")
        for name in ("replicas", "running"):
            _require(
                getattr(self, name) >= 1, name, f"must be at least 1, is {getattr(self, name)}"
            )
        for name in ("solved", "decided"):
            _require(
                0 <= getattr(self, name) <= 1,
                name,
                f"must be from 0 to 1, is {getattr(self, name)}",
            )


@dataclass(frozen=True, kw_only=True)
class Skew:
    """Makes the prompts that one controller gets in the first pass longer than those of the
    others.
    """

    shards: int = 0
    """How many controllers there are: ${controller.shards}. 0: no skew."""
    shard: int = 0
    factor: float = 4.0
    """Factor of the prompt's length."""
    answer_factor: float = 1.0
    """Factor of the answers' median length."""
    seed: int = 0
    """The run's seed, ${run.seed}, which decides which rows a controller gets."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Rows that change with the ordinal that they have in the first pass: from the first to the
    second value of each pair, medians geometrically. Lengths are log-normal, in tokens.
    """

    ordinals: int = 0
    """Number of ordinals after which the second values are reached; 0: no drift."""
    answer: list[float] = field(default_factory=lambda: [800.0, 8000.0])
    answer_sigma: float = 1.0
    answer_limit: int = 32768
    verdict: list[float] = field(default_factory=lambda: [400.0, 1200.0])
    verdict_sigma: float = 0.5
    verdict_limit: int = 4096
    keep: list[float] = field(default_factory=lambda: [0.7, 0.3])
    """Chance that a prompt teaches: for `sim/asks`, as verdicts are."""
    seed: int = 0
    """The run's seed, ${run.seed}, which decides which row has which ordinal."""

    def __post_init__(self) -> None:
        _at_least_zero(self, "ordinals", "answer_sigma", "verdict_sigma")
        for name in ("answer", "verdict", "keep"):
            pair = getattr(self, name)
            _require(
                len(pair) == 2 and min(pair) > 0,
                f"drift.{name}",
                f"must be two positive numbers, is {pair}",
            )
        _require(max(self.keep) <= 1, "drift.keep", f"must be at most 1, is {max(self.keep):g}")


@dataclass(frozen=True, kw_only=True)
class AsksConfig:
    """Verdicts are as long as their row says, see ``drift`` of ``sim/prompts``."""

    instructions: int = 1024
    """Tokens that a judge reads besides prompt and answer."""
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least_zero(self, "instructions")


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    rows: int = 100_000
    kind: Literal["chat", "rl16k", "rl64k"] = "rl16k"
    """Lengths of prompts and answers, both log-normal: chat about 256 and 350 tokens, rl16k 512 and
    2,500 (at most 16,384), rl64k 512 and 6,000 (at most 65,536).
    """
    correlation: float = 0.5
    """How much of the variance of an answer's log-length its prompt decides."""
    prompt_tokens: list[int] = field(default_factory=list)
    """Given lengths instead: of row 0, 1, ..., and from the first again."""
    answer_tokens: list[int] = field(default_factory=list)
    """Given lengths instead, of all answers to row 0, 1, ..., and from the first again."""
    skew: Skew = field(default_factory=Skew)
    drift: Drift = field(default_factory=Drift)
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.rows >= 1, "rows", f"must be at least 1, is {self.rows}")
        _require(
            0 <= self.correlation <= 1, "correlation", f"must be from 0 to 1, is {self.correlation}"
        )
        for name in ("prompt_tokens", "answer_tokens"):
            _require(all(n >= 1 for n in getattr(self, name)), name, "each must be at least 1")
        shards = self.skew.shards
        shard = self.skew.shard
        _require(
            not shards or 0 <= shard < shards,
            "skew.shard",
            f"there is no shard {shard} of {shards}",
        )


@dataclass(frozen=True, kw_only=True)
class CrowdConfig(LocalConfig):
    """As of ``core/local``, and

    processes: hosts that share the emulated workers. Controllers, and whatever is not emulated,
        have processes of their own.
    """

    processes: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.processes >= 1, "processes", f"must be at least 1, is {self.processes}")
