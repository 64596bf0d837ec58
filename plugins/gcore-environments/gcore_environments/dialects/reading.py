"""What all dialects read alike: messages, tools, limits, and sampling values that must be the
policy's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from gcore_environments.questions import Policy, Refused

#: Roles of messages, and as what a chat template gets them.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
#: Fields that bend what is sampled, with the values that do not. The policy's log-probs would not
#: be those of its records with others.
STRAIGHT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "continue_final_message": (False,),
    "prompt_logprobs": (0, False),
    "truncate_prompt_tokens": (),
}
_STOPS = 16


def refuse_other_sampling(body: dict[str, Any], policy: Policy) -> None:
    """A client may repeat how the policy is sampled, or say nothing of it. Of a role it says
    nothing.
    """
    own: dict[str, tuple[Any, ...]] = {
        "temperature": (policy.temperature,),
        "top_p": (policy.top_p,),
        "top_k": (policy.top_k, -1) if policy.top_k == 0 else (policy.top_k,),
    }
    if policy.is_role:
        own = dict.fromkeys(own, ())
    for name, values in {**own, **STRAIGHT}.items():
        value = body.get(name)
        if value is None or value in values:
            continue
        allowed = " or ".join(map(json.dumps, values[:1])) or "nothing"
        who, why = "the policy", "whose log-probs train it"
        if policy.is_role:
            who, why = f"the role {policy.model}", "whose settings alone say that"
        elif name in own:
            why = "which is sampled as its records say"
        raise Refused(
            400,
            f"{name}: {_short(value)} is not how {who} is sampled, {why}. Leave it out, or "
            f"send {allowed}.",
            "unsupported_value",
        )


def whole_number(body: dict[str, Any], *names: str) -> int:
    """The first of these fields that is there; 0 where none is."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Refused(400, f"{name} must be a whole number above 0, is {_short(value)}.")
        return value
    return 0


def flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(400, f"{name} must be true or false, is {_short(value)}.")
    return bool(value)


def stop_texts(body: dict[str, Any], name: str = "stop") -> tuple[str, ...]:
    value = body.get(name) or []
    texts = [value] if isinstance(value, str) else value
    good = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    if not good or len(texts) > _STOPS:
        raise Refused(400, f"{name} must be a text or a list of up to {_STOPS} texts.")
    return tuple(texts)


def text_of(content: Any, where: str) -> str:
    """Contents may come as a list of parts; those of text are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(400, f"{where} must be a text or a list of parts, is {_short(content)}.")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if kind in ("text", "input_text", "output_text") else None
        if not isinstance(text, str):
            raise Refused(
                400, f"{where} has a part {_short(kind or part)}: only parts of text are read."
            )
        texts.append(text)
    return "".join(texts)


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Messages in the form of chat completions, with the fields that a chat template knows."""
    if not isinstance(value, list) or not value:
        raise Refused(400, "messages must be a list of at least one message.")
    found = [_message(one, f"messages[{place}]") for place, one in enumerate(value)]
    refuse_last_of_policy(found)
    return found


def refuse_last_of_policy(messages: list[dict[str, Any]]) -> None:
    if messages[-1]["role"] == "assistant":
        raise Refused(
            400, "The last message is the assistant's: there is nothing that it is asked."
        )


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(400, f"{where} must be an object, is {_short(value)}.")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise Refused(400, f"{where}.role must be one of {', '.join(ROLES)}; is {_short(role)}.")
    content = value.get("content")
    if content is None and role == "assistant":
        content = ""
    message: dict[str, Any] = {"role": ROLES[role], "content": text_of(content, f"{where}.content")}
    for name in ("name", "tool_call_id"):
        if isinstance(value.get(name), str):
            message[name] = value[name]
    if role == "assistant":
        reasoning = value.get("reasoning_content") or value.get("reasoning")
        if isinstance(reasoning, str):
            message["reasoning_content"] = reasoning
        calls = value.get("tool_calls") or []
        if not isinstance(calls, list):
            raise Refused(400, f"{where}.tool_calls must be a list, is {_short(calls)}.")
        if calls:
            message["tool_calls"] = [
                _call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)
            ]
    return message


def _call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise Refused(400, f"{where} must be a call of a function with a name.")
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    number = value.get("id")
    return chat_call(number if isinstance(number, str) else "", name, text)


def chat_call(number: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": number, "type": "function", "function": function}


def tools_of(value: Any) -> tuple[dict[str, Any], ...]:
    """Tools in the form of chat completions."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise Refused(400, f"tools must be a list, is {_short(value)}.")
    for place, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise Refused(400, f"tools[{place}] must be a function with a name.")
    return tuple(value)


def ids_of(value: Any, name: str, vocabulary: int) -> list[int]:
    most = vocabulary or 1 << 31
    good = isinstance(value, list) and len(value) > 0
    if not good or not all(type(one) is int and 0 <= one < most for one in value):
        raise Refused(400, f"{name} must be a list of ids, each from 0 to {most - 1}.")
    return list(value)


def without_effect(body: dict[str, Any], known: Iterable[str]) -> tuple[str, ...]:
    """Fields that say something, and are read by nobody here."""
    read = {*known, *STRAIGHT, "temperature", "top_p", "top_k", "model", "stream"}
    return tuple(name for name, value in body.items() if value is not None and name not in read)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
