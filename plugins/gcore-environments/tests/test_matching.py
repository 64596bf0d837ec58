"""Where a history goes on: by messages and by ids, and by which cause it forks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gcore_environments.book import Book
from gcore_environments.endpoint import Refused
from gcore_environments.matching import answer_of, answered, place, place_ids
from gcore_environments.rendering import Bridge, Said

from tests.support.scripted_policy import END, Letters, text_of

SYSTEM = {"role": "system", "content": "Play."}
USER = {"role": "user", "content": "go"}
TOOLS = ({"type": "function", "function": {"name": "move"}},)


def said(text: str, calls: list[dict[str, Any]] | None = None) -> Said:
    return Said(text=text, reasoning="", calls=calls or [], unparsed=0)


class Episode:
    """A book, and an agent that posts what it wants."""

    def __init__(self, drift: str = "fork", renderer: Any = None) -> None:
        self.book, self.drift, self.renderer = Book(), drift, renderer or Letters()

    def ask(self, *messages: dict[str, Any], tools: tuple[dict[str, Any], ...] = ()) -> int:
        return place(self.book, self.renderer, messages, tools, self.drift)

    def turn(
        self,
        *messages: dict[str, Any],
        text: str = "ok",
        calls: list[dict[str, Any]] | None = None,
        tools: tuple[dict[str, Any], ...] = (),
    ) -> dict[str, Any]:
        """The policy's message in answer to a history."""
        number = self.ask(*messages, tools=tools)
        ids = [*map(ord, text), END]
        self.book.sampled(number, ids, [-1.0] * len(ids), [0] * len(ids))
        answered(self.book, number, messages, tools, said(text, calls))
        return answer_of(said(text, calls))

    @property
    def forks(self) -> dict[str, int]:
        return dict(self.book.forks)


def by_ids(episode: Episode, ids: list[int], text: str = "ok") -> None:
    number = place_ids(episode.book, ids, episode.drift)
    said_ids = [*map(ord, text), END]
    episode.book.sampled(number, said_ids, [-1.0] * len(said_ids), [0] * len(said_ids))


def test_thirty_turns_are_one_sequence_that_begins_with_every_earlier_one() -> None:
    episode = Episode("error")
    history = [SYSTEM, USER]
    before: list[int] = []
    for turn in range(30):
        history.append(episode.turn(*history, text=f"said {turn}"))
        history.append({"role": "user", "content": f"more {turn}"})
        (only,) = episode.book.sequences
        assert only.ids[: len(before)] == before
        before = list(only.ids)
    assert episode.forks == {}
    assert len(only.spans) == 30


def test_arguments_are_compared_as_objects_and_contents_without_their_margins() -> None:
    episode = Episode("error")
    function = {"name": "move", "arguments": '{"a": 1, "b": [2]}'}
    calls = [{"id": "call_0", "type": "function", "function": function}]
    message = episode.turn(USER, calls=calls, tools=TOOLS)
    again = json.loads(json.dumps(message))
    again["content"] = f"  {again['content']}\n"
    again["tool_calls"][0]["id"] = "another"
    again["tool_calls"][0]["function"]["arguments"] = '{"b":[2],"a":1}'
    episode.turn(USER, again, {"role": "tool", "content": "3"}, tools=TOOLS)
    assert episode.forks == {}


def test_the_policys_words_are_read_as_sampled_not_as_posted() -> None:
    episode = Episode()
    message = episode.turn(USER, text=" spaced ")
    episode.turn(USER, {**message, "content": "spaced"}, USER)
    (only,) = episode.book.sequences
    assert "[assistant] spaced [user]" in text_of(only.ids)


@pytest.mark.parametrize("drift", ["fork", "error"])
def test_several_answers_from_one_point_are_a_fork_by_right(drift: str) -> None:
    episode = Episode(drift)
    first = episode.turn(SYSTEM, USER)
    episode.turn(SYSTEM, USER, text="other")
    assert episode.forks == {"parallel": 1}
    episode.turn(SYSTEM, USER, first, {"role": "user", "content": "a"})
    episode.turn(SYSTEM, USER, first, {"role": "user", "content": "b"})
    episode.turn(SYSTEM, USER, first, {"role": "user", "content": "b"})
    assert episode.forks == {"parallel": 3}
    for one in episode.book.sequences[2:]:
        parent = episode.book.sequences[one.parent]
        assert parent.ids[: one.shared] == one.ids[: one.shared]


def test_two_calls_that_wait_at_once_never_share_a_sequence() -> None:
    episode = Episode("error")
    numbers = [episode.ask(USER) for _ in range(3)]
    assert len(set(numbers)) == 3
    assert episode.forks == {"parallel": 2}


def test_another_conversation_is_a_fork_by_right() -> None:
    episode = Episode("error")
    episode.turn(SYSTEM, USER)
    episode.turn({"role": "system", "content": "You are a helper."}, USER)
    assert episode.forks == {"parallel": 1}


REWRITTEN = {
    "an answer": lambda m: [SYSTEM, USER, {**m, "content": "never said"}, USER],
    "the beginning": lambda m: [{**SYSTEM, "content": "Other."}, USER, m, USER],
    "the question": lambda m: [SYSTEM, {**USER, "content": "other"}, m, USER],
    "a call": lambda m: [SYSTEM, USER, {**m, "tool_calls": CALLED}, USER],
}
CALLED = [{"id": "x", "type": "function", "function": {"name": "move", "arguments": "{}"}}]


@pytest.mark.parametrize("change", REWRITTEN)
def test_a_rewritten_history_forks_and_is_refused_where_drift_is_an_error(change: str) -> None:
    for drift in "fork", "error":
        episode = Episode(drift)
        message = episode.turn(SYSTEM, USER)
        history = REWRITTEN[change](message)
        if drift == "error":
            before = list(episode.book.sequences[0].ids)
            with pytest.raises(Refused, match="not what the policy said") as refused:
                episode.turn(*history)
            assert refused.value.status == 409
            assert [one.ids for one in episode.book.sequences] == [before]
            episode.turn(SYSTEM, USER, message, USER)  # and the episode goes on
        else:
            episode.turn(*history)
            assert episode.forks == {"rewritten": 1}


def test_an_answer_that_is_rewritten_later_forks_where_the_policy_was_last_right() -> None:
    episode = Episode()
    first = episode.turn(USER, text="first")
    second = episode.turn(USER, first, USER, text="second")
    episode.turn(USER, first, USER, {**second, "content": "forged"}, USER)
    assert episode.forks == {"rewritten": 1}
    one = episode.book.sequences[1]
    assert text_of(one.ids[: one.shared]) == "[user]go[assistant]first"
    trained = [text_of(one.ids[begin:end]) for begin, end, _, _ in one.spans]
    assert trained == ["ok"]


def test_other_tools_are_another_history() -> None:
    episode = Episode()
    message = episode.turn(USER, tools=TOOLS)
    episode.turn(USER, message, USER)
    assert episode.forks == {"rewritten": 1}


def test_a_message_of_the_assistant_that_nobody_denies_is_given() -> None:
    episode = Episode("error")
    message = episode.turn(USER)
    episode.turn(USER, message, {"role": "assistant", "content": "I go on."}, USER)
    assert episode.forks == {}
    (only,) = episode.book.sequences
    trained = [text_of(only.ids[begin:end]) for begin, end, _, _ in only.spans]
    assert trained == ["ok", "ok"]


def test_a_template_without_a_bridge_forks_and_is_refused_where_drift_is_an_error() -> None:
    episode = Episode("fork", Letters(declines=True))
    message = episode.turn(USER)
    episode.turn(USER, message, USER)
    assert episode.forks == {"template": 1}
    episode = Episode("error", Letters(declines=True))
    message = episode.turn(USER)
    with pytest.raises(Refused, match="chat template writes old turns"):
        episode.turn(USER, message, USER)
    assert len(episode.book.sequences) == 1


def test_a_token_that_is_not_read_on_is_a_boundary() -> None:
    class OtherEnd(Letters):
        def bridge(self, ids: list[int], messages: Any, tools: Any = ()) -> Bridge:
            return Bridge([2, *self.start(messages)], drop=1)

    episode = Episode("error", OtherEnd())
    message = episode.turn(USER)
    episode.turn(USER, message, USER)
    assert episode.forks == {"boundary": 1}
    first, second = episode.book.sequences
    assert first.ids[: second.shared] == second.ids[: second.shared]
    assert second.shared == len(first.ids) - 1


def test_a_template_that_fails_is_the_agents_fault_and_writes_nothing() -> None:
    class Strict(Letters):
        def start(self, messages: Any, tools: Any = ()) -> list[int]:
            raise ValueError("roles must alternate")

    episode = Episode("fork", Strict())
    with pytest.raises(Refused, match="roles must alternate") as refused:
        episode.turn(USER, USER)
    assert refused.value.status == 400
    assert episode.book.sequences == []


def test_ids_go_on_behind_the_turn_that_they_repeat() -> None:
    episode = Episode("error")
    prompt = [10, 11]
    by_ids(episode, prompt, "a")
    (only,) = episode.book.sequences
    by_ids(episode, [*only.ids, 12, 13], "b")
    assert episode.forks == {}
    assert only.ids == [10, 11, ord("a"), END, 12, 13, ord("b"), END]


def test_ids_that_repeat_a_point_are_a_fork_by_right() -> None:
    episode = Episode("error")
    by_ids(episode, [10, 11], "abc")
    by_ids(episode, [10, 11], "xyz")
    by_ids(episode, [*episode.book.sequences[0].ids, 12])
    by_ids(episode, [*episode.book.sequences[1].ids, 12])
    by_ids(episode, [*episode.book.sequences[0].ids[:6], 13])
    assert episode.forks == {"parallel": 2}


@pytest.mark.parametrize("place_", [2, 3, 4])
def test_ids_that_encode_a_turn_anew_are_rewritten(place_: int) -> None:
    for drift in "fork", "error":
        episode = Episode(drift)
        by_ids(episode, [10, 11], "abc")
        ids = [*episode.book.sequences[0].ids, 12]
        ids[place_] = 7
        if drift == "error":
            with pytest.raises(Refused):
                by_ids(episode, ids)
            assert len(episode.book.sequences) == 1
        else:
            by_ids(episode, ids)
            assert episode.forks == {"rewritten": 1}
            assert episode.book.sequences[1].spans[0][0] == len(ids)
