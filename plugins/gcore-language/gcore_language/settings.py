"""The settings that all generators, and all trainers, of language models have; a plugin's config
adds its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gcore_core.contract.errors import ConfigError

#: Dtype -> how far apart two correct engines may be in the log-prob of one action, in nats.
#: float32: kernels that add up in another order differ by 1e-6 to 3e-5 in a logit, more where
#: logits are large; every fault seen (old weights, an old cache, another temperature) shows as 1e-2
#: and more. bfloat16 has 8 bits of mantissa, float16 11: logits of size 16 are 0.06 and 0.008
#: apart, and an unlikely action's log-prob is the sum of many such roundings.
LOGPROB_BANDS = {"float32": 1e-3, "float16": 1e-1, "bfloat16": 1.0}


def require(holds: bool, where: str, what: str) -> None:
    """Raises ConfigError for the setting ``where`` unless it ``holds``."""
    if not holds:
        raise ConfigError(what, where=where)


@dataclass(frozen=True, kw_only=True)
class GeneratorSettings:
    """Settings of ``roles.<generator>.config``."""

    max_new_tokens: int = 512
    """Most actions of one sample; the end-of-sequence token counts."""
    temperature: float = 1.0
    """Logits are divided by it; log-probs are of the divided logits. 0 samples greedily."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability; log-probs stay those of
    all tokens.
    """
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 is all. Log-probs stay those of all tokens."""
    stop: list[str] = field(default_factory=list)
    """A sample ends when its text contains one of these."""
    max_batch: int = 256
    """Most samples decoded at once; others wait."""
    context_length: int | None = None
    """Most tokens of prompt and completion; empty: the model's. A prompt that fills it fails as
    prompt_too_long.
    """
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and cache; log-probs are always computed in float32."""
    threads: int = 1
    """CPU threads; 0 leaves the library's choice."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model directory."""

    def __post_init__(self) -> None:
        require(
            self.max_new_tokens > 0, "max_new_tokens", f"must be positive, is {self.max_new_tokens}"
        )
        require(self.max_batch > 0, "max_batch", f"must be positive, is {self.max_batch}")
        require(
            self.temperature >= 0, "temperature", f"must not be negative, is {self.temperature}"
        )
        require(0 < self.top_p <= 1, "top_p", f"must be in 0..1, is {self.top_p}")
        require(self.top_k >= 0, "top_k", f"must not be negative, is {self.top_k}")
        require("" not in self.stop, "stop", "an empty string would end every sample")
        length = self.context_length
        require(length is None or length > 0, "context_length", f"must be positive, is {length}")

    def logprob_band(self) -> float:
        return LOGPROB_BANDS[self.dtype]


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Settings of ``roles.<trainer>.config``."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes from its peak to ``final_fraction`` of it over all updates of the run."""
    warmup_updates: int = 0
    """Updates in which the rate rises linearly from 0 to its peak."""
    final_fraction: float = 0.0
    """Rate of the last update as a fraction of the peak (linear and cosine)."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's two decay rates."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices; vectors (norms, biases) are never decayed."""
    clip_grad_norm: float = 1.0
    """Largest gradient norm, over all ranks; 0 does not clip."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of forward and backward, and dtype of exported weights; the optimizer's weights
    are always float32.
    """
    budget_tokens: int = 16384
    """Most tokens, padding included, of one forward pass; an update accumulates as many passes as
    it needs.
    """
    packing: Literal["auto", "shared_prompt", "padded"] = "auto"
    """shared_prompt encodes the prompt of a group once for all its samples; padded encodes each
    record by itself; auto takes the cheaper of those that give this model's log-probs (checked on
    random tokens when it is loaded).
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is one."""
    threads: int = 1
    """CPU threads of a rank; 0 leaves torch's choice."""
    reference: bool = False
    """Keep a frozen copy of the initial weights; implied by an objective that requires
    ``ref_logp``.
    """
    reference_path: str = ""
    """Model directory of the reference; empty: the initial policy."""
    gradient_checkpointing: bool = False
    """Keep only the layers' inputs and compute the rest again in the backward pass."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model directory."""
    dump_dir: str = ""
    """Where the records of an update whose loss or gradient is not finite are written; empty: the
    run's directory.
    """

    def __post_init__(self) -> None:
        require(
            self.learning_rate >= 0,
            "learning_rate",
            f"must not be negative, is {self.learning_rate}",
        )
        require(
            self.warmup_updates >= 0,
            "warmup_updates",
            f"must not be negative, is {self.warmup_updates}",
        )
        require(
            0 <= self.final_fraction <= 1,
            "final_fraction",
            f"must be in 0..1, is {self.final_fraction}",
        )
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "betas",
            f"must be two numbers in 0..1, is {list(self.betas)}",
        )
        require(
            self.clip_grad_norm >= 0,
            "clip_grad_norm",
            f"must not be negative, is {self.clip_grad_norm}",
        )
        require(
            self.budget_tokens > 0, "budget_tokens", f"must be positive, is {self.budget_tokens}"
        )

    def logprob_band(self) -> float:
        return LOGPROB_BANDS[self.dtype]
