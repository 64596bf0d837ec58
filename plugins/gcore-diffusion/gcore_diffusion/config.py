"""What may be set under ``config:`` of what this plugin offers. Light: no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from gcore_language.settings import AUTO, check_threads, require

from gcore_core.contract.traits import Traits

Noise = Literal["sde", "dance", "cps", "ddim"]
Prediction = Literal["flow", "epsilon", "v"]

#: Dtype -> by how many nats a dimension two correct evaluations of one transition may differ.
#: float32: other batch shapes move it by 1e-7 (measured on five models); a wrong guidance, schedule
#: or weights show as 1e-2 and more. In bfloat16 the model's output itself is rounded to 8 bits
#: (5e-3 measured on the digits).
LOGPROB_BANDS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters in place of full training, for pipelines only.

    Both roles must have the same settings.
    """

    rank: int = 0
    """Rank of the adapters, at least 0; 0 uses no adapters and trains all weights of the denoiser.
    """
    alpha: float = 64.0
    """Number that scales the adapters' output, which is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["to_q", "to_k", "to_v", "to_out.0"])
    """Names of the modules that get an adapter."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", f"must not be negative, is {self.rank}")


@dataclass(frozen=True, kw_only=True)
class DenoiserSettings:
    """What sampler and trainer must have in common to speak of the same transition."""

    guidance: float = 1.0
    """Strength w of classifier-free guidance, at least 1: unconditional + w (conditional -
    unconditional). 1 does without. Flux takes it as an input of the model.
    """
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Adapters that are trained in place of the denoiser's weights; the reference is then the model
    without them.
    """
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the denoiser's arithmetic. Transitions, latents and log-probs are always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs: auto takes cuda where torch sees a CUDA device, else cpu."""
    threads: int | str = AUTO
    """Number of CPU threads, at least 1. auto: the worker's part of the cores, which the devices in
    use meanwhile share; 1 in a deterministic run, and for weights below 64 MiB.
    """
    max_sequence_length: int = 256
    """Most tokens of a prompt that a pipeline's text encoders read, at least 1."""

    def __post_init__(self) -> None:
        check_threads(self.threads)
        require(self.guidance >= 1, "guidance", f"must be at least 1, is {self.guidance}")
        require(
            self.max_sequence_length > 0,
            "max_sequence_length",
            f"must be positive, is {self.max_sequence_length}",
        )

    def traits(self) -> Traits:
        return Traits(logprob_band=LOGPROB_BANDS[self.dtype])


@dataclass(frozen=True, kw_only=True)
class DiffusionGeneratorConfig(DenoiserSettings):
    """Settings of ``roles.<generator>.config``."""

    steps: int = 10
    """Number of denoising steps of a sample, at least 2."""
    noise: Noise = "sde"
    """Kind of noise of a stochastic step: sde (Flow-GRPO), dance (DanceGRPO) and cps
    (coefficients-preserving) for models that predict the flow; ddim for those that predict epsilon
    or v.
    """
    scale: float = 0.7
    """How much noise a stochastic step adds, at least 0: a for sde, eta for dance and ddim, a share
    of the noise level for cps; at most 1 for cps and ddim. 0: no step is stochastic and records
    have no actions, as a forward-process objective wants it.
    """
    window: int = 0
    """Number of neighbouring steps that are stochastic, and so are actions; the others are
    deterministic (MixGRPO). 0: all steps before ``window_end``.
    """
    window_end: int | None = None
    """Number, counted from 0, of the first step that is never stochastic; in 1..steps, for cps and
    ddim below steps: their last step adds no noise. Empty: the last step, whose noise all but
    vanishes.
    """
    window_moves: Literal["random", "slide", "stay"] = "random"
    """Where the window stands: random is drawn anew for each version of the weights; slide moves on
    by one step with each version and then begins again; stay is at the first step.
    """
    shift: float = 1.0
    """How far the tiny model's noise levels t are moved towards noise, above 0: shift t / (1 +
    (shift - 1) t). 1 leaves them evenly spaced. A pipeline's scheduler has its own.
    """
    same_noise: bool = False
    """Whether samples of one prompt start from the same noise (DanceGRPO), so that they differ by
    the noise of their steps alone.
    """
    height: int = 0
    """Height of the images in pixels; 0 is the model's own size."""
    width: int = 0
    """Width of the images in pixels; 0 is the model's own size."""
    max_batch: int = 256
    """Most samples that are denoised at once, at least 1; further ones wait."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.steps >= 2, "steps", f"must be at least 2, is {self.steps}")
        require(self.max_batch > 0, "max_batch", f"must be positive, is {self.max_batch}")
        require(self.scale >= 0, "scale", f"must not be negative, is {self.scale}")
        require(0 < self.shift < math.inf, "shift", f"must be positive, is {self.shift}")
        for name in ("height", "width"):
            size = getattr(self, name)
            require(size >= 0, name, f"must not be negative, is {size}")
        require(
            self.noise not in ("cps", "ddim") or self.scale <= 1,
            "scale",
            f"must be in 0..1, is {self.scale}",
        )
        last = self.last_stochastic
        require(1 <= last <= self.steps, "window_end", f"must be in 1..{self.steps}, is {last}")
        require(
            last < self.steps or self.scale == 0 or self.noise not in ("cps", "ddim"),
            "window_end",
            f"must be below {self.steps} with noise {self.noise}, whose last step adds none",
        )
        require(0 <= self.window <= last, "window", f"must be in 0..{last}, is {self.window}")

    def traits(self) -> Traits:
        # No noise differs then, neither the first nor a step's.
        alike = f"scale={self.scale}" if self.same_noise and self.scale == 0 else ""
        return replace(super().traits(), samples_alike=alike)

    @property
    def last_stochastic(self) -> int:
        """Steps from this one on are never stochastic."""
        return self.steps - 1 if self.window_end is None else self.window_end


@dataclass(frozen=True, kw_only=True)
class DiffusionTrainerConfig(DenoiserSettings):
    """Settings of ``roles.<trainer>.config``."""

    # What the shared training program asks of language models.
    packing: ClassVar[str] = "padded"
    resplit_every: ClassVar[int] = 0

    learning_rate: float = 1e-5
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
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's decay rates of the first and the second moment; two numbers, each at least 0 and
    below 1.
    """
    eps: float = 1e-8
    """Number that is added to the denominator of AdamW's step, at least 0."""
    weight_decay: float = 0.0
    """AdamW's decoupled decay of matrices, at least 0; vectors are never decayed. 0 decays
    nothing.
    """
    clip_grad_norm: float = 1.0
    """Largest norm of the gradient, taken over all ranks; at least 0. A larger gradient is scaled
    down to it; 0 does not clip.
    """
    kl_coefficient: float = 0.0
    """Factor c by which c KL(policy || reference) of the trained transitions is added to the loss,
    at least 0. The KL is exact, in nats a dimension; for a forward-process objective it is the mean
    squared difference of the two models' outputs.
    """
    reference: bool = True
    """Whether to keep the initial weights as reference, to which KL is measured; with LoRA the
    reference is the model without its adapters.
    """
    reference_path: ClassVar[str] = ""
    reference_decay: float = 1.0
    """Share of itself that the reference keeps in each step, in 0..1; the rest comes from the
    policy, so that below 1 it is a moving average. 1 keeps the initial weights. Not below 1 with
    LoRA.
    """
    budget_rows: int = 4096
    """Most transitions of one forward pass, at least 1; a larger micro-batch goes through in parts
    and needs one more forward pass.
    """
    batch_records: int = 1024
    """Most records of one micro-batch, at least 1."""
    draws: int = 4
    """Number of noise levels drawn for each record, at least 1; for a forward-process objective
    only.
    """
    gradient_checkpointing: bool = False
    """Whether to keep only the blocks' inputs and compute the rest again in the backward pass,
    which saves memory and costs time; for pipelines only.
    """
    dump_dir: str = ""
    """Directory for the records of an update whose loss or gradient is not finite; empty: the run's
    directory.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "learning_rate",
            "warmup_updates",
            "eps",
            "weight_decay",
            "clip_grad_norm",
            "kl_coefficient",
        ):
            require(
                getattr(self, name) >= 0, name, f"must not be negative, is {getattr(self, name)}"
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
    """How far the two implicit policies v+ and v- stand from the old one, above 0: v+ = (1 - beta)
    v_old + beta v, v- = (1 + beta) v_old - beta v (DiffusionNFT).
    """
    advantage_clip: float = 2.0
    """Size of an advantage, above 0, from which on an image counts as certainly good or certainly
    bad.
    """

    def __post_init__(self) -> None:
        require(self.beta > 0, "beta", f"must be positive, is {self.beta}")
        require(
            self.advantage_clip > 0, "advantage_clip", f"must be positive, is {self.advantage_clip}"
        )


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """Settings of the reward ``diffusion/classifier``."""

    path: str
    """Directory that holds the classifier, or a Python file with a function that makes it (see
    ``model: make``).
    """
    name: str = ""
    """Name of that function; needed where ``path`` is a file."""
    config: dict[str, Any] = field(default_factory=dict)
    """Mapping that the function gets as its ``config``."""
    file: str = "classifier.safetensors"
    """Name of the file with the classifier's weights in the directory."""
    label: str = "label"
    """Field of a row that holds the class its image is to show, a whole number from 0 on."""
    measure: Literal["probability", "correct"] = "probability"
    """What is scored: probability is that of the wanted class, in 0..1; correct is 1 when the
    wanted class is the likeliest one, else 0.
    """
    threads: int = 1
    """Number of CPU threads, at least 1."""


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Settings of the reward ``diffusion/preference``."""

    path: str
    """Directory of a CLIP in transformers' layout, or its name on the hub, such as
    yuvalkirstain/PickScore_v1; it must be given.
    """
    processor: str = ""
    """Directory or name on the hub that has its tokenizer and image processor. Empty: ``path``."""
    batch_images: int = 16
    """Most images of one forward pass, at least 1."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which the weights are held and the score is computed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs: auto takes cuda where torch sees a CUDA device, else cpu."""
    threads: int | str = AUTO
    """Number of CPU threads, at least 1. auto: the worker's part of the cores, which the devices in
    use meanwhile share; 1 in a deterministic run, and for weights below 64 MiB.
    """

    def __post_init__(self) -> None:
        check_threads(self.threads)
        require(bool(self.path), "path", "no directory of a preference model is given")
        require(self.batch_images > 0, "batch_images", f"must be positive, is {self.batch_images}")
