"""Plays episodes with an engine that is scripted and answers at once, to see what a turn costs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import Prompt


class ScriptedEpisodes:
    """Environments in a process of their own, and what draws from the scripted engine for them.

    place: of the class, as in a job.
    tokenizer: the engine's.
    says: from what was read to what the policy says.
    turns: of an episode, at most.
    prompt: of all episodes.
    config: what the class is made with.
    """

    def __init__(
        self,
        place: str,
        tokenizer: Any,
        says: Callable[[str], str],
        *,
        turns: int,
        prompt: str,
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        from gcore_environments.draws import EpisodeDraws
        from gcore_environments.scripted import ScriptedEngine
        from gcore_environments.settings import EnvironmentConfig

        self._engine_s = 0.0
        self._prompt = Prompt(row=0, text=prompt)
        engine = ScriptedEngine(tokenizer, says, max_actions=1 << 20)
        step = engine.step

        def timed() -> list[Finished]:
            began_s = time.thread_time()  # the endpoint has threads of its own
            finished = step()
            self._engine_s += time.thread_time() - began_s
            return finished

        engine.step = timed  # type: ignore[method-assign]
        settings = EnvironmentConfig(
            environment=place, config=dict(config), turns=turns, turn_s=60.0
        )
        self._draws = EpisodeDraws(settings, WorkerContext(role="rollout"), engine)
        try:
            self.play(1)  # until the environment's imports are over
        except BaseException:
            self.close()
            raise

    def play(
        self, episodes: int, clock: Callable[[], float] = time.process_time
    ) -> tuple[float, list[Finished]]:
        """Plays episodes at the same time; returns the clock's seconds besides the engine's, and
        the records. Ends the benchmark where one has not ended well.
        """
        requests = [
            SampleRequest(ordinal=number, sample=0, seed=number, prompt=self._prompt)
            for number in range(episodes)
        ]
        began_s, self._engine_s = clock(), 0.0
        self._draws.submit(requests)
        records: list[Finished] = []
        while len(records) < episodes:
            records += self._draws.step()
        taken_s = clock() - began_s - self._engine_s
        for record in records:
            if record.status != "finished":
                sys.exit(f"an episode has {record.status}: {record.reason}")
        return taken_s, records

    def close(self) -> None:
        self._draws.close()
