"""What agents may speak: one module for each form of request."""

from __future__ import annotations

from typing import Any, Protocol

from gcore_environments.questions import Drawn, Policy, Refused, Wish

#: One server-sent event: its name, empty where the dialect names none, and what it carries.
Event = tuple[str, dict[str, Any]]


class Dialect(Protocol):
    """Reads requests of one form, and writes their answers.

    names_events: whether the events of a stream have names; else ``[DONE]`` ends them.
    """

    names_events: bool

    def read(self, body: dict[str, Any], policy: Policy) -> Wish:
        """Raises ``Refused`` where the body asks for what the policy does not do."""
        ...

    def write(self, wish: Wish, drawn: Drawn, policy: Policy) -> dict[str, Any]: ...

    def events(self, wish: Wish, whole: dict[str, Any]) -> list[Event]:
        """The answer as a stream, sent in one piece: only the whole tells a call from text."""
        ...

    def error(self, refused: Refused) -> dict[str, Any]: ...


def find(path: str) -> Dialect | None:
    """The dialect that is served at a path."""
    from gcore_environments.dialects.chat import Chat
    from gcore_environments.dialects.generate import Generate
    from gcore_environments.dialects.messages import Messages
    from gcore_environments.dialects.responses import Responses

    dialects: dict[str, Dialect] = {
        "/v1/chat/completions": Chat(),
        "/inference/v1/generate": Generate(),
        "/v1/messages": Messages(),
        "/v1/responses": Responses(),
    }
    return dialects.get(path)
