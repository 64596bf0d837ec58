"""OpenAI's chat completions, with vLLM's ``return_token_ids``."""

from __future__ import annotations

import secrets
import time
from typing import Any

from gcore_core.contract.records import TRUNCATED
from gcore_environments.dialects import Event
from gcore_environments.dialects.reading import (
    flag,
    messages_of,
    refuse_other_sampling,
    stop_texts,
    tools_of,
    whole_number,
    without_effect,
)
from gcore_environments.matching import answer_of
from gcore_environments.questions import Drawn, Policy, Refused, Wish

_KNOWN = (
    *("messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop"),
    *("stream_options", "logprobs", "top_logprobs", "return_token_ids"),
)
#: Kinds of errors by status, in the words of OpenAI's API.
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    500: "server_error",
    503: "server_error",
}
CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    409: "history_rewritten",
    411: "length_required",
    413: "request_too_large",
    500: "internal_error",
    503: "closed",
}


class Chat:
    """See ``gcore_environments.dialects.Dialect``."""

    names_events = False

    def read(self, body: dict[str, Any], policy: Policy) -> Wish:
        refuse_other_sampling(body, policy)
        if body.get("top_logprobs"):
            raise Refused(
                400,
                "top_logprobs must be 0: the policy's log-probs are known of what it sampled, and "
                "of nothing else.",
                "unsupported_value",
            )
        tools, ignored = tools_and_choice(body.get("tool_choice"), tools_of(body.get("tools")))
        options = body.get("stream_options") or {}
        return Wish(
            messages=messages_of(body.get("messages")),
            tools=tools,
            most=whole_number(body, "max_completion_tokens", "max_tokens"),
            stop=stop_texts(body),
            stream=flag(body, "stream"),
            ignored=(*without_effect(body, _KNOWN), *ignored),
            body={
                "logprobs": flag(body, "logprobs"),
                "return_token_ids": flag(body, "return_token_ids"),
                "include_usage": isinstance(options, dict) and bool(options.get("include_usage")),
            },
        )

    def write(self, wish: Wish, drawn: Drawn, policy: Policy) -> dict[str, Any]:
        message = answer_of(drawn.said, wish.stop)
        if message.get("tool_calls") and not message["content"]:
            message["content"] = None
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": finish_reason(drawn),
            "logprobs": logprobs_of(drawn) if wish.body["logprobs"] else None,
        }
        whole: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": policy.model,
            "choices": [choice],
            "usage": usage_of(drawn),
        }
        if wish.body["return_token_ids"]:
            choice["token_ids"] = drawn.ids
            whole["prompt_token_ids"] = drawn.prompt_ids
        return whole

    def events(self, wish: Wish, whole: dict[str, Any]) -> list[Event]:
        (choice,) = whole["choices"]
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [
                {"index": place, **call} for place, call in enumerate(delta["tool_calls"])
            ]
        about = {name: whole[name] for name in ("id", "created", "model")}
        about["object"] = "chat.completion.chunk"
        first = {**choice, "delta": delta, "finish_reason": None}
        del first["message"]
        chunk = {**about, "choices": [first]}
        if "prompt_token_ids" in whole:
            chunk["prompt_token_ids"] = whole["prompt_token_ids"]
        last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
        chunks = [chunk, {**about, "choices": [last]}]
        if wish.body["include_usage"]:
            chunks.append({**about, "choices": [], "usage": whole["usage"]})
        return [("", one) for one in chunks]

    def error(self, refused: Refused) -> dict[str, Any]:
        return error_of(refused)


def tools_and_choice(
    choice: Any, tools: tuple[dict[str, Any], ...]
) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """The tools that the policy is shown, and what of the choice has no effect: none is forced."""
    if choice in (None, "auto"):
        return tools, ()
    if choice == "none":
        return (), ()
    return tools, ("tool_choice",)


def finish_reason(drawn: Drawn) -> str:
    if drawn.status == TRUNCATED:
        return "length"
    return "tool_calls" if drawn.said.calls else "stop"


def logprobs_of(drawn: Drawn) -> dict[str, Any]:
    """Tokens are named by their ids, as vLLM's ``return_tokens_as_token_ids`` does."""
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{number}", "logprob": logp, "bytes": None, "top_logprobs": []}
        for number, logp in zip(drawn.ids, drawn.logp, strict=True)
    ]
    return {"content": content}


def usage_of(drawn: Drawn) -> dict[str, Any]:
    read, said = drawn.lengths
    return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}


def error_of(refused: Refused) -> dict[str, Any]:
    kind = KINDS.get(refused.status, "invalid_request_error")
    code = refused.code or CODES.get(refused.status, "invalid_request")
    return {"error": {"message": refused.text, "type": kind, "param": None, "code": code}}
