"""Has an environment of two turns around any generator that takes tokens: it nods between them.

Where a role speaks for a player, it nods when the role has spoken.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import Finished, Generator, SampleRequest, TakesTokens
from gcore_core.contract.order import FIRST_QUESTION, FIRST_TURN
from gcore_core.contract.questions import Answer, Question, Speaker
from gcore_core.contract.records import ABORTED, FAILED

Key = tuple[int, int]  # ordinal, sample
#: What it says between two turns: a token that every model has.
NOD = (0,)


@dataclass
class Episode:
    """Holds what has been drawn of one sample."""

    request: SampleRequest
    prompt: list[int]
    turns: list[Finished] = field(default_factory=list)


class FakeEnvironment:
    """Asks for two turns; the record is both, with its own tokens masked between them.

    generator: has the trait ``tokens``.
    """

    turns = 2

    def __init__(self, config: None, context: WorkerContext, generator: Generator) -> None:
        assert isinstance(generator, TakesTokens)
        self._generator = generator
        self._tokenizer = generator.tokenizer
        self._temperature = generator.temperature
        self._ordinals = itertools.count(FIRST_TURN)
        self._open: dict[Key, Episode] = {}  # of a turn that runs -> its episode
        self._speakers: list[Speaker] = list(context.speakers.values())
        self._owed: list[tuple[Episode, Future[Answer]]] = []  # what roles are to say

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        questions = [one for one in requests if one.ordinal >= FIRST_QUESTION]
        self._generator.submit(questions)
        for request in requests:
            if request.ordinal < FIRST_QUESTION:
                prompt = self._tokenizer.encode(request.prompt.text or "")
                self._ask(Episode(request, prompt))

    def step(self) -> list[Finished]:
        ended = []
        for record in self._generator.step():
            episode = self._open.pop((record.request.ordinal, record.request.sample), None)
            if episode is None or record.status == FAILED:
                ended.append(replace(record, request=(episode or record).request))
                continue
            episode.turns.append(record)
            if len(episode.turns) == self.turns:
                ended.append(self.record(episode, record.status))
            elif self._speakers:
                question = Question(prompt=record.request.prompt, seed=record.request.seed)
                self._owed.append((episode, self._speakers[0].ask(question)))
            else:
                self._ask(episode)
        return ended + self._roles_spoke()

    def _roles_spoke(self) -> list[Finished]:
        """Goes on with the episodes whose role has spoken; returns those whose role has failed."""
        ended = []
        for episode, answer in [one for one in self._owed if one[1].done()]:
            self._owed.remove((episode, answer))
            if error := answer.exception():
                failed = replace(self.record(episode, FAILED), reason=f"role_lost: {error}")
                ended.append(replace(failed, columns={}))
            else:
                self._ask(episode)
        return ended

    def abort(self, keys: Sequence[Key]) -> list[Finished]:
        named = {key: one for key, one in self._open.items() if key_of(one.request) in keys}
        for record in self._generator.abort(list(named)):
            named[record.request.ordinal, record.request.sample].turns.append(record)
        for key in named:
            del self._open[key]
        waiting = [one for one in self._owed if key_of(one[0].request) in keys]
        for one in waiting:
            one[1].cancel()
            self._owed.remove(one)
        questions = [key for key in keys if key[0] >= FIRST_QUESTION]
        ended = self._generator.abort(questions)
        episodes = [*named.values(), *(episode for episode, _ in waiting)]
        return ended + [self.record(episode, ABORTED) for episode in episodes]

    def close(self) -> None:
        self._open.clear()
        for _, answer in self._owed:
            answer.cancel()

    def _ask(self, episode: Episode) -> None:
        """Asks for the next turn, behind all that was said."""
        request = episode.request
        turn = SampleRequest(
            ordinal=next(self._ordinals),
            sample=0,
            seed=(request.seed + len(episode.turns)) % 2**63,
            prompt=request.prompt,
            greedy=request.greedy,
            ids=np.array([*episode.prompt, *self.said(episode)[0].tolist()], np.int32),
        )
        self._open[turn.ordinal, turn.sample] = episode
        self._generator.submit([turn])

    def said(self, episode: Episode) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns tokens, log-probs, mask and the number of the turn of all behind the prompt."""
        ids: list[int] = []
        logp: list[float] = []
        mask: list[int] = []
        number: list[int] = []
        for place, turn in enumerate(episode.turns):
            drawn = turn.columns["action_ids"].tolist()
            goes_on = place < self.turns - 1 and turn.status != ABORTED
            given = NOD if goes_on else ()
            ids += [*drawn, *given]
            logp += [*turn.columns["logp"].tolist(), *(0.0 for _ in given)]
            mask += [*(1 for _ in drawn), *(0 for _ in given)]
            number += [place] * (len(drawn) + len(given))
        return (
            np.array(ids, np.int32),
            np.array(logp, np.float32),
            np.array(mask, np.uint8),
            np.array(number, np.float32),
        )

    def record(self, episode: Episode, status: str) -> Finished:
        """Returns the record of an episode."""
        ids, logp, mask, number = self.said(episode)
        temperature = 1.0 if episode.request.greedy else self._temperature or 1.0
        texts = [turn.columns["text"].tobytes() for turn in episode.turns]
        versions = [version for turn in episode.turns for version in turn.versions]
        return Finished(
            request=episode.request,
            status=status,
            versions=(min(versions), max(versions)) if versions else (0, 0),
            columns={
                "prompt_ids": np.array(episode.prompt, np.int32),
                "action_ids": ids,
                "logp": logp,
                "action_mask": mask,
                "temperature": np.array(temperature, np.float32),
                "text": np.frombuffer(b"\n".join(texts), np.uint8),
                "turn": number,
            },
        )


def key_of(request: SampleRequest) -> Key:
    return request.ordinal, request.sample
