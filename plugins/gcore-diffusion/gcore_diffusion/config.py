"""What may be set under ``config:`` of what this plugin offers. Light: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from gcore_language.settings import require

Noise = Literal["sde", "dance", "cps", "ddim"]
Prediction = Literal["flow", "epsilon", "v"]

#: Dtype -> by how many nats a dimension two correct evaluations of one transition may differ.
#: float32: other batch shapes move it by 1e-7 (measured on five models); a wrong guidance, schedule
#: or weights show as 1e-2 and more. In bfloat16 the model's output itself is rounded to 8 bits
#: (5e-3 measured on the digits).
LOGPROB_BANDS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters in place of full training (pipelines only); both roles must say the
    same.
    """

    rank: int = 0
    """0 trains all weights of the denoiser."""
    alpha: float = 64.0
    """The adapter's output is scaled by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["to_q", "to_k", "to_v", "to_out.0"])
    """Names of the modules that get an adapter."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", f"must not be negative, is {self.rank}")


@dataclass(frozen=True, kw_only=True)
class DenoiserSettings:
    """What sampler and trainer must have in common to speak of the same transition."""

    guidance: float = 1.0
    """Classifier-free guidance: unconditional + guidance x (conditional - unconditional); 1 is
    without. Flux takes it as an input.
    """
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Train low-rank adapters; the reference is then the model without them."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Arithmetic of the denoiser. Transitions, latents and log-probs are always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is one."""
    threads: int = 1
    """CPU threads; 0 leaves torch's choice."""
    max_sequence_length: int = 256
    """Most tokens of a prompt that a pipeline's text encoders read."""

    def __post_init__(self) -> None:
        require(self.guidance >= 1, "guidance", f"must be at least 1, is {self.guidance}")

    def logprob_band(self) -> float:
        return LOGPROB_BANDS[self.dtype]


@dataclass(frozen=True, kw_only=True)
class DiffusionGeneratorConfig(DenoiserSettings):
    """Settings of ``roles.<generator>.config``."""

    steps: int = 10
    """Denoising steps of a sample."""
    noise: Noise = "sde"
    """Of a stochastic step: sde (Flow-GRPO), dance (DanceGRPO), cps (coefficients-preserving), ddim
    (eta).
    """
    scale: float = 0.7
    """How much noise: a of sde, eta of dance and ddim, the share of the level for cps. 0: no step
    is stochastic and records have no actions, which is what a forward-process objective wants.
    """
    window: int = 0
    """How many neighbouring steps are stochastic, and so are actions; the others are deterministic
    (MixGRPO).
    0: all but the last.
    """
    window_end: int | None = None
    """The window stays before this step; empty: before the last one, whose noise all but
    vanishes.
    """
    window_moves: Literal["random", "slide", "stay"] = "random"
    """Where the window stands: random anew for each version of the weights, sliding on with it, or
    at the beginning.
    """
    shift: float = 1.0
    """Shift of the tiny model's noise levels towards noise; a pipeline's scheduler has its own."""
    same_noise: bool = False
    """Samples of one prompt start from the same noise (DanceGRPO); they differ by the noise of
    their steps alone.
    """
    height: int = 0
    """Of the images, in pixels; 0 is the model's own size."""
    width: int = 0
    """Of the images, in pixels; 0 is the model's own size."""
    max_batch: int = 256
    """Most samples denoised at once; others wait."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.steps >= 2, "steps", f"must be at least 2, is {self.steps}")
        require(self.max_batch > 0, "max_batch", f"must be positive, is {self.max_batch}")
        require(self.scale >= 0, "scale", f"must not be negative, is {self.scale}")
        require(
            self.noise not in ("cps", "ddim") or self.scale <= 1,
            "scale",
            f"must be in 0..1, is {self.scale}",
        )
        last = self.last_stochastic
        require(1 <= last <= self.steps, "window_end", f"must be in 1..{self.steps}, is {last}")
        require(0 <= self.window <= last, "window", f"must be in 0..{last}, is {self.window}")

    @property
    def last_stochastic(self) -> int:
        """Steps from this one on are never stochastic."""
        return self.steps - 1 if self.window_end is None else self.window_end


@dataclass(frozen=True, kw_only=True)
class DiffusionTrainerConfig(DenoiserSettings):
    """Settings of ``roles.<trainer>.config``."""

    packing: ClassVar[str] = "padded"  # what the shared training program asks of language models

    learning_rate: float = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes from its peak to ``final_fraction`` of it over all updates of the run."""
    warmup_updates: int = 0
    """Updates in which the rate rises linearly from 0 to its peak."""
    final_fraction: float = 0.0
    """Rate of the last update as a fraction of the peak (linear and cosine)."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's two decay rates."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices; vectors are never decayed."""
    clip_grad_norm: float = 1.0
    """Largest gradient norm, over all ranks; 0 does not clip."""
    kl_coefficient: float = 0.0
    """The loss gains this x KL(policy || reference) of each trained transition: exact, in nats a
    dimension. For a forward-process objective it is this x the mean squared difference of the two
    models' outputs.
    """
    reference: bool = True
    """Keep the initial weights (with LoRA: the model without its adapters), to which KL is
    measured.
    """
    reference_path: ClassVar[str] = ""
    reference_decay: float = 1.0
    """Below 1 the reference is a moving average of the policy: its own share in each step's
    mean.
    """
    budget_rows: int = 4096
    """Most transitions of one forward pass; a larger micro-batch goes through in parts, with one
    more forward pass.
    """
    batch_records: int = 1024
    """Most records of one micro-batch."""
    draws: int = 4
    """For a forward-process objective: noise levels drawn for each record."""
    gradient_checkpointing: bool = False
    """Keep only the blocks' inputs and compute the rest again in the backward pass (pipelines
    only).
    """
    dump_dir: str = ""
    """Where the records of an update whose loss or gradient is not finite are written; empty: the
    run's directory.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("learning_rate", "warmup_updates", "clip_grad_norm", "kl_coefficient"):
            require(
                getattr(self, name) >= 0, name, f"must not be negative, is {getattr(self, name)}"
            )
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "betas",
            f"must be two numbers in 0..1, is {list(self.betas)}",
        )
        for name in ("budget_rows", "batch_records", "draws"):
            require(getattr(self, name) > 0, name, f"must be positive, is {getattr(self, name)}")
        require(
            0 <= self.reference_decay <= 1,
            "reference_decay",
            f"must be in 0..1, is {self.reference_decay}",
        )
        require(
            self.reference or not self.kl_coefficient, "kl_coefficient", "needs reference: true"
        )
        moves = self.reference_decay < 1
        require(
            not (moves and self.lora.rank),
            "reference_decay",
            "with LoRA the reference is the model without adapters",
        )


@dataclass(frozen=True, kw_only=True)
class NftConfig:
    """Settings of ``objective.config`` of ``diffusion/nft``."""

    beta: float = 0.5
    """How far the two implicit policies stand from the old one: v+- = (1 -+ beta) v_old +- beta v
    (DiffusionNFT).
    """
    advantage_clip: float = 2.0
    """Advantages of this size and more count as certainly good or certainly bad."""

    def __post_init__(self) -> None:
        require(self.beta > 0, "beta", f"must be positive, is {self.beta}")
        require(
            self.advantage_clip > 0, "advantage_clip", f"must be positive, is {self.advantage_clip}"
        )


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """Settings of the reward ``diffusion/classifier``."""

    path: str
    """A directory that holds the classifier, or a Python file with a function that makes one (see
    ``model: make``).
    """
    name: str = ""
    """The function, where ``path`` is a file."""
    config: dict[str, Any] = field(default_factory=dict)
    """What the function is given."""
    file: str = "classifier.safetensors"
    """The classifier's weights in that directory."""
    label: str = "label"
    """Field of a row that holds the class its image is to show."""
    measure: Literal["probability", "correct"] = "probability"
    """probability: of the wanted class. correct: 1 when it is the likeliest class, else 0."""
    threads: int = 1
    """CPU threads; 0 leaves torch's choice."""
