"""Says how much memory a rank of this trainer will need. It imports neither torch nor DeepSpeed.

A model is opened in float32 and trained under autocast, so what ZeRO shares out is float32: from
stage 1 the optimizer's own weights and moments, from stage 2 the gradients, from stage 3 the
weights (Rajbhandari et al. 2020, "ZeRO", section 5). The closed forms of activations are those of
``gcore_language.memory``; they were compared with the trainer torch, not with DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gcore_language.architecture import Architecture, UnknownSizes, numbers, read_architecture
from gcore_language.lora_settings import adapters_of_values
from gcore_language.memory import (
    MOMENTS_BYTES,
    asleep_trainer,
    cast_weights,
    in_every_phase,
    keeps_reference,
    largest_tensor,
    of_passes,
    push_buckets,
    unknown,
)

from gcore_core.contract.memory import PHASES, MemoryNeed, WorkerShape
from gcore_deepspeed.config import DeepSpeedTrainerConfig

_MASTER = 4  # bytes of a float32


def trainer_memory(config: DeepSpeedTrainerConfig, worker: WorkerShape) -> Iterator[MemoryNeed]:
    """Yields what one rank of the trainer needs, see ``gcore_core.contract.memory``.

    Raises ConfigError for adapters of a model with a value head.
    """
    if config.lora.on and "values" in worker.requires:
        raise adapters_of_values(worker.role)
    try:
        model = read_architecture(worker.model)
    except UnknownSizes as error:
        yield from unknown(str(error))
        return
    if config.lora.on:
        yield from unknown("of a trainer with adapters nobody has counted it yet")
        return
    held = list(_held(model, config, worker))
    yield from held
    yield asleep_trainer(held, worker)
    replicas = max(1, worker.slots // config.traits().replica_slots)
    yield from of_passes(model, config, worker, replicas=replicas)
    yield push_buckets(model, config.dtype, worker.push_bytes)


def _held(
    model: Architecture, config: DeepSpeedTrainerConfig, worker: WorkerShape
) -> Iterator[MemoryNeed]:
    """Yields what the rank holds beside its forward and backward passes."""
    share = -(-model.parameters // worker.slots)
    weights = share if config.stage == 3 else model.parameters
    gradients = share if config.stage >= 2 else model.parameters
    more = f"slots={worker.slots * 2}"
    higher = more if config.stage == 3 else f"config.stage={config.stage + 1}"
    offloaded = "" if config.offload_optimizer else "config.offload_optimizer=true"
    for phase in PHASES:
        yield MemoryNeed(
            phase=phase,
            what="weights",
            nbytes=_MASTER * weights,
            on="host" if config.offload_params else "device",
            setting=higher,
            note=f"float32, ZeRO stage {config.stage}",
        )
        yield MemoryNeed(
            phase=phase,
            what="optimizer",
            nbytes=(_MASTER + MOMENTS_BYTES) * share,
            on="host" if config.offload_optimizer else "device",
            setting=offloaded or more,
            note="its own weights and AdamW's two moments in float32, this rank's share",
        )
    if keeps_reference(config, worker):
        for need in in_every_phase("reference", _MASTER * weights, note="float32"):
            yield replace(need, on="host" if config.offload_params else "device")
    yield MemoryNeed(
        phase="training",
        what="gradients",
        nbytes=_MASTER * gradients,
        setting=higher,
        note="float32",
    )
    for phase in ("preparation", "training"):
        if casts := cast_weights(model, config.dtype):
            yield MemoryNeed(
                phase=phase, what="cast weights", nbytes=casts, note=f"matrices in {config.dtype}"
            )
        yield MemoryNeed(
            phase=phase,
            what="buckets",
            nbytes=2 * _MASTER * max(config.bucket_elements, largest_tensor(model)),
            setting=f"config.bucket_elements={config.bucket_elements // 2 or 1}",
            note="what is reduced, and what is gathered, in one piece",
        )
        if config.stage == 3:
            yield MemoryNeed(
                phase=phase,
                what="gathered weights",
                nbytes=_MASTER * (numbers(model.root()) + 2 * numbers(model.layer())),
                note="the embeddings and two layers, whole",
            )
