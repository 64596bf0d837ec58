"""Emulates a generator: it makes real records, and takes the time that a model of an engine says.

The records go through the same code as those of a real engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import xxhash

from gcore_core.contract.columns import Columns, column_of_versions
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ContractError, WeightMismatch
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import (
    ABORTED,
    FAILED,
    FINISHED,
    TRUNCATED,
    TensorSpec,
    WeightPlan,
)
from gcore_placement.sim.batching import ContinuousBatch, Key
from gcore_placement.sim.clock import spend
from gcore_placement.sim.config import GeneratorConfig
from gcore_placement.sim.policy import (
    END,
    LETTERS,
    Table,
    codes_of,
    initial_table,
    table_of,
    tensors_of,
    weight_specs,
)
from gcore_placement.sim.prompts import AnswerLengths, answer_lengths

_BYTES_PER_GB = 10**9
_SHIFTS = 1 << 16  # payloads that differ


@dataclass
class _Sample:
    """A sample that was submitted and has not been returned.

    request: what was asked.
    prompt: tokens of the prompt.
    answer: tokens that the whole answer will have.
    status: FINISHED, or TRUNCATED when the answer was cut at the limit.
    past: for each earlier weights version that sampled a part of it: the tokens there were at the
        end of that part, the version and its table. Empty while one version has sampled all.
    """

    request: SampleRequest
    prompt: int
    answer: int
    status: str
    past: list[tuple[int, int, Table]] = field(default_factory=list)


class SimGenerator:
    """Draws an answer's length from its seed and its row, and its letters from seed and weights.

    See ``Generator``, ``ReceivesWeights`` and ``Sleeps`` in ``gcore_core.contract.generator``.
    """

    def __init__(self, config: GeneratorConfig, context: WorkerContext) -> None:
        self.version = 0
        self._config = config
        self._progress = context.progress
        self._lengths = AnswerLengths(
            config.answer_median, config.answer_sigma, config.max_new_tokens
        )
        self._batch = ContinuousBatch(config.profile, config.prefix_cache)
        self._samples: dict[Key, _Sample] = {}
        self._failed: list[Finished] = []
        self._table = initial_table()
        self._incoming: dict[str, bytes] = {}
        self._awake = True

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """See ``Generator.submit``. A prompt longer than the context fails as prompt_too_long."""
        for request in requests:
            prompt = _prompt_tokens(request)
            if prompt > self._config.context_length:
                versions = self.version, self.version
                failed = Finished(
                    request=request, status=FAILED, versions=versions, reason="prompt_too_long"
                )
                self._failed.append(failed)
                continue
            lengths = answer_lengths(request.prompt.fields, self._lengths)
            length = max(1, round(lengths.median)) if request.greedy else lengths.draw(request.seed)
            answer, status = (
                (length, FINISHED) if length <= lengths.limit else (lengths.limit, TRUNCATED)
            )
            self._samples[request.ordinal, request.sample] = _Sample(
                request, prompt, answer, status
            )
            self._batch.add((request.ordinal, request.sample), prompt, answer)

    def step(self) -> list[Finished]:
        """Emulates decoding until the next answer ends, or for ``tick_s``."""
        if not self._awake:
            raise ContractError("a sleeping generator was asked to go on", where="sim")
        failed = self._failed
        self._failed = []
        seconds, ended = self._batch.advance(self._config.tick_s)
        if seconds > 0:
            self._progress()
        self._spend(seconds)
        return failed + [self._finished(key, None) for key in ended]

    def abort(self, keys: Sequence[Key]) -> list[Finished]:
        """See ``Generator.abort``; an unknown key is ignored."""
        aborted = []
        for key in keys:
            if key in self._samples:
                sampled = self._batch.done(key)
                self._batch.remove(key)
                aborted.append(self._finished(key, sampled))
        return aborted

    def _finished(self, key: Key, aborted_after: int | None) -> Finished:
        """Makes a sample's result and forgets the sample.

        aborted_after: the tokens that it has when it is aborted; None: it ended by itself.
        """
        sample = self._samples.pop(key)
        status, answer = (
            (sample.status, sample.answer) if aborted_after is None else (ABORTED, aborted_after)
        )
        # Each part of the answer was sampled by one version of the weights. Letters are drawn for
        # the whole answer under every version, and each part takes its own slice of them.
        parts = [*sample.past, (answer, self.version, self._table)]
        if sample.request.greedy:
            letters = [
                np.full(answer, table.logits[:END].argmax(), np.uint8) for _, _, table in parts
            ]
        else:
            codes = codes_of(sample.request.seed, answer)
            letters = [table.letter_of[codes] for _, _, table in parts]
        actions = np.empty(answer, np.int32)
        logp = np.empty(answer, np.float32)
        sampled_by = np.empty(answer, np.int32)
        begun = 0
        for (end, version, table), version_letters in zip(parts, letters, strict=True):
            actions[begun:end] = version_letters[begun:end]
            if end == answer and status == FINISHED:
                actions[-1] = END
            logp[begun:end] = table.logp[actions[begun:end]]
            sampled_by[begun:end] = version
            begun = end
        columns = {
            "prompt_ids": (np.arange(sample.prompt, dtype=np.int32) + sample.request.prompt.row)
            % np.int32(END),
            "action_ids": actions,
            "logp": logp,
            "action_mask": np.ones(answer, np.uint8),
            "temperature": np.ones((), np.float32),
            "text": LETTERS[actions],
            **column_of_versions(sampled_by),
        }
        media = {"payload": self._payload(sample.request)} if self._config.payload.nbytes else {}
        versions = parts[0][1], self.version
        return Finished(
            request=sample.request, status=status, versions=versions, columns=columns, media=media
        )

    def _payload(self, request: SampleRequest) -> np.ndarray:
        """Returns a record's payload, uint8[nbytes], without copying.

        It is a view of the memory that all records share. The view's place is a hash of the
        record's name, so payloads differ.
        """
        payload = self._config.payload
        name = f"{request.ordinal}" if payload.shared else f"{request.ordinal}/{request.sample}"
        shift = xxhash.xxh3_64_intdigest(name.encode()) % _SHIFTS
        return _noise(payload.nbytes + _SHIFTS)[shift : shift + payload.nbytes]

    # -- weights -----------------------------------------------------------------------------------

    def begin_weights(self, plan: WeightPlan) -> None:
        """See ``ReceivesWeights.begin_weights``.

        Raises WeightMismatch for an older version or for tensors of another model.
        """
        if plan.version < self.version:
            what = f"version {plan.version} is older than {self.version}"
            raise WeightMismatch(
                what, where=f"tensor {plan.tensors[0].name!r}" if plan.tensors else ""
            )
        if mismatched := set(plan.tensors) ^ set(weight_specs()):
            raise WeightMismatch(
                "the push is of another model", where=f"tensor {min(s.name for s in mismatched)!r}"
            )
        self._incoming.clear()

    def load_weights(self, tensors: Iterable[tuple[TensorSpec, np.ndarray]]) -> None:
        """See ``ReceivesWeights.load_weights``. Spends the time of the emulated gigabytes."""
        total = sum(spec.nbytes for spec in weight_specs())
        for spec, array in tensors:
            self._incoming[spec.name] = array.tobytes()
            self._spend(spec.nbytes / total * self._config.weights_gb * self._config.push_s_per_gb)

    def commit_weights(self, plan: WeightPlan) -> None:
        """See ``ReceivesWeights.commit_weights``; running answers go on under the new weights.

        What they have so far is read again, as an engine reads it whose cache was of the old ones.
        """
        # What the old version has sampled of each answer becomes a part of its past.
        for key, sample in self._samples.items():
            sampled = self._batch.done(key)
            if sampled > (sample.past[-1][0] if sample.past else 0):
                sample.past.append((sampled, self.version, self._table))
        self._batch.forget_cache()
        self._table = table_of(b"".join(self._incoming[spec.name] for spec in weight_specs()))
        self.version = plan.version

    def fingerprint(self) -> dict[str, int]:
        """Returns name -> xxh3-64 of the tensor's bytes."""
        return {
            spec.name: xxhash.xxh3_64_intdigest(part.data) for spec, part in tensors_of(self._table)
        }

    def logprobs(self, records: Sequence[Columns]) -> list[np.ndarray]:
        """See ``ScoresLogprobs.logprobs``; no time is spent."""
        return [self._table.logp[record["action_ids"]] for record in records]

    # -- memory ------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Device memory that the emulated engine holds."""
        return int(self._config.weights_gb * _BYTES_PER_GB) if self._awake else 0

    def sleep(self) -> None:
        """Gives the memory of weights and cache back; what runs is prefilled again after waking."""
        self._awake = False
        self._batch.forget_cache()
        self._spend(self._config.sleep_s)

    def wake(self) -> None:
        """Takes the memory back that ``sleep`` gave away."""
        self._awake = True
        self._spend(self._config.wake_s)

    def close(self) -> None:
        pass

    def _spend(self, seconds: float) -> None:
        """Spends emulated seconds, scaled by ``time_scale``."""
        spend(seconds * self._config.time_scale, self._progress)


def _prompt_tokens(request: SampleRequest) -> int:
    """Returns the tokens of a prompt: what its row says, else the bytes of its text."""
    tokens = request.prompt.fields.get("prompt_tokens")
    return int(tokens) if tokens is not None else len((request.prompt.text or "").encode())


@lru_cache(maxsize=2)
def _noise(nbytes: int) -> np.ndarray:
    """Returns uint8[nbytes], read-only: one megabyte of random bytes, repeated.

    All workers of a process share it.
    """
    noise = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8), nbytes)
    noise.flags.writeable = False
    return noise
