"""Denoisers that are pipelines of diffusers.

A sampler calls a pipeline's own ``__call__``. Only the scheduler is replaced: ours hands every
transition to a ``Way``, so that sampler and trainer compute transitions by the same kernel.

For each pipeline this module holds two things: what its prompt encoder returns, and the call of its
transformer, which a trainer repeats without the pipeline.

These adapters are tested on the CPU in float32 with tiny random models. Their paths for bfloat16
and CUDA have not been run.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.records import Prompt
from gcore_diffusion.components import open_part, parts_of, read_index
from gcore_diffusion.config import (
    DenoiserSettings,
    DiffusionGeneratorConfig,
    DiffusionTrainerConfig,
    LoraSettings,
    Prediction,
)
from gcore_diffusion.way import Condition, Schedule, Way, read_prompts

_TIMES = 1000.0  # the time that the models take as input is the noise level times this


class WayScheduler(FlowMatchEulerDiscreteScheduler):
    """diffusers' flow matching schedule, whose transitions are computed by ``way``.

    way: the batch that is denoised; set before each call of the pipeline.
    clean: the sample after the latest step, float32[B, *D]; after the last step, the clean latents.
    """

    way: Way
    clean: Tensor

    def step(
        self, model_output: Tensor, timestep: Any, sample: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor]:
        """See the base class. Returns a tuple of one tensor, whatever ``return_dict`` asks for."""
        if self.step_index is None:
            self._init_step_index(timestep)
        place = self.step_index
        if place == 0:
            # the pipeline has set the levels and times for its number of steps by now
            self.way.begin(
                Schedule(levels=self.sigmas.float().cpu(), times=self.timesteps.float().cpu())
            )
        self.clean = self.way.step(place, model_output, sample)
        self._step_index += 1
        return (self.clean,)


class PipelineDenoiser(ABC):
    """Base of the adapters; see ``gcore_diffusion.models.Denoiser``.

    pipeline_class: name of the diffusers class that the adapter is for.
    prediction: what the transformer predicts.
    pipeline: the whole pipeline in a sampler; None in a trainer.
    module: the transformer.
    """

    pipeline_class: ClassVar[str]
    prediction: Prediction = "flow"

    def __init__(
        self, directory: Path, settings: DenoiserSettings, device: torch.device, *, sampling: bool
    ) -> None:
        self._directory = directory
        self._settings = settings
        self.device = device
        if sampling:
            self.pipeline: Any = _load_pipeline(directory, device)
            self.module: nn.Module = self.pipeline.transformer
        else:
            self.pipeline = None
            self.module = _load_transformer(directory, device)
        self.module.eval()
        if settings.lora.rank:
            add_adapter(self.module, settings.lora)
        if isinstance(settings, DiffusionTrainerConfig) and settings.gradient_checkpointing:
            self.module.enable_gradient_checkpointing()

    # -- sampling ----------------------------------------------------------------------------------

    def size(self, settings: DiffusionGeneratorConfig) -> tuple[int, int]:
        """Height and width of an image, in pixels."""
        default = self.default_size()
        return settings.height or default, settings.width or default

    def default_size(self) -> int:
        return int(self.pipeline.default_sample_size * self.pipeline.vae_scale_factor)

    @abstractmethod
    def dims(self, settings: DiffusionGeneratorConfig) -> tuple[int, ...]:
        """Shape of one sample's latent, without the batch dimension."""

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt]) -> list[dict[str, np.ndarray]]:
        """Encodes each prompt alone; returns its condition as float32 arrays by name. Raises
        DataError for a prompt without text.
        """
        texts = read_prompts(prompts)
        encoded = [
            {name: t[0].float().cpu().numpy() for name, t in self.encode_text(text).items()}
            for text in texts
        ]
        return [{**condition, **self.extra()} for condition in encoded]

    @abstractmethod
    def encode_text(self, text: str) -> dict[str, Tensor]:
        """Encodes one prompt: name of the pipeline's argument -> tensor [1, ...]."""

    def extra(self) -> dict[str, np.ndarray]:
        """Returns what the transformer needs besides the encoded prompt; empty by default."""
        return {}

    def guidance_arguments(self, settings: DiffusionGeneratorConfig) -> dict[str, Any]:
        """Returns the pipeline's arguments that set guidance."""
        return {"guidance_scale": settings.guidance}

    @torch.no_grad()
    def sample(
        self, condition: Condition, way: Way, settings: DiffusionGeneratorConfig
    ) -> tuple[Tensor, np.ndarray]:
        """Denoises one batch along ``way``.

        Returns the clean latents, float32[B, *D], and the pictures, uint8[B, H, W, C]. Numbers that
        are not finite become black or white pixels.
        """
        height, width = self.size(settings)
        self.pipeline.scheduler.way = way
        # "grid" is for the trainer's call of the transformer; a pipeline works it out by itself
        arguments = {name: tensor for name, tensor in condition.items() if name != "grid"}
        images = self.pipeline(
            **arguments,
            **self.guidance_arguments(settings),
            height=height,
            width=width,
            num_inference_steps=way.steps,
            latents=way.first,
            output_type="np",
        ).images
        pictures = (np.clip(np.nan_to_num(images), 0, 1) * 255).round().astype(np.uint8)
        return self.pipeline.scheduler.clean, pictures

    # -- the transformer ---------------------------------------------------------------------------

    @abstractmethod
    def output(self, x: Tensor, times: Tensor, condition: Condition, guidance: float) -> Tensor:
        """Calls the transformer as the pipeline would, guidance included; shaped as ``x``."""

    def time_of(self, sigma: Tensor) -> Tensor:
        """Returns the model's time input for noise levels."""
        return sigma * _TIMES

    def save(self, directory: Path) -> None:
        """Writes the adapters alone with LoRA, else a whole pipeline that diffusers loads."""
        if self._settings.lora.rank:
            directory.mkdir(parents=True, exist_ok=True)
            self.module.save_lora_adapter(str(directory))
            return
        # all but the transformer is copied from the directory that the pipeline came from
        shutil.copytree(
            self._directory,
            directory,
            ignore=lambda at, names: ["transformer"] if Path(at) == self._directory else [],
            dirs_exist_ok=True,
        )
        self.module.save_pretrained(directory / "transformer")

    def close(self) -> None:
        self.pipeline = None


class StableDiffusion3(PipelineDenoiser):
    """Stable Diffusion 3, which guides in one batch with the unconditional half first."""

    pipeline_class = "StableDiffusion3Pipeline"

    def dims(self, settings: DiffusionGeneratorConfig) -> tuple[int, ...]:
        height, width = self.size(settings)
        factor = self.pipeline.vae_scale_factor
        return int(self.module.config.in_channels), height // factor, width // factor

    def encode_text(self, text: str) -> dict[str, Tensor]:
        guided = self._settings.guidance > 1
        length = self._settings.max_sequence_length
        embeds, none, pooled, none_pooled = self.pipeline.encode_prompt(
            text,
            text,
            text,
            do_classifier_free_guidance=guided,
            max_sequence_length=length,
            device=self.device,
        )
        arguments = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
        return arguments | (
            {"negative_prompt_embeds": none, "negative_pooled_prompt_embeds": none_pooled}
            if guided
            else {}
        )

    def output(self, x: Tensor, times: Tensor, condition: Condition, guidance: float) -> Tensor:
        embeds = condition["prompt_embeds"]
        pooled = condition["pooled_prompt_embeds"]
        if guidance > 1:
            x = torch.cat([x, x])
            times = torch.cat([times, times])
            embeds = torch.cat([condition["negative_prompt_embeds"], embeds])
            pooled = torch.cat([condition["negative_pooled_prompt_embeds"], pooled])
        predicted = self.module(
            hidden_states=x,
            timestep=times,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return guided_halves(predicted, guidance)


class Flux(PipelineDenoiser):
    """Flux, whose latents are packed and whose model takes guidance as an input."""

    pipeline_class = "FluxPipeline"

    def dims(self, settings: DiffusionGeneratorConfig) -> tuple[int, ...]:
        height, width = packed_grid(self.size(settings), self.pipeline.vae_scale_factor)
        return height * width, int(self.module.config.in_channels)

    def encode_text(self, text: str) -> dict[str, Tensor]:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            text, text, max_sequence_length=self._settings.max_sequence_length, device=self.device
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def extra(self) -> dict[str, np.ndarray]:
        return {
            "grid": np.array(
                packed_grid(self.size(_sampling(self._settings)), self.pipeline.vae_scale_factor)
            )
        }

    def output(self, x: Tensor, times: Tensor, condition: Condition, guidance: float) -> Tensor:
        embeds = condition["prompt_embeds"]
        height, width = condition["grid"][0].tolist()
        positions = diffusers.FluxPipeline._prepare_latent_image_ids(
            len(x), height, width, x.device, torch.float32
        )
        guidances = (
            torch.full((len(x),), guidance, device=x.device)
            if self.module.config.guidance_embeds
            else None
        )
        predicted: Tensor = self.module(
            hidden_states=x,
            timestep=times / _TIMES,
            guidance=guidances,
            pooled_projections=condition["pooled_prompt_embeds"],
            encoder_hidden_states=embeds,
            txt_ids=torch.zeros(embeds.shape[1], 3, device=x.device),
            img_ids=positions,
            return_dict=False,
        )[0]
        return predicted


class Sana(PipelineDenoiser):
    """Sana, a linear transformer whose prompts come with a mask."""

    pipeline_class = "SanaPipeline"

    def default_size(self) -> int:
        return int(self.module.config.sample_size * self.pipeline.vae_scale_factor)

    def dims(self, settings: DiffusionGeneratorConfig) -> tuple[int, ...]:
        height, width = self.size(settings)
        factor = self.pipeline.vae_scale_factor
        return int(self.module.config.in_channels), height // factor, width // factor

    def encode_text(self, text: str) -> dict[str, Tensor]:
        guided = self._settings.guidance > 1
        embeds, mask, none, none_mask = self.pipeline.encode_prompt(
            text,
            do_classifier_free_guidance=guided,
            max_sequence_length=self._settings.max_sequence_length,
            complex_human_instruction=None,
            device=self.device,
        )
        arguments = {"prompt_embeds": embeds, "prompt_attention_mask": mask}
        return arguments | (
            {"negative_prompt_embeds": none, "negative_prompt_attention_mask": none_mask}
            if guided
            else {}
        )

    def guidance_arguments(self, settings: DiffusionGeneratorConfig) -> dict[str, Any]:
        # The negative prompt is given as embeddings, so its text must be None. Binning would change
        # the size of the latents.
        return {
            "guidance_scale": settings.guidance,
            "negative_prompt": None,
            "use_resolution_binning": False,
        }

    def output(self, x: Tensor, times: Tensor, condition: Condition, guidance: float) -> Tensor:
        embeds = condition["prompt_embeds"]
        mask = condition["prompt_attention_mask"]
        channels = x.shape[1]
        if guidance > 1:
            x = torch.cat([x, x])
            times = torch.cat([times, times])
            embeds = torch.cat([condition["negative_prompt_embeds"], embeds])
            mask = torch.cat([condition["negative_prompt_attention_mask"], mask])
        predicted = self.module(
            x,
            encoder_hidden_states=embeds,
            encoder_attention_mask=mask,
            timestep=times * self.module.config.timestep_scale,
            return_dict=False,
        )[0]
        predicted = guided_halves(predicted.float(), guidance)
        return predicted[:, :channels]  # the other channels are a predicted variance


class QwenImage(PipelineDenoiser):
    """Qwen-Image, whose latents are packed.

    Prompts are padded to one length. Guidance takes two passes, and the guided output is rescaled
    to the norm of the conditional one.
    """

    pipeline_class = "QwenImagePipeline"

    def dims(self, settings: DiffusionGeneratorConfig) -> tuple[int, ...]:
        height, width = packed_grid(self.size(settings), self.pipeline.vae_scale_factor)
        return height * width, int(self.module.config.in_channels)

    def encode_text(self, text: str) -> dict[str, Tensor]:
        arguments = dict(
            zip(("prompt_embeds", "prompt_embeds_mask"), self._padded(text), strict=True)
        )
        if self._settings.guidance > 1:
            names = ("negative_prompt_embeds", "negative_prompt_embeds_mask")
            arguments |= dict(zip(names, self._padded(" "), strict=True))
        return arguments

    def _padded(self, text: str) -> tuple[Tensor, Tensor]:
        """Returns a prompt's embeddings and mask, padded to ``max_sequence_length``, so that
        prompts can share a batch.
        """
        length = self._settings.max_sequence_length
        embeds, mask = self.pipeline.encode_prompt(
            text, max_sequence_length=length, device=self.device
        )
        count = embeds.shape[1]
        mask = torch.ones(1, count, device=embeds.device) if mask is None else mask
        missing = length - count
        return nn.functional.pad(embeds, (0, 0, 0, missing)), nn.functional.pad(mask, (0, missing))

    def extra(self) -> dict[str, np.ndarray]:
        return {
            "grid": np.array(
                packed_grid(self.size(_sampling(self._settings)), self.pipeline.vae_scale_factor)
            )
        }

    def guidance_arguments(self, settings: DiffusionGeneratorConfig) -> dict[str, Any]:
        distilled_guidance = settings.guidance if self.module.config.guidance_embeds else None
        length = settings.max_sequence_length
        return {
            "true_cfg_scale": settings.guidance,
            "guidance_scale": distilled_guidance,
            "max_sequence_length": length,
        }

    def output(self, x: Tensor, times: Tensor, condition: Condition, guidance: float) -> Tensor:
        conditional = self._predict(x, times, condition, "", guidance)
        if guidance <= 1:
            return conditional
        unconditional = self._predict(x, times, condition, "negative_", guidance)
        guided = unconditional + guidance * (conditional - unconditional)
        return guided * (
            torch.norm(conditional, dim=-1, keepdim=True) / torch.norm(guided, dim=-1, keepdim=True)
        )

    def _predict(
        self, x: Tensor, times: Tensor, condition: Condition, prefix: str, guidance: float
    ) -> Tensor:
        """Calls the transformer once.

        prefix: "" for the prompt, "negative_" for the unconditional pass.
        """
        mask = condition[f"{prefix}prompt_embeds_mask"]
        height, width = condition["grid"][0].tolist()
        guidances = (
            torch.full((len(x),), guidance, device=x.device)
            if self.module.config.guidance_embeds
            else None
        )
        predicted: Tensor = self.module(
            hidden_states=x,
            timestep=times / _TIMES,
            guidance=guidances,
            encoder_hidden_states_mask=None if mask.all() else mask,
            encoder_hidden_states=condition[f"{prefix}prompt_embeds"],
            img_shapes=[[(1, height, width)]] * len(x),
            attention_kwargs={},
            return_dict=False,
        )[0]
        return predicted


_KNOWN: Mapping[str, type[PipelineDenoiser]] = {
    known.pipeline_class: known for known in (StableDiffusion3, Flux, Sana, QwenImage)
}


def open_pipeline(
    directory: Path, settings: DenoiserSettings, device: torch.device, *, sampling: bool
) -> PipelineDenoiser:
    """Opens the pipeline in a directory with the adapter for its class.

    Raises ConfigError when no adapter is for that class, DataError when the directory cannot be
    read.
    """
    name = str(read_index(directory).get("_class_name"))
    if name not in _KNOWN:
        raise ConfigError(
            f"there is no adapter for {name}.",
            where=f"model.path: {directory}",
            why=f"The adapters are for {', '.join(_KNOWN)}.",
            todo=(
                "An adapter says how prompts are encoded and the transformer is called: "
                "gcore_diffusion/pipelines.py."
            ),
        )
    return _KNOWN[name](directory, settings, device, sampling=sampling)


def add_adapter(module: Any, settings: LoraSettings) -> None:
    """Freezes the module and gives it adapters, which start out the same in every process.

    Raises ConfigError when ``lora.targets`` names no module.
    """
    from peft import LoraConfig

    module.requires_grad_(False)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        init_lora_weights="gaussian",
        target_modules=list(settings.targets),
    )
    # a fixed seed makes the processes agree; the fork leaves the caller's random stream alone
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            module.add_adapter(config)
        except ValueError as error:
            raise ConfigError(
                "the adapters fit no module.", where="lora.targets", why=str(error)
            ) from error


def guided_halves(predicted: Tensor, guidance: float) -> Tensor:
    """Combines the unconditional first half with the conditional second half.

    Without guidance (1 or less) there are no halves, and the output is returned as it is.
    """
    if guidance <= 1:
        return predicted
    unconditional, conditional = predicted.chunk(2)
    return unconditional + guidance * (conditional - unconditional)


def packed_grid(size: tuple[int, int], factor: int) -> tuple[int, int]:
    """Returns how many rows and columns of 2x2 patches a latent has.

    size: height and width of the image in pixels.
    factor: pixels for each side of a latent's cell.
    """
    return size[0] // (2 * factor), size[1] // (2 * factor)


def _sampling(settings: DenoiserSettings) -> DiffusionGeneratorConfig:
    if not isinstance(settings, DiffusionGeneratorConfig):
        raise TypeError("a trainer has no image size of its own")
    return settings


def _load_pipeline(directory: Path, device: torch.device) -> Any:
    name = read_index(directory).get("_class_name")
    parts = {part: open_part(directory, part, kind) for part, kind in parts_of(directory).items()}
    try:
        pipeline = getattr(diffusers, str(name)).from_pretrained(
            str(directory), use_safetensors=True, local_files_only=True, **parts
        )
    except Exception as error:  # isolation point: which one it raises, the files decide
        raise _unreadable(directory, error) from error
    scheduler_config = dict(pipeline.scheduler.config)
    # schedulers other than flow matching's call the shift flow_shift
    shift = scheduler_config.get("shift", scheduler_config.get("flow_shift", 1.0))
    pipeline.scheduler = WayScheduler.from_config(scheduler_config, shift=shift)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.enable_slicing()  # images are decoded one by one, whatever the batch
    return pipeline.to(device)


def _load_transformer(directory: Path, device: torch.device) -> nn.Module:
    kind = parts_of(directory).get("transformer")
    if kind is None:
        raise _unreadable(directory, ValueError("model_index.json names no transformer"))
    transformer: nn.Module = open_part(directory, "transformer", kind)
    return transformer.to(device)


def _unreadable(directory: Path, error: BaseException) -> DataError:
    lines = str(error).strip().splitlines()
    return DataError(
        "the pipeline cannot be read.", where=str(directory), why=lines[0] if lines else repr(error)
    )
