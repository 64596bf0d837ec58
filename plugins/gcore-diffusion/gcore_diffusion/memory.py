"""Says how much memory the workers of this plugin will need, for pipelines of diffusers.

It imports no engine. Both roles hold float32 weights, since a low precision is autocast over them
on both sides. The trainer holds the transformer alone; the sampler holds the whole pipeline.

Activations are bounds, by the number of bytes that autograd saves for the backward pass. They were
counted on SD3.5-medium's and Flux.1-dev's own shapes, whole and with adapters, in float32 and under
autocast (``tests/test_memory.py`` counts them again on small ones).
"""

from __future__ import annotations

from collections.abc import Iterator

from gcore_core.contract.memory import PHASES, MemoryNeed, WorkerShape
from gcore_diffusion.config import (
    DenoiserSettings,
    DiffusionGeneratorConfig,
    DiffusionTrainerConfig,
)
from gcore_diffusion.sizes import PipelineSizes, UnknownPipeline, read_sizes

_FLOAT32 = 4
#: AdamW's two moments in float32, for each number that is trained.
_MOMENTS = 8
#: dtype -> bytes of a number of the arithmetic.
_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: dtype -> most bytes that one block saves for each token and channel, without weights. In float32
#: SD3.5-medium's blocks, which attend twice, save 131 and Flux's 89 on average; under autocast 89
#: and 53.
SAVED_BY_BLOCK = {"float32": 135, "float16": 95, "bfloat16": 95}
#: The same without a gradient, where only what is at work is held: the feed-forward's channels are
#: four times the hidden ones, before and after its activation, beside inputs and a norm.
_AT_WORK = 48
#: Tokens of a prompt that come beside ``max_sequence_length``: those of CLIP.
_CLIP_TOKENS = 77
#: Bytes that an autoencoder of diffusers holds at once for each pixel of one image that it decodes,
#: in float32: five layers of 256 channels at full size. An estimate.
_DECODED = 4 * 5 * 256
#: Modules of a block that one name under ``lora.targets`` may fit, at most: blocks that attend
#: twice have two of each.
_OF_A_NAME = 2


def trainer_memory(config: DiffusionTrainerConfig, worker: WorkerShape) -> Iterator[MemoryNeed]:
    """Yields what one rank of the trainer needs; see ``gcore_core.contract.memory``."""
    try:
        sizes = read_sizes(worker.model)
    except UnknownPipeline as error:
        yield from _unknown(str(error))
        return
    trained = _trained(sizes, config)
    yield from _in_every_phase("weights", _FLOAT32 * _held(sizes, config), "float32, on every rank")
    yield from _in_every_phase("optimizer", _MOMENTS * trained, "AdamW's two moments in float32")
    if config.reference and not config.lora.rank:
        yield from _in_every_phase("reference", _FLOAT32 * sizes.transformer, "float32")
    yield MemoryNeed(phase="training", what="gradients", nbytes=_FLOAT32 * trained, note="float32")
    saves_weights = not config.gradient_checkpointing
    yield from _casts(sizes, config, "preparation", every=not config.lora.rank)
    yield from _casts(sizes, config, "training", every=not config.lora.rank or saves_weights)
    yield from _passes(sizes, config)
    for phase in ("preparation", "training"):
        yield MemoryNeed(
            phase=phase,
            what="latents of the step",
            nbytes=None,
            note="they grow with the records of a step, which a role does not see",
        )


def generator_memory(config: DiffusionGeneratorConfig, worker: WorkerShape) -> Iterator[MemoryNeed]:
    """Yields what one sampler needs; see ``gcore_core.contract.memory``."""
    try:
        sizes = read_sizes(worker.model)
    except UnknownPipeline as error:
        yield from _unknown(str(error))
        return
    yield from _in_every_phase(
        "weights", _FLOAT32 * (sizes.transformer + sizes.others), "the whole pipeline in float32"
    )
    yield from _casts(sizes, config, "rollout", every=not config.lora.rank)
    height = config.height or sizes.side
    width = config.width or sizes.side
    image = (height // sizes.pixels) * (width // sizes.pixels)
    tokens = config.max_batch * _guided(config.guidance, sizes) * (image + _prompt(config))
    fewer = f"config.max_batch={max(1, config.max_batch // 2)}"
    yield MemoryNeed(
        phase="rollout",
        what="activations",
        nbytes=_AT_WORK * sizes.hidden * tokens,
        at_most=True,
        setting=fewer,
        note=f"of one block, {config.max_batch} images of {height} x {width}",
    )
    yield MemoryNeed(
        phase="rollout",
        what="decoding",
        nbytes=_DECODED * height * width,
        at_most=True,
        note="one image after the other",
    )


def _passes(sizes: PipelineSizes, config: DiffusionTrainerConfig) -> Iterator[MemoryNeed]:
    """Yields what the fullest forward and backward pass of a trainer saves."""
    rows = config.budget_rows * _guided(config.guidance, sizes)
    tokens = rows * (sizes.tokens + _prompt(config))
    block = SAVED_BY_BLOCK[config.dtype] * sizes.hidden * tokens
    kept = sizes.blocks * _NBYTES[config.dtype] * sizes.hidden * tokens
    checkpointed = config.gradient_checkpointing
    fewer = f"config.budget_rows={max(1, config.budget_rows // 2)}"
    size = f"{config.budget_rows} rows at most, as for images of {sizes.side} x {sizes.side}"
    yield MemoryNeed(
        phase="preparation",
        what="activations",
        nbytes=_AT_WORK * sizes.hidden * tokens,
        at_most=True,
        setting=fewer,
        note=f"of one block, {size}",
    )
    yield MemoryNeed(
        phase="training",
        what="activations",
        nbytes=kept + block if checkpointed else sizes.blocks * block,
        at_most=True,
        setting=fewer if checkpointed else "config.gradient_checkpointing=true",
        note=size + (", blocks' inputs and one block" if checkpointed else ""),
    )


def _casts(
    sizes: PipelineSizes, config: DenoiserSettings, phase: str, *, every: bool
) -> Iterator[MemoryNeed]:
    """Yields the copies of weights that autocast makes.

    every: of all blocks at once: autocast keeps copies of weights that need a gradient, and a
        backward pass keeps those of frozen ones. Else those of one block.
    """
    if config.dtype == "float32":
        return
    nbytes = _NBYTES[config.dtype] * (sizes.transformer - sizes.fixed)
    yield MemoryNeed(
        phase=phase,
        what="cast weights",
        nbytes=nbytes if every else nbytes // sizes.blocks,
        at_most=True,
        note=config.dtype if every else f"{config.dtype}, of one block",
    )


def _trained(sizes: PipelineSizes, config: DiffusionTrainerConfig) -> int:
    """Returns how many numbers are trained; of adapters at most so many."""
    if not config.lora.rank:
        return sizes.transformer - sizes.fixed
    modules = _OF_A_NAME * len(config.lora.targets) * sizes.blocks
    return modules * config.lora.rank * 2 * sizes.hidden


def _held(sizes: PipelineSizes, config: DiffusionTrainerConfig) -> int:
    return sizes.transformer + (_trained(sizes, config) if config.lora.rank else 0)


def _guided(guidance: float, sizes: PipelineSizes) -> int:
    """Returns how many rows one image takes: Flux takes guidance as an input, others go twice."""
    return 1 if guidance <= 1 or sizes.pipeline == "FluxPipeline" else 2


def _prompt(config: DenoiserSettings) -> int:
    return config.max_sequence_length + _CLIP_TOKENS


def _in_every_phase(what: str, nbytes: int, note: str) -> Iterator[MemoryNeed]:
    for phase in PHASES:
        yield MemoryNeed(phase=phase, what=what, nbytes=nbytes, note=note)


def _unknown(why: str) -> Iterator[MemoryNeed]:
    for phase in PHASES:
        yield MemoryNeed(phase=phase, what="model", nbytes=None, note=why)
