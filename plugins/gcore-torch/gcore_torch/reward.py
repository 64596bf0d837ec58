"""Provides the reward ``torch``: a scalar reward model that was trained on preferences.

It takes any sequence classifier of transformers with one output, whose logit is the reward. Of two
completions of one prompt with rewards r1 and r2, the first is preferred with probability 1 / (1 +
exp(r2 - r1)) (Bradley and Terry, 1952). So only differences within a prompt have a meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from gcore_language.chats import Chats, Unreadable
from gcore_language.model_files import open_model_files
from gcore_language.model_places import position_limit
from gcore_language.models import choose_device, load_reward_model, refuse_engine
from gcore_language.prompts import added_tokens, all_tokens, load_tokenizer

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.scorer import Score, ScoredRecord, failure
from gcore_torch.config import TorchRewardConfig


class TorchReward:
    """Scores records with a scalar reward model; see ``gcore_core.contract.scorer.Scorer``.

    The score is read where transformers reads it: at the last token of a decoder, at the first one
    of an encoder.
    """

    def __init__(self, config: TorchRewardConfig, context: WorkerContext) -> None:
        refuse_engine(context)
        path = str(open_model_files(context, config.path).directory)
        trust = config.trust_remote_code
        self._device = choose_device(config.device, context, config.threads, path)
        self._model = load_reward_model(path, dtype=config.dtype, trust_remote_code=trust).to(
            self._device
        )
        embedded = self._model.get_input_embeddings().weight.shape[0]
        self._tokenizer = load_tokenizer(path, embedded, trust_remote_code=trust)
        self._chats = Chats(self._tokenizer)
        self._added = added_tokens(self._tokenizer)
        text_config = self._model.config.get_text_config()
        self._pad = text_config.pad_token_id
        model_limit = (position_limit(text_config.to_dict()) or 2**31) - _unused_places(self._model)
        self._context_length = min(config.context_length or model_limit, model_limit)
        self._budget_tokens = config.budget_tokens

    def score(self, records: Sequence[ScoredRecord]) -> list[Score]:
        """Returns the reward of each record, in their order.

        A record that is too long, whose prompt the tokenizer cannot write, or whose reward is not
        finite gets a failure that says so.
        """
        scores: list[Score] = [failure("")] * len(records)
        rows: dict[int, list[int]] = {}
        for i, record in enumerate(records):
            try:
                ids = self._encode(record)
            except Unreadable as error:
                scores[i] = failure(f"row {record.prompt.row} for the reward model: {error}")
                continue
            if 0 < len(ids) <= self._context_length:
                rows[i] = ids
            else:
                scores[i] = failure(
                    f"{len(ids)} tokens, and the reward model takes 1 to {self._context_length}"
                )
        for batch in self._batches(rows):
            for i, value in zip(batch, self._forward([rows[i] for i in batch]), strict=True):
                scores[i] = (
                    Score(value=value)
                    if math.isfinite(value)
                    else failure(f"the reward model gave {value}")
                )
        return scores

    def _encode(self, record: ScoredRecord) -> list[int]:
        """Encodes prompt and completion as one text. Raises Unreadable where that cannot be.

        The tokenizer adds special tokens only without a chat template, which writes its own, and
        none in front that the text begins with: so it is read as the policy was asked.
        """
        prompt = record.prompt
        if prompt.messages is None:
            return self._tokens((prompt.text or "") + record.text, special=True)
        messages = [*prompt.messages, {"role": "assistant", "content": record.text}]
        return self._tokens(self._chats.written(messages), special=False)

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        (ids,) = all_tokens(self._tokenizer, [text], special=special)
        if isinstance(ids, Unreadable):
            raise ids
        return self._added.whole(ids) if special else ids

    def _batches(self, rows: dict[int, list[int]]) -> Iterator[list[int]]:
        """Yields batches of records' indexes; records of similar length share a batch.

        A batch has at most ``budget_tokens`` tokens, padding included, unless it is one record.
        """
        batch: list[int] = []
        # in order of length, the record that is added is the longest: all are padded to it
        for i in sorted(rows, key=lambda i: len(rows[i])):
            if batch and (len(batch) + 1) * len(rows[i]) > self._budget_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    @torch.no_grad()
    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Returns the reward of each row of tokens."""
        lengths = np.array([len(row) for row in rows])
        ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        mask = torch.arange(ids.shape[1])[None] < torch.from_numpy(lengths)[:, None]
        ids = ids.to(self._device)
        mask = mask.to(self._device, torch.long)
        if not hasattr(self._model, "score"):  # an encoder, which reads from its first token
            logits = self._model(input_ids=ids, attention_mask=mask).logits[:, 0]
        else:
            # transformers would look for the last token by its id in the padded rows, and mistake
            # padding for it where the two ids are equal
            hidden = self._model.base_model(
                input_ids=ids, attention_mask=mask, use_cache=False
            ).last_hidden_state
            last = torch.tensor([_last(row, self._pad) for row in rows], device=self._device)
            logits = self._model.score(hidden[torch.arange(len(rows), device=self._device), last])[
                :, 0
            ]
        values: list[float] = logits.float().cpu().tolist()
        return values


def _last(row: Sequence[int], pad: int | None) -> int:
    """Returns the place of the last token whose id is not the padding's; 0 when there is none.

    Models with that head were trained so.
    """
    return next((i for i in range(len(row) - 1, -1, -1) if row[i] != pad), 0)


def _unused_places(model: torch.nn.Module) -> int:
    """Returns how many places of a model no token has: RoBERTa's first one is behind padding's."""
    return next(
        (
            module.padding_idx + 1
            for name, module in model.named_modules()
            if name.endswith("position_embeddings")
            and isinstance(module, torch.nn.Embedding)
            and module.padding_idx is not None
        ),
        0,
    )
