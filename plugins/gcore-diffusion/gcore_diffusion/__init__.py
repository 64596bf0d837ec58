"""The plugin named ``diffusion``: image policies whose actions are stochastic denoising steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gcore_core import hookimpl
from gcore_core.contract.looking import Look
from gcore_core.contract.providers import (
    GeneratorProvider,
    ObjectiveProvider,
    RewardProvider,
    TrainerProvider,
)
from gcore_core.contract.records import RunFacts, StepReport
from gcore_diffusion import config

_NEEDS = ("torch>=2.7", "safetensors>=0.5")


@hookimpl
def gcore_generators() -> Iterable[GeneratorProvider]:
    yield GeneratorProvider(
        summary=(
            "denoises images: the tiny model, or a diffusers pipeline with its own scheduler "
            "in place of the given"
        ),
        factory="gcore_diffusion.generator:DiffusionGenerator",
        config=config.DiffusionGeneratorConfig,
        needs=_NEEDS,
        memory="gcore_diffusion.memory:generator_memory",
        twin="gcore_diffusion.twins:twin_of_generator",
    )


@hookimpl
def gcore_trainers() -> Iterable[TrainerProvider]:
    yield TrainerProvider(
        summary=(
            "AdamW on a denoiser, whole or by LoRA, through the log-probs of its stochastic steps"
        ),
        factory="gcore_diffusion.training:DiffusionTrainer",
        config=config.DiffusionTrainerConfig,
        needs=_NEEDS,
        memory="gcore_diffusion.memory:trainer_memory",
        twin="gcore_diffusion.twins:twin_of_trainer",
    )


@hookimpl
def gcore_objectives() -> Iterable[ObjectiveProvider]:
    yield ObjectiveProvider(
        name="nft",
        summary=(
            "contrasts good and bad images in the forward process; needs no log-probs "
            "(DiffusionNFT)"
        ),
        factory="gcore_diffusion.forward:Nft",
        config=config.NftConfig,
        needs=_NEEDS,
    )


@hookimpl
def gcore_rewards() -> Iterable[RewardProvider]:
    yield RewardProvider(
        name="brightness",
        summary="mean of the image's pixels, 0 to 1",
        factory="gcore_diffusion.rewards:Brightness",
    )
    yield RewardProvider(
        name="compressibility",
        summary="1 - size of the compressed image over its size",
        factory="gcore_diffusion.rewards:Compressibility",
    )
    yield RewardProvider(
        name="classifier",
        summary="what a small classifier says of the class that the image is to show",
        factory="gcore_diffusion.rewards:Classifier",
        config=config.ClassifierConfig,
        needs=_NEEDS,
    )
    yield RewardProvider(
        name="preference",
        summary="how well an image answers its prompt, by a CLIP that learned what people prefer",
        factory="gcore_diffusion.preference:Preference",
        config=config.PreferenceConfig,
        needs=(*_NEEDS, "transformers>=5.0"),
        twin="gcore_diffusion.twins:twin_of_preference",
    )


@hookimpl
def gcore_check(plan: Mapping[str, Any]) -> Iterable[str]:
    from gcore_diffusion.checks import problems

    return problems(plan)


@hookimpl
def gcore_check_files(plan: Mapping[str, Any], here: bool) -> Iterable[str | Look]:
    from gcore_diffusion.checks import file_problems

    return file_problems(plan, here)


@hookimpl
def gcore_step_end(run: RunFacts, report: StepReport) -> None:
    from gcore_diffusion import gallery, watch

    watch.after_step(run, report)
    gallery.after_step(run, report)


@hookimpl
def gcore_run_end(run: RunFacts, error: str) -> None:
    from gcore_diffusion import gallery

    gallery.contact_sheet(run)
