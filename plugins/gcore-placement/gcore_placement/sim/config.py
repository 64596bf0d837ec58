"""What may be set below ``config:`` of a role, reward, dataset or launcher that uses this plugin.

Times are seconds of the emulated cluster; ``time_scale`` makes them shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.traits import Traits
from gcore_core.kits.launching import LocalConfig

#: workload -> (prompt tokens, answer tokens: median and sigma of log-normal ones, most answer
#: tokens)
KINDS: dict[str, tuple[int, int, float, int]] = {
    "chat": (256, 350, 0.8, 3840),
    "rl16k": (512, 2500, 1.0, 16384),
    "rl64k": (512, 6000, 0.9, 65536),
}


def _require(holds: bool, where: str, what: str) -> None:
    """Raises ConfigError with ``what`` for the setting ``where`` unless it ``holds``."""
    if not holds:
        raise ConfigError(what, where=where)


def _at_least_zero(settings: Any, *names: str) -> None:
    """Raises ConfigError unless none of these settings is negative."""
    for name in names:
        _require(
            getattr(settings, name) >= 0,
            name,
            f"must not be negative, is {getattr(settings, name)}",
        )


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """How long an engine takes.

    The defaults are a roofline, not a measurement: a dense model of 32e9 parameters in bfloat16 on
    four devices of 80 GB, 3.35 TB/s and 989 TFLOP/s.
    """

    base_s: float = 0.012
    """Seconds of one decoding step whatever the batch, at least 0: the time to read the weights."""
    running_s: float = 3.0e-5
    """Seconds that each running sequence adds to a decoding step, at least 0."""
    cached_s: float = 2.8e-8
    """Seconds that each token in the cache adds to a decoding step, at least 0, since the step
    reads it.
    """
    prefill_s: float = 6.25e-5
    """Seconds to read one token of a prompt, at least 0; nothing is decoded meanwhile."""
    max_running: int = 256
    """Most sequences that run at a time, at least 1; others wait, first come first served."""
    cache_tokens: int = 750_000
    """Tokens that the cache holds. A sequence is let in while there is room for its prompt, or when
    nothing else runs; sequences that run grow without limit.
    """

    def __post_init__(self) -> None:
        _at_least_zero(self, "base_s", "running_s", "cached_s", "prefill_s")
        _require(self.max_running >= 1, "max_running", f"must be at least 1, is {self.max_running}")

    def step_s(self, running: int, cached: float) -> float:
        """Returns the seconds of one decoding step, which gives each running sequence a token.

        running: sequences that run.
        cached: tokens in the cache, of all of them together.
        """
        return self.base_s + self.running_s * running + self.cached_s * cached


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The medium ``payload``, uint8, that a record carries besides its tokens, as an image would
    be.
    """

    nbytes: int = 0
    """Bytes of one record's payload, at least 0; 0: records have none."""
    shared: bool = False
    """Whether the records of a prompt carry the same bytes; false: every record has its own."""

    def __post_init__(self) -> None:
        _at_least_zero(self, "nbytes")


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """Settings of ``roles.<generator>.config``. Answers have as many tokens as their row says, see
    ``sim/prompts``.
    """

    profile: EngineProfile = field(default_factory=EngineProfile)
    prefix_cache: bool = True
    """Whether the prompt of a group is read only once as long as one of its samples runs; false: it
    is read for every sample.
    """
    tick_s: float = 0.5
    """Seconds after which a step of the engine ends if no answer ended before, above 0. New
    requests join between steps.
    """
    context_length: int = 131_072
    """Tokens of the longest prompt that is taken; a longer one fails as prompt_too_long."""
    answer_median: float = 12.0
    """Median tokens of answers to rows that do not say how long their answers are."""
    answer_sigma: float = 0.5
    """Standard deviation of the natural logarithm of those answers' tokens; 0: all have the median.
    """
    max_new_tokens: int = 65_536
    """Most tokens of an answer, at least 1; a longer one is truncated."""
    weights_gb: float = 64.0
    """Gigabytes (1e9 bytes) of the emulated weights, at least 0. What is really pushed is a table
    of letters.
    """
    push_s_per_gb: float = 0.1
    """Seconds that a push takes for each gigabyte of ``weights_gb``, at least 0."""
    sleep_s: float = 1.0
    """Seconds that falling asleep takes, at least 0."""
    wake_s: float = 1.0
    """Seconds that waking takes, at least 0."""
    payload: Payload = field(default_factory=Payload)
    time_scale: float = 1.0
    """Factor of all times above, at least 0: 1 is the emulated cluster's pace, 0.01 a hundred times
    as fast, 0 takes no time.
    """

    def traits(self) -> Traits:
        return Traits(
            abort=True,
            determinism=True,
            fingerprints=True,
            midway_weights=True,
            receives_weights=True,
            scores_logprobs=True,
            sleeps=True,
        )

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
    """Settings of ``roles.<trainer>.config``.

    A rank takes ``record_s + token_s L + token2_s L^2`` seconds for a record of L tokens, forward
    and backward. The defaults are the arithmetic of the generator's model and devices, at 35% of
    their peak. A rank waits for no other between updates: a step takes as long as its longest rank.
    """

    record_s: float = 0.0
    """Seconds of a record whatever its length, at least 0."""
    token_s: float = 1.4e-4
    """Seconds of each token of a record, prompt and answer, at least 0."""
    token2_s: float = 1.4e-9
    """Seconds that the square of a record's tokens is multiplied by, at least 0: the attention's
    part.
    """
    prepare_share: float = 0.55
    """Time of the preparation (forward passes of policy and reference) as a share of the time of
    one epoch, at least 0.
    """
    update_s: float = 0.5
    """Seconds of each optimizer update, at least 0."""
    learning_rate: float = 0.0
    """Factor of the gradient of plain REINFORCE that each update adds to a table of letters; 0:
    nothing is learned.
    """
    micro_batch: int = 0
    """Records whose gradient is computed at once, at least 0; 0: all of a minibatch."""
    reads: bool = False
    """Whether to go over every byte of what records show, as a model that sees it does."""
    time_scale: float = 1.0
    """Factor of all times above, at least 0: 1 is the emulated cluster's pace, 0.01 a hundred times
    as fast, 0 takes no time.
    """

    def __post_init__(self) -> None:
        _at_least_zero(
            self, "record_s", "token_s", "token2_s", "prepare_share", "update_s", "micro_batch"
        )
        _at_least_zero(self, "time_scale")

    def record_seconds(self, length: int) -> float:
        """Returns the seconds of forward and backward of a record of ``length`` tokens, prompt and
        answer.
        """
        return self.record_s + self.token_s * length + self.token2_s * length * length


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """Settings of ``rewards.<name>.config`` for ``sim/judge``: judges that are always busy.

    Each record takes its share of ``replicas`` engines, each of which writes ``running`` verdicts
    at a time. What one verdict waits for its last token is not emulated, since a scorer is asked
    one call at a time.
    """

    profile: EngineProfile = field(default_factory=EngineProfile)
    replicas: int = 1
    """Engines that judge, at least 1."""
    running: int = 128
    """Verdicts that each engine writes at a time, at least 1."""
    instructions: int = 1024
    """Tokens that a judge reads besides prompt and answer."""
    verdict_median: float = 600.0
    """Median tokens of a verdict, at least 0."""
    verdict_sigma: float = 0.5
    """Standard deviation of the natural logarithm of a verdict's tokens; 0: all have the median."""
    verdict_limit: int = 4096
    """Most tokens of a verdict."""
    solved: float = 0.5
    """Chance, from 0 to 1, that a record gets the reward 1; the others get 0."""
    decided: float = 0.0
    """Share of prompts, from 0 to 1, whose answers all get the same reward, so that their groups do
    not teach.
    """
    reads: bool = False
    """Whether to go over every byte of what records show, as a model that sees it does, and to
    check that it is what was stored.
    """
    seed: int = 0
    """Seed of rewards and lengths of verdicts."""
    time_scale: float = 1.0
    """Factor of all times above, at least 0: 1 is the emulated cluster's pace, 0.01 a hundred times
    as fast, 0 takes no time.
    """

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
    """Prompts of one controller that are longer than those of the others, in the first pass."""

    shards: int = 0
    """Number of controllers: ${controller.shards}; 0: no skew."""
    shard: int = 0
    """Number of the controller whose prompts are longer, from 0 to ``shards`` - 1."""
    factor: float = 4.0
    """Factor of those prompts' tokens."""
    answer_factor: float = 1.0
    """Factor of the median tokens of the answers to those prompts; 1: they are as long as all
    others.
    """
    seed: int = 0
    """The run's seed, ${run.seed}, which decides which rows a controller gets."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Rows that change with the ordinal that they have in the first pass.

    Each pair holds the value at ordinal 0 and the value from ``ordinals`` on. In between medians
    grow by a constant factor and chances by a constant amount for each ordinal. Lengths are
    log-normal, in tokens.
    """

    ordinals: int = 0
    """Number of ordinals after which the second values are reached, at least 0; 0: no drift."""
    answer: list[float] = field(default_factory=lambda: [800.0, 8000.0])
    """Median tokens of an answer at the beginning and at the end: two positive numbers."""
    answer_sigma: float = 1.0
    """Standard deviation of the natural logarithm of an answer's tokens, at least 0."""
    answer_limit: int = 32768
    """Most tokens of an answer."""
    verdict: list[float] = field(default_factory=lambda: [400.0, 1200.0])
    """Median tokens of a verdict at the beginning and at the end: two positive numbers."""
    verdict_sigma: float = 0.5
    """Standard deviation of the natural logarithm of a verdict's tokens, at least 0."""
    verdict_limit: int = 4096
    """Most tokens of a verdict."""
    keep: list[float] = field(default_factory=lambda: [0.7, 0.3])
    """Chance that a prompt teaches at the beginning and at the end: two numbers above 0, at most 1.
    Like the verdicts' lengths, only `sim/asks` reads it.
    """
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
    """Settings of ``rewards.<name>.config`` for ``sim/asks``. Verdicts are as long as their row
    says, see ``drift`` of ``sim/prompts``.
    """

    instructions: int = 1024
    """Tokens that a judge reads besides prompt and answer, at least 0."""
    seed: int = 0
    """Seed of the verdicts' lengths."""

    def __post_init__(self) -> None:
        _at_least_zero(self, "instructions")

    def traits(self) -> Traits:
        return Traits(asks=True)


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """Settings of ``data.config`` for ``sim/prompts``."""

    rows: int = 100_000
    """Number of rows, at least 1."""
    kind: Literal["chat", "rl16k", "rl64k"] = "rl16k"
    """Lengths of prompts and answers, both log-normal, with these medians: chat 256 and 350 tokens
    (at most 3,840), rl16k 512 and 2,500 (at most 16,384), rl64k 512 and 6,000 (at most 65,536).
    """
    correlation: float = 0.5
    """Share, from 0 to 1, of the variance of an answer's log-length that its prompt decides; 1: all
    answers to a prompt are equally long.
    """
    prompt_tokens: list[int] = field(default_factory=list)
    """Tokens of the prompts of row 0, 1, ..., each at least 1, and from the first again; empty:
    ``kind`` decides.
    """
    answer_tokens: list[int] = field(default_factory=list)
    """Tokens of all answers to row 0, 1, ..., each at least 1, and from the first again; empty:
    ``kind`` or ``drift`` decides.
    """
    skew: Skew = field(default_factory=Skew)
    drift: Drift = field(default_factory=Drift)
    seed: int = 0
    """Seed of the rows' lengths."""

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
    """Settings of ``launcher.config`` for ``sim/crowd``: those of ``core/local``, and

    processes: number of host processes that share the emulated workers, at least 1. Controllers,
        and whatever is not emulated, have processes of their own.
    """

    processes: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.processes >= 1, "processes", f"must be at least 1, is {self.processes}")
