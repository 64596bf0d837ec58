"""Anthropic's messages."""

from __future__ import annotations

import json
import secrets
from typing import Any

from gcore_core.contract.records import TRUNCATED
from gcore_environments.dialects import Event
from gcore_environments.dialects.reading import (
    chat_call,
    flag,
    refuse_last_of_policy,
    refuse_other_sampling,
    stop_texts,
    text_of,
    whole_number,
    without_effect,
)
from gcore_environments.matching import answer_of
from gcore_environments.questions import Drawn, Policy, Refused, Wish

_KNOWN = ("system", "messages", "tools", "tool_choice", "max_tokens", "stop_sequences")
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "api_error",
}
#: Arguments that are no JSON object go out, and come back, as the text that the policy wrote.
_RAW = "unparsed_arguments"


class Messages:
    """See ``gcore_environments.dialects.Dialect``."""

    names_events = True

    def read(self, body: dict[str, Any], policy: Policy) -> Wish:
        refuse_other_sampling(body, policy)
        tools, ignored = _tools_and_choice(body)
        return Wish(
            messages=_messages(body),
            tools=tools,
            most=whole_number(body, "max_tokens"),
            stop=stop_texts(body, "stop_sequences"),
            stream=flag(body, "stream"),
            ignored=(*without_effect(body, _KNOWN), *ignored),
        )

    def write(self, wish: Wish, drawn: Drawn, policy: Policy) -> dict[str, Any]:
        message = answer_of(drawn.said, wish.stop)
        content: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            thinking = message["reasoning_content"]
            content.append({"type": "thinking", "thinking": thinking, "signature": ""})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        content += [_use(call) for call in message.get("tool_calls", ())]
        stopped = next((one for one in wish.stop if one in drawn.said.text), None)
        return {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": policy.model,
            "content": content,
            "stop_reason": _stop_reason(drawn, stopped),
            "stop_sequence": stopped,
            "usage": dict(zip(("input_tokens", "output_tokens"), drawn.lengths, strict=True)),
        }

    def events(self, wish: Wish, whole: dict[str, Any]) -> list[Event]:
        begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
        found: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
        for place, block in enumerate(whole["content"]):
            empty, delta = _begun_and_rest(block)
            start = {"type": "content_block_start", "index": place, "content_block": empty}
            found += [start, {"type": "content_block_delta", "index": place, "delta": delta}]
            found.append({"type": "content_block_stop", "index": place})
        end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        found.append({"type": "message_delta", "delta": end, "usage": whole["usage"]})
        found.append({"type": "message_stop"})
        return [(one["type"], one) for one in found]

    def error(self, refused: Refused) -> dict[str, Any]:
        kind = _KINDS.get(refused.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": refused.text}}


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        raise Refused(400, "messages must be a list of at least one message.")
    found: list[dict[str, Any]] = []
    if body.get("system"):
        found.append({"role": "system", "content": text_of(body["system"], "system")})
    for place, message in enumerate(value):
        where = f"messages[{place}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            raise Refused(400, f"{where}.role must be user or assistant.")
        blocks = _blocks(message.get("content"), f"{where}.content")
        found += _of_user(blocks, where) if role == "user" else [_of_policy(blocks, where)]
    refuse_last_of_policy(found)
    return found


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise Refused(400, f"{where} must be a text or a list of blocks.")
    return content


def _of_user(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Results of tools first, each a message of its own, then what the user says."""
    found, texts = [], []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(text_of([block], where))
            continue
        content = block.get("content")
        text = "" if content is None else text_of(content, f"{where}.tool_result")
        number = block.get("tool_use_id")
        name = {"tool_call_id": number} if isinstance(number, str) else {}
        found.append({"role": "tool", "content": text, **name})
    return [*found, {"role": "user", "content": "".join(texts)}] if texts or not found else found


def _of_policy(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts, calls, thoughts = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_call(block, where))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(text_of([block], where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, given, number = block.get("name"), block.get("input"), block.get("id")
    if not isinstance(name, str) or not isinstance(given, dict):
        raise Refused(400, f"{where} has a tool_use without a name, or whose input is no object.")
    raw = given.get(_RAW) if len(given) == 1 else None
    text = raw if isinstance(raw, str) else json.dumps(given)
    return chat_call(number if isinstance(number, str) else "", name, text)


def _use(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        given = json.loads(function["arguments"])
    except ValueError:
        given = None
    if not isinstance(given, dict):
        given = {_RAW: function["arguments"]}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


def _tools_and_choice(
    body: dict[str, Any],
) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    value = body.get("tools") or []
    if not isinstance(value, list):
        raise Refused(400, "tools must be a list.")
    tools = tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(value))
    choice = body.get("tool_choice") or {}
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "none":
        return (), ()
    return tools, () if kind in (None, "auto") else ("tool_choice",)


def _tool(value: Any, where: str) -> dict[str, Any]:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or value.get("type") not in (None, "custom"):
        raise Refused(400, f"{where} must have a name, and no type but `custom`.")
    function = {"name": name, "description": value.get("description") or ""}
    return {
        "type": "function",
        "function": {**function, "parameters": value.get("input_schema") or {}},
    }


def _stop_reason(drawn: Drawn, stopped: str | None) -> str:
    if drawn.status == TRUNCATED:
        return "max_tokens"
    if drawn.said.calls:
        return "tool_use"
    return "stop_sequence" if stopped else "end_turn"


def _begun_and_rest(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    kind = block["type"]
    if kind == "tool_use":
        text = json.dumps(block["input"])
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": text}
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
