"""The settings that all generators, and all trainers, of language models have; a plugin's config
adds its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError
from gcore_core.contract.traits import Traits

#: Dtype -> how far apart two correct engines may be in the log-prob of one action, in nats.
#: float32: kernels that add up in another order differ by 1e-6 to 3e-5 in a logit, more where
#: logits are large; every fault seen (old weights, an old cache, another temperature) shows as 1e-2
#: and more. bfloat16 has 8 bits of mantissa, float16 11: logits of size 16 are 0.06 and 0.008
#: apart, and an unlikely action's log-prob is the sum of many such roundings. Their gaps have so
#: heavy a tail that no bound both holds for the largest one and finds a fault, so these are gross
#: stops; the plugin ``sentinel`` finds what is below.
LOGPROB_BANDS = {"float32": 1e-3, "float16": 5e-1, "bfloat16": 4.0}

#: Below this temperature the likeliest token is sampled, unless another one is as likely but for
#: rounding.
_COLD = 0.01
#: Up to this ``top_p``, the likeliest token alone has that probability at nearly every place.
_NARROW = 0.01

#: ``threads`` of a role that leaves the number to the run.
AUTO = "auto"
#: Products of smaller weights are so short that a second thread waits more than it works.
_SMALL_BYTES = 64 << 20

#: What ``prompts.encode`` itself gives to a chat template.
TEMPLATE_ARGUMENTS = frozenset({"add_generation_prompt", "conversation", "messages", "tokenize"})


def require(holds: bool, where: str, what: str) -> None:
    """Raises ConfigError for the setting ``where`` unless it ``holds``."""
    if not holds:
        raise ConfigError(what, where=where)


def check_threads(threads: int | str) -> None:
    """Raises ConfigError for a value of ``threads`` that is neither "auto" nor a number above 0."""
    holds = threads == AUTO or (isinstance(threads, int) and threads > 0)
    require(holds, "threads", f"must be auto or a positive number, is {threads!r}")


def threads_of(
    threads: int | str, context: WorkerContext, path: str | Path, *, processes: int = 1
) -> int:
    """Returns the number of CPU threads of a worker, or of each of its processes.

    threads: as in a role's settings; "auto": what the run gives the worker (``context.threads``),
        or 1 for a small model.
    path: directory of the worker's model.
    processes: how many compute at once for the worker.
    """
    if threads != AUTO:
        return int(threads)
    nbytes = sum(file.stat().st_size for file in Path(path).rglob("*.safetensors")) if path else 0
    return max(1, context.threads // processes) if nbytes >= _SMALL_BYTES else 1


@dataclass(frozen=True, kw_only=True)
class GeneratorSettings:
    """Settings of ``roles.<generator>.config``."""

    max_new_tokens: int = 512
    """Most actions of one sample, at least 1; the end-of-sequence token counts."""
    temperature: float = 1.0
    """Number by which logits are divided before sampling, at least 0; log-probs are those of the
    divided logits. 0 samples greedily.
    """
    top_p: float = 1.0
    """Sample from the smallest set of tokens that together have this probability, above 0 and at
    most 1; 1 takes all tokens. Log-probs stay those of all tokens.
    """
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 takes all. Log-probs stay those of all tokens."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a sample as soon as its text contains one of them; none may be empty."""
    max_batch: int = 256
    """Most samples that are decoded at once, at least 1; further ones wait."""
    context_length: int | None = None
    """Most tokens of prompt and completion together, at least 1; empty: as many as the model
    allows. A prompt that fills it fails as prompt_too_long.
    """
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of weights and cache. Log-probs are always computed in float32."""
    threads: int | str = AUTO
    """Number of CPU threads, at least 1. auto: the worker's part of the cores, which the devices in
    use meanwhile share; 1 in a deterministic run, and for weights below 64 MiB.
    """
    trust_remote_code: bool = False
    """Whether Python code that lies in the model directory may be run."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the model's chat template, such as ``enable_thinking: false`` of Qwen3. Only
    prompts that are chat messages have a template, and one that does not know a variable ignores
    it.
    """

    def __post_init__(self) -> None:
        taken = sorted(self.chat_template_kwargs.keys() & TEMPLATE_ARGUMENTS)
        require(
            not taken,
            "chat_template_kwargs",
            f"{', '.join(taken)}: what the template is given by the generator itself",
        )
        require(
            self.max_new_tokens > 0, "max_new_tokens", f"must be positive, is {self.max_new_tokens}"
        )
        check_threads(self.threads)
        require(self.max_batch > 0, "max_batch", f"must be positive, is {self.max_batch}")
        require(
            0 <= self.temperature < math.inf,
            "temperature",
            f"must be a finite number of at least 0, is {self.temperature}",
        )
        require(0 < self.top_p <= 1, "top_p", f"must be in 0..1, is {self.top_p}")
        require(self.top_k >= 0, "top_k", f"must not be negative, is {self.top_k}")
        require("" not in self.stop, "stop", "an empty string would end every sample")
        length = self.context_length
        require(length is None or length > 0, "context_length", f"must be positive, is {length}")

    def traits(self) -> Traits:
        return Traits(
            logprob_band=LOGPROB_BANDS[self.dtype],
            precision=self.dtype,
            samples_alike=self._samples_alike(),
        )

    def _samples_alike(self) -> str:
        """Returns the setting under which the likeliest token is taken, always or all but."""
        if self.temperature < _COLD:
            return f"temperature={self.temperature}"
        if self.top_k == 1:
            return "top_k=1"
        return f"top_p={self.top_p}" if self.top_p <= _NARROW else ""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Settings of ``roles.<trainer>.config``."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW; at least 0. ``schedule`` and ``warmup_updates`` say how it
    changes.
    """
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate changes after the warm-up, counted in updates of the whole run: constant stays
    at the peak; linear and cosine go down to ``final_fraction`` of it.
    """
    warmup_updates: int = 0
    """Number of updates in which the rate rises linearly to its peak; at least 0. 0 starts at the
    peak.
    """
    final_fraction: float = 0.0
    """Rate of the run's last update as a fraction of the peak, for schedules linear and cosine; in
    0..1. 0 lets the rate end at 0.
    """
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's decay rates of the first and the second moment; two numbers, each at least 0 and
    below 1.
    """
    eps: float = 1e-8
    """Number that is added to the denominator of AdamW's step, at least 0."""
    weight_decay: float = 0.0
    """AdamW's decoupled decay of matrices, at least 0; vectors (norms, biases) are never decayed. 0
    decays nothing.
    """
    clip_grad_norm: float = 1.0
    """Largest norm of the gradient, taken over all ranks; at least 0. A larger gradient is scaled
    down to it; 0 does not clip.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the arithmetic in forward and backward passes, and of exported weights. The
    optimizer's weights are always float32.
    """
    budget_tokens: int = 16384
    """Most tokens of one forward pass, padding included; at least 1. An update adds up as many
    passes as it needs; a record that alone is longer gets a pass of its own.
    """
    packing: Literal["auto", "shared_prompt", "padded"] = "auto"
    """How records share a forward pass: shared_prompt encodes the prompt of a group once for all
    its samples; padded encodes each record by itself; auto takes the cheaper of those that give
    this model's log-probs, which is tried on random tokens when it is loaded.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs: auto takes cuda where torch sees a CUDA device, else cpu."""
    threads: int | str = AUTO
    """Number of CPU threads of one rank, at least 1. auto: as in a generator."""
    reference: bool = False
    """Whether to keep a frozen copy of the initial weights as reference. It is also kept when
    ``reference_path`` is set, and when the objective requires ``ref_logp`` and no other role
    supplies it.
    """
    reference_path: str = ""
    """Directory of the reference's model, or its name on the hub; empty: the initial policy's."""
    gradient_checkpointing: bool = False
    """Whether to keep only the layers' inputs and compute the rest again in the backward pass,
    which saves memory and costs time.
    """
    resplit_every: int = 100
    """Number of steps after which the gradient of a minibatch is computed a second time, from
    micro-batches that are cut otherwise, beginning with a process's first step; at least 0. A
    gradient that differs by more than rounding ends the run, and so does a loss of the wrong sign
    or an update that moves weights further than AdamW can. It costs one more pass over one
    minibatch. 0 never does it; engines that cannot show gradient or weights leave these out.
    """
    value_head_std: float = 0.0
    """Standard deviation of the normal numbers with which a new value head begins, at least 0; 0
    begins with zeros. It is read where the objective requires values and the model has no such
    head.
    """
    trust_remote_code: bool = False
    """Whether Python code that lies in the model directory may be run."""
    dump_dir: str = ""
    """Directory for the records of an update whose loss or gradient is not finite; empty: the run's
    directory.
    """

    def __post_init__(self) -> None:
        check_threads(self.threads)
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
            self.resplit_every >= 0,
            "resplit_every",
            f"must not be negative, is {self.resplit_every}",
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
            0 <= self.weight_decay < math.inf,
            "weight_decay",
            f"must not be negative, is {self.weight_decay}",
        )
        require(0 <= self.eps < math.inf, "eps", f"must not be negative, is {self.eps}")
        require(
            self.clip_grad_norm >= 0,
            "clip_grad_norm",
            f"must not be negative, is {self.clip_grad_norm}",
        )
        require(
            self.budget_tokens > 0, "budget_tokens", f"must be positive, is {self.budget_tokens}"
        )
        require(
            0 <= self.value_head_std < math.inf,
            "value_head_std",
            f"must not be negative, is {self.value_head_std}",
        )

    def traits(self) -> Traits:
        return Traits(logprob_band=LOGPROB_BANDS[self.dtype], precision=self.dtype)
