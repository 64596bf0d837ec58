"""Questions of rewards to a generator: answered in the same engine as leases, and told as text, not
stored.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.order import sample_seed
from gcore_core.runtime.messages import AnswerItem, AskRequest, short_reason
from gcore_core.runtime.rpc.service import Call
from gcore_core.runtime.store.client import StoreReader

Key = tuple[int, int]
FIRST_ORDINAL = 1 << 48  # so that no question shares a key with a record


@dataclass
class Asked:
    """One open request. ``waiting``: key of a sample -> (index of its question, which sample)."""

    call: Call
    waiting: dict[Key, tuple[int, int]] = field(default_factory=dict)
    inbox: asyncio.Queue[list[AnswerItem]] = field(default_factory=asyncio.Queue)


class Asking:
    """The open questions of one generator. ``store`` opens what they show."""

    def __init__(self, store: StoreReader) -> None:
        self._store = store
        self._ordinals = itertools.count(FIRST_ORDINAL)
        self._open: list[Asked] = []

    def __len__(self) -> int:
        """Answers that are owed."""
        return sum(len(asked.waiting) for asked in self._open)

    async def open(self, request: AskRequest, call: Call) -> tuple[Asked, list[SampleRequest]]:
        """What to wait for, and what the engine must draw. Every request is drawn anew, also one
        asked again.
        """
        asked, wanted = Asked(call), []
        shown = await asyncio.gather(
            *(self._store.arrays(question.images) for question in request.questions)
        )
        for question, images in zip(request.questions, shown, strict=True):
            ordinal = next(self._ordinals)
            for sample in question.samples:
                asked.waiting[ordinal, sample] = question.index, sample
                wanted.append(
                    SampleRequest(
                        ordinal=ordinal,
                        sample=sample,
                        seed=sample_seed(question.seed, 0, 0, sample),
                        prompt=question.prompt,
                        greedy=question.greedy,
                        images=images,
                    )
                )
        self._open.append(asked)
        return asked, wanted

    def close(self, asked: Asked) -> None:
        self._open.remove(asked)

    def progress(self) -> None:
        for asked in self._open:
            asked.call.progress()

    def failed(self) -> None:
        """The engine failed: every open request is to look why."""
        for asked in self._open:
            asked.inbox.put_nowait([])

    def take(self, finished: list[Finished]) -> list[Finished]:
        """Passes on the answers among them; returns the others, which are records or belong to
        nobody.
        """
        rest = [record for record in finished if record.request.ordinal < FIRST_ORDINAL]
        for asked in self._open:
            mine = [r for r in finished if (r.request.ordinal, r.request.sample) in asked.waiting]
            if mine:
                asked.inbox.put_nowait([_answer(r, *asked.waiting.pop(_key(r))) for r in mine])
        return rest


def _key(record: Finished) -> Key:
    return record.request.ordinal, record.request.sample


def _answer(record: Finished, index: int, sample: int) -> AnswerItem:
    columns = record.columns
    return AnswerItem(
        index=index,
        sample=sample,
        text=columns["text"].tobytes().decode("utf-8", "replace") if "text" in columns else "",
        status=record.status,
        reason=short_reason(record.reason),
        n_prompt=columns["prompt_ids"].size if "prompt_ids" in columns else 0,
        n_actions=columns["action_mask"].size if "action_mask" in columns else 0,
    )
