"""Computes how much memory a language model takes to train and to sample from, by closed forms.

Each form counts the tensors that transformers' Llama-like decoders and this library hold at the
moment when they hold most.

Legend of sizes: D hidden size, V vocabulary, I feed-forward channels, H query heads, K key-value
heads, E head size, T tokens of a micro-batch, A its actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gcore_core.contract.memory import ASLEEP, PHASES, MemoryNeed, WorkerShape
from gcore_language.architecture import (
    Architecture,
    Tensors,
    UnknownSizes,
    numbers,
    read_architecture,
)
from gcore_language.settings import GeneratorSettings, TrainerSettings

#: Names of facts: tokens of the longest prompt, and the most that an answer may have.
PROMPT_TOKENS = "prompt_tokens"
ANSWER_TOKENS = "answer_tokens"
#: dtype -> bytes of a number.
NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Optimizer states of AdamW in float32: two moments for each number.
MOMENTS_BYTES = 8
#: The most logits that are held at once, see ``gcore_language.policy``.
CHUNK_LOGITS = 2**25
#: Longest row of the shared layout, see ``gcore_language.packing``.
_SHARED_ROW_TOKENS = 4096


# -- activations -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Describes a forward pass of a trainer.

    tokens: that go through the layers, T.
    actions: whose log-probs are computed, A.
    dtype: of the arithmetic, as in ``TrainerSettings.dtype``.
    repeats_keys: keys and values are repeated for each query head, as transformers does where
        attention has a mask.
    mask_row: tokens of a row, where attention has a mask [rows, 1, W, W]; 0: it has none.
    """

    tokens: int
    actions: int
    dtype: str = "float32"
    repeats_keys: bool = False
    mask_row: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a number that a linear map gives."""
        return NBYTES[self.dtype]


def saved_by_layer(model: Architecture, run: Pass) -> int:
    """Returns the bytes that autograd keeps of one layer for its backward pass.

    Norms are computed in float32: each keeps its input and its normalised input, and each linear
    map its own input. Under autocast (bfloat16) that is a copy for each map, for only weights are
    cast once. Attention keeps queries, keys, values, its output and a float32 for each head; the
    feed-forward keeps the gate, its SiLU, the other half and their product.
    """
    mixed = run.dtype != "float32"
    norms = 2 * 2 * 4 * model.hidden
    inputs = 5 * run.nbytes * model.hidden if mixed else 2 * 4 * model.hidden
    keys = model.query_size if run.repeats_keys else model.key_size
    attention = run.nbytes * (2 * model.query_size + 2 * keys) + 4 * model.heads
    if model.normed_heads:
        normed = model.query_size + model.key_size
        attention += normed * (4 + run.nbytes)
    return run.tokens * (norms + inputs + attention + _saved_by_feed_forward(model, run))


def _saved_by_feed_forward(model: Architecture, run: Pass) -> int:
    """Returns the bytes that a token leaves in a feed-forward; of a sparse one an estimate."""
    if not model.experts:
        return 4 * run.nbytes * model.intermediate
    chosen = model.experts_per_token
    channels = 4 * run.nbytes * model.expert_channels
    between = 3 * run.nbytes * model.hidden
    return chosen * (channels + between) + 3 * 4 * model.experts


def activations(model: Architecture, run: Pass, *, checkpointing: bool) -> int:
    """Returns the bytes of activations when the backward pass begins, without those of the head.

    checkpointing: only the layers' inputs are kept.
    """
    layer = 4 * model.hidden * run.tokens if checkpointing else saved_by_layer(model, run)
    mask = 4 * run.tokens * run.mask_row
    return layer * model.layers + _last_norm(model, run) + mask


def _last_norm(model: Architecture, run: Pass) -> int:
    return 3 * 4 * model.hidden * run.tokens


def at_work(
    model: Architecture, run: Pass, *, checkpointing: bool, ranks: int = 1, frozen: bool = False
) -> tuple[int, str]:
    """Returns the bytes of what comes and goes while a gradient is computed, beside activations,
    and the moment at which they are most.

    Moments, in the order in which they come:

    head     the logits of a chunk, or one of that size and the gradient of the output embedding
    layer    the gradients of the last layer's activations; with checkpointing the layer computed
             again; a tied output embedding's gradient, which waits for the input's. Ranks also
             gather the next layer, and hold this layer's gradient whole, as computed and as sent
    end      the gradients of both embeddings, when all activations are gone

    frozen: embeddings get no gradient, since adapters are trained.
    """
    embedding = 0 if frozen else 4 * model.vocabulary * model.hidden
    head = max(
        logits(model, run, gradient=True), 4 * _chunk(model, run) * model.vocabulary + embedding
    )
    layer = 3 * run.nbytes * _channels(model) * run.tokens
    layer += saved_by_layer(model, run) if checkpointing else 0
    layer += embedding if model.tied or ranks > 1 else 0
    layer += 3 * 4 * numbers(model.layer()) if ranks > 1 else 0
    layer -= _last_norm(model, run)
    end = 2 * embedding - activations(model, run, checkpointing=checkpointing)
    moments = {"the head": head, "the last layer": layer, "the embeddings": end}
    moment = max(moments, key=lambda name: moments[name])
    return moments[moment], moment


def _channels(model: Architecture) -> int:
    """Returns the feed-forward channels that compute a token."""
    if model.experts:
        return model.experts_per_token * model.expert_channels
    return model.intermediate


def cast_weights(model: Architecture, dtype: str) -> int:
    """Returns the bytes of the copies that autocast makes of the layers' matrices.

    Each is made once in a forward pass and kept for the backward pass, whole on every rank.
    """
    return 0 if dtype == "float32" else NBYTES[dtype] * model.matrices


def logits(model: Architecture, run: Pass, *, gradient: bool) -> int:
    """Returns the bytes that the head holds at its fullest.

    The head is applied in chunks of at most ``CHUNK_LOGITS`` logits. Of a chunk there are at once
    the logits and, in float32, their log-softmax and the two factors that an entropy is summed
    from. Without a gradient there is no entropy: the logits, in float32 too, and the log-softmax.
    """
    chunk = _chunk(model, run) * model.vocabulary
    head = 0 if run.dtype == "float32" else run.nbytes * model.vocabulary * model.hidden
    return chunk * (run.nbytes + 4 * (3 if gradient else 2)) + head


def _chunk(model: Architecture, run: Pass) -> int:
    """Returns how many actions go through the head at once."""
    return min(run.actions, max(1, CHUNK_LOGITS // model.vocabulary))


def forward_only(model: Architecture, run: Pass) -> int:
    """Returns the bytes of activations of a forward pass without gradient: those of one layer."""
    layer = 3 * 4 * model.hidden + 3 * run.nbytes * _channels(model)
    return run.tokens * (layer + 4 * run.mask_row)


def largest_tensor(model: Architecture) -> int:
    """Returns how many numbers the largest single tensor holds."""
    tensors: list[Tensors] = [*model.root(), *model.layer()]
    return max(numbers([Tensors(shape=item.shape)]) for item in tensors)


# -- what every engine needs -----------------------------------------------------------------------


def pass_of(settings: TrainerSettings, worker: WorkerShape, *, replicas: int, parts: int) -> Pass:
    """Returns the fullest forward pass that a trainer can have.

    A pass has at most ``budget_tokens`` tokens. Where the job's records are known, it also has no
    more tokens than they have: each prompt and each answer counts as long as the longest one.
    Where they are not known, every token counts as an action; the head computes these in chunks. A
    model that gives values has no such head.

    replicas: that share the records of a step.
    parts: into which a step's records are cut, one after the other.
    """
    shared = settings.packing == "shared_prompt"
    tokens = actions = settings.budget_tokens
    prompt, answer = (worker.facts.get(name, 0) for name in (PROMPT_TOKENS, ANSWER_TOKENS))
    if worker.records and prompt and answer:
        # Whole groups are in a part; a replica has some of their records.
        groups = -(-worker.records // (worker.group_size * parts))
        records = -(-groups * worker.group_size // replicas)
        # Each layout but the padded one has a prompt once for all of its answers.
        prompts = records if settings.packing == "padded" else min(groups, records)
        tokens = min(tokens, prompts * prompt + records * answer)
        actions = min(tokens, records * answer)
    if "values" in worker.requires:
        actions = 0
    return Pass(
        tokens=tokens,
        actions=actions,
        dtype=settings.dtype,
        repeats_keys=shared and worker.device != "cpu",
        mask_row=min(tokens, _SHARED_ROW_TOKENS) if shared else 0,
    )


def of_passes(
    model: Architecture,
    settings: TrainerSettings,
    worker: WorkerShape,
    *,
    replicas: int,
    frozen: bool = False,
) -> Iterator[MemoryNeed]:
    """Yields what the fullest passes of a trainer need beside what a rank holds.

    replicas: that share the records of a step.
    frozen: as in ``at_work``.
    """
    prepared = pass_of(settings, worker, replicas=replicas, parts=1)
    run = pass_of(settings, worker, replicas=replicas, parts=worker.minibatches)
    checkpointing = settings.gradient_checkpointing
    fewer = f"config.budget_tokens={max(1, min(settings.budget_tokens, run.tokens) // 2)}"
    kept = "" if checkpointing else "config.gradient_checkpointing=true"
    tokens = f"{run.tokens} tokens, {settings.dtype}"
    yield MemoryNeed(
        phase="preparation",
        what="activations",
        nbytes=forward_only(model, prepared),
        at_most=True,
        setting=fewer,
        note=f"of one layer, {prepared.tokens} tokens, {settings.dtype}",
    )
    yield MemoryNeed(
        phase="preparation",
        what="logits",
        nbytes=logits(model, prepared, gradient=False),
        at_most=True,
        note="of a chunk of actions",
    )
    yield MemoryNeed(
        phase="training",
        what="activations",
        nbytes=activations(model, run, checkpointing=checkpointing),
        at_most=True,
        setting=kept or fewer,
        note=tokens + (", layers' inputs alone" if checkpointing else ""),
    )
    nbytes, moment = at_work(
        model, run, checkpointing=checkpointing, ranks=worker.slots, frozen=frozen
    )
    yield MemoryNeed(
        phase="training",
        what="logits and gradients at work",
        nbytes=nbytes,
        at_most=True,
        setting=fewer,
        note=f"most at {moment}",
    )


def of_paged_engine(
    settings: GeneratorSettings,
    worker: WorkerShape,
    *,
    engine: str,
    cache_bytes: Callable[[Architecture], int | None],
    setting: str,
    devices: int = 1,
) -> Iterator[MemoryNeed]:
    """Yields what a replica of a paged engine needs on each of its devices.

    engine: its name, for a reader.
    cache_bytes: of the key-value cache that the settings ask for; None where the engine takes what
        it finds free.
    setting: the setting that bounds that cache.
    devices: that share the model's matrices.
    """
    try:
        model = read_architecture(worker.model)
    except UnknownSizes as error:
        yield from unknown(str(error), (*PHASES, ASLEEP))
        return
    weights = NBYTES[settings.dtype] * model.of_slice(devices)
    note = settings.dtype if devices == 1 else f"{settings.dtype}, over {devices} devices"
    yield from in_every_phase("weights", weights, note=note)
    cache = cache_bytes(model)
    for phase in PHASES:
        yield MemoryNeed(
            phase=phase,
            what="key-value cache",
            nbytes=None if cache is None else cache // devices,
            setting=setting if cache else "",
            note=f"what {engine} finds free; set {setting.partition('=')[0]}"
            if cache is None
            else f"as {setting.partition('=')[0]} says",
        )
        yield MemoryNeed(
            phase=phase,
            what="engine",
            nbytes=None,
            note=f"what {engine} takes for its passes and graphs is its own to say",
        )
    yield MemoryNeed(
        phase=ASLEEP, what="weights", nbytes=weights, on="host", note="copied to host memory"
    )


def keeps_reference(settings: TrainerSettings, worker: WorkerShape) -> bool:
    """Returns whether the trainer holds a reference model; as in ``gcore_language.training``."""
    required = "ref_logp" in worker.requires and "ref_logp" not in worker.given
    return settings.reference or bool(settings.reference_path) or required


def push_buckets(model: Architecture, dtype: str, push_bytes: int) -> MemoryNeed:
    """Returns the need of a push's memory, which the trainer and its receivers share.

    All buckets lie in it. It holds the largest tensor at least, and the whole weights at most
    (``gcore_core.workers.push``).

    dtype: in which the weights are pushed.
    push_bytes: as in ``WorkerShape``.
    """
    largest, whole = (NBYTES[dtype] * n for n in (largest_tensor(model), model.parameters))
    nbytes = max(largest, min(push_bytes, whole))
    if nbytes == largest:
        note = "shared memory of the largest tensor"
    elif nbytes == whole:
        note = "shared memory of all weights"
    else:
        note = "shared memory, as controller.config.push_bucket_bytes says"
    return MemoryNeed(
        phase="push",
        what="push buckets",
        nbytes=nbytes,
        on="host",
        shared=True,
        note=note,
    )


def unknown(why: str, phases: Sequence[str] = PHASES) -> Iterator[MemoryNeed]:
    """Yields for each phase that nobody knows what the model takes."""
    for phase in phases:
        yield MemoryNeed(phase=phase, what="model", nbytes=None, note=why)


def in_every_phase(
    what: str, nbytes: int, *, setting: str = "", note: str = ""
) -> Iterator[MemoryNeed]:
    """Yields the same need for each phase."""
    for phase in PHASES:
        yield MemoryNeed(phase=phase, what=what, nbytes=nbytes, setting=setting, note=note)


def asleep_trainer(held: Iterable[MemoryNeed], worker: WorkerShape) -> MemoryNeed:
    """Returns what a trainer's rank keeps in memory while it sleeps; see ``Offload``.

    held: what it holds awake. What it holds in a rollout is kept, without gradients.
    """
    if worker.device == "cpu":
        return MemoryNeed(
            phase=ASLEEP, what="state", nbytes=0, on="host", note="in a file of the run's directory"
        )
    kept = (need for need in held if need.phase == "rollout" and need.what != "gradients")
    return MemoryNeed(
        phase=ASLEEP,
        what="state",
        nbytes=sum(need.nbytes or 0 for need in kept),
        on="host",
        note="weights, optimizer and reference, in pinned memory",
    )
