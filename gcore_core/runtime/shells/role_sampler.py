"""How a reward asks a generator role: each question goes to the least burdened replica that is
awake.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import msgspec

from gcore_core.contract.errors import ContractError, DeadlineExceeded, WorkerDied
from gcore_core.contract.launching import Peer
from gcore_core.contract.questions import Answer, Question
from gcore_core.contract.records import Inquiry
from gcore_core.runtime.messages import ASK, AskRequest, QuestionItem
from gcore_core.runtime.rpc.retry import LOST, PATIENT


class RoleSampler:
    """One scorer worker's way to the replicas of a role. It knows its own load of each only, which
    is enough: others' questions are spread by the same rule.
    """

    def __init__(self, role: str, replicas: Sequence[Peer], progress: Callable[[], None]) -> None:
        self.role, self._replicas, self._progress = role, list(replicas), progress
        self._awake = list(range(len(self._replicas)))
        self._awake_version = 0
        self._load: Counter[int] = Counter()  # replica -> answers it owes
        self._asked: dict[tuple[int, int], list[tuple[Inquiry, float]]] = defaultdict(list)

    def route(self, awake: Sequence[int], version: int = 0) -> None:
        """From here on only these replicas are asked. Messages overtake each other: what an older
        ``version`` says changes nothing.
        """
        if version >= self._awake_version:
            self._awake = list(awake)
            self._awake_version = version

    def asked(self, ordinal: int, sample: int) -> list[Inquiry]:
        """What every answer about a record took; told once."""
        now_s = asyncio.get_running_loop().time()
        return [
            msgspec.structs.replace(
                took, began_ago_s=now_s - ended_s + took.began_ago_s, ended_ago_s=now_s - ended_s
            )
            for took, ended_s in self._asked.pop((ordinal, sample), [])
        ]

    async def sample(self, questions: Sequence[Question]) -> list[list[Answer]]:
        found: list[list[Answer | None]] = [[None] * question.samples for question in questions]
        avoid = set[int]()  # replicas that were lost in the latest try

        async def ask_for_the_rest(attempt: int) -> None:
            parts = self._deal(questions, found, avoid)
            asks = (self._ask(replica, part, questions, found) for replica, part in parts.items())
            errors = dict(zip(parts, await asyncio.gather(*asks), strict=True))
            avoid.clear()
            avoid.update(replica for replica, error in errors.items() if error)
            for error in filter(None, errors.values()):
                raise error

        await PATIENT.run(ask_for_the_rest, LOST)
        answers = [[answer for answer in row if answer is not None] for row in found]
        if any(
            len(row) != question.samples for row, question in zip(answers, questions, strict=True)
        ):
            raise ContractError(
                "a replica ended before it had answered every question", where="sample"
            )
        return answers

    def _deal(
        self,
        questions: Sequence[Question],
        found: Sequence[Sequence[Answer | None]],
        avoid: set[int],
    ) -> dict[int, list[QuestionItem]]:
        """What is not answered yet, to the replicas that owe least; not to those that were just
        lost, if there are others.
        """
        parts: dict[int, list[QuestionItem]] = defaultdict(list)
        able = [replica for replica in self._awake if replica not in avoid] or self._awake
        for index, (question, row) in enumerate(zip(questions, found, strict=True)):
            missing = [sample for sample, answer in enumerate(row) if answer is None]
            if missing:
                replica = min(able, key=lambda at: (self._load[at], at))
                self._load[replica] += len(missing)
                images = list(question.images)
                item = QuestionItem(
                    index, question.prompt, question.seed, missing, question.greedy, images
                )
                parts[replica].append(item)
        return parts

    async def _ask(
        self,
        replica: int,
        part: list[QuestionItem],
        questions: Sequence[Question],
        found: list[list[Answer | None]],
    ) -> WorkerDied | DeadlineExceeded | None:
        """Fills in what this replica answers; the error, when it is lost on the way."""
        owed, clock = sum(len(item.samples) for item in part), asyncio.get_running_loop().time
        began_s = clock()
        stream = self._replicas[replica].stream(ASK, AskRequest(part))
        try:
            async with contextlib.aclosing(stream):
                async for answers in stream:
                    for item in answers:
                        found[item.index][item.sample] = Answer(
                            text=item.text,
                            status=item.status,
                            reason=item.reason,
                            n_prompt=item.n_prompt,
                            n_actions=item.n_actions,
                        )
                        took = Inquiry(
                            self.role,
                            replica,
                            item.n_prompt,
                            item.n_actions,
                            clock() - began_s,
                            0.0,
                        )
                        self._asked[questions[item.index].about].append((took, clock()))
                    self._progress()
        except (WorkerDied, DeadlineExceeded) as error:
            return error
        finally:
            self._load[replica] -= owed
        return None
