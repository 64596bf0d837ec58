"""OpenEnv's capture between an agent, the openai client, and an endpoint.

python openenv_capture.py URL KEY; prints JSON.
"""

import json
import socket
import sys

import httpx
import openai
from openenv.core.harness.capture.runner import CaptureServer

url, key = sys.argv[1:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = CaptureServer(llm_url=url, model="policy", port=port, api_key=key, admin_key="admin")
server.start()
base, admin = f"http://127.0.0.1:{port}", {"authorization": "Bearer admin"}
opened = httpx.post(f"{base}/sessions", headers=admin, json={"sampling": {"temperature": 1.0}})
session = opened.json().get("session_id") or opened.json().get("id")
client = openai.OpenAI(base_url=f"{base}/v1", api_key=session, max_retries=0)
parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "0+2?"}]
for turn in range(3):
    answer = client.chat.completions.create(
        model="policy", messages=messages, tools=tools, temperature=1.0, max_tokens=200
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if message.tool_calls:
        for call in message.tool_calls:
            content = "said <|im_end|>"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    else:
        messages.append({"role": "user", "content": f"no, again {turn}"})
found = httpx.get(f"{base}/sessions/{session}/rollout", headers=admin).json()
print(json.dumps({"sequences": found["sequences"], "findings": found["validation"]}))
