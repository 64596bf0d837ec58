"""The endpoint over real connections: what an agent may ask, what it gets, and what it cannot
break.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

import pytest
from gcore_environments.endpoint import Asked
from gcore_environments.questions import Refused, Wish

from tests.support.http_agent import ADD, USER, Agent
from tests.support.scripted_policy import END, ScriptedPolicy, text_of

CALLS = '<call>["add", {"a": 1, "b": 2}]</call><call>["add", {"a": 3}]</call>'


def test_an_agent_gets_what_the_policy_said_with_its_ids_and_log_probs() -> None:
    with ScriptedPolicy("three") as policy, Agent(policy.endpoint) as agent:
        found = agent.chat(USER, logprobs=True, return_token_ids=True, temperature=1.0)
        (choice,) = found["choices"]
        assert choice["message"] == {"role": "assistant", "content": "three"}
        assert choice["finish_reason"] == "stop"
        assert text_of(found["prompt_token_ids"]) == "[user]1+2?[assistant]"
        assert choice["token_ids"] == [*map(ord, "three"), END]
        tokens = [one["token"] for one in choice["logprobs"]["content"]]
        assert tokens == [f"token_id:{one}" for one in choice["token_ids"]]
        assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + 6


def test_ids_are_not_sent_where_they_are_not_asked_for() -> None:
    with ScriptedPolicy() as policy, Agent(policy.endpoint) as agent:
        found = agent.chat(USER)
        assert "prompt_token_ids" not in found
        assert "token_ids" not in found["choices"][0]
        assert found["choices"][0]["logprobs"] is None


def test_two_calls_of_one_turn_come_as_calls_and_their_history_goes_on() -> None:
    with ScriptedPolicy(CALLS, "6") as policy, Agent(policy.endpoint) as agent:
        found = agent.chat(USER, tools=[ADD], tool_choice="auto", parallel_tool_calls=True)
        (choice,) = found["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        calls = choice["message"]["tool_calls"]
        assert [json.loads(one["function"]["arguments"]) for one in calls] == [
            {"a": 1, "b": 2},
            {"a": 3},
        ]
        for one in calls:  # agents write arguments anew
            arguments = json.loads(one["function"]["arguments"])
            one["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
        results = [{"role": "tool", "tool_call_id": one["id"], "content": "3"} for one in calls]
        agent.chat(USER, choice["message"], *results, tools=[ADD])
        (book,) = policy.books.values()
        assert len(book.sequences) == 1
        assert not book.forks


def test_a_limit_cuts_an_answer_and_says_so() -> None:
    with ScriptedPolicy("a long answer") as policy, Agent(policy.endpoint) as agent:
        for name in ("max_tokens", "max_completion_tokens"):
            found = agent.chat(USER, **{name: 6}, return_token_ids=True)
            assert found["choices"][0]["finish_reason"] == "length"
            assert len(found["choices"][0]["token_ids"]) == 6


def test_a_stop_text_is_sampled_but_not_shown_and_the_history_goes_on() -> None:
    with ScriptedPolicy("yes STOP never seen", "good") as policy, Agent(policy.endpoint) as agent:
        found = agent.chat(USER, stop="STOP", return_token_ids=True)
        message = found["choices"][0]["message"]
        assert message["content"] == "yes "
        assert text_of(found["choices"][0]["token_ids"]) == "yes STOP"
        again = agent.chat(USER, message, USER, stop=["STOP"], return_token_ids=True)
        assert "yes STOP" in text_of(again["prompt_token_ids"])
        (book,) = policy.books.values()
        assert not book.forks


def test_a_stream_has_the_whole_answer_its_end_and_its_usage_where_asked_for() -> None:
    with ScriptedPolicy(CALLS) as policy, Agent(policy.endpoint) as agent:
        body = {"messages": [USER], "tools": [ADD], "stream": True, "return_token_ids": True}
        for options, chunks in ({}, 2), ({"stream_options": {"include_usage": True}}, 3):
            data = json.dumps({**body, **options}).encode()
            status, found = agent.raw("/v1/chat/completions", data)
            assert status == 200
            assert agent.headers["content-type"] == "text/event-stream"
            lines = found.decode().split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
            assert len(events) == chunks
            assert [one["index"] for one in events[0]["choices"][0]["delta"]["tool_calls"]] == [
                0,
                1,
            ]
            assert events[0]["choices"][0]["token_ids"]
            assert events[0]["prompt_token_ids"]
            assert events[1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "name, value",
    [
        *(("temperature", 0.0), ("temperature", 0.7), ("top_p", 0.9), ("top_k", 20)),
        *(("min_p", 0.1), ("presence_penalty", 1), ("frequency_penalty", 0.5)),
        *(("repetition_penalty", 1.1), ("logit_bias", {"5": 100}), ("n", 2), ("best_of", 4)),
        *(("response_format", {"type": "json_object"}), ("min_tokens", 3), ("ignore_eos", True)),
        *(("structured_outputs", {"regex": "a"}), ("guided_json", {}), ("top_logprobs", 5)),
        ("prompt_logprobs", 1),
    ],
)
def test_a_sampling_value_that_is_not_the_policys_is_refused_by_name(name: str, value: Any) -> None:
    with ScriptedPolicy() as policy, Agent(policy.endpoint) as agent:
        status, text = agent.refused(**{name: value})
        assert status == 400
        assert text.startswith(name)
        assert policy.seen == []


def test_the_log_says_once_why_requests_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Many clients raise the status alone, and then nobody knows what to change."""
    with ScriptedPolicy() as policy, Agent(policy.endpoint) as agent:
        for _ in range(3):
            agent.refused(temperature=0.1)
        assert agent.post("/v1/embeddings")[0] == 404
        policy.endpoint.forget((0, 0))
        assert agent.refused()[0] == 404
    first, second = caplog.messages
    assert first.startswith("a request of an agent is refused (status 400): temperature")
    assert "(status 404): Nothing is served at /v1/embeddings" in second


def test_the_policys_own_sampling_values_may_be_repeated() -> None:
    with ScriptedPolicy(temperature=0.7, top_p=0.9, top_k=20) as policy:
        with Agent(policy.endpoint) as agent:
            agent.chat(USER, temperature=0.7, top_p=0.9, top_k=20, n=1, presence_penalty=0)
            assert agent.refused(temperature=1.0)[0] == 400
    with ScriptedPolicy() as policy, Agent(policy.endpoint) as agent:
        straight = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "top_logprobs": 0}
        agent.chat(USER, temperature=1, top_p=1.0, logit_bias={}, stop=None, **straight)


def test_what_has_no_effect_is_named_in_the_answer() -> None:
    with ScriptedPolicy() as policy, Agent(policy.endpoint) as agent:
        agent.chat(USER, model="gpt-9", seed=3, user="me", tool_choice="required", tools=[ADD])
        assert agent.headers["x-ignored"] == "seed, user, tool_choice"
        agent.chat(USER, **{"a\r\nset-cookie: b": 1})
        assert agent.headers["x-ignored"] is None
        assert agent.headers["set-cookie"] is None
        agent.chat(USER, model="policy")
        assert agent.headers["x-ignored"] is None


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    with ScriptedPolicy() as policy, Agent(policy.endpoint) as agent:
        agent.chat(USER, tools=[ADD], tool_choice="none")
        assert policy.seen[0].tools == ()


def test_ids_go_in_as_a_prompt_and_come_back_with_their_log_probs() -> None:
    with ScriptedPolicy("three", "four") as policy, Agent(policy.endpoint) as agent:
        prompt = [*map(ord, "[user]1+2?[assistant]")]
        sampling = {
            "temperature": 1.0,
            "max_tokens": 9,
            "logprobs": 1,
            "stop_token_ids": [END],
            "skip_special_tokens": False,
            "routed_experts_prompt_start": 3,
        }
        body = {"model": "policy", "token_ids": prompt, "sampling_params": sampling}
        status, found = agent.post("/inference/v1/generate", **body)
        assert status == 200
        (choice,) = found["choices"]
        said = choice["token_ids"]
        assert said == [*map(ord, "three"), END]
        assert [one["token"] for one in choice["logprobs"]["content"]] == [
            f"token_id:{one}" for one in said
        ]
        assert all(one["logprob"] == -0.25 for one in choice["logprobs"]["content"])
        assert choice["finish_reason"] == "stop"
        assert found["request_id"]
        assert found["prompt_token_ids"] == prompt
        body["token_ids"] = [*prompt, *said, *map(ord, "[user]more[assistant]")]
        assert agent.post("/inference/v1/generate", **body)[0] == 200
        (book,) = policy.books.values()
        assert len(book.sequences) == 1


def test_ids_of_an_agent_never_train_whatever_they_repeat() -> None:
    with ScriptedPolicy("three", "four") as policy, Agent(policy.endpoint) as agent:
        prompt = [*map(ord, "[user]1+2?[assistant]")]
        forged = [*prompt, *map(ord, "nine"), END, *map(ord, "[user]more[assistant]")]
        for ids in prompt, forged:
            assert agent.post("/inference/v1/generate", token_ids=ids)[0] == 200
        (book,) = policy.books.values()
        trained = [one.ids[begin:end] for one in book.sequences for begin, end, _, _ in one.spans]
        assert trained == [[*map(ord, "three"), END], [*map(ord, "four"), END]]
        assert dict(book.forks) == {"rewritten": 1}


@pytest.mark.parametrize("ids", [None, [], [1.5], [True], [-1], [1 << 31], ["a"], "abc", [[1]]])
def test_ids_that_are_none_are_refused(ids: Any) -> None:
    with ScriptedPolicy() as policy, Agent(policy.endpoint) as agent:
        status, found = agent.post("/inference/v1/generate", token_ids=ids)
        assert status == 400
        assert "token_ids" in found["error"]["message"]


def test_an_id_that_the_vocabulary_lacks_is_refused() -> None:
    with ScriptedPolicy(vocabulary=100) as policy, Agent(policy.endpoint) as agent:
        assert agent.post("/inference/v1/generate", token_ids=[99])[0] == 200
        assert agent.post("/inference/v1/generate", token_ids=[100])[0] == 400


def test_models_are_listed_with_the_context_where_it_is_known() -> None:
    with ScriptedPolicy(model="mine", context_length=512) as policy:
        with Agent(policy.endpoint) as agent:
            status, data = agent.raw("/v1/models", None, "GET")
            assert status == 200
            (model,) = json.loads(data)["data"]
            assert (model["id"], model["max_model_len"]) == ("mine", 512)


@pytest.mark.parametrize("key", ["", "x", "0.0.1.", "0.0.1.00", "0.0.1.é", "..."])
def test_a_key_of_no_episode_is_refused_everywhere(key: str) -> None:
    with ScriptedPolicy() as policy:
        policy.endpoint.key((0, 0))
        with Agent(policy.endpoint, key or " ") as agent:
            status, text = agent.refused()
            assert status == 401
            assert "api_key" in text
            assert agent.raw("/v1/models", None, "GET")[0] == 401
            assert agent.post("/inference/v1/generate", token_ids=[1])[0] == 401
        assert policy.seen == []


def test_the_key_of_one_endpoint_opens_no_other() -> None:
    with ScriptedPolicy() as one, ScriptedPolicy() as other:
        other.endpoint.key((0, 0))
        with Agent(other.endpoint, one.endpoint.key((0, 0))) as agent:
            assert agent.refused()[0] == 401


def test_a_key_is_dead_with_its_episode_and_a_new_try_has_another() -> None:
    with ScriptedPolicy() as policy, Agent(policy.endpoint, episode=-7) as agent:
        agent.chat(USER)
        second = policy.endpoint.key((-7, 0))
        assert agent.refused() == (404, "This episode is over.")
        with Agent(policy.endpoint, second) as later:
            later.chat(USER)
            policy.endpoint.forget((-7, 0))
            assert later.refused()[0] == 404


def test_a_request_of_an_earlier_try_never_becomes_a_turn_of_the_next() -> None:
    """Its key was looked at, and then, while its body was read, the episode was drawn again."""
    with ScriptedPolicy() as policy:
        before = policy.endpoint.try_of(policy.endpoint.key((3, 0)))
        now = policy.endpoint.try_of(policy.endpoint.key((3, 0)))
        wish = Wish(messages=[USER])
        with pytest.raises(Refused, match="over"):
            policy.endpoint.ask(before, wish)
        assert policy.seen == []
        policy.endpoint.ask(now, wish)
        assert len(policy.seen) == 1


def test_who_waits_when_the_episode_ends_is_told_so() -> None:
    asked = threading.Event()
    with ScriptedPolicy(say=lambda one: asked.set()) as policy:
        with Agent(policy.endpoint) as agent:
            found: list[tuple[int, str]] = []
            waits = threading.Thread(target=lambda: found.append(agent.refused()))
            waits.start()
            assert asked.wait(30)
            policy.endpoint.forget((0, 0))
            waits.join(30)
            assert found == [(404, "This episode is over.")]
            policy.seen[0].refuse(policy.seen[0].answer.exception(0))  # type: ignore[arg-type]


def test_who_waits_when_the_endpoint_closes_is_told_so_and_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    asked = threading.Event()
    with ScriptedPolicy(say=lambda one: asked.set()) as policy:
        agent = Agent(policy.endpoint)
        found: list[tuple[int, str]] = []
        waits = threading.Thread(target=lambda: found.append(agent.refused()))
        waits.start()
        assert asked.wait(30)
        idle = Agent(policy.endpoint, episode=1)
        assert idle.raw("/health", None, "GET") == (200, b'{"status":"ok"}')
        policy.endpoint.close()
        waits.join(30)
        assert found[0][0] == 503
        for one in set(threading.enumerate()) - before - {policy.thread}:
            one.join(30)
            assert not one.is_alive()
        agent.connection.close()
        idle.connection.close()
        policy.endpoint.close = lambda: None  # type: ignore[method-assign]


RUBBISH = [
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    *(
        json.dumps(body).encode()
        for body in (
            {},
            {"messages": []},
            {"messages": "hello"},
            {"messages": [5]},
            {"messages": [{"role": "king", "content": "x"}]},
            {"messages": [{"role": [], "content": "x"}]},
            {"messages": [{"role": "user"}]},
            {"messages": [{"role": "user", "content": 5}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"messages": [{"role": "user", "content": [7]}]},
            {"messages": [USER, {"role": "assistant", "content": "x"}]},
            {"messages": [{"role": "assistant", "tool_calls": 5}, USER]},
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}, USER]},
            {"messages": [USER], "tools": 5},
            {"messages": [USER], "tools": [{"type": "function"}]},
            {"messages": [USER], "max_tokens": -1},
            {"messages": [USER], "max_tokens": "5"},
            {"messages": [USER], "stop": [""]},
            {"messages": [USER], "stop": 5},
            {"messages": [USER], "stream": "yes"},
            {"messages": [USER], "temperature": "hot"},
        )
    ),
]


@pytest.mark.parametrize("data", RUBBISH, ids=range(len(RUBBISH)))
def test_rubbish_is_refused_and_the_connection_goes_on(data: bytes) -> None:
    with ScriptedPolicy() as policy, Agent(policy.endpoint) as agent:
        status, found = agent.raw("/v1/chat/completions", data)
        assert status == 400
        assert json.loads(found)["error"]["type"] == "invalid_request_error"
        assert policy.seen == []
        opened = agent.connection.sock
        agent.chat(USER)
        assert agent.connection.sock is opened


def test_a_body_above_the_limit_is_refused_without_being_read() -> None:
    with ScriptedPolicy() as policy, Agent(policy.endpoint) as agent:
        with socket.create_connection(("127.0.0.1", agent.connection.port)) as raw:
            raw.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n"
            )
            assert raw.recv(12) == b"HTTP/1.1 413"


@pytest.mark.parametrize(
    "head, status",
    [
        (b"content-length: -5", b"400"),
        (b"content-length: many", b"400"),
        (b"transfer-encoding: chunked", b"411"),
    ],
)
def test_a_body_without_a_length_is_refused(head: bytes, status: bytes) -> None:
    with ScriptedPolicy() as policy, Agent(policy.endpoint) as agent:
        with socket.create_connection(("127.0.0.1", agent.connection.port)) as raw:
            raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" + head + b"\r\n\r\n")
            assert raw.recv(12) == b"HTTP/1.1 " + status


def test_what_is_no_request_at_all_and_other_methods_get_errors_of_the_same_form() -> None:
    with ScriptedPolicy() as policy, Agent(policy.endpoint) as agent:
        with socket.create_connection(("127.0.0.1", agent.connection.port)) as raw:
            raw.sendall(b"hello there, how are you\r\n\r\n")
            assert b'"error"' in raw.makefile("rb").read()
        status, data = agent.raw("/v1/models", b"{}", "PUT")
        assert status == 501
        assert "error" in json.loads(data)
        assert agent.post("/v1/nothing")[0] == 404


def test_an_agent_that_drops_its_connection_hurts_no_other() -> None:
    held: list[Asked] = []
    asked = threading.Event()

    def hold(one: Asked) -> None:
        held.append(one)
        asked.set()

    with ScriptedPolicy(say=hold) as policy:
        gone = Agent(policy.endpoint)
        data = json.dumps({"messages": [USER]}).encode()
        bearer = {"authorization": f"Bearer {gone.key}"}
        gone.connection.request("POST", "/v1/chat/completions", data, bearer)
        assert asked.wait(30)
        gone.connection.close()
        policy.say = None
        held[0].reply(policy._drawn(held[0]))
        with Agent(policy.endpoint, gone.key) as again:  # its try again is another answer
            again.chat(USER)
        (book,) = policy.books.values()
        assert dict(book.forks) == {"parallel": 1}


def test_a_request_that_stops_half_way_takes_no_answer() -> None:
    with ScriptedPolicy() as policy, Agent(policy.endpoint) as agent:
        with socket.create_connection(("127.0.0.1", agent.connection.port)) as raw:
            bearer = f"authorization: Bearer {agent.key}\r\n".encode()
            raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" + bearer)
            raw.sendall(b'content-length: 500\r\n\r\n{"messages": ')
        agent.chat(USER)
        assert len(policy.seen) == 1


def test_a_fault_of_the_owner_is_an_error_of_the_server() -> None:
    def fail(one: Asked) -> None:
        one.answer.set_exception(ValueError("broken"))

    with ScriptedPolicy(say=fail) as policy, Agent(policy.endpoint) as agent:
        status, text = agent.refused()
        assert status == 500
        assert "ValueError" in text


def test_many_agents_at_once_get_their_own_answers() -> None:
    with ScriptedPolicy("one", "two", "three") as policy:
        faults: list[object] = []

        def play(episode: int) -> None:
            with Agent(policy.endpoint, episode=episode) as agent:
                history = [{"role": "user", "content": f"episode {episode}"}]
                for expected in ("one", "two", "three"):
                    found = agent.chat(*history, return_token_ids=True)
                    message = found["choices"][0]["message"]
                    if message["content"] != expected or f"episode {episode}[" not in text_of(
                        [2 if one == END else one for one in found["prompt_token_ids"]]
                    ).replace(chr(2), "["):
                        faults.append((episode, expected, found))
                    history += [message, {"role": "user", "content": "and then?"}]

        threads = [threading.Thread(target=play, args=(one,)) for one in range(16)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(60)
        assert faults == []
        assert len(policy.books) == 16
        assert all(len(book.sequences) == 1 for book in policy.books.values())


def test_the_endpoint_listens_on_loopback_alone() -> None:
    with ScriptedPolicy() as policy:
        (door,) = policy.endpoint._served
        assert door.getsockname()[0] == "127.0.0.1"
        assert policy.endpoint.url.startswith("http://127.0.0.1:")


def test_all_agents_of_a_step_may_connect_at_once() -> None:
    """Also while nobody accepts them yet, as on a machine that is busy."""
    with ScriptedPolicy() as policy:
        ((http, _),) = policy.endpoint._served.values()
        with http._lock, contextlib.ExitStack() as opened:  # which holds the server up
            for _ in range(600):
                opened.enter_context(socket.create_connection(http.server_address, timeout=5))
