"""Computes log-probs and entropies of a packed batch's actions with a causal language model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gcore_core.contract.errors import DataError
from gcore_language import flat
from gcore_language.image_text import hidden_states
from gcore_language.images import takes_images
from gcore_language.packing import Batch, Layout, Sample, micro_batches
from gcore_language.routing import Routers

Entropy = Literal["none", "metric", "gradient"]

#: The most logits, counted in numbers, that are held at once. The head is applied in chunks of
#: actions when there would be more.
_CHUNK_LOGITS = 2**25


class Policy(nn.Module):
    """Wraps a Hugging Face causal language model, so that sharding has one root and one forward.

    model: the wrapped model.
    layouts: the packings with which the model gives the right log-probs; see ``check_layouts``.
    head_apart: whether the logits are the output embedding of the last hidden state and nothing
        more. Then only positions that predict actions go through the output embedding.
    routers: of a mixture of experts; they take the experts of a batch's records. None: there are
        none, or nobody watches them.
    around_layers: makes a context in which the layers run where the head is apart, such as one that
        keeps elsewhere what autograd saves.
    takes_images: whether the model takes images. Such models are known to have their head apart
        and to be right when padded, so that they need no trial.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.layouts: frozenset[Layout] = frozenset({"padded"})
        self.takes_images = takes_images(model.config)
        self.head_apart = self.takes_images
        self.routers: Routers | None = None
        self.around_layers: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(
        self, batch: Batch, entropy: Entropy = "none", tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (log-probs float32[A], entropies float32[A]) of the batch's actions.

        Both are at the actions' temperature. Entropies are None when ``entropy`` is "none", and
        have no gradient when it is "metric".

        tokens: int64[A, k], ids of other tokens whose log-probs at the actions' places are wanted.
            Log-probs are then float32[A, 1 + k]: first the action's, then those of these tokens.
            They are one tensor, so that a sharded model sees all of its outputs.

        Raises DataError when the batch has images and the model takes none.
        """
        self._check_images(batch)
        if self.head_apart:
            return self.logp_of(self._states(batch), batch, entropy, tokens)
        logits = self._whole_logits(batch)
        targets = _targets(batch, tokens)
        logp, entropies = _action_logp(logits, targets, batch.temperature, entropy)
        return (logp.squeeze(1) if tokens is None else logp), entropies

    def logp_of(
        self, hidden: Tensor, batch: Batch, entropy: Entropy, tokens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns what ``forward`` does, of the hidden states [A, D] before the actions; only where
        the head is apart.
        """
        head = self.model.get_output_embeddings()
        logp, entropies = _head_logp(head, hidden, batch, entropy, _targets(batch, tokens))
        return (logp.squeeze(1) if tokens is None else logp), entropies

    def likeliest(self, batch: Batch, k: int, known: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (action log-probs float32[A], ids int64[A, k], their log-probs float32[A, k]).

        The ids are those of the k most probable tokens at each action, from the likeliest down, at
        the actions' temperature. It is not for a sharded model, and has no gradient.

        k: 1..known.
        known: only tokens below this number are looked for. Others keep their probability.
        """
        self._check_images(batch)

        def run(span: slice) -> tuple[Tensor, ...]:
            logits = self._whole_logits(batch)[span] if states is None else head(states[span])
            logp = _logp_of(logits, _part(batch.temperature, span))
            own = logp.gather(1, batch.targets[span, None]).squeeze(1)
            best = logp[:, :known].topk(k, dim=1)
            return own, best.indices, best.values

        def head(hidden: Tensor) -> Tensor:
            return flat.of_enough_rows(self.model.get_output_embeddings(), hidden)

        with torch.no_grad():
            states = self._states(batch) if self.head_apart else None
            parts = [run(span) for span in self._spans(len(batch.targets), states)]
        own, ids, best = (torch.cat(part) for part in zip(*parts, strict=True))
        return own, ids, best

    def _spans(self, actions: int, states: Tensor | None) -> list[slice]:
        """Returns the chunks of actions that go through the head together; one without states."""
        if states is None:
            return [slice(0, actions)]
        rows = _chunk_rows(self.model.get_output_embeddings())
        return [slice(start, start + rows) for start in range(0, actions, rows)]

    def _check_images(self, batch: Batch) -> None:
        if batch.images and not self.takes_images:
            raise DataError(
                "records have images, and the model takes none.",
                where=self.model.config.name_or_path,
            )

    def _states(self, batch: Batch) -> Tensor:
        """Returns the last hidden states [A, D] at the positions that predict actions."""
        if not self.takes_images:
            return self._hidden(batch)
        images = batch.images or (None,) * len(batch.ids)
        with self.around_layers():
            hidden = hidden_states(self.model, batch.ids, images).flatten(0, 1)
        return hidden.index_select(0, batch.predict)

    def trial(self, batch: Batch) -> Tensor:
        """Returns what ``check_layouts`` compares, [A, ...]: log-probs."""
        logp: Tensor = self(batch)[0]
        return logp

    def logits(self, batch: Batch) -> Tensor:
        """Returns the logits [A, vocabulary] from which ``forward`` computes log-probs, before the
        temperature; not for models that take images.
        """
        if not self.head_apart:
            return self._whole_logits(batch)
        return flat.of_enough_rows(self.model.get_output_embeddings(), self._hidden(batch))

    def _whole_logits(self, batch: Batch) -> Tensor:
        """Returns the model's own logits at the positions that predict actions."""
        logits: Tensor = self._transformers(self.model, batch).logits
        return logits.flatten(0, 1).index_select(0, batch.predict)

    def _hidden(self, batch: Batch) -> Tensor:
        """Returns the states of a model that takes no images."""
        with self.around_layers():
            if batch.flat is not None:
                hidden = flat.forward(self.model, batch.ids, batch.flat)
            else:
                found = self._transformers(self.model.base_model, batch)
                hidden = found.last_hidden_state.flatten(0, 1)
        return hidden.index_select(0, batch.predict)

    def _transformers(self, module: Any, batch: Batch) -> Any:
        """Calls a module of transformers on the batch's rows, with mask and positions if any."""
        if self.routers is not None:
            self.routers.begin(batch.routing)
        extra = (
            {}
            if batch.mask is None
            else {"attention_mask": batch.mask, "position_ids": batch.positions}
        )
        if torch.is_autocast_enabled(batch.ids.device.type) and batch.mask is not None:
            extra["attention_mask"] = batch.mask.to(torch.get_autocast_dtype(batch.ids.device.type))
        return module(input_ids=batch.ids, use_cache=False, **extra)


def _targets(batch: Batch, tokens: Tensor | None) -> Tensor:
    """Returns the tokens whose log-probs are wanted, int64[A, 1 + k]: the actions come first."""
    actions = batch.targets[:, None]
    return actions if tokens is None else torch.cat([actions, tokens], 1)


def _head_logp(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    batch: Batch,
    entropy: Entropy,
    targets: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Computes ``_action_logp`` of ``head(hidden)`` in chunks.

    targets: int64[A, n].

    The backward pass computes the logits of each chunk again, so that one chunk's are held at a
    time.
    """

    def run(h: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return _action_logp(flat.of_enough_rows(head, h), targets, temperature, entropy)

    rows = _chunk_rows(head)
    if len(hidden) <= rows:
        return run(hidden, targets, batch.temperature)
    parts = []
    for start in range(0, len(hidden), rows):
        span = slice(start, start + rows)
        temperature = _part(batch.temperature, span)
        parts.append(checkpoint(run, hidden[span], targets[span], temperature, use_reentrant=False))
    logp = torch.cat([part[0] for part in parts])
    return logp, None if entropy == "none" else torch.cat([part[1] for part in parts])


def _chunk_rows(head: Any) -> int:
    """Returns how many actions go through an output embedding at once."""
    return max(1, _CHUNK_LOGITS // int(head.weight.shape[0]))


def _part(temperature: Tensor | None, span: slice) -> Tensor | None:
    return None if temperature is None else temperature[span]


def _logp_of(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Returns the log-probs float32[A, vocabulary] at the actions' temperature.

    Those of float64 logits are float64.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if temperature is not None:
        logits = logits / temperature[:, None]
    return logits.log_softmax(-1)


def _action_logp(
    logits: Tensor, targets: Tensor, temperature: Tensor | None, entropy: Entropy
) -> tuple[Tensor, Tensor | None]:
    """Returns (log-probs float32[A, n], entropies float32[A] or None) from logits [A, vocabulary].

    targets: int64[A, n], the tokens whose log-probs are wanted.
    """
    logp = _logp_of(logits, temperature)
    target_logp = logp.gather(1, targets)
    if entropy == "none":
        return target_logp, None
    if entropy == "metric":
        logp = logp.detach()
    return target_logp, -(logp.exp() * logp).sum(-1)


@torch.no_grad()
def check_layouts(
    policy: Policy, device: torch.device, *, may_flat: bool, tolerance: float
) -> None:
    """Tries which layouts are right for this model, and sets ``head_apart`` and ``layouts``.

    The log-probs of random tokens must be those of padded rows. Models whose positions or attention
    windows ignore ``position_ids`` or a 4-D mask fail the trial and stay padded.

    may_flat: whether to try the layout "flat".
    tolerance: how far a log-prob may differ, in nats.
    """
    if policy.takes_images:
        return
    samples = _trial_samples(int(policy.model.config.get_text_config().vocab_size))
    expected = _trial(policy, samples, "padded", device)

    def agrees(layout: Layout) -> bool:
        try:
            logp = _trial(policy, samples, layout, device)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
            return False  # the model does not take such inputs
        return bool((logp - expected).abs().max() <= tolerance)

    if policy.model.get_output_embeddings() is not None:
        policy.head_apart = True
        policy.head_apart = agrees("padded")
    layouts: set[Layout] = {"padded"}
    # The mask of "shared" takes the window's place, and the trial's samples fit into any window.
    if not flat.has_window(policy.model.config.get_text_config()) and agrees("shared"):
        layouts.add("shared")
    if may_flat and policy.head_apart and flat.family_supported(policy.model.config):
        flat.install(policy.model)
        if agrees("flat"):
            layouts.add("flat")
    policy.layouts = frozenset(layouts)


def _trial(policy: Policy, samples: list[Sample], layout: Layout, device: torch.device) -> Tensor:
    """Returns what is compared of all samples' actions, in one batch, in the order of samples."""
    (batch,) = micro_batches(samples, layout, 10**9, device)
    logp = policy.trial(batch)
    out = torch.empty_like(logp)  # rows may have been reordered; bring them back by record
    place = np.concatenate(
        [np.arange(i * _TRIAL_ACTIONS, (i + 1) * _TRIAL_ACTIONS) for i in batch.index]
    )
    out[torch.from_numpy(place).to(device)] = logp
    return out


_TRIAL_ACTIONS = 6


def _trial_samples(vocabulary: int) -> list[Sample]:
    """Makes two groups of two samples, whose prompts differ in length."""
    draw = np.random.default_rng(0)
    samples: list[Sample] = []
    for group, length in enumerate((5, 9)):
        prompt = draw.integers(0, vocabulary, length).astype(np.int32)
        for _ in range(2):
            columns: dict[str, np.ndarray] = {
                "action_ids": draw.integers(0, vocabulary, _TRIAL_ACTIONS).astype(np.int32),
                "action_mask": np.ones(_TRIAL_ACTIONS, np.uint8),
                "logp": np.zeros(_TRIAL_ACTIONS, np.float32),
                "temperature": np.ones((), np.float32),
            }
            samples.append(
                Sample(index=len(samples), ordinal=group, prompt=prompt, columns=columns)
            )
    return samples
