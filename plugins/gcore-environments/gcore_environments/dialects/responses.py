"""OpenAI's responses, without a memory of its own: each request has the whole input."""

from __future__ import annotations

import secrets
import time
from typing import Any

from gcore_core.contract.records import TRUNCATED
from gcore_environments.dialects import Event
from gcore_environments.dialects.chat import error_of, tools_and_choice
from gcore_environments.dialects.reading import (
    ROLES,
    chat_call,
    flag,
    refuse_last_of_policy,
    refuse_other_sampling,
    text_of,
    whole_number,
    without_effect,
)
from gcore_environments.matching import answer_of
from gcore_environments.questions import Drawn, Policy, Refused, Wish

_KNOWN = (
    *("input", "instructions", "tools", "tool_choice", "max_output_tokens", "text"),
    *("previous_response_id", "conversation", "background", "top_logprobs", "stream_options"),
)


class Responses:
    """See ``gcore_environments.dialects.Dialect``."""

    names_events = True

    def read(self, body: dict[str, Any], policy: Policy) -> Wish:
        refuse_other_sampling(body, policy)
        _refuse_what_is_kept(body)
        tools, ignored = tools_and_choice(body.get("tool_choice"), _tools(body.get("tools")))
        return Wish(
            messages=_messages(body),
            tools=tools,
            most=whole_number(body, "max_output_tokens"),
            stream=flag(body, "stream"),
            ignored=(*without_effect(body, _KNOWN), *ignored),
            body={name: body.get(name) for name in ("instructions", "tools", "tool_choice")},
        )

    def write(self, wish: Wish, drawn: Drawn, policy: Policy) -> dict[str, Any]:
        cut = drawn.status == TRUNCATED
        read, said = drawn.lengths
        return {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "instructions": wish.body["instructions"],
            "metadata": {},
            "model": policy.model,
            "output": _items(drawn, "incomplete" if cut else "completed"),
            "parallel_tool_calls": True,
            "temperature": policy.temperature,
            "top_p": policy.top_p,
            "tool_choice": wish.body["tool_choice"] or "auto",
            "tools": wish.body["tools"] or [],
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": said,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": read + said,
            },
        }

    def events(self, wish: Wish, whole: dict[str, Any]) -> list[Event]:
        begun = {**whole, "status": "in_progress", "output": [], "usage": None}
        found: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
        for place, item in enumerate(whole["output"]):
            found += _events_of(item, place)
        end = "incomplete" if whole["status"] == "incomplete" else "completed"
        found.append({"type": f"response.{end}", "response": whole})
        return [(one["type"], {**one, "sequence_number": n}) for n, one in enumerate(found)]

    def error(self, refused: Refused) -> dict[str, Any]:
        return error_of(refused)


def _refuse_what_is_kept(body: dict[str, Any]) -> None:
    for name in ("previous_response_id", "conversation", "background", "top_logprobs"):
        if body.get(name):
            what = "nothing is kept between requests: post the whole input"
            if name == "top_logprobs":
                what = "the policy's log-probs are known of what it sampled, and of nothing else"
            raise Refused(400, f"{name} must be left out: {what}.", "unsupported_value")
    text = body.get("text") or {}
    form = text.get("format") if isinstance(text, dict) else None
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise Refused(
            400,
            "text.format must be text: the policy's words are sampled as they are trained.",
            "unsupported_value",
        )


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    value = body.get("input")
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise Refused(400, "input must be a text or a list of at least one item.")
    found: list[dict[str, Any]] = []
    if body.get("instructions"):
        found.append({"role": "system", "content": text_of(body["instructions"], "instructions")})
    for place, item in enumerate(items):
        message = _message(item, f"input[{place}]")
        last = found[-1] if found else None
        if last and message["role"] == last["role"] == "assistant":
            _join(last, message)  # one turn of the policy is several items
        else:
            found.append(message)
    refuse_last_of_policy(found)
    return found


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise Refused(400, f"{where} must be an item.")
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES or role == "tool":
            raise Refused(400, f"{where}.role must be system, developer, user or assistant.")
        return {"role": ROLES[role], "content": text_of(item.get("content"), f"{where}.content")}
    if kind == "function_call":
        name, arguments = item.get("name"), item.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise Refused(400, f"{where} must have the name and the arguments of a call.")
        call = chat_call(str(item.get("call_id") or ""), name, arguments)
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        content = text_of(item.get("output"), f"{where}.output")
        return {"role": "tool", "content": content, "tool_call_id": str(item.get("call_id") or "")}
    if kind == "reasoning":
        parts = item.get("content") or []
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        thoughts = "".join(text for text in texts if isinstance(text, str))
        return {"role": "assistant", "content": "", "reasoning_content": thoughts}
    raise Refused(400, f"{where}.type is not read: {kind!r}.")


def _join(message: dict[str, Any], further: dict[str, Any]) -> None:
    message["content"] += further["content"]
    for name in ("tool_calls", "reasoning_content"):
        if name in further:
            message[name] = message[name] + further[name] if name in message else further[name]


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise Refused(400, "tools must be a list.")
    return tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(value))


def _tool(value: Any, where: str) -> dict[str, Any]:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or value.get("type") != "function":
        raise Refused(400, f"{where} must be a function with a name.")
    function = {"name": name, "description": value.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": value.get("parameters")}}


def _items(drawn: Drawn, status: str) -> list[dict[str, Any]]:
    message = answer_of(drawn.said)
    found: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        thoughts = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        item = {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "summary": []}
        found.append({**item, "content": thoughts})
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        item = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        found.append({**item, "status": status, "content": [text]})
    for call in calls:
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": status}
        found.append({**item, "call_id": call["id"], **call["function"]})
    return found


def _events_of(item: dict[str, Any], place: int) -> list[dict[str, Any]]:
    """What a stream says of one item: it begins, its text comes in one piece, it ends."""
    at = {"output_index": place, "item_id": item["id"]}
    begun = {**item, "status": "in_progress"}
    inner: list[dict[str, Any]] = []
    if item["type"] == "message":
        (part,) = item["content"]
        begun["content"] = []
        at["content_index"] = 0
        text, empty = part["text"], {**part, "text": ""}
        inner = [
            {"type": "response.content_part.added", **at, "part": empty},
            {"type": "response.output_text.delta", **at, "delta": text, "logprobs": []},
            {"type": "response.output_text.done", **at, "text": text, "logprobs": []},
            {"type": "response.content_part.done", **at, "part": part},
        ]
    elif item["type"] == "function_call":
        begun["arguments"] = ""
        text, name = item["arguments"], "response.function_call_arguments"
        inner = [
            {"type": f"{name}.delta", **at, "delta": text},
            {"type": f"{name}.done", **at, "name": item["name"], "arguments": text},
        ]
    return [
        {"type": "response.output_item.added", "output_index": place, "item": begun},
        *inner,
        {"type": "response.output_item.done", "output_index": place, "item": item},
    ]
