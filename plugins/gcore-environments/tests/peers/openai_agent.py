"""The plain openai client as an agent: tools, two calls at once, a stream, a wrong key.

python openai_agent.py URL KEY; prints JSON.
"""

import json
import sys

import openai

url, key = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
number = {"type": "integer"}
parameters = {"type": "object", "properties": {"a": number, "b": number}}
add = {"name": "add", "description": "adds", "parameters": parameters}
about = {"model": "policy", "tools": [{"type": "function", "function": add}]}
messages = [{"role": "system", "content": "You add."}, {"role": "user", "content": "1+2 and 3+4?"}]
found = {"models": [one.id for one in client.models.list()], "turns": []}


def whole():
    answer = client.chat.completions.create(
        messages=messages,
        temperature=1.0,
        logprobs=True,
        parallel_tool_calls=True,
        tool_choice="auto",
        extra_body={"return_token_ids": True},
        **about,
    )
    (choice,) = answer.choices
    ids = choice.token_ids
    assert len(choice.logprobs.content) == len(ids) == answer.usage.completion_tokens
    found["turns"].append({"prompt": answer.prompt_token_ids, "ids": ids})
    return choice.message.model_dump(exclude_none=True), choice.finish_reason


def streamed():
    content, calls, finish, usage = "", {}, None, None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(
        messages=messages, stream=True, stream_options=options, **about
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for delta in choice.delta.tool_calls or []:
                function = {"name": delta.function.name, "arguments": ""}
                call = {"id": delta.id, "type": "function", "function": function}
                kept = calls.setdefault(delta.index, call)
                kept["function"]["arguments"] += delta.function.arguments
            finish = choice.finish_reason or finish
    assert usage.completion_tokens > 0
    message = {"role": "assistant", "content": content}
    return message | ({"tool_calls": list(calls.values())} if calls else {}), finish


for ask in whole, streamed, whole:
    message, finish = ask()
    found.setdefault("finish", []).append(finish)
    messages.append(message)
    for call in message.get("tool_calls", []):
        given = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(given, separators=(",", ":"))
        content = f"{given['a'] + given['b']} <|im_end|>"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
found["said"] = messages[-1]["content"]

for name, changed in {"key": {"api_key": "nobody"}, "temperature": {}}.items():
    try:
        other = client.with_options(**changed)
        other.chat.completions.create(
            messages=messages[:2], model="policy", temperature=0.0 if name == "temperature" else 1.0
        )
    except openai.APIStatusError as error:
        found[name] = [error.status_code, error.code, error.message]

answer = client.responses.create(model="policy", input="1+2?", tools=[{"type": "function", **add}])
found["responses"] = [one.type for one in answer.output]
with client.responses.stream(model="policy", input="3+4?") as stream:
    kinds = [event.type for event in stream]
    found["stream"] = [kinds[0], kinds[-1], stream.get_final_response().output_text]
print(json.dumps(found))
