"""Lets a generator's samples depend on their prompts and seeds alone, bit for bit.

A decoder computes a token beside others, and rounds differently beside different ones. That moves
log-probs by about 1e-6, and now and then a token: where the random number falls that close to the
edge between two. So a deterministic run samples in one of two ways.

Records of at most ``packing.STEADY_KEYS`` tokens, of models that go through the layout "flat", are
sampled by a ``SteadyDecoder``. Its logits are those of the trainer's forward pass.

Others are sampled by the usual decoder, and then

* a token that near an edge is drawn again, from logits of a forward pass over its sample alone;
* the log-probs of finished samples are those of a forward pass over whole samples.

Both passes are the trainer's own, in which a record's numbers do not depend on its company (see
``gcore_language.packing.build``). So the trainer, with the same weights, has the same log-probs to
the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from gcore_language.images import takes_images
from gcore_language.packing import Batch, Sample, steady_batches
from gcore_language.policy import Policy, check_layouts
from gcore_language.routing import has_experts

from gcore_core.contract.columns import Columns
from gcore_core.contract.errors import ContractError
from gcore_torch.config import TorchGeneratorConfig
from gcore_torch.steady_decoder import SteadyDecoder, columns_of

#: A decoder's probabilities may be this far from those of the forward pass. Float32 leaves some
#: 1e-5; of tokens drawn, about 1 in 5,000 is so near to an edge.
NEAR = 1e-4
_TOKENS = 16384
#: Lengths of the prompts, and the number of actions, with which decoders are tried.
_TRIAL_PROMPTS = (3, 17, 30)
_TRIAL_ACTIONS = 19


class SteadyScorer:
    """Computes log-probs and logits as the trainer does.

    role: the generator's, for errors.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, role: str) -> None:
        self._policy = Policy(model)
        self._device = device
        self._role = role
        check_layouts(self._policy, device, may_flat=True, tolerance=1e-3)

    @torch.no_grad()
    def next_logits(self, prompt: np.ndarray, actions: np.ndarray) -> torch.Tensor:
        """Returns the logits [1, V] of the token that follows a prompt and the actions so far.

        prompt: int[P]. actions: int[A].
        """
        columns = columns_of(np.append(actions, 0).astype(np.int32))
        (batch,) = self._batches([Sample(index=0, ordinal=0, prompt=prompt, columns=columns)])
        return self._policy.logits(batch)[-1:]

    @torch.no_grad()
    def rescore(self, records: Sequence[Columns], older: Sequence[int] = ()) -> None:
        """Replaces the column ``logp`` of records by the forward pass's.

        Raises ContractError where the decoder's differ so much that it may have drawn other tokens.

        older: of each record, how many of its first actions keep what they have, since older
            weights sampled them; without it none.
        """
        kept = list(older) or [0] * len(records)
        shown = [_without(record, count) for record, count in zip(records, kept, strict=True)]
        samples = [
            Sample(index=i, ordinal=0, prompt=record["prompt_ids"], columns=record)
            for i, record in enumerate(shown)
            if len(record["action_ids"]) > kept[i]
        ]
        samples.sort(key=lambda sample: sample.prompt.tobytes())  # so that each is read once
        for batch in self._batches(samples):
            logp = self._policy(batch)[0].numpy()
            decoded = batch.columns["rollout_logp"].numpy()
            # What older weights drew is masked, with the log-prob 0, and is not compared.
            drawn = np.concatenate([shown[i]["action_mask"] for i in batch.index]) != 0
            logp[~drawn] = 0.0
            self._compare(float(np.abs(np.exp(logp) - np.exp(decoded)).max()))
            ends = np.cumsum([len(records[i]["action_ids"]) for i in batch.index])
            for i, part in zip(batch.index.tolist(), np.split(logp, ends[:-1]), strict=True):
                before = records[i]["logp"][: kept[i]]
                records[i]["logp"] = np.concatenate([before, part[kept[i] :]])

    @torch.no_grad()
    def decodes_alike(self, decoder: SteadyDecoder, vocabulary: int) -> bool:
        """Returns whether a decoder has this scorer's bits, on random tokens.

        It is tried with one row, whose products are filled up with zeros, and with many. The
        answers are longer than the 16 columns to a multiple of which attention is padded.

        vocabulary: number of tokens to draw from.
        """
        if "flat" not in self._policy.layouts:
            return False
        draw = np.random.default_rng(0)
        prompts = [draw.integers(0, vocabulary, length) for length in _TRIAL_PROMPTS]
        for repeats in ([1, 0, 0], [5, 3, 12]):
            rows = [
                prompt for prompt, count in zip(prompts, repeats, strict=True) for _ in range(count)
            ]
            actions = draw.integers(0, vocabulary, (len(rows), _TRIAL_ACTIONS))
            read = [prompt for prompt, count in zip(prompts, repeats, strict=True) if count]
            logits = [decoder.prefill(read, [count for count in repeats if count])]
            logits += [decoder.advance(torch.from_numpy(column)) for column in actions.T[:-1]]
            decoder.clear()
            samples = [
                Sample(index=i, ordinal=0, prompt=prompt, columns=columns_of(answer))
                for i, (prompt, answer) in enumerate(zip(rows, actions, strict=True))
            ]
            (batch,) = self._batches(samples)
            if not torch.equal(torch.stack(logits, 1).flatten(0, 1), self._policy.logits(batch)):
                return False
        return True

    def _batches(self, samples: Sequence[Sample]) -> list[Batch]:
        return list(steady_batches(samples, self._policy.layouts, _TOKENS, self._device))

    def _compare(self, gap: float) -> None:
        if not gap <= NEAR:
            raise ContractError(
                f"the decoder's probabilities are {gap:.3g} away from the model's.",
                where=f"roles.{self._role}.config.decoder",
                why=f"A deterministic run holds them to {NEAR:g}: else it may draw other tokens.",
                todo="Set decoder: transformers, or run.deterministic: false.",
            )


def _without(record: Columns, count: int) -> Columns:
    """Returns a record whose first ``count`` actions look as if they had not been drawn here."""
    if not count:
        return record
    columns = dict(record)
    for name in ("logp", "action_mask"):
        columns[name] = np.concatenate([np.zeros_like(record[name][:count]), record[name][count:]])
    return columns


def can_be_steady(model: torch.nn.Module, config: TorchGeneratorConfig, device: str) -> bool:
    """Returns whether a ``SteadyScorer`` is known to have the trainer's bits here.

    It is for text models in float32 on a CPU, without top_p or top_k, whose edges lie elsewhere.
    Experts have other bits in another batch.
    """
    plain = config.top_p == 1 and config.top_k == 0
    text = not takes_images(model.config) and not has_experts(model.config)
    return text and plain and config.dtype == "float32" and device == "cpu"
