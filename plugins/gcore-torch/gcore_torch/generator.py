"""The provider ``torch`` of kind generator: samples from a Hugging Face causal language model with a cached batch.

Every call of ``step`` gives each running sample one more token. Samples join as rows become free and leave when they
end. A sample's randomness depends on its seed and the position alone; ``deterministic`` also fixes which samples run
together (waiting ones are sorted, and join only when nothing runs), so that tokens repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from gcore_core.errors import WeightMismatch
from gcore_core.protocols import Columns, Finished, SampleRequest, WorkerContext
from gcore_core.records import ABORTED, FAILED, FINISHED, TRUNCATED, Prompt, TensorSpec, WeightPlan
from gcore_torch.config import TorchGeneratorConfig
from gcore_torch.decoder import make_decoder
from gcore_torch.model import choose_device, end_tokens, load_model, load_tokenizer, model_path
from gcore_torch.packing import Sample, micro_batches
from gcore_torch.policy import Policy, check_layouts
from gcore_torch.sampling import choose, uniforms
from gcore_torch.weights import copy_bytes, named_tensors, spec_of, to_bytes

_SEED_MASK = 2**64 - 1
_SCORE_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: SampleRequest
    prompt: np.ndarray  # int32[P]
    limit: int  # most actions


class _Rows:
    """What is known of the running samples, row by row as the decoder has them."""

    def __init__(self, capacity: int, actions: int) -> None:
        self.count = 0
        self.waiting: list[_Waiting] = []
        self.tokens = np.zeros((capacity, actions), np.int32)
        self.logp = np.zeros((capacity, actions), np.float32)
        self.length = np.zeros(capacity, np.int64)
        self.limit = np.zeros(capacity, np.int64)
        self.seed = np.zeros(capacity, np.uint64)
        self.greedy = np.zeros(capacity, np.bool_)
        self.version = np.zeros(capacity, np.int64)  # that sampled the first action

    def add(self, rows: Sequence[_Waiting], version: int) -> None:
        fresh = slice(self.count, self.count + len(rows))
        self.length[fresh] = 0
        self.limit[fresh] = [row.limit for row in rows]
        self.seed[fresh] = [row.request.seed & _SEED_MASK for row in rows]
        self.greedy[fresh] = [row.request.greedy for row in rows]
        self.version[fresh] = version
        self.waiting += rows
        self.count += len(rows)

    def append(self, tokens: np.ndarray, logp: np.ndarray) -> None:
        row, at = np.arange(self.count), self.length[: self.count]
        self.tokens[row, at] = tokens
        self.logp[row, at] = logp
        self.length[: self.count] += 1

    def reorder(self, order: np.ndarray) -> None:
        """Keeps the rows ``order`` names, in that order."""
        to = (order != np.arange(len(order))).nonzero()[0]
        source = order[to]
        for column in (self.tokens, self.logp, self.length, self.limit, self.seed, self.greedy, self.version):
            column[to] = column[source]
        self.waiting = [self.waiting[i] for i in order.tolist()]
        self.count = len(order)


class TorchGenerator:
    """See ``gcore_core.protocols.Generator``, ``ReceivesWeights``, ``Fingerprints`` and ``ScoresLogprobs``."""

    def __init__(self, config: TorchGeneratorConfig, context: WorkerContext) -> None:
        self.version = 0
        self._config, self._context = config, context
        self._device = choose_device(config.device, context, config.threads)
        path = model_path(context)
        trust = config.trust_remote_code
        self._model = load_model(path, dtype=config.dtype, trust_remote_code=trust).to(self._device)
        self._tokenizer = load_tokenizer(path, self._model, trust_remote_code=trust)
        self._ends = np.zeros(self._model.get_output_embeddings().weight.shape[0], np.bool_)
        self._ends[list(end_tokens(self._model, self._tokenizer))] = True
        longest = getattr(self._model.config.get_text_config(), "max_position_embeddings", None) or 2**31
        self._context_length = min(config.context_length or longest, longest)
        tolerance = 1e-3 if config.dtype == "float32" else 0.5
        self._decoder = make_decoder(self._model, config.decoder, config.max_batch, tolerance)
        self._tensors = named_tensors(self._model)
        self._rows = _Rows(config.max_batch, config.max_new_tokens)
        self._queue: list[_Waiting] = []
        self._failed: list[Finished] = []
        self._stale = False  # running rows were read under older weights
        self._missing: set[str] | None = None  # tensors yet to come, during a push
        self._scorer: Policy | None = None

    # -- sampling -----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """See ``Generator.submit``; requests of one ordinal have one prompt, which is encoded once."""
        first = {request.ordinal: request.prompt for request in reversed(requests)}
        encoded = dict(zip(first, self._encode(list(first.values())), strict=True))
        for request in requests:
            prompt = encoded[request.ordinal]
            room = self._context_length - len(prompt)
            if len(prompt) == 0 or room <= 0:
                reason = "prompt_too_long" if len(prompt) else "prompt_empty"
                versions = (self.version, self.version)
                self._failed.append(Finished(request=request, status=FAILED, versions=versions, reason=reason))
            else:
                self._queue.append(_Waiting(request, prompt, min(self._config.max_new_tokens, room)))

    def _encode(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """int32[P] each. A chat template writes its own special tokens, so none are added to what it gives."""
        found: list[np.ndarray] = [np.zeros(0, np.int32)] * len(prompts)
        plain = [i for i, prompt in enumerate(prompts) if prompt.messages is None]
        chats = [i for i, prompt in enumerate(prompts) if prompt.messages is not None]
        texts = [prompts[i].text or "" for i in plain]
        turns = [
            self._tokenizer.apply_chat_template(prompts[i].messages, add_generation_prompt=True, tokenize=False)
            for i in chats
        ]
        for where, batch, special in ((plain, texts, True), (chats, turns, False)):
            if batch:
                ids = self._tokenizer(batch, add_special_tokens=special, return_attention_mask=False).input_ids
                for i, row in zip(where, ids, strict=True):
                    found[i] = np.array(row, np.int32)
        return found

    def step(self) -> list[Finished]:
        """See ``Generator.step``: one token for each running sample, after waiting ones have joined."""
        if self._missing is not None:
            raise WeightMismatch(
                "a weight push has begun and was not committed.",
                where=f"roles.{self._context.role}",
                todo="Push all tensors again.",
            )
        finished, self._failed = self._failed, []
        logits = []
        self._stale = self._stale and self._rows.count > 0
        if self._rows.count:
            logits.append(self._advance())
        if joining := self._take():
            logits.append(self._join(joining))
        if logits:
            self._sample(torch.cat(logits))
            finished += self._collect()
        return finished

    def _take(self) -> list[_Waiting]:
        """Waiting samples that join now: as many as there are free rows, prompts of one length together."""
        free = self._config.max_batch - self._rows.count
        if not self._queue or free <= 0 or (self._context.deterministic and self._rows.count):
            return []
        if self._context.deterministic:
            self._queue.sort(key=lambda w: (w.request.ordinal, w.request.sample))
        taken, self._queue = self._queue[:free], self._queue[free:]
        return sorted(taken, key=lambda w: len(w.prompt))

    def _join(self, joining: list[_Waiting]) -> torch.Tensor:
        by_prompt: dict[bytes, list[_Waiting]] = {}
        for waiting in joining:
            by_prompt.setdefault(waiting.prompt.tobytes(), []).append(waiting)
        groups = list(by_prompt.values())
        self._rows.add([waiting for group in groups for waiting in group], self.version)
        return self._decoder.prefill([group[0].prompt for group in groups], [len(group) for group in groups])

    def _advance(self) -> torch.Tensor:
        rows = self._rows
        if not self._stale:
            last = rows.tokens[np.arange(rows.count), rows.length[: rows.count] - 1]
            return self._decoder.advance(torch.from_numpy(last.astype(np.int64)).to(self._device))
        # the weights are new: what running samples have so far is read again
        self._stale = False
        self._decoder.clear()
        so_far = [
            np.concatenate([waiting.prompt, rows.tokens[i, : rows.length[i]]]) for i, waiting in enumerate(rows.waiting)
        ]
        return self._decoder.prefill(so_far, [1] * rows.count)

    def _sample(self, logits: torch.Tensor) -> None:
        rows, config = self._rows, self._config
        uniform = uniforms(rows.seed[: rows.count], rows.length[: rows.count])
        greedy = rows.greedy[: rows.count]
        tokens, logp = choose(
            logits,
            torch.from_numpy(uniform).to(self._device),
            config.temperature,
            torch.from_numpy(greedy).to(self._device) if greedy.any() else None,
            top_p=config.top_p,
            top_k=config.top_k,
        )
        rows.append(tokens.cpu().numpy(), logp.cpu().numpy())

    def _collect(self) -> list[Finished]:
        """Takes out the rows that ended with this token."""
        rows = self._rows
        length = rows.length[: rows.count]
        last = rows.tokens[np.arange(rows.count), length - 1]
        ended = self._ends[last]
        gone = ended | (length >= rows.limit[: rows.count])
        stopped = self._stopped(~ended) if self._config.stop else np.zeros_like(ended)
        gone |= stopped
        if not gone.any():
            return []
        finished = []
        indexes = gone.nonzero()[0]
        for i, columns in zip(indexes.tolist(), self._columns(indexes), strict=True):
            status, reason = (FINISHED, "") if ended[i] else (FINISHED, "stop") if stopped[i] else (TRUNCATED, "length")
            finished.append(self._finish(i, status, reason, columns))
        rows.reorder(self._decoder.drop(gone))
        return finished

    def _stopped(self, candidates: np.ndarray) -> np.ndarray:
        """Rows whose text contains a stop string."""
        indexes = candidates.nonzero()[0]
        found = np.zeros_like(candidates)
        for i, text in zip(indexes.tolist(), self._decode(indexes), strict=True):
            found[i] = any(stop in text for stop in self._config.stop)
        return found

    def _finish(self, row: int, status: str, reason: str, columns: Columns) -> Finished:
        versions = (int(self._rows.version[row]), self.version)
        request = self._rows.waiting[row].request
        return Finished(request=request, status=status, versions=versions, columns=columns, reason=reason)

    def _columns(self, indexes: np.ndarray) -> list[Columns]:
        rows = self._rows
        tokens, logp = rows.tokens[indexes], rows.logp[indexes]  # copies, which the views below keep
        mask = np.ones(tokens.shape[1], np.uint8)
        cold, warm = np.ones((), np.float32), np.array(self._config.temperature or 1.0, np.float32)
        found: list[Columns] = []
        for place, (i, text) in enumerate(zip(indexes.tolist(), self._decode(indexes), strict=True)):
            actions = int(rows.length[i])
            found.append(
                {
                    "prompt_ids": rows.waiting[i].prompt,
                    "action_ids": tokens[place, :actions],
                    "logp": logp[place, :actions],
                    "action_mask": mask[:actions],
                    "temperature": cold if rows.greedy[i] else warm,
                    "text": np.frombuffer(text.encode(), np.uint8),
                }
            )
        return found

    def _decode(self, indexes: np.ndarray) -> list[str]:
        rows = self._rows
        ids = [rows.tokens[i, : rows.length[i]].tolist() for i in indexes.tolist()]
        tokenizer = self._tokenizer
        if tokenizer.is_fast and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
            # the same as batch_decode, in one call of the Rust library
            return list(tokenizer.backend_tokenizer.decode_batch(ids, skip_special_tokens=True))
        return list(tokenizer.batch_decode(ids, skip_special_tokens=True))

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        """See ``Generator.abort``; a sample that has not begun ends without actions, an unknown key is ignored."""
        wanted = set(keys)
        finished = []
        kept = []
        for waiting in self._queue:
            request = waiting.request
            if (request.ordinal, request.sample) in wanted:
                versions = (self.version, self.version)
                finished.append(Finished(request=request, status=ABORTED, versions=versions, columns=_empty(waiting)))
            else:
                kept.append(waiting)
        self._queue = kept
        rows = self._rows
        gone = np.array([(w.request.ordinal, w.request.sample) in wanted for w in rows.waiting], np.bool_)
        if gone.any():
            indexes = gone.nonzero()[0]
            for i, columns in zip(indexes.tolist(), self._columns(indexes), strict=True):
                finished.append(self._finish(i, ABORTED, "", columns))
            rows.reorder(self._decoder.drop(gone))
        return finished

    def close(self) -> None:
        self._decoder.clear()
        self._queue.clear()

    # -- weights ------------------------------------------------------------------------------------------------------

    def begin_weights(self, plan: WeightPlan) -> None:
        """See ``ReceivesWeights.begin_weights``; dtypes may differ, they are converted."""
        if plan.version < self.version:
            raise self._mismatch(
                f"weights version {plan.version} is older than {self.version}, which is loaded.",
                todo="Push a newer one.",
            )
        offered = {spec.name: spec for spec in plan.tensors}
        for name in offered.keys() - self._tensors.keys():
            raise self._mismatch(f"the plan has tensor {name}, which the model does not have.", tensor=name)
        for name, tensor in self._tensors.items():
            if name not in offered:
                raise self._mismatch(f"the plan lacks tensor {name}.", tensor=name)
            shape = tuple(offered[name].shape)
            if shape != tuple(tensor.shape):
                raise self._mismatch(
                    f"tensor {name} has shape {shape} in the plan and {tuple(tensor.shape)} here.", tensor=name
                )
        self._missing = set(self._tensors)

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        if self._missing is None:
            raise self._mismatch("tensors came before their plan.")
        for spec, array in tensors:
            if spec.name not in self._tensors or array.nbytes != spec.nbytes:
                raise self._mismatch(f"tensor {spec.name} is not as planned.", tensor=spec.name)
            copy_bytes(self._tensors[spec.name], spec, array)
            self._missing.discard(spec.name)

    def commit_weights(self, plan: WeightPlan) -> None:
        if self._missing is None or self._missing:
            lacking = sorted(self._missing or ["all of them"])
            raise self._mismatch(f"tensor {lacking[0]} has not come.", why=f"{len(lacking)} are missing.")
        self._missing = None
        self._stale = self._rows.count > 0
        self.version = plan.version

    def _mismatch(
        self, what: str, *, why: str = "", todo: str = "Make both roles from one model directory.", tensor: str = ""
    ) -> WeightMismatch:
        return WeightMismatch(what, where=f"roles.{self._context.role}", why=why, todo=todo, tensor=tensor)

    def fingerprint(self) -> dict[str, int]:
        """See ``Fingerprints.fingerprint``; in the dtype this generator holds."""
        return {name: xxhash.xxh3_64_intdigest(to_bytes(self._tensors[name]).data) for name in sorted(self._tensors)}

    def weight_specs(self) -> list[TensorSpec]:
        """Every tensor of a push, as this generator holds it."""
        return [spec_of(name, tensor) for name, tensor in self._tensors.items()]

    @torch.no_grad()
    def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
        """See ``ScoresLogprobs.logprobs``."""
        if self._scorer is None:
            self._scorer = Policy(self._model)
            check_layouts(self._scorer, self._device, may_flat=False, tolerance=1e-3)
        found = [np.zeros(len(record["action_ids"]), np.float32) for record in records]
        samples = [
            Sample(index=i, ordinal=i, prompt=record["prompt_ids"], columns=record)
            for i, record in enumerate(records)
            if len(record["action_ids"])
        ]
        for batch in micro_batches(samples, "padded", _SCORE_TOKENS, self._device):
            logp = self._scorer(batch)[0].cpu().numpy()
            start = 0
            for i in batch.index.tolist():
                found[i][:] = logp[start : start + len(found[i])]
                start += len(found[i])
        return found


def _empty(waiting: _Waiting) -> Columns:
    """Columns of a sample that has no actions."""
    return {
        "prompt_ids": waiting.prompt,
        "action_ids": np.zeros(0, np.int32),
        "logp": np.zeros(0, np.float32),
        "action_mask": np.zeros(0, np.uint8),
        "temperature": np.array(np.float32(1)),
        "text": np.zeros(0, np.uint8),
    }
