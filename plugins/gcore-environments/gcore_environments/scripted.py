"""An engine that says what a script tells it: for tests, and to measure what a turn costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gcore_core.contract.columns import Columns
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import ABORTED, FINISHED, TRUNCATED

#: The log-prob of everything that it says.
LOGP = -0.25


class ScriptedEngine:
    """Says in each turn what ``says`` returns for the text that was read, with an end token.

    It implements Generator and TakesTokens of ``gcore_core.contract.generator``. All requests end
    in the step after they came.

    read_ids: how many ids it has been given to read, in all.
    """

    version = 0

    def __init__(
        self,
        tokenizer: Any,
        says: Callable[[str], str],
        *,
        max_actions: int = 4096,
        context_length: int = 0,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.end_ids = frozenset({int(tokenizer.eos_token_id)})
        self.max_actions = max_actions
        self.context_length = context_length
        self.temperature = 1.0
        self.top_p = top_p
        self.top_k = top_k
        self.read_ids = 0
        self._says = says
        self._running: list[SampleRequest] = []

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self._running += requests

    def step(self) -> list[Finished]:
        running, self._running = self._running, []
        return [self._answer(request) for request in running]

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        named = set(keys)
        ended = [one for one in self._running if (one.ordinal, one.sample) in named]
        self._running = [one for one in self._running if (one.ordinal, one.sample) not in named]
        return [self._finished(request, [], ABORTED) for request in ended]

    def close(self) -> None:
        self._running = []

    def _answer(self, request: SampleRequest) -> Finished:
        prompt = self._prompt(request)
        self.read_ids += len(prompt)
        text = self._says(self.tokenizer.decode(prompt))
        said = [*self.tokenizer(text, add_special_tokens=False).input_ids, *self.end_ids]
        most = min(request.most or self.max_actions, self.max_actions)
        status = FINISHED if len(said) <= most else TRUNCATED
        return self._finished(request, said[:most], status)

    def _prompt(self, request: SampleRequest) -> list[int]:
        if request.ids is not None:
            ids: list[int] = request.ids.tolist()
            return ids
        return list(self.tokenizer(request.prompt.text).input_ids)

    def _finished(self, request: SampleRequest, said: list[int], status: str) -> Finished:
        text = self.tokenizer.decode(said, skip_special_tokens=True)
        columns: Columns = {
            "prompt_ids": np.array(self._prompt(request), np.int32),
            "action_ids": np.array(said, np.int32),
            "logp": np.full(len(said), LOGP, np.float32),
            "action_mask": np.ones(len(said), np.uint8),
            "temperature": np.array(1.0, np.float32),
            "text": np.frombuffer(text.encode(), np.uint8),
        }
        reason = "length" if status == TRUNCATED else ""
        return Finished(
            request=request,
            status=status,
            versions=(self.version, self.version),
            columns=columns,
            reason=reason,
        )
