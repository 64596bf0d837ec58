"""Connects a node with the home of a run: TLS, on which both prove that they know one token.

    home  -> node   Challenge   a nonce
    node  -> home   Claim       a nonce, and the proof that the node knows the token
    home  -> node   Welcome     the proof that home knows it; in place of it Refused

Home makes a certificate for this, and nobody signs it, so TLS alone would not tell a node who
answers. A proof is an HMAC-SHA256 with the token over

    who proves (home or node), SHA-256 of home's certificate, home's nonce, the node's nonce.

Nobody between the two has the key of home's certificate. If he shows one of his own, the node's
proof is about that one, and home refuses it. A proof of before is about other nonces. A proof of
one side is none of the other's. Who does not know the token gets a nonce, and nothing else.

Rejected: TLS with a pre-shared key, which Python's ``ssl`` has from 3.13 on; a certificate that is
handed to the nodes, which a person would have to make and to keep.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import ssl
from typing import Any

import msgspec

from gcore_core.contract.errors import ConfigError, ContractError, WorkerDied
from gcore_core.kits.wire import LENGTH_BYTES, framed, length_at

_NONCE_BYTES = 32
_STRANGER_LIMIT_BYTES = 256  # a message before the proof
_LIMIT_BYTES = 256 << 20
_UNSENT_LIMIT_BYTES = 1 << 20


# -- messages --------------------------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True, tag=True):
    """Is what one side tells the other."""


class Challenge(Message, frozen=True):
    nonce: bytes


class Claim(Message, frozen=True):
    nonce: bytes
    proof: bytes


class Welcome(Message, frozen=True):
    """silence_s: the connection ends after so long without a sign of life from the other side."""

    proof: bytes
    silence_s: float


class Refused(Message, frozen=True):
    """Answers who does not know the token."""


class Joining(Message, frozen=True):
    """Says who joins.

    name: under which the node is known.
    version: of gcore-core there.
    python: path of the interpreter there.
    facts: ``MachineFacts``, encoded; they may look different in another version.
    """

    name: str
    version: str
    python: str
    facts: bytes


class Turned(Message, frozen=True):
    """Answers a node that cannot join.

    why: for its person.
    again: it may try again later.
    """

    why: str
    again: bool


class Start(Message, frozen=True):
    """Has a node start its agent.

    spec: ``AgentSpec``, encoded; it holds what is secret.
    """

    spec: bytes


class Output(Message, frozen=True):
    """Is what the agent has written."""

    content: bytes


class Ended(Message, frozen=True):
    """Says that the agent has ended."""

    code: int


class End(Message, frozen=True):
    """Has a node end its agent."""


class Over(Message, frozen=True):
    """Is the last message.

    well: nothing went wrong.
    again: the node is needed again soon.
    why: what went wrong.
    """

    well: bool
    again: bool = False
    why: str = ""


_ANY = (
    Challenge | Claim | Welcome | Refused | Joining | Turned | Start | Output | Ended | End | Over
)
_DECODER = msgspec.msgpack.Decoder(_ANY)


# -- the proof -------------------------------------------------------------------------------------


def fingerprint(certificate: bytes) -> bytes:
    """Returns the SHA-256 of a certificate, DER."""
    return hashlib.sha256(certificate).digest()


def proof(
    token: bytes, who: str, certificate: bytes, home_nonce: bytes, node_nonce: bytes
) -> bytes:
    """Returns what proves that ``who`` knows the token, on one connection alone.

    who: "home" or "node".
    certificate: fingerprint of the one that home showed on this connection.
    """
    # Each part has one length, but for the first, whose two values have the same one.
    message = b"".join([b"g-core join ", who.encode(), certificate, home_nonce, node_nonce])
    return hmac.digest(token, message, "sha256")


# -- connections -----------------------------------------------------------------------------------


class Channel:
    """Sends and receives messages over one connection.

    peer: address of the other side.
    here: address of this side.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._limit_bytes = _STRANGER_LIMIT_BYTES
        nobody = ("somebody who has gone",)  # the kernel has forgotten him already
        self.peer = str((writer.get_extra_info("peername") or nobody)[0])
        self.here = str((writer.get_extra_info("sockname") or nobody)[0])

    def send(self, message: Message) -> None:
        """Sends a message. When the connection has ended nothing happens; ``receive`` says so."""
        content = msgspec.msgpack.encode(message)
        if not self._writer.is_closing():
            self._writer.write(framed(content))

    @property
    def is_full(self) -> bool:
        """Whether the other side takes nothing for the time being."""
        return self._writer.transport.get_write_buffer_size() > _UNSENT_LIMIT_BYTES

    async def receive(self) -> Any:
        """Returns the next message.

        Raises WorkerDied when the connection has ended, ContractError for what is no message.
        """
        try:
            head = await self._reader.readexactly(LENGTH_BYTES)
            nbytes = length_at(head, 0, self._limit_bytes, self.peer)
            return _DECODER.decode(await self._reader.readexactly(nbytes))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerDied("the connection has ended", where=self.peer, why=_why(error)) from None
        except msgspec.MsgspecError as error:
            raise ContractError("this is no message", where=self.peer, why=str(error)) from None

    async def expect(self, *kinds: type[Message]) -> Any:
        """Returns the next message. Raises ContractError when it is of none of the kinds."""
        message = await self.receive()
        if not isinstance(message, kinds):
            name = type(message).__name__
            raise ContractError(f"{name} is not what comes next", where=self.peer)
        return message

    def trust(self, silence_s: float) -> None:
        """Takes long messages from now on, and ends when the other side gives no sign of life.

        The kernel there gives such signs, also for a process that is stopped or busy.
        """
        self._limit_bytes = _LIMIT_BYTES
        stream = self._writer.get_extra_info("socket")
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            asked_every_s = max(1, int(silence_s / 4))
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, asked_every_s)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, asked_every_s)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))

    async def close(self, within_s: float = 2.0) -> None:
        """Ends the connection, after what was sent. Waits at most so long for the other side."""
        self._writer.close()
        try:
            async with asyncio.timeout(within_s):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()


def _why(error: Exception) -> str:
    return "" if isinstance(error, asyncio.IncompleteReadError) else str(error)


async def admit(channel: Channel, token: bytes, certificate: bytes, silence_s: float) -> bool:
    """Finds out, at home, whether a node knows the token, and proves that home does.

    certificate: home's fingerprint.
    Returns False for a node that does not know it; it is told so, and no more. Raises as
    ``Channel.receive`` does.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    channel.send(Challenge(nonce))
    claim = await channel.expect(Claim)
    wanted = proof(token, "node", certificate, nonce, claim.nonce)
    if len(claim.nonce) != _NONCE_BYTES or not hmac.compare_digest(claim.proof, wanted):
        channel.send(Refused())
        return False
    own = proof(token, "home", certificate, nonce, claim.nonce)
    channel.send(Welcome(own, silence_s))
    channel.trust(silence_s)
    return True


async def connect(host: str, port: int, token: bytes, timeout_s: float) -> Channel:
    """Connects a node with home.

    Raises OSError or TimeoutError when nobody answers there in time, WorkerDied when home ends the
    connection, and ConfigError when one side does not know the other's token.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the proof is about the certificate that home shows
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        channel = Channel(reader, writer)
        try:
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            await _prove(channel, token, fingerprint(shown), f"{host}:{port}")
        except BaseException:
            writer.transport.abort()
            raise
    return channel


async def _prove(channel: Channel, token: bytes, certificate: bytes, where: str) -> None:
    """Proves to home that this node knows the token, and finds out whether home does."""
    challenge = await channel.expect(Challenge)
    if len(challenge.nonce) != _NONCE_BYTES:
        raise ContractError("this is no nonce", where=where)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    channel.send(Claim(nonce, proof(token, "node", certificate, challenge.nonce, nonce)))
    answer = await channel.expect(Welcome, Refused)
    if isinstance(answer, Refused):
        raise ConfigError(
            "this node is refused: its token is not the one of the run",
            where=where,
            why="or somebody between the two shows a certificate of his own",
            todo="give the same token to g-core run and to every node",
        )
    wanted = proof(token, "home", certificate, challenge.nonce, nonce)
    if not hmac.compare_digest(answer.proof, wanted):
        raise ConfigError(
            "whoever answers there does not know the token of the run",
            where=where,
            todo="see who listens at this address",
        )
    channel.trust(answer.silence_s)
