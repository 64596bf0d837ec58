"""One episode without an engine or processes: limits, turns that overlap, and its record."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest
from gcore_environments.episodes import Episode, EpisodeEnds, Rules
from gcore_environments.limits import Limits
from gcore_environments.questions import IDS, Asked, Refused
from gcore_environments.testing import byte_tokenizer
from gcore_environments.turns import Turn

from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FINISHED, Prompt
from tests.support.scripted_policy import Letters

HI = {"role": "user", "content": "hi"}


class Engine:
    """What an episode asks of its engine when it makes a record."""

    temperature = 1.0

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer("")


def episode_of(context_length: int = 0) -> Episode:
    rules = Rules(
        engine=cast(Any, Engine()),
        renderer=Letters(),
        limits=Limits(turns=9, turn_tokens=0, tokens=1000, context_length=context_length),
        drift="fork",
        times=False,
    )
    request = SampleRequest(ordinal=0, sample=0, seed=1, prompt=Prompt(row=0, text="hi"))
    return Episode(request, cast(Any, None), rules)


def chat(*messages: dict[str, Any]) -> Asked:
    return Asked(key=(0, 0), kind="chat", messages=list(messages))


def finished(text: str, versions: tuple[int, int] = (0, 0)) -> Finished:
    ids = [ord(letter) for letter in text]
    return Finished(
        request=cast(Any, None),
        status=FINISHED,
        versions=versions,
        columns={
            "action_ids": np.array(ids, np.int32),
            "logp": np.zeros(len(ids), np.float32),
            "version": np.array([versions[0], *[versions[1]] * (len(ids) - 1)], np.int32),
        },
    )


def says(
    episode: Episode, turn: Turn, text: str, versions: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    """Has the policy answer an agent; returns the message that the agent posts again."""
    assert turn.asked is not None
    episode.answer(turn, turn.asked, finished(text, versions))
    return {"role": "assistant", "content": turn.asked.answer.result(0).said.text}


def test_a_request_that_the_context_has_no_room_for_leaves_nothing_in_the_book() -> None:
    """A reference model could not read it, and a client that tries again would add it each time."""
    episode = episode_of(context_length=40)
    said = says(episode, episode.hear(chat(HI)), "ok")
    (only,) = episode.book.sequences
    before = list(only.ids)
    long = {"role": "user", "content": "much too long for this context"}
    too_long = [
        chat(HI, said, long),
        chat(long, long),
        Asked(key=(0, 0), kind=IDS, ids=[*before, *range(40)]),
    ]
    for asked in [*too_long, *too_long]:
        with pytest.raises(Refused, match="context"):
            episode.hear(asked)
    assert episode.book.sequences == [only]
    assert only.ids == before
    assert not episode.book.forks
    assert episode.hear(chat(HI)).sequence == 1  # a shorter one is still answered


def test_versions_of_overlapping_turns_are_the_first_and_the_last_of_all() -> None:
    """The turn that ends first has begun last: a record is as old as its oldest action."""
    episode = episode_of()
    old, new = episode.hear(chat(HI)), episode.hear(chat(HI))
    says(episode, new, "new", (4, 4))
    says(episode, old, "old", (3, 4))
    assert episode.record(FINISHED, "", 9).versions == (3, 4)


@pytest.mark.parametrize(("player", "earned"), [("0", -1.0), ("", 0.0)])
def test_the_reward_of_a_player_without_a_turn_goes_to_no_other_player(
    player: str, earned: float
) -> None:
    """A game may end before all have had a turn. Without players a slash is part of the name."""
    episode = episode_of()
    turn = episode.observe({"messages": [HI], "player": player})
    episode.reply(turn, finished("a foul"))
    with pytest.raises(EpisodeEnds):
        episode.observe({"rewards": {"0/game": -1.0, "1/game": 1.0}, "done": True})
    assert episode.book.sequences[0].rewards == [earned]
    assert episode.rewards == {"0/game": -1.0, "1/game": 1.0}


def test_an_answer_is_told_behind_the_messages_that_it_answers() -> None:
    """Rewards read them: an answer to one request must not stand behind those of another."""
    episode = episode_of()
    other = {"role": "user", "content": "something else"}
    first, second = episode.hear(chat(HI)), episode.hear(chat(other))
    says(episode, second, "two")
    says(episode, first, "one")
    record = episode.record(FINISHED, "", 0)
    told = json.loads(record.columns["episode"].tobytes())
    assert told["messages"] == [HI, {"role": "assistant", "content": "one"}]
