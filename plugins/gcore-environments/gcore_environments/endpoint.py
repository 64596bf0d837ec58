"""Serves the policy to agents on this machine, as a service of language models would.

Each episode has a key of its own: it is the session, and nobody can name another's. A request waits
in a queue until the episode's owner has had the policy speak; no thread here touches an engine.

A request whose ``model`` is the name of another role is answered by that role; any other name means
the policy.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import hmac
import json
import logging
import queue
import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from gcore_environments.dialects import Dialect, find
from gcore_environments.dialects.chat import error_of
from gcore_environments.questions import IDS, Asked, Drawn, Policy, Refused, Wish

__all__ = ["Asked", "Drawn", "EndpointServer", "Refused"]

LOOPBACK = "127.0.0.1"
_MOST_BYTES = 32 << 20  # of a request
#: Seconds that a connection without a request is kept. Agents think, and clients keep theirs.
_IDLE_S = 600.0
#: Agents of all episodes of a step may connect at once; who finds no room in the queue is reset.
_MOST_CONNECTING = 4096
_POLL_S = 0.05  # how often the server looks whether it is to end
_MOST_IGNORED = 1000  # characters of the header that names fields without effect
_MOST_TOLD = 32  # refusals that the log has, of different texts
_TOLD_CHARACTERS = 500
_LOG = logging.getLogger(__name__)

Key = tuple[int, int]
#: An episode and the number of its try: an episode that is drawn again has another number.
Try = tuple[Key, int]


class EndpointServer:
    """Puts what agents ask into the queue ``asked``, and sends them the answers.

    asked: who reads it answers each request by its ``reply`` or ``refuse``, on any thread.
    model: the name of the policy that agents are told.
    roles: the other roles of the run that they may ask, by their names.
    temperature, top_p, top_k: how the policy is sampled. A request may repeat them, and is refused
        with another value. top_k 0: all tokens.
    context_length: most ids of a prompt and its answer; 0: unknown.
    vocabulary: ids from this number on are refused in a prompt by ids; 0: unknown.
    url: the base address for clients, which ends with ``/v1``.
    """

    def __init__(
        self,
        asked: queue.Queue[Asked],
        model: str = "policy",
        *,
        roles: Collection[str] = (),
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        context_length: int = 0,
        vocabulary: int = 0,
    ) -> None:
        self.policy = Policy(
            model=model,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            context_length=context_length,
            vocabulary=vocabulary,
        )
        self.roles = {role: Policy(model=role, is_role=True) for role in sorted(roles)}
        self._asked = asked
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._tries: dict[Key, int] = {}  # of the episodes that are played now
        self._begun = 0  # tries so far
        self._waiting: dict[Key, set[Asked]] = defaultdict(set)
        self._closed = False
        self._told: set[str] = set()  # texts of refusals that the log has
        self._served: dict[socket.socket, tuple[_Http, threading.Thread]] = {}
        http = _Http(self)
        self.url = f"http://{LOOPBACK}:{http.server_address[1]}/v1"
        self._serve(http)

    def listen(self, door: socket.socket) -> None:
        """Serves on a socket that listens, too: a confined agent's is in a network of its own."""
        self._serve(_Http(self, door))

    def leave(self, door: socket.socket) -> None:
        """Ends what ``listen`` began, and closes the socket; nothing where that has been done."""
        if door in self._served:
            http, thread = self._served.pop(door)
            http.shutdown()
            http.server_close()
            http.cut_connections()
            thread.join()

    def _serve(self, http: _Http) -> None:
        thread = threading.Thread(
            target=http.serve_forever, args=(_POLL_S,), name="endpoint", daemon=True
        )
        self._served[http.socket] = http, thread
        thread.start()

    def key(self, key: Key) -> str:
        """Begins an episode, or a new try of it, and returns the key that its agent must show.

        The key of an earlier try is dead: whatever still runs of that try is refused.
        """
        self.forget(key)
        with self._lock:
            self._begun += 1
            self._tries[key] = self._begun
            name = f"{key[0]}.{key[1]}.{self._begun}"
        return f"{name}.{self._sign(name)}"

    def forget(self, key: Key) -> None:
        """Ends an episode: its key is dead, and each agent that waits for an answer is refused."""
        with self._lock:
            self._tries.pop(key, None)
            waiting = self._waiting.pop(key, set())
        for one in waiting:
            one.refuse(_over())

    def close(self) -> None:
        """Refuses all agents, cuts their connections and ends the server's threads."""
        with self._lock:
            self._closed = True
            waiting = [one for these in self._waiting.values() for one in these]
        for one in waiting:
            one.refuse(_closed())
        for door in list(self._served):
            self.leave(door)

    def tell(self, refused: Refused) -> None:
        """Logs why a request is refused, each text once, since many clients show only the status.

        At most 32 texts are logged.
        """
        if refused.text in (_over().text, _closed().text):
            return  # no fault of the agent's
        with self._lock:
            if refused.text in self._told or len(self._told) == _MOST_TOLD:
                return
            self._told.add(refused.text)
        _LOG.warning(
            "a request of an agent is refused (status %d): %s",
            refused.status,
            refused.text[:_TOLD_CHARACTERS],
        )

    def _sign(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()

    def try_of(self, shown: str) -> Try:
        """Returns the try of an episode whose key this is.

        Raises Refused: 401 for what is no key, 404 for the key of a try that has ended.
        """
        name, _, signature = shown.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(name).encode()):
            raise Refused(
                401,
                "This is not the key of an episode. Send the api_key that the program was given, "
                "as `Authorization: Bearer KEY`.",
            )
        ordinal, sample, number = map(int, name.split("."))
        with self._lock:
            if self._tries.get((ordinal, sample)) != number:
                raise _over()
        return (ordinal, sample), number

    def ask(self, one_try: Try, wish: Wish, role: str = "") -> Drawn:
        """Puts a request into the queue, and waits until the policy, or a role, has answered it.

        Raises Refused, also where the try has ended since its key was looked at: a request of an
        earlier try must not become a turn of the next one.
        """
        episode, number = one_try
        asked = Asked(
            key=episode,
            kind=wish.kind,
            messages=wish.messages,
            tools=wish.tools,
            ids=wish.ids,
            most=wish.most,
            stop=wish.stop,
            role=role,
        )
        with self._lock:
            if self._closed:
                raise _closed()
            if self._tries.get(episode) != number:
                raise _over()
            self._waiting[episode].add(asked)
        self._asked.put(asked)
        try:
            return asked.answer.result()
        except concurrent.futures.CancelledError as error:
            raise _over() from error
        finally:
            with self._lock:
                if episode in self._waiting:
                    self._waiting[episode].discard(asked)


def _over() -> Refused:
    return Refused(404, "This episode is over.", "episode_over")


def _closed() -> Refused:
    return Refused(503, "The endpoint is closed.")


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = _MOST_CONNECTING

    def __init__(self, endpoint: EndpointServer, door: socket.socket | None = None) -> None:
        self.endpoint = endpoint
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__((LOOPBACK, 0), _Handler, bind_and_activate=door is None)
        if door is not None:
            self.socket.close()
            self.socket = door

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's own asks the network for this machine's name

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        with self._lock:
            self._connections.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def cut_connections(self) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it is gone by itself

    def handle_error(self, request: Any, client_address: Any) -> None:
        _LOG.debug("a connection of %s has ended in a fault", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = _IDLE_S
    server: _Http

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: an agent's requests are in its record."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends what the standard library refuses in the form of all errors here."""
        self.close_connection = True
        self._send(error_of(Refused(code, message or "This is no request.")), code)

    def do_GET(self) -> None:
        try:
            self._read()
            path = self._path()
            if path == "/health":
                return self._send({"status": "ok"})
            self.server.endpoint.try_of(self._key())
            if path != "/v1/models":
                raise Refused(404, f"Nothing is served at {path}.")
        except Refused as refused:
            return self._send(error_of(refused), refused.status)
        endpoint = self.server.endpoint
        return self._send(_models([endpoint.policy, *endpoint.roles.values()]))

    def do_POST(self) -> None:
        path = self._path()
        dialect = find(path)
        try:
            raw = self._read()
            one_try = self.server.endpoint.try_of(self._key())
            if dialect is None:
                raise Refused(404, f"Nothing is served at {path}.")
            self._answer(dialect, one_try, _parsed(raw))
        except Refused as refused:
            self._refuse(dialect, refused)
        except ConnectionError:
            raise
        except Exception as error:  # a fault here must not leave the agent waiting
            _LOG.exception("a request at %s has failed", path)
            self._refuse(dialect, Refused(500, f"The endpoint has failed: {type(error).__name__}."))

    def _refuse(self, dialect: Dialect | None, refused: Refused) -> None:
        self.server.endpoint.tell(refused)
        error = dialect.error(refused) if dialect else error_of(refused)
        self._send(error, refused.status)

    def _answer(self, dialect: Dialect, one_try: Try, body: dict[str, Any]) -> None:
        endpoint = self.server.endpoint
        role = endpoint.roles.get(str(body.get("model")))
        speaks = role or endpoint.policy
        wish = dialect.read(body, speaks)
        if role is not None:
            wish = _of_role(role.model, wish)
        drawn = endpoint.ask(one_try, wish, role.model if role else "")
        whole = dialect.write(wish, drawn, speaks)
        ignored = ", ".join(name for name in wish.ignored if name.isascii() and name.isprintable())
        if wish.stream:
            lines = []
            for name, event in dialect.events(wish, whole):
                lines.append((f"event: {name}\n" if name else "") + f"data: {_json(event)}\n\n")
            lines.append("" if dialect.names_events else "data: [DONE]\n\n")
            return self._send_bytes("".join(lines).encode(), "text/event-stream", 200, ignored)
        return self._send_bytes(_json(whole).encode(), "application/json", 200, ignored)

    def _path(self) -> str:
        """Returns the path, with one ``/v1`` where a client added its own to that of the url."""
        path = self.path.partition("?")[0].rstrip("/")
        return path.replace("/v1/v1/", "/v1/").replace("/v1/inference/v1/", "/inference/v1/")

    def _key(self) -> str:
        bearer = self.headers.get("authorization", "")
        return bearer.removeprefix("Bearer ") or self.headers.get("x-api-key", "")

    def _read(self) -> bytes:
        """Returns the body of the request.

        It is read before anything is refused, so that the connection can go on.
        """
        if self.headers.get("transfer-encoding"):
            self.close_connection = True
            raise Refused(411, "Send the body in one piece, with its content-length.")
        length = self.headers.get("content-length") or "0"
        if not (length.isascii() and length.isdigit()):
            self.close_connection = True
            raise Refused(400, "content-length must be a number of bytes.")
        if int(length) > _MOST_BYTES:
            self.close_connection = True
            raise Refused(413, f"A request may have {_MOST_BYTES} bytes, this one has {length}.")
        return self.rfile.read(int(length))

    def _send(self, body: dict[str, Any], status: int = 200) -> None:
        self._send_bytes(_json(body).encode(), "application/json", status)

    def _send_bytes(self, data: bytes, kind: str, status: int, ignored: str = "") -> None:
        """Sends head and body in one write, so that they can go in one packet."""
        phrase, _ = self.responses.get(status, ("", ""))
        head = [f"HTTP/1.1 {status} {phrase}", f"content-type: {kind}"]
        head.append(f"content-length: {len(data)}")
        if ignored:
            head.append(f"x-ignored: {ignored[:_MOST_IGNORED]}")
        if self.close_connection:
            head.append("connection: close")
        self.wfile.write("\r\n".join([*head, "", ""]).encode("latin-1") + data)


def _of_role(role: str, wish: Wish) -> Wish:
    """Returns the wish as a role can fulfil it, which is asked by messages alone.

    Raises Refused where ids are asked for: they are of the role's own tokenizer.
    """
    if wish.kind == IDS or wish.body.get("logprobs") or wish.body.get("return_token_ids"):
        raise Refused(
            400,
            f"The role {role} reads messages and answers with a text. Nothing of it is trained on, "
            "so its token ids and log-probs are not given: leave them out.",
            "unsupported_value",
        )
    without = {"max_tokens": wish.most, "tools": wish.tools}
    ignored = (name for name, value in without.items() if value)
    return replace(wish, most=0, tools=(), ignored=(*wish.ignored, *ignored))


def _models(served: list[Policy]) -> dict[str, Any]:
    data = []
    for one in served:
        about = {"id": one.model, "object": "model", "created": 0, "owned_by": "g-core"}
        if one.context_length:
            about["max_model_len"] = one.context_length
        data.append(about)
    return {"object": "list", "data": data}


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
        if b"\\u" in raw:  # half of a pair is no text, and no tokenizer takes it
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The body is no JSON text in UTF-8: {error}.") from error
    if not isinstance(body, dict):
        raise Refused(400, "The body must be a JSON object.")
    return body


def _json(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"))
