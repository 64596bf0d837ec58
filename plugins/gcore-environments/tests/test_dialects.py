"""The other forms of requests say the same as chat completions: one history, whoever posts it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http_agent import ADD, USER, Agent
from tests.support.scripted_policy import ScriptedPolicy, text_of

CALLS = 'Two calls. <call>["add", {"a": 1, "b": 2}]</call><call>["add", [3]]</call>'
NAMED = {"name": "add", "description": "", "input_schema": {"type": "object"}}
NAMELESS = {"type": "tool_use", "input": {}}
FLAT = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def events_of(data: bytes) -> list[dict[str, Any]]:
    blocks = data.decode().strip().split("\n\n")
    found = []
    for block in blocks:
        name, text = block.split("\n")
        found.append(json.loads(text.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_messages_with_calls_go_on_in_one_sequence() -> None:
    with ScriptedPolicy(CALLS, "It is 3.", drift="error") as policy:
        with Agent(policy.endpoint) as agent:
            body: dict[str, Any] = {"system": [{"type": "text", "text": "Add."}], "tools": [NAMED]}
            body |= {"model": "x", "max_tokens": 500, "messages": [USER]}
            status, found = agent.post("/v1/messages", **body)
            assert status == 200
            assert found["stop_reason"] == "tool_use"
            text, *uses = found["content"]
            assert text == {"type": "text", "text": "Two calls."}
            inputs = [one["input"] for one in uses]
            assert inputs == [{"a": 1, "b": 2}, {"unparsed_arguments": "[3]"}]
            results = [
                {"type": "tool_result", "tool_use_id": one["id"], "content": content}
                for one, content in zip(uses, ["3", [{"type": "text", "text": "no"}]], strict=True)
            ]
            history = [USER, {"role": "assistant", "content": found["content"]}]
            history.append({"role": "user", "content": [*results, {"type": "text", "text": "Go"}]})
            status, found = agent.post("/v1/messages", **{**body, "messages": history})
            assert status == 200
            assert found["content"] == [{"type": "text", "text": "It is 3."}]
            assert found["stop_reason"] == "end_turn"
        (book,) = policy.books.values()
        assert len(book.sequences) == 1
        assert "[system]Add.[user]1+2?[assistant]Two calls." in text_of(book.sequences[0].ids)
        assert "[tool]3[tool]no[user]Go[assistant]" in text_of(book.sequences[0].ids)


def test_messages_say_why_they_stopped() -> None:
    with ScriptedPolicy("one two three") as policy, Agent(policy.endpoint) as agent:
        body = {"messages": [USER], "max_tokens": 3}
        assert agent.post("/v1/messages", **body)[1]["stop_reason"] == "max_tokens"
        body = {"messages": [USER], "max_tokens": 99, "stop_sequences": ["two"]}
        found = agent.post("/v1/messages", **body)[1]
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "two")
        assert found["content"][0]["text"] == "one "


def test_messages_stream_their_blocks() -> None:
    with ScriptedPolicy(CALLS) as policy, Agent(policy.endpoint) as agent:
        body = {"messages": [USER], "max_tokens": 99, "tools": [NAMED], "stream": True}
        status, data = agent.raw("/v1/messages", json.dumps(body).encode())
        assert status == 200
        events = events_of(data)
        assert [one["type"] for one in events if not one["type"].startswith("content_block")] == [
            "message_start",
            "message_delta",
            "message_stop",
        ]
        deltas = [one["delta"] for one in events if one["type"] == "content_block_delta"]
        assert [one["type"] for one in deltas] == ["text_delta", *["input_json_delta"] * 2]
        assert json.loads(deltas[1]["partial_json"]) == {"a": 1, "b": 2}


def test_the_key_may_come_as_anthropics_clients_send_it() -> None:
    with ScriptedPolicy() as policy, Agent(policy.endpoint) as agent:
        key, agent.key = agent.key, "nobody's"
        body = json.dumps({"messages": [USER], "max_tokens": 5}).encode()
        agent.connection.request("POST", "/v1/v1/messages", body, {"x-api-key": key})
        assert agent.connection.getresponse().read()
        status, found = agent.post("/v1/messages", messages=[USER])
        assert status == 401
        assert found == {"type": "error", "error": found["error"]}
        assert found["error"]["type"] == "authentication_error"


def test_responses_with_calls_go_on_in_one_sequence() -> None:
    with ScriptedPolicy(CALLS, "It is 3.", drift="error") as policy:
        with Agent(policy.endpoint) as agent:
            body: dict[str, Any] = {"instructions": "Add.", "tools": [FLAT], "input": "1+2?"}
            status, found = agent.post("/v1/responses", **body)
            assert status == 200
            assert found["status"] == "completed"
            message, *calls = found["output"]
            assert message["content"][0]["text"] == "Two calls."
            assert [one["arguments"] for one in calls] == ['{"a": 1, "b": 2}', "[3]"]
            results = [
                {"type": "function_call_output", "call_id": one["call_id"], "output": "3"}
                for one in calls
            ]
            body["input"] = [USER, *found["output"], *results]
            status, found = agent.post("/v1/responses", **body)
            assert status == 200
            assert found["output"][0]["content"][0]["text"] == "It is 3."
            usage = found["usage"]
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        (book,) = policy.books.values()
        assert len(book.sequences) == 1


def test_responses_stream_their_items() -> None:
    with ScriptedPolicy(CALLS) as policy, Agent(policy.endpoint) as agent:
        body = {"input": "1+2?", "tools": [FLAT], "stream": True}
        status, data = agent.raw("/v1/responses", json.dumps(body).encode())
        assert status == 200
        events = events_of(data)
        assert [one["sequence_number"] for one in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created"
        assert events[-1]["type"] == "response.completed"
        done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]


def test_an_answer_that_is_cut_is_an_incomplete_response() -> None:
    with ScriptedPolicy("a long answer") as policy, Agent(policy.endpoint) as agent:
        found = agent.post("/v1/responses", input="x", max_output_tokens=3)[1]
        assert found["status"] == "incomplete"
        assert found["incomplete_details"] == {"reason": "max_output_tokens"}


def test_one_history_in_three_forms_is_one_sequence() -> None:
    with ScriptedPolicy("one", "two", "three", drift="error") as policy:
        with Agent(policy.endpoint) as agent:
            first = agent.chat(USER)["choices"][0]["message"]
            history: list[dict[str, Any]] = [USER, first, USER]
            said = agent.post("/v1/messages", messages=history, max_tokens=9)[1]["content"]
            history += [{"role": "assistant", "content": said}, USER]
            for message in history:
                if isinstance(message["content"], list):
                    message["content"] = message["content"][0]["text"]
            found = agent.post("/v1/responses", input=history)[1]
            assert found["output"][0]["content"][0]["text"] == "three"
        (book,) = policy.books.values()
        assert len(book.sequences) == 1
        assert len(book.sequences[0].spans) == 3


@pytest.mark.parametrize(
    "path, body",
    [
        ("messages", {"messages": [USER], "max_tokens": 5, "temperature": 0.3}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "system", "content": "x"}]}),
        ("messages", {"messages": [{"role": "user", "content": [5]}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        (
            "messages",
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, USER]},
        ),
        ("messages", {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "w"}]}),
        ("messages", {"messages": [USER], "tools": [{}]}),
        ("messages", {"messages": [USER, {"role": "assistant", "content": "I"}]}),
        ("responses", {"input": "x", "top_p": 0.3}),
        ("responses", {"input": []}),
        ("responses", {"input": [5]}),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("responses", {"input": [{"role": "tool", "content": "x"}]}),
        ("responses", {"input": [{"type": "function_call", "name": "x"}]}),
        ("responses", {"input": "x", "previous_response_id": "resp_1"}),
        ("responses", {"input": "x", "text": {"format": {"type": "json_object"}}}),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}),
        ("responses", {"input": "x", "tools": [ADD]}),
    ],
)
def test_what_cannot_be_served_is_refused(path: str, body: dict[str, Any]) -> None:
    with ScriptedPolicy() as policy, Agent(policy.endpoint) as agent:
        status, found = agent.post(f"/v1/{path}", **body)
        assert status == 400
        assert found["error"]["type"] == "invalid_request_error"
        assert found["error"]["message"]
        assert policy.seen == []
