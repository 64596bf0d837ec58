"""What the engine is asked for episodes: in which order, with which seeds, and what passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gcore_environments.turns import Turn, Turns, seed_of_turn

from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.order import FIRST_QUESTION, FIRST_TURN
from gcore_core.contract.records import ABORTED, FINISHED, Prompt


class Engine:
    """Notes what it is asked; each step ends the first request."""

    version = 0

    def __init__(self) -> None:
        self.asked: list[SampleRequest] = []

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self.asked += requests

    def step(self) -> list[Finished]:
        return [Finished(request=self.asked.pop(0), status=FINISHED, versions=(0, 0))]

    def abort(self, keys: Sequence[tuple[int, int]]) -> list[Finished]:
        ended = [one for one in self.asked if (one.ordinal, one.sample) in set(keys)]
        self.asked = [one for one in self.asked if one not in ended]
        return [Finished(request=one, status=ABORTED, versions=(0, 0)) for one in ended]

    def close(self) -> None:
        pass


def turn(key: tuple[int, int], sequence: int = 0) -> Turn:
    return Turn(key=key, sequence=sequence, ids=np.array([1, 2], np.int32), seed=5, most=3)


def test_turns_go_to_the_engine_in_the_order_of_their_episodes() -> None:
    engine = Engine()
    turns = Turns(engine)
    for key in ((2, 0), (-1, 1), (1, 3), (1, 0)):
        turns.draw(turn(key))
    assert not engine.asked  # not before the step
    order = []
    while turns:
        order += [drawn.key for drawn, _ in turns.step()[0]]
    assert order == [(-1, 1), (1, 0), (1, 3), (2, 0)]


def test_a_turn_is_asked_for_by_its_ids_with_its_own_limit() -> None:
    engine = Engine()
    turns = Turns(engine)
    turns.draw(turn((1, 0)))
    turns.draw(turn((2, 0)))
    turns.step()
    (request,) = engine.asked
    assert request.ordinal == FIRST_TURN + 1
    assert request.ids is not None
    assert (request.ids.tolist(), request.most, request.seed) == ([1, 2], 3, 5)


def test_questions_pass_and_their_answers_come_back_apart() -> None:
    engine = Engine()
    turns = Turns(engine)
    question = SampleRequest(
        ordinal=FIRST_QUESTION, sample=0, seed=1, prompt=Prompt(row=0, text="?")
    )
    turns.ask([question])
    assert engine.asked == [question]
    turns.draw(turn((0, 0)))
    drawn, answers = turns.step()
    assert (drawn, [one.request for one in answers]) == ([], [question])
    assert [one.key for one, _ in turns.step()[0]] == [(0, 0)]
    assert not turns


def test_the_turns_of_an_episode_end_and_those_of_others_do_not() -> None:
    engine = Engine()
    turns = Turns(engine)
    turns.draw(turn((0, 0)))
    turns.draw(turn((1, 0)))
    turns.draw(turn((1, 0), sequence=1))
    turns.draw(turn((2, 0)))
    turns.step()
    turns.draw(turn((1, 0), sequence=2))  # not with the engine yet
    ended = turns.end((1, 0))
    assert [(one.sequence, done.status) for one, done in ended] == [(0, ABORTED), (1, ABORTED)]
    assert [one.key for one, _ in turns.step()[0]] == [(2, 0)]
    assert not turns


def test_the_first_turn_has_the_seed_of_its_sample_and_all_others_have_their_own() -> None:
    seeds = [seed_of_turn(2**62 + 7, place) for place in range(1000)]
    assert seeds[0] == 2**62 + 7
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
