"""A policy whose ranks share the tokens of each micro-batch.

Each rank goes through the model with its own tokens alone, and computes the log-probs of the
actions that they predict. Then the ranks of the context group put these together, so that all have
all of them and compute the same loss. In the backward pass each takes the gradients of its own
actions; what the others' queries add to its keys and values comes around the ring. So the gradient
of a group is the sum over its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gcore_core.contract.errors import ConfigError
from gcore_language.context.attention import ARGUMENT, NAME, SharedRow, register
from gcore_language.context.groups import ContextGroups
from gcore_language.context.kernels import kernel_for
from gcore_language.context.layout import Layout
from gcore_language.packing import Batch, Sample, in_one_row, micro_batches
from gcore_language.policy import Entropy, Policy
from gcore_language.shared_values import PolicyWithValues
from gcore_language.values import ValueModel

#: Layers of these kinds say what they see by arguments that the attention gets.
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})

#: Makes a layout from the lengths of a row's records, int64[N].
Split = Callable[[np.ndarray], Layout]


@dataclass(frozen=True, kw_only=True)
class _OwnBatch(Batch):
    """What one rank computes of a batch: ids and positions int64[1, S] of its own tokens.

    predict, targets, temperature: of the actions that its tokens predict.
    """

    row: SharedRow


class SharedPolicy(Policy):
    """A policy of a model of transformers whose context group shares rows of whole records.

    A batch that is no such row, such as a stand-in, is computed by each rank alone.

    split: makes the layout of each row; it must give all ranks of the group the same.
    """

    def __init__(self, policy: Policy, groups: ContextGroups, split: Split) -> None:
        """Takes the place of a policy, and changes its model's attention.

        Raises ConfigError for a model whose attention cannot be changed.
        """
        self._begin_as(policy)
        self.layouts = policy.layouts
        self.head_apart = policy.head_apart
        self._groups = groups
        self.split = split
        _change_attention(self.model)

    def _begin_as(self, policy: Policy) -> None:
        """Initialises the class that this one stands before, with what the policy has."""
        super().__init__(policy.model)

    def forward(
        self, batch: Batch, entropy: Entropy = "none", tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See ``Policy.forward``; every rank of the group gets all log-probs and entropies."""
        if not _is_row(batch):
            return super().forward(batch, entropy, tokens)
        self._check_images(batch)
        part, places = self._own_part(batch)
        own_tokens = None if tokens is None else tokens[places]
        logp, entropies = super().forward(part, entropy, own_tokens)
        return self._joined(logp, entropies, places, len(batch.targets), entropy)

    def logits(self, batch: Batch) -> Tensor:
        """See ``Policy.logits``; every rank of the group gets those of all actions."""
        if not _is_row(batch):
            return super().logits(batch)
        part, places = self._own_part(batch)
        whole: Tensor = _Joined.apply(
            super().logits(part), places, len(batch.targets), self._groups.group
        )
        return whole

    def trial(self, batch: Batch) -> Tensor:
        """See ``Policy.trial``; every rank of the group gets that of all actions."""
        if not _is_row(batch):
            return super().trial(batch)
        part, places = self._own_part(batch)
        own = super().trial(part)
        columns = own if own.dim() > 1 else own[:, None]
        whole: Tensor = _Joined.apply(columns, places, len(batch.targets), self._groups.group)
        return whole if own.dim() > 1 else whole[:, 0]

    def _own_part(self, batch: Batch) -> tuple[_OwnBatch, Tensor]:
        """Returns what this rank computes, and int64[own actions]: which of the actions those are.

        Where a rank would have no token, a record that predicts nothing is added for all.
        """
        assert batch.positions is not None
        ids = batch.ids[0]
        positions = batch.positions[0]
        layout = self.split(_lengths(positions))
        device = ids.device
        if any(0 in layout.sizes(member) for member in range(layout.ring)):
            layout = _with_filler(layout)
            filler = torch.arange(int(layout.lengths[-1]), device=device)
            ids = torch.cat([ids, torch.zeros_like(filler)])
            positions = torch.cat([positions, filler])
        groups = self._groups
        own = torch.from_numpy(layout.own(groups.member, groups.place)).to(device)
        place = torch.full((len(ids),), -1, device=device)
        place[own] = torch.arange(len(own), device=device)
        predict = place[batch.predict]
        places = (predict >= 0).nonzero().flatten()
        temperature = batch.temperature
        changed = {
            "ids": ids[own][None],
            "positions": positions[own][None],
            "predict": predict[places],
            "targets": batch.targets[places],
            "temperature": None if temperature is None else temperature[places],
        }
        unchanged = {
            field.name: getattr(batch, field.name)
            for field in fields(Batch)
            if field.name not in changed
        }
        row = SharedRow(layout, groups, kernel_for(device))
        return _OwnBatch(**unchanged, **changed, row=row), places

    def _joined(
        self,
        logp: Tensor,
        entropies: Tensor | None,
        places: Tensor,
        actions: int,
        entropy: Entropy,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns log-probs and entropies of all actions, from those of this rank's.

        places: int64[own actions], which of the ``actions`` those are.
        """
        columns = logp if logp.dim() > 1 else logp[:, None]
        if entropies is not None:
            columns = torch.cat([columns, entropies[:, None]], 1)
        joined: Tensor = _Joined.apply(columns, places, actions, self._groups.group)
        whole = joined if entropies is None else joined[:, :-1]
        all_entropies = None if entropies is None else joined[:, -1]
        if all_entropies is not None and entropy == "metric":
            all_entropies = all_entropies.detach()
        return (whole if logp.dim() > 1 else whole[:, 0]), all_entropies

    def _transformers(self, module: Any, batch: Batch) -> Any:
        if not isinstance(batch, _OwnBatch):
            return super()._transformers(module, batch)
        row = {ARGUMENT: batch.row}
        return module(input_ids=batch.ids, position_ids=batch.positions, use_cache=False, **row)


class SharedPolicyWithValues(SharedPolicy, PolicyWithValues):
    """The same of a policy with a value head: the values before all actions are put together, too.

    Every rank computes the value loss of the whole group, as it does the objective's.
    """

    def _begin_as(self, policy: Policy) -> None:
        assert isinstance(policy, PolicyWithValues)
        PolicyWithValues.__init__(self, policy.model, detach=policy.detach, std=0.0, seed=0)
        self.score = policy.score


class SharedValueModel(SharedPolicy, ValueModel):
    """The same of a model of values alone, such as a critic."""

    def _begin_as(self, policy: Policy) -> None:
        ValueModel.__init__(self, policy.model)


def shared_policy(
    policy: Policy, groups: ContextGroups, split: Split, kind: type[SharedPolicy] | None = None
) -> SharedPolicy:
    """Returns a policy of the same model, with the same heads, whose ranks share rows.

    kind: the class to make, of a trainer that has its own; None: the one for the policy's heads.

    Raises ConfigError for a model whose attention cannot be changed.
    """
    if kind is not None:
        return kind(policy, groups, split)
    kind = SharedPolicy
    if isinstance(policy, PolicyWithValues):
        kind = SharedPolicyWithValues
    elif isinstance(policy, ValueModel):
        kind = SharedValueModel
    return kind(policy, groups, split)


def _is_row(batch: Batch) -> bool:
    """Returns whether a batch is a row that the ranks of a group have yet to share."""
    is_packed = batch.positions is not None and batch.mask is None
    return is_packed and not isinstance(batch, _OwnBatch)


class _Joined(torch.autograd.Function):
    """Puts the rows of all ranks of a group together; each row is one rank's."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, places: Tensor, rows: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(places)
        whole = own.new_zeros(rows, own.shape[1])
        whole[places] = own
        if group is not None:
            dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return gradient[places], None, None, None


def _lengths(positions: Tensor) -> np.ndarray:
    """Returns int64[N]: the records' lengths, from positions int64[tokens] of a packed row."""
    starts = (positions == 0).nonzero().flatten().cpu().numpy()
    return np.diff(np.append(starts, len(positions)))


def _with_filler(layout: Layout) -> Layout:
    """Returns a layout with one more record, of which each rank has a token at least."""
    tokens = 2 * layout.ring * layout.ulysses
    return replace(
        layout,
        lengths=np.append(layout.lengths, tokens),
        members=(*layout.members, tuple(range(layout.ring))),
    )


def _change_attention(model: Any) -> None:
    """Gives a model of transformers this library's attention. Raises ConfigError if it has none
    that can be changed, or layers of which the attention is not told what they see.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    register()
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation == NAME and kinds <= _KNOWN_LAYERS:
        return
    strange = sorted(kinds - _KNOWN_LAYERS)
    raise ConfigError(
        "the attention of this model cannot be shared by several slots.",
        where="context",
        why=f"It has layers of another kind: {', '.join(strange)}."
        if strange
        else f"{type(model).__name__} does not take its attention from transformers' interface.",
        todo="Leave context out for this model.",
    )


@torch.no_grad()
def check_shared(policy: Policy, device: torch.device, *, tolerance: float) -> None:
    """Raises ConfigError unless a shared row gives the log-probs that each rank computes alone.

    Of a model of values the last hidden states are compared, see ``ValueModel.trial``. All ranks
    call it, with all weights on each or sharded.

    tolerance: how far a log-prob may differ, in nats.
    """
    samples = _trial_samples(int(policy.model.config.get_text_config().vocab_size))
    row = in_one_row(samples, device)
    # records of one length each by itself, since the attention of padded rows has a mask
    alone = torch.cat(
        [
            policy.trial(batch)
            for s in samples
            for batch in micro_batches([s], "padded", 10**9, device)
        ]
    )
    gap = float((policy.trial(row) - alone).abs().max())
    if not gap <= tolerance:
        raise ConfigError(
            f"slots that share a record give log-probs that are {gap:.3g} off.",
            where="context",
            why=f"{type(policy.model).__name__} does not pass positions or arguments on to its "
            "attention.",
            todo="Leave context out for this model.",
        )


def _trial_samples(vocabulary: int) -> Sequence[Sample]:
    """Makes records of different lengths."""
    draw = np.random.default_rng(0)
    samples = []
    for index, (prompt, actions) in enumerate(((3, 5), (40, 30), (1, 1))):
        columns: dict[str, np.ndarray] = {
            "action_ids": draw.integers(0, vocabulary, actions).astype(np.int32),
            "action_mask": np.ones(actions, np.uint8),
            "logp": np.zeros(actions, np.float32),
            "temperature": np.ones((), np.float32),
        }
        ids = draw.integers(0, vocabulary, prompt).astype(np.int32)
        samples.append(Sample(index=index, ordinal=index, prompt=ids, columns=columns))
    return samples
