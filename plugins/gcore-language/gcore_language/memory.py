"""Computes how much memory a language model takes to train and to sample from, by closed forms.

Each form counts the tensors that transformers' Llama-like decoders and this library hold at the
moment when they hold most. ``benchmarks/large_plan.py`` compares them with torch's own tracker.

Legend of sizes: D hidden size, V vocabulary, I feed-forward channels, H query heads, K key-value
heads, E head size, T tokens of a micro-batch, A its actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gcore_core.contract.memory import PHASES, MemoryNeed, WorkerShape
from gcore_language.architecture import Architecture, Tensors, numbers
from gcore_language.settings import TrainerSettings

#: dtype -> bytes of a number.
NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Optimizer states of AdamW in float32: two moments for each number.
MOMENTS_BYTES = 8
#: The most logits that are held at once, see ``gcore_language.policy``.
CHUNK_LOGITS = 2**25
#: The most bytes of a bucket of a push, unless one tensor is larger (``gcore_core.runtime.push``).
_BUCKET_BYTES = 64 << 20
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

    checkpointing: only the layers' inputs are kept, and one layer is computed again at a time.
    """
    layer = saved_by_layer(model, run)
    last_norm = 3 * 4 * model.hidden * run.tokens
    mask = 4 * run.tokens * run.mask_row
    if checkpointing:
        inputs = 4 * model.hidden * run.tokens * model.layers
        return inputs + layer + last_norm + mask
    return layer * model.layers + last_norm + mask


def cast_weights(model: Architecture, dtype: str) -> int:
    """Returns the bytes of the copies that autocast makes of the layers' matrices.

    Each is made once in a forward pass and kept for the backward pass, whole on every rank.
    """
    return 0 if dtype == "float32" else NBYTES[dtype] * model.matrices


def logits(model: Architecture, run: Pass, *, gradient: bool) -> int:
    """Returns the bytes that the head holds at its fullest.

    The head is applied in chunks of at most ``CHUNK_LOGITS`` logits. Of a chunk there are, at
    once, the logits, their log-softmax in float32 and one more of that size: the gradient of the
    one, or what the entropy is summed from.
    """
    chunk = min(run.actions, max(1, CHUNK_LOGITS // model.vocabulary))
    units = 4 if gradient else 3
    head = 0 if run.dtype == "float32" else run.nbytes * model.vocabulary * model.hidden
    return units * 4 * chunk * model.vocabulary + head


def forward_only(model: Architecture, run: Pass) -> int:
    """Returns the bytes of activations of a forward pass without gradient: those of one layer."""
    widest = 3 * (model.intermediate or 0)
    if model.experts:
        widest = model.experts_per_token * 3 * model.expert_channels
    return run.tokens * (3 * 4 * model.hidden + run.nbytes * widest) + 4 * run.tokens * run.mask_row


def largest_tensor(model: Architecture) -> int:
    """Returns how many numbers the largest single tensor holds."""
    tensors: list[Tensors] = [*model.root(), *model.layer()]
    return max(numbers([Tensors(shape=item.shape)]) for item in tensors)


# -- what every engine needs -----------------------------------------------------------------------


def pass_of(model: Architecture, settings: TrainerSettings, worker: WorkerShape) -> Pass:
    """Returns the fullest forward pass that a trainer's settings allow.

    Every token is taken to be an action, which the head computes in chunks anyway.
    """
    shared = settings.packing == "shared_prompt"
    row = min(settings.budget_tokens, _SHARED_ROW_TOKENS) if shared else 0
    return Pass(
        tokens=settings.budget_tokens,
        actions=settings.budget_tokens,
        dtype=settings.dtype,
        repeats_keys=shared and worker.device != "cpu",
        mask_row=row,
    )


def keeps_reference(settings: TrainerSettings, worker: WorkerShape) -> bool:
    """Returns whether the trainer holds a reference model; as in ``gcore_language.training``."""
    required = "ref_logp" in worker.requires and "ref_logp" not in worker.given
    return settings.reference or bool(settings.reference_path) or required


def push_buckets(model: Architecture, dtype: str) -> MemoryNeed:
    """Returns the need of a push's memory, which the trainer and its receivers share."""
    nbytes = max(_BUCKET_BYTES, NBYTES[dtype] * largest_tensor(model))
    return MemoryNeed(
        phase="push",
        what="push buckets",
        nbytes=nbytes,
        on="host",
        shared=True,
        note="shared memory of 64 MiB, or of the largest tensor",
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
