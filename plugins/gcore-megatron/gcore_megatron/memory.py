"""Says how much memory a rank of this trainer will need. It imports neither torch nor Megatron.

Tensor-parallel slots share each matrix and the vocabulary, pipeline stages share the layers. In
bfloat16 a rank holds two bytes of weight and four of gradient for each number, and the optimizer
twelve: its own float32 weight and two moments; these are shared out over the replicas with
``distributed_optimizer`` (Megatron-Core's guide, "Distributed Optimizer"). In float32 the
optimizer's weights are the model's.

Experts are whole on their slots: tensor-parallel slots do not share them, ``expert_parallel`` slots
of a stage do. Other slots of the stage hold the same experts, and share out their optimizer.

The closed forms of activations are those of ``gcore_language.memory``, divided by what the slots
share; they were compared with the trainer torch, not with Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gcore_language.architecture import Architecture, UnknownSizes, read_architecture
from gcore_language.memory import (
    MOMENTS_BYTES,
    NBYTES,
    asleep_trainer,
    in_every_phase,
    keeps_reference,
    of_passes,
    push_buckets,
    unknown,
)

from gcore_core.contract.memory import MemoryNeed, WorkerShape
from gcore_megatron.config import MegatronTrainerConfig

_MASTER = 4  # bytes of a float32


def trainer_memory(config: MegatronTrainerConfig, worker: WorkerShape) -> Iterator[MemoryNeed]:
    """Yields what one rank of the trainer needs, see ``gcore_core.contract.memory``."""
    try:
        model = read_architecture(worker.model)
    except UnknownSizes as error:
        yield from unknown(str(error))
        return
    held = list(_held(model, config, worker))
    yield from held
    yield asleep_trainer(held, worker)
    stages = config.pipeline_parallel
    run = replace(worker, slots=1)  # no weights are gathered
    shared = config.context_parallel
    shared *= config.tensor_parallel if config.sequence_parallel else 1
    replicas = max(1, worker.slots // config.traits().replica_slots)
    for need in of_passes(model, config, run, replicas=replicas):
        # A first stage keeps as many micro-batches as there are stages (1F1B), each of its layers
        # alone: together as much as one device would keep.
        note = f"{need.note}; {stages} micro-batches at a time" if stages > 1 else need.note
        yield replace(need, nbytes=(need.nbytes or 0) // shared, note=note)
    if model.experts and config.expert_parallel > 1:
        sent = config.budget_tokens * model.experts_per_token * model.hidden // shared
        for phase in ("preparation", "training"):
            yield MemoryNeed(
                phase=phase,
                what="tokens under way",
                nbytes=2 * NBYTES[config.dtype] * sent,
                at_most=True,
                note="sent and received, where all experts are chosen equally often",
            )
    yield push_buckets(model, config.dtype, worker.push_bytes)


def _held(
    model: Architecture, config: MegatronTrainerConfig, worker: WorkerShape
) -> Iterator[MemoryNeed]:
    """Yields weights, gradients and optimizer of a rank."""
    experts = _experts_of_slot(model, config)
    dense = _of_stage(model, config)
    own = dense + experts
    replicas = max(1, worker.slots // config.traits().replica_slots)
    size = NBYTES[config.dtype]
    states = MOMENTS_BYTES + (_MASTER if size < _MASTER else 0)
    share = replicas if config.distributed_optimizer else 1
    alike = max(1, worker.slots // (config.pipeline_parallel * config.expert_parallel))
    share_of_experts = alike if config.distributed_optimizer else 1
    tensor = f"config.tensor_parallel={config.tensor_parallel * 2}"
    split = f"tensor parallel {config.tensor_parallel}, stages {config.pipeline_parallel}"
    over = f"over {share} replicas"
    if model.experts:
        split += f", experts over {config.expert_parallel}"
        over += f", of experts over {share_of_experts}"
    yield from in_every_phase(
        "weights", size * own, setting=tensor, note=f"{config.dtype}, {split}"
    )
    yield from in_every_phase(
        "gradients", _MASTER * own, setting=tensor, note="float32, one buffer that is kept"
    )
    yield from in_every_phase(
        "optimizer",
        -(-states * dense // share) - (-states * experts // share_of_experts),
        setting=f"slots={worker.slots * 2}" if config.distributed_optimizer else tensor,
        note=f"float32, {over}",
    )
    if keeps_reference(config, worker):
        for need in in_every_phase("reference", size * own, note=config.dtype):
            yield replace(need, on="host")  # it is swapped in tensor by tensor


def _of_stage(model: Architecture, config: MegatronTrainerConfig) -> int:
    """Returns how many numbers the fullest stage holds besides experts: an even part of the layers,
    and the embeddings that stand at its end; the first and the last stage have one each.
    """
    whole = model.of_slice(config.tensor_parallel)
    whole -= sum(-(-size // config.tensor_parallel) for size in _experts(model))
    embedding = -(-model.vocabulary * model.hidden // config.tensor_parallel)
    ends = embedding * (1 if model.tied else 2)
    if config.pipeline_parallel == 1:
        return whole
    return -(-(whole - ends) // config.pipeline_parallel) + embedding


def _experts(model: Architecture) -> Iterator[int]:
    """Yields how many numbers each tensor of experts holds."""
    for layer in model.all_layers():
        yield from (item.numbers for item in layer if len(item.shape) == 3)


def _experts_of_slot(model: Architecture, config: MegatronTrainerConfig) -> int:
    """Returns how many numbers of experts a slot holds, where stages have equally many."""
    return -(-sum(_experts(model)) // (config.expert_parallel * config.pipeline_parallel))
