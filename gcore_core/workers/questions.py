"""Lets a generator answer questions; the same engine draws them, and text goes back.

Rewards ask them, and environments for which its role speaks.

Nothing of an answer is stored. A question's samples get ordinals from ``FIRST_QUESTION`` on, so
that what the engine has finished can be told apart from records by its key.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.order import FIRST_QUESTION, sample_seed
from gcore_core.runtime.messages import AnswerItem, AskRequest, short_reason
from gcore_core.store.client import StoreReader
from gcore_core.wire.service import Call

Key = tuple[int, int]


@dataclass
class OpenRequest:
    """Holds one request of a worker that asks, until all its answers have been sent.

    call: that worker's, whose deadline is extended when samples end.
    missing: key of a sample in the engine -> (index of its question, which sample of it).
    inbox: answers to send, in lists. An empty list says that the engine has failed.
    """

    call: Call
    missing: dict[Key, tuple[int, int]] = field(default_factory=dict)
    inbox: asyncio.Queue[list[AnswerItem]] = field(default_factory=asyncio.Queue)


class Asking:
    """Holds the open requests of one generator.

    store: opens the images of their questions.
    """

    def __init__(self, store: StoreReader) -> None:
        self._store = store
        self._ordinals = itertools.count(FIRST_QUESTION)
        self._open: list[OpenRequest] = []

    def __len__(self) -> int:
        """Counts the answers that are still missing, over all open requests."""
        return sum(len(opened.missing) for opened in self._open)

    async def open(
        self, request: AskRequest, call: Call
    ) -> tuple[OpenRequest, list[SampleRequest]]:
        """Opens a request; returns (what to wait for, what the engine must draw).

        Not idempotent: a repeated request is drawn again, under other ordinals.
        """
        opened = OpenRequest(call)
        samples: list[SampleRequest] = []
        images_by_question = await asyncio.gather(
            *(self._store.arrays(question.images) for question in request.questions)
        )
        for question, images in zip(request.questions, images_by_question, strict=True):
            ordinal = next(self._ordinals)
            for sample in question.samples:
                opened.missing[ordinal, sample] = question.index, sample
                samples.append(
                    SampleRequest(
                        ordinal=ordinal,
                        sample=sample,
                        seed=sample_seed(question.seed, 0, 0, sample),
                        prompt=question.prompt,
                        greedy=question.greedy,
                        images=images,
                    )
                )
        self._open.append(opened)
        return opened, samples

    def close(self, opened: OpenRequest) -> list[Key]:
        """Closes a request; returns the samples that nobody waits for any more."""
        self._open.remove(opened)
        return list(opened.missing)

    def progress(self) -> None:
        """Tells every open request's caller that the engine goes on."""
        for opened in self._open:
            opened.call.progress()

    def failed(self) -> None:
        """Wakes every open request: the engine has failed, and each is to see why."""
        for opened in self._open:
            opened.inbox.put_nowait([])

    def take(self, finished: list[Finished]) -> list[Finished]:
        """Hands each answer to the request that waits for it; returns the records.

        An answer whose request was closed belongs to nobody: it is dropped.
        """
        records = [one for one in finished if one.request.ordinal < FIRST_QUESTION]
        for opened in self._open:
            answered = [one for one in finished if _key(one) in opened.missing]
            if answered:
                answers = [_answer(one, *opened.missing.pop(_key(one))) for one in answered]
                opened.inbox.put_nowait(answers)
        return records


def _key(finished: Finished) -> Key:
    return finished.request.ordinal, finished.request.sample


def _answer(finished: Finished, index: int, sample: int) -> AnswerItem:
    columns = finished.columns
    return AnswerItem(
        index=index,
        sample=sample,
        text=columns["text"].tobytes().decode("utf-8", "replace") if "text" in columns else "",
        status=finished.status,
        reason=short_reason(finished.reason),
        n_prompt=columns["prompt_ids"].size if "prompt_ids" in columns else 0,
        n_actions=columns["action_mask"].size if "action_mask" in columns else 0,
    )
