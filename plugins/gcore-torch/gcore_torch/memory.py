"""Says how much memory the workers of this plugin will need. It imports neither torch nor
transformers.

The trainer holds float32 weights, gradients and AdamW's moments, each rank its rows of them
(FSDP2); ``sharding`` says who shares what, and ``offload`` puts parts of it in host memory. Under
autocast it also holds copies of the matrices in bfloat16 while it computes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from gcore_language.architecture import (
    Architecture,
    Tensors,
    UnknownSizes,
    numbers,
    read_architecture,
)
from gcore_language.lora_settings import adapters_of_values
from gcore_language.memory import (
    MOMENTS_BYTES,
    NBYTES,
    PROMPT_TOKENS,
    Pass,
    asleep_trainer,
    cast_weights,
    forward_only,
    in_every_phase,
    keeps_reference,
    largest_tensor,
    of_passes,
    pass_of,
    push_buckets,
    unknown,
)

from gcore_core.contract.memory import ASLEEP, PHASES, MemoryNeed, WorkerShape
from gcore_torch.cache_columns import PARKED_BYTES, cache_columns, most_columns_on_cpu
from gcore_torch.config import TorchGeneratorConfig, TorchTrainerConfig
from gcore_torch.sharding_settings import ShardingSettings

_MASTER = 4  # bytes of a float32
#: Most tokens of one forward pass over prompts, as in ``gcore_torch.decoder``.
_PREFILL_TOKENS = 16384
#: Resident bytes of a worker whose model takes next to nothing, after three steps of the quickstart
#: on Linux. A generator has imported more of transformers.
_TRAINER, _GENERATOR = 400 << 20, 540 << 20
#: Numbers of the smallest matrix of which a generator keeps a packed copy, as in
#: ``gcore_torch.products``.
_PACKED_LEAST = 2**18
#: oneDNN compiles a product for each shape of a packed matrix and each number of rows, of which so
#: many are packed, and keeps so many of these kernels. Measured on an AMD EPYC with AVX-512.
_PACKED_ROWS = range(3, 129)
_KERNEL, _MOST_KERNELS = 560 << 10, 1024
#: Smaller blocks stay with the process when they are freed, see ``gcore_language.host_memory``.
_RETURNED = 4 << 20
#: Of what a pass holds in such blocks, the share that comes to lie between others; measured with
#: SmolLM2-135M on passes of 400 and 600 tokens, with adapters and without.
_BETWEEN = 0.15
#: Phases in which the trainer runs its model.
_COMPUTES = ("preparation", "training")


def trainer_memory(config: TorchTrainerConfig, worker: WorkerShape) -> Iterator[MemoryNeed]:
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
    if config.value_head.on:
        yield from unknown("of a policy with a value head nobody has counted it yet")
        return
    if "values" in worker.requires:
        model = replace(model, tied=True)  # one row of numbers in place of an output embedding
    if config.lora.path:
        yield from unknown("of a trainer that goes on from an adapter nobody has counted it yet")
        return
    yield from _libraries(worker, _TRAINER)
    held = list(held_by_rank(model, config, worker))
    for need in held:
        yield replace(need, on="host") if config.offload.state else need
    yield asleep_trainer(held, worker)
    yield from _computing(_of_slot(model, config.sharding), config, worker)
    yield push_buckets(model, config.dtype, worker.push_bytes)
    if worker.slots > 1 or config.lora.on:
        yield MemoryNeed(
            phase="push",
            what="gathered tensor",
            nbytes=largest_tensor(model) * (_MASTER + NBYTES[config.dtype]),
            note="the largest tensor, whole",
        )


def _libraries(worker: WorkerShape, nbytes: int) -> Iterator[MemoryNeed]:
    """Yields what a process takes before it holds a model; on a GPU, where nobody has measured it,
    nothing.
    """
    if worker.device == "cpu":
        yield from in_every_phase("libraries", nbytes, note="torch and transformers, imported")


def held_by_rank(
    model: Architecture, config: TorchTrainerConfig, worker: WorkerShape
) -> Iterator[MemoryNeed]:
    """Yields what the fullest rank holds: weights, optimizer, reference, gradients, exact sums."""
    replicas = config.sharding.replicas
    own = _own_numbers(model, config, worker.slots)
    trained = _adapter_numbers(model, config.lora.rank) if config.lora.on else own
    more = f"slots={worker.slots * 2}" if replicas == 1 else "config.sharding.replicas=1"
    apart = worker.device != "cpu" and not config.offload.state and not worker.deterministic
    elsewhere = "config.offload.state=true" if apart else more
    yield from in_every_phase(
        "weights", _MASTER * own, setting=more, note="float32, this rank's rows"
    )
    if config.lora.on:
        yield from in_every_phase("adapters", _MASTER * trained, note="float32, of all layers")
    yield from in_every_phase(
        "optimizer",
        MOMENTS_BYTES * trained,
        setting=elsewhere,
        note="AdamW's two moments in float32",
    )
    if keeps_reference(config, worker):
        yield from in_every_phase("reference", _MASTER * own, note="float32, this rank's rows")
    yield MemoryNeed(
        phase="training",
        what="gradients",
        nbytes=_MASTER * trained,
        setting=elsewhere,
        note="float32",
    )
    if worker.deterministic:
        yield MemoryNeed(
            phase="training",
            what="exact sums",
            nbytes=16 * trained + _MASTER * trained,
            note="two float64 for each gradient, and the gradients of one pass",
        )


def _adapter_numbers(model: Architecture, rank: int) -> int:
    """Returns how many numbers the adapters of all linear maps of the layers hold, on one rank or
    on each: two matrices a map, [rank, inputs] and [outputs, rank].
    """
    return rank * sum(
        item.count * sum(item.shape)
        for layer in model.all_layers()
        for item in layer
        if len(item.shape) == 2
    )


def _own_numbers(model: Architecture, config: TorchTrainerConfig, slots: int) -> int:
    """Returns how many numbers of the model the fullest rank holds."""
    sharing = max(1, slots // config.sharding.replicas)
    of_layers = max(1, sharing // config.sharding.tensor)
    own = 0
    for item in (item for layer in _of_slot(model, config.sharding).all_layers() for item in layer):
        experts = len(item.shape) == 3
        own += item.of_rank(max(1, of_layers // config.sharding.experts) if experts else of_layers)
    return own + sum(item.of_rank(sharing) for item in model.root())


def _of_slot(model: Architecture, sharding: ShardingSettings) -> Architecture:
    """Returns a model with the heads and channels that one slot of a tensor group computes, or with
    the experts of one slot of those that they are spread over.
    """
    model = replace(model, spread=sharding.experts) if model.experts else model
    tensor = sharding.tensor
    if tensor == 1:
        return model
    return replace(
        model,
        heads=model.heads // tensor,
        kv_heads=model.kv_heads // tensor,
        intermediate=model.intermediate // tensor,
    )


def _computing(
    model: Architecture, config: TorchTrainerConfig, worker: WorkerShape
) -> Iterator[MemoryNeed]:
    """Yields what the fullest passes need beside what the rank holds."""
    casts = cast_weights(model, config.dtype)
    for phase in _COMPUTES:
        kept = phase == "training" and not config.gradient_checkpointing
        if casts:
            yield MemoryNeed(
                phase=phase,
                what="cast weights",
                nbytes=casts if kept else casts // model.layers,
                setting="config.gradient_checkpointing=true" if kept else "",
                note=f"matrices of {'all layers' if kept else 'a layer'} in {config.dtype}, whole",
            )
        if config.lora.on and kept:
            yield MemoryNeed(
                phase=phase,
                what="merged weights",
                nbytes=_MASTER * model.matrices,
                setting="config.gradient_checkpointing=true",
                note="matrices of all layers with their adapters, kept for the backward pass",
            )
        if worker.slots > 1 or config.offload.state:
            yield MemoryNeed(
                phase=phase,
                what="gathered weights",
                nbytes=_MASTER * (numbers(model.root()) + numbers(model.layer())),
                note="the embeddings and a layer, whole, by FSDP2"
                if model.spread == 1
                else "the embeddings and a layer with this slot's experts, by FSDP2",
            )
        if model.spread > 1:
            yield MemoryNeed(
                phase=phase,
                what="tokens under way",
                nbytes=2 * NBYTES[config.dtype] * _sent_numbers(model, config.budget_tokens),
                at_most=True,
                note="sent and received, where all experts are chosen equally often",
            )
    # a state in host memory goes through FSDP2 on one rank too
    shared = replace(worker, slots=max(2, worker.slots)) if config.offload.state else worker
    replicas = max(1, worker.slots // config.traits().replica_slots)
    run = pass_of(config, shared, replicas=replicas, parts=worker.minibatches)
    for need in of_passes(model, config, shared, replicas=replicas, frozen=config.lora.on):
        saved = (need.phase, need.what) == ("training", "activations")
        if saved:
            yield from _between(model, config, worker.device, run.tokens, need.nbytes or 0)
        if saved and config.offload.activations:
            yield from _inputs_on_host(model, run.tokens, need)
        elif saved and config.gradient_checkpointing and worker.device != "cpu":
            yield replace(need, setting="config.offload.activations=true")
        else:
            yield need


def _between(
    model: Architecture, config: TorchTrainerConfig, device: str, tokens: int, held: int
) -> Iterator[MemoryNeed]:
    """Yields what small passes hold of a CPU's memory beside their tensors.

    tokens: of the fullest pass.
    held: bytes of its activations.
    """
    largest = _MASTER * tokens * model.intermediate
    if device != "cpu" or config.gradient_checkpointing or largest >= _RETURNED:
        return
    merged = _MASTER * model.matrices if config.lora.on else 0
    yield MemoryNeed(
        phase="training",
        what="freed blocks",
        nbytes=round(_BETWEEN * (held + merged)),
        at_most=True,
        note="too small to go back to the system, between others",
    )


def _sent_numbers(model: Architecture, tokens: int) -> int:
    """Returns how many numbers go to the experts of a layer: a token goes to each of its own."""
    return tokens * model.experts_per_token * model.hidden


def _inputs_on_host(model: Architecture, tokens: int, need: MemoryNeed) -> Iterator[MemoryNeed]:
    """Yields a pass's activations in two parts: the layers' inputs, and what stays on the device,
    where one layer's input is at a time.

    need: the activations as they are where all stay on the device.
    """
    one = _MASTER * model.hidden * tokens
    inputs = one * model.layers
    yield replace(need, what="layers' inputs", nbytes=inputs, on="host")
    left = (need.nbytes or 0) - inputs + one
    yield replace(need, nbytes=left, note="of the last norm, and a layer's input")


def generator_memory(config: TorchGeneratorConfig, worker: WorkerShape) -> Iterator[MemoryNeed]:
    """Yields what one replica needs, see ``gcore_core.contract.memory``."""
    try:
        model = read_architecture(worker.model)
    except UnknownSizes as error:
        yield from unknown(str(error), (*PHASES, ASLEEP))
        return
    yield from _libraries(worker, _GENERATOR)
    size = NBYTES[config.dtype]
    weights = size * model.parameters
    narrow = "" if size == 2 else "config.dtype=bfloat16"
    yield from in_every_phase("weights", weights, setting=narrow, note=config.dtype)
    rows = _rows(config, worker)
    if packed := _packed(model, config, worker):
        note = "copies of large matrices, in the order in which a CPU multiplies few rows fastest"
        yield from in_every_phase("packed weights", size * numbers(packed), note=note)
        shapes = len({item.shape for item in packed})
        kernels = min(_MOST_KERNELS, shapes * sum(number <= rows for number in _PACKED_ROWS))
        note = f"of products with them, {kernels}: one for each shape and number of rows"
        for need in in_every_phase("kernels", _KERNEL * kernels, note=note):
            yield replace(need, at_most=True)
    for phase in PHASES:  # the cache is kept for the next rollout
        for need in _cache(model, config, worker):
            yield replace(need, phase=phase)
    prompt = worker.facts.get(PROMPT_TOKENS, 0)
    read = min(_PREFILL_TOKENS, rows * prompt) if prompt else _PREFILL_TOKENS
    run = Pass(tokens=read, actions=rows, dtype=config.dtype)
    yield MemoryNeed(
        phase="rollout",
        what="activations",
        nbytes=forward_only(model, run),
        at_most=True,
        note=f"of one layer, {read} tokens of prompts",
    )
    yield MemoryNeed(
        phase="rollout",
        what="logits",
        nbytes=rows * model.vocabulary * (size + 2 * 4),
        at_most=True,
        setting=f"config.max_batch={max(1, rows // 2)}",
        note=f"{rows} samples",
    )
    kept = weights if config.sleep == "keep" else 0
    yield MemoryNeed(phase=ASLEEP, what="weights", nbytes=kept, on="host", note=config.sleep)


def _rows(config: TorchGeneratorConfig, worker: WorkerShape) -> int:
    """Returns how many samples a replica draws at a time at most."""
    known = -(-worker.records // max(1, worker.slots)) if worker.records else config.max_batch
    return min(config.max_batch, known)


def _packed(
    model: Architecture, config: TorchGeneratorConfig, worker: WorkerShape
) -> list[Tensors]:
    """Returns the matrices that are held a second time; see ``gcore_torch.products``."""
    if worker.device != "cpu" or worker.deterministic or config.dtype != "float32":
        return []
    head = Tensors(shape=(model.vocabulary, model.hidden))
    of_layers = (item for layer in model.all_layers() for item in layer)
    matrices = [item for item in (head, *of_layers) if len(item.shape) == 2]
    # The fused decoder multiplies with these as one matrix, and with gates and ups.
    joined: dict[tuple[int, ...], int] = {}
    if config.decoder != "transformers" and not model.experts:
        attention = model.query_size + 2 * model.key_size
        joined[model.query_size, model.hidden] = attention
        joined[model.key_size, model.hidden] = attention
        joined[model.intermediate, model.hidden] = 2 * model.intermediate
    return [
        item
        for item in matrices
        if joined.get(item.shape, item.shape[0]) * item.shape[1] >= _PACKED_LEAST
    ]


def _cache(
    model: Architecture, config: TorchGeneratorConfig, worker: WorkerShape
) -> Iterator[MemoryNeed]:
    """Yields the key-value cache of all rows that are drawn at a time, and what is kept of rows.

    Where it grows, the former one is there until it is copied.
    """
    rows = _rows(config, worker)
    prompt = worker.facts.get(PROMPT_TOKENS, 0)
    limit = config.context_length or 0
    length = limit or config.max_new_tokens
    if prompt:
        length = min(limit or sys.maxsize, prompt + config.max_new_tokens)
    if worker.device != "cpu":
        columns = cache_columns(length) * 3 // 2
        grown = "a power of two, and the former cache while it grows"
    else:
        actions = min(length, config.max_new_tokens)
        columns = most_columns_on_cpu(length - actions, actions)
        grown = "the former cache while it grows"
    prompts = "" if limit or prompt else "; prompts are not counted, set context_length"
    column = NBYTES[config.dtype] * model.cached_numbers * rows
    setting = f"config.max_batch={max(1, rows // 2)}"
    yield MemoryNeed(
        phase="rollout",
        what="key-value cache",
        nbytes=column * columns,
        at_most=True,
        setting=setting,
        note=f"{rows} samples of {length} tokens and {grown}{prompts}",
    )
    if worker.acts and not worker.deterministic:
        yield MemoryNeed(
            phase="rollout",
            what="parked rows",
            nbytes=max(PARKED_BYTES, column * length),
            at_most=True,
            setting=setting,
            note="of episodes between two turns, as many bytes as the cache of samples that run"
            f"{prompts}",
        )
