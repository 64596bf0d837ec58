"""Generators that sample nothing: their records are the answers that rows have.

Whoever writes tokens into the store is a generator: no payload passes through a controller. So
rows are read and encoded here, on the node of the records, and everything behind a generator
(window, ledger, balance, checkpoints, resume) is that of any run.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from gcore_language.chats import Unreadable
from gcore_language.model_files import open_model_files
from gcore_language.model_places import position_limit
from gcore_language.prompts import added_tokens, load_tokenizer, padding_id

from gcore_algorithms.offline.config import AnswersConfig, ReaderConfig
from gcore_algorithms.offline.remembered import RememberingTokenizer
from gcore_algorithms.offline.rows import Example, Turns, example_in
from gcore_algorithms.offline.tokens import Encoded, encode_answers, encode_texts
from gcore_core.contract.columns import Columns
from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ConfigError, DataError
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FAILED, FINISHED, UNSAMPLED, Prompt

#: Why a record ended that was not sampled.
_READ = "read"
_UNSAMPLED = (UNSAMPLED, UNSAMPLED)
#: More tokens than any row has.
_ANY = 2**31

log = logging.getLogger(__name__)


class RowReader(ABC):
    """Gives the records of rows; see ``gcore_core.contract.generator.Generator``.

    A row that cannot be used ends alone, as any record that cannot be served:

        prompt_too_long     it has more tokens than are allowed
        prompt_unreadable   the chat template refuses it
        equal_answers       the answers of a pair are the same tokens
        nothing_to_train    an answer has no token that is trained on

    Raises ConfigError for an ``engine:`` mapping, and DataError when the tokenizer cannot be read.
    """

    version = 0

    def __init__(self, config: ReaderConfig, context: WorkerContext) -> None:
        if context.engine:
            raise ConfigError(
                "a reader of rows has no engine; leave it out.",
                where=f"roles.{context.role}.engine",
            )
        files = open_model_files(context)
        self.directory = str(files.directory)
        tokenizer = load_tokenizer(
            self.directory, files.embedded, trust_remote_code=config.trust_remote_code
        )
        self.tokenizer = RememberingTokenizer(tokenizer, added_tokens(tokenizer))
        self._config = config
        allowed = position_limit(files.config) or _ANY
        self._most = min(config.max_tokens or _ANY, allowed)
        self._context = context
        self._waiting: deque[list[SampleRequest]] = deque()  # those of one row together

    @abstractmethod
    def encode(self, example: Example, where: str) -> list[Encoded]:
        """Returns the tokens of each answer of a row; all have the same prompt.

        Raises Unreadable where the template refuses it, DataError where no row could be read so.
        """

    @abstractmethod
    def texts(self, example: Example) -> Iterator[tuple[str, bool]]:
        """Yields texts that ``encode`` will ask for, with whether special tokens are added.

        They are encoded together with those of other rows. None of them is needed: a text that is
        not there is encoded alone.
        """

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        rows: dict[int, list[SampleRequest]] = {}
        for request in requests:
            rows.setdefault(request.ordinal, []).append(request)
        self._waiting += rows.values()

    def step(self) -> list[Finished]:
        """Encodes some rows; returns their records."""
        count = min(self._config.batch, len(self._waiting))
        rows = [self._waiting.popleft() for _ in range(count)]
        examples = [_example_of(requests[0].prompt) for requests in rows]
        self.tokenizer.encode(text for example in examples for text in self.texts(example))
        finished: list[Finished] = []
        for requests, example in zip(rows, examples, strict=True):
            finished += self._read(requests, example)
            self._context.progress()
        return finished

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        """Raises NotImplementedError: a record is read at once."""
        raise NotImplementedError("a reader of rows has nothing to abort")

    def close(self) -> None:
        self._waiting.clear()

    def _read(self, requests: list[SampleRequest], example: Example) -> list[Finished]:
        """Returns the records of one row, for those of its answers that are asked for."""
        prompt = requests[0].prompt
        encoded: list[Encoded] = []
        try:
            encoded = self.encode(example, f"row {prompt.row}")
            reason = self._unusable(encoded, prompt)
        except Unreadable as error:
            reason = f"prompt_unreadable: {error}"
            log.warning("row %d: %s", prompt.row, error)
        if not reason and max(request.sample for request in requests) >= len(encoded):
            raise DataError(
                f"the row has {len(encoded)} answers, and this step program needs more",
                where=f"row {prompt.row}",
                todo="set controller.use: offline/sft for rows with one answer",
            )
        return [
            Finished(request=request, status=FAILED, versions=_UNSAMPLED, reason=reason)
            if reason
            else Finished(
                request=request,
                status=FINISHED,
                versions=_UNSAMPLED,
                columns=_columns(
                    encoded[request.sample], example.answers[request.sample], example.label
                ),
                reason=_READ,
            )
            for request in requests
        ]

    def _unusable(self, encoded: Sequence[Encoded], prompt: Prompt) -> str:
        """Returns why a row cannot be used; "" when it can. Raises DataError where it must."""
        where = f"row {prompt.row}"
        longest = max(map(len, encoded))
        if longest > self._most:
            if self._config.too_long == "error":
                raise DataError(
                    f"the row has {longest} tokens, and {self._most} are allowed",
                    where=where,
                    todo="shorten it, raise roles.rollout.config.max_tokens, or set too_long: drop",
                )
            return f"prompt_too_long: {longest} tokens, and {self._most} are allowed"
        if len(encoded) == 2 and np.array_equal(encoded[0].actions, encoded[1].actions):
            if self._config.equal == "error":
                raise DataError(
                    "chosen and rejected are the same tokens, so neither is better",
                    where=where,
                    todo="remove the row, or set roles.rollout.config.equal: drop",
                )
            return "equal_answers"
        if not all(answer.mask.any() for answer in encoded):
            return "nothing_to_train"
        return ""


class AnswerReader(RowReader):
    """Reads answers as a policy would have sampled them."""

    def __init__(self, config: AnswersConfig, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._last_turn = config.turns == "last"
        self._add_end = config.add_end

    def encode(self, example: Example, where: str) -> list[Encoded]:
        return encode_answers(
            self.tokenizer,
            example,
            last_turn=self._last_turn,
            add_end=self._add_end,
            where=where,
        )

    def texts(self, example: Example) -> Iterator[tuple[str, bool]]:
        if isinstance(example.prompt, str):
            yield example.prompt, True
        yield from ((answer, False) for answer in example.answers if isinstance(answer, str))


class TextReader(RowReader):
    """Reads prompts with answers as a reward model sees them."""

    def __init__(self, config: ReaderConfig, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._padding = padding_id(self.directory, trust_remote_code=config.trust_remote_code)

    def encode(self, example: Example, where: str) -> list[Encoded]:
        return encode_texts(self.tokenizer, example, padding=self._padding)

    def texts(self, example: Example) -> Iterator[tuple[str, bool]]:
        if isinstance(example.prompt, str):
            texts = [answer for answer in example.answers if isinstance(answer, str)]
            yield from ((example.prompt + text, True) for text in texts)


def _example_of(prompt: Prompt) -> Example:
    return example_in(prompt, 2 if _is_pair(prompt) else 1)


def _is_pair(prompt: Prompt) -> bool:
    example = prompt.fields.get("example")
    if example is not None:
        return len(example["answers"]) == 2
    return "chosen" in prompt.fields


def _columns(encoded: Encoded, answer: str | Turns, label: float) -> Columns:
    actions = len(encoded.actions)
    shown = answer if isinstance(answer, str) else str(answer[-1]["content"])
    return {
        "prompt_ids": encoded.prompt,
        "action_ids": encoded.actions,
        "logp": np.zeros(actions, np.float32),
        "action_mask": encoded.mask,
        "temperature": np.ones((), np.float32),
        "text": np.frombuffer(shown.encode(), np.uint8),
        "label": np.full(actions, label, np.float32),
    }
