"""Lets a reward or an environment ask a generator role: each question goes to the awake replica
that owes least.

questions -> deal to replicas -> stream answers from all of them side by side
                  ^                     |
                  +--- a replica is lost: what it has not answered is dealt again
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from gcore_core.contract.errors import ContractError, DeadlineExceeded, WorkerDied
from gcore_core.contract.launching import Peer
from gcore_core.contract.questions import Answer, Question
from gcore_core.contract.records import Inquiry
from gcore_core.runtime.messages import ASK, AskRequest, QuestionItem
from gcore_core.wire.retry import LOST, PATIENT

_NO_RECORD = Question.about  # of a question that says of no record that it is about it


@dataclass
class _Sheet:
    """Holds the questions of one call of ``sample``, and the answers that have come so far.

    answers: [question][sample], None where the answer is missing.
    """

    questions: Sequence[Question]
    answers: list[list[Answer | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.answers = [[None] * question.samples for question in self.questions]

    def missing(self, index: int) -> list[int]:
        """Returns the samples of a question that have no answer yet."""
        return [sample for sample, answer in enumerate(self.answers[index]) if answer is None]


class RoleSampler:
    """Asks the replicas of a role, for one worker.

    It counts the answers that its open calls ask of each replica (one that has come counts until
    its call ends), and knows nothing of other workers. That is enough: they spread their questions
    by the same rule.

    role: the role's name.
    replicas: all of them; those that sleep are not asked.
    progress: called whenever answers have come.
    """

    def __init__(self, role: str, replicas: Sequence[Peer], progress: Callable[[], None]) -> None:
        self.role = role
        self._replicas = list(replicas)
        self._progress = progress
        self._awake = list(range(len(self._replicas)))
        self._awake_version = 0
        self._load: Counter[int] = Counter()  # replica -> answers of open calls
        # key of a record -> (one answer's measurements, when it ended)
        self._inquiries: dict[tuple[int, int], list[tuple[Inquiry, float]]] = defaultdict(list)

    def route(self, awake: Mapping[str, Sequence[int]], version: int = 0) -> None:
        """Sets the replicas that are asked from here on, where ``awake`` names the role.

        Messages overtake each other: an older ``version`` than the newest changes nothing.
        """
        if self.role in awake and version >= self._awake_version:
            self._awake = list(awake[self.role])
            self._awake_version = version

    def take_inquiries(self, ordinal: int, sample: int) -> list[Inquiry]:
        """Returns the measured answers about a record. Each is returned once, and forgotten."""
        now_s = asyncio.get_running_loop().time()
        inquiries = []
        for inquiry, ended_s in self._inquiries.pop((ordinal, sample), []):
            ended_ago_s = now_s - ended_s
            began_ago_s = ended_ago_s + inquiry.began_ago_s  # as kept, it counts from the end
            inquiries.append(
                msgspec.structs.replace(inquiry, began_ago_s=began_ago_s, ended_ago_s=ended_ago_s)
            )
        return inquiries

    async def sample(self, questions: Sequence[Question]) -> list[list[Answer]]:
        """Returns the answers to each question, in order.

        What a lost replica has not answered is dealt again, as often as ``PATIENT`` allows. Raises
        the loss after that, or what a replica itself raised.
        """
        sheet = _Sheet(questions)
        lost = set[int]()  # replicas that failed in the latest try

        async def ask_what_is_missing(attempt: int) -> None:
            parts = self._deal(sheet, lost)
            errors = await asyncio.gather(
                *(self._begin_asking(replica, part, sheet) for replica, part in parts.items())
            )
            lost.clear()
            lost.update(replica for replica, error in zip(parts, errors, strict=True) if error)
            for error in errors:
                if error:
                    raise error

        await PATIENT.run(ask_what_is_missing, LOST)
        answers = [[answer for answer in row if answer is not None] for row in sheet.answers]
        if any(
            len(row) != question.samples for row, question in zip(answers, questions, strict=True)
        ):
            raise ContractError(
                "a replica ended before it had answered every question", where="sample"
            )
        return answers

    def _deal(self, sheet: _Sheet, lost: set[int]) -> dict[int, list[QuestionItem]]:
        """Deals what is not answered yet: replica -> its questions.

        A question goes to the replica that owes least, the first of equal ones. Those that were
        just lost get none, unless all were.
        """
        parts: dict[int, list[QuestionItem]] = defaultdict(list)
        able = [replica for replica in self._awake if replica not in lost] or self._awake
        for index, question in enumerate(sheet.questions):
            missing = sheet.missing(index)
            if missing:
                replica = min(able, key=lambda able_one: (self._load[able_one], able_one))
                self._load[replica] += len(missing)  # at once: the next question sees it
                images = list(question.images)
                item = QuestionItem(
                    index, question.prompt, question.seed, missing, question.greedy, images
                )
                parts[replica].append(item)
        return parts

    def _begin_asking(
        self, replica: int, part: list[QuestionItem], sheet: _Sheet
    ) -> asyncio.Task[WorkerDied | DeadlineExceeded | None]:
        """Asks one replica, which owes nothing more when that ends, or is cancelled before."""
        owed = sum(len(item.samples) for item in part)
        asking = asyncio.create_task(self._ask_replica(replica, part, sheet))
        asking.add_done_callback(lambda _: self._load.subtract({replica: owed}))
        return asking

    async def _ask_replica(
        self, replica: int, part: list[QuestionItem], sheet: _Sheet
    ) -> WorkerDied | DeadlineExceeded | None:
        """Writes what one replica answers into the sheet; returns the error if it is lost."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        stream = self._replicas[replica].stream(ASK, AskRequest(part))
        try:
            async with contextlib.aclosing(stream):
                async for answers in stream:
                    for item in answers:
                        sheet.answers[item.index][item.sample] = Answer(
                            text=item.text,
                            status=item.status,
                            reason=item.reason,
                            n_prompt=item.n_prompt,
                            n_actions=item.n_actions,
                        )
                        ended_s = clock()
                        inquiry = Inquiry(
                            self.role,
                            replica,
                            item.n_prompt,
                            item.n_actions,
                            ended_s - began_s,
                            0.0,
                        )
                        about = sheet.questions[item.index].about
                        if about != _NO_RECORD:
                            self._inquiries[about].append((inquiry, ended_s))
                    self._progress()
        except (WorkerDied, DeadlineExceeded) as error:
            return error
        return None


class LoopSpeaker:
    """Asks a role from outside the event loop in which its sampler lives.

    It implements Speaker of ``gcore_core.contract.questions``.
    """

    def __init__(self, sampler: RoleSampler, loop: asyncio.AbstractEventLoop) -> None:
        self.role = sampler.role
        self._sampler = sampler
        self._loop = loop

    def ask(self, question: Question) -> Future[Answer]:
        return asyncio.run_coroutine_threadsafe(self._answer(question), self._loop)

    async def _answer(self, question: Question) -> Answer:
        ((answer,),) = await self._sampler.sample([question])
        return answer
