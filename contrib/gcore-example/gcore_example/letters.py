"""Answers in letters, each drawn from one table of log-probs that follows the policy."""

import numpy as np

from gcore_core.contract.errors import WeightMismatch
from gcore_core.contract.generator import Finished
from gcore_core.contract.records import FINISHED, TRUNCATED, TensorSpec

LETTERS = "abcdefgh."  # the last one ends an answer
TENSORS = [TensorSpec("letters", "F32", (8,), 32), TensorSpec("end", "F32", (1,), 4)]


class Letters:
    def __init__(self, config, context):
        self.version = 0
        self._limit = config.max_new_tokens
        self._table = log_softmax(np.zeros(len(LETTERS), np.float32))
        self._running = {}
        self._incoming = {}

    def submit(self, requests):
        for request in requests:
            self._running[request.ordinal, request.sample] = request, self.version, [], []

    def step(self):
        ended = []
        for key, (request, version, letters, logp) in list(self._running.items()):
            # The seed and the place alone decide: who else is in the batch must not matter.
            noise = np.random.default_rng([request.seed, len(letters)]).gumbel(size=len(LETTERS))
            letters.append(int(np.argmax(self._table if request.greedy else self._table + noise)))
            logp.append(self._table[letters[-1]])
            done = LETTERS[letters[-1]] == "."
            if done or len(letters) == self._limit:
                del self._running[key]
                ended.append(
                    Finished(
                        request=request,
                        status=FINISHED if done else TRUNCATED,
                        versions=(version, self.version),
                        columns=columns(request.prompt.text, letters, logp),
                    )
                )
        return ended

    def abort(self, keys):
        raise NotImplementedError("an answer cannot be ended early")

    def begin_weights(self, plan):
        if plan.version < self.version:
            raise WeightMismatch(
                f"version {plan.version} is older than {self.version}", where="letters"
            )
        for spec in set(plan.tensors) ^ set(TENSORS):
            raise WeightMismatch("the push is of another model", where=f"tensor {spec.name!r}")

    def load_weights(self, tensors):
        for spec, array in tensors:
            self._incoming[spec.name] = array.view(
                np.float32
            ).copy()  # the array is gone after this call

    def commit_weights(self, plan):
        self._table = log_softmax(np.concatenate([self._incoming[spec.name] for spec in TENSORS]))
        self.version = plan.version

    def close(self):
        pass


def columns(prompt, letters, logp):
    return {
        "prompt_ids": np.frombuffer(prompt.encode(), np.uint8).astype(np.int32),
        "action_ids": np.array(letters, np.int32),
        "logp": np.array(logp, np.float32),
        "action_mask": np.ones(len(letters), np.uint8),
        "temperature": np.ones((), np.float32),
        "text": np.frombuffer("".join(LETTERS[i] for i in letters).encode(), np.uint8),
    }


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum())
