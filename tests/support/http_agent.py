"""An agent that speaks to the endpoint over one connection of the standard library."""

from __future__ import annotations

import http.client
import json
from typing import Any

from gcore_environments.endpoint import EndpointServer

USER = {"role": "user", "content": "1+2?"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


class Agent:
    """One connection, kept open, of one episode."""

    def __init__(self, endpoint: EndpointServer, key: str = "", episode: int = 0) -> None:
        self.key = key or endpoint.key((episode, 0))
        self.connection = http.client.HTTPConnection(endpoint.url.split("/")[2], timeout=30)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def raw(
        self, path: str, data: bytes | None, method: str = "POST", **headers: str
    ) -> tuple[int, bytes]:
        bearer = {"authorization": f"Bearer {self.key}"}
        self.connection.request(method, path, data, {**bearer, **headers})
        response = self.connection.getresponse()
        self.headers = response.headers
        return response.status, response.read()

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        status, data = self.raw(path, json.dumps(body).encode())
        return status, json.loads(data)

    def chat(self, *messages: dict[str, Any], **body: Any) -> dict[str, Any]:
        status, found = self.post("/v1/chat/completions", messages=list(messages), **body)
        assert status == 200, found
        return found

    def refused(self, **body: Any) -> tuple[int, str]:
        body = {"messages": [USER], **body}
        status, found = self.post("/v1/chat/completions", **body)
        assert set(found) == {"error"}
        assert {"message", "type", "code"} <= set(found["error"])
        return status, found["error"]["message"]
