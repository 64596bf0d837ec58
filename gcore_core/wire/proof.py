"""Proves that a process is of the run: it shows the run's secret and its version of gcore-core.

Who connects shows them in the first message on a stream, and who listens answers with a text: why
it refuses, empty where it does not. That is all the proof on one machine, where nobody else can
listen in. Between machines TLS comes first, by which each side has shown the run's certificate.
"""

from __future__ import annotations

import hmac
import sys

import msgspec

from gcore_core import __version__
from gcore_core.contract.errors import ContractError
from gcore_core.wire.service import Body, decoded, encode

GREETING_BYTES = 4096  # the limit of a greeting, and of its answer


class Greeting(msgspec.Struct, array_like=True, frozen=True):
    """Says who connects.

    secret: the run's.
    version: of gcore-core.
    python: the path of the interpreter, for the text of a refusal.
    """

    secret: bytes
    version: str
    python: str


_GREETING = msgspec.msgpack.Decoder(Greeting)
_ANSWER = msgspec.msgpack.Decoder(str)


def prove(secret: bytes) -> bytes:
    """Returns the message by which this process proves that it knows the run's secret."""
    return encode(Greeting(secret, __version__, sys.executable))


def refusal(greeting: Body, secret: bytes, where: str) -> str:
    """Returns why who connects is refused; empty where the greeting proves that it is of the run.

    Raises ContractError for what is no greeting.
    """
    shown = decoded(_GREETING, greeting, "greeting", where)
    if not hmac.compare_digest(shown.secret, secret):
        return "wrong or missing run secret"
    if shown.version != __version__:
        return (
            f"gcore-core {__version__} here ({sys.executable}), {shown.version} "
            f"({shown.python}) there"
        )
    return ""


def check_answer(answer: Body | str, where: str) -> None:
    """Raises ContractError unless the answer to a greeting lets this process in.

    answer: a text where none came: why the stream has ended, empty where nobody knows.
    """
    why = answer if isinstance(answer, str) else decoded(_ANSWER, answer, "greeting", where)
    if why:
        raise ContractError("refused the connection", where=where, why=why, process=where)
