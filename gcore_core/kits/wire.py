"""Holds the parts of a connection of one's own between processes of a run, as the core's are made.

Who connects to another machine does so by TLS with the run's identity, then proves that it is of
the run, and sends framed messages. Nothing on a stream is a pickle.

contexts, Contexts: both ends of TLS, with the run's identity and nothing else trusted.
certificate_of, identity_file: the identity's certificate, and a path at which OpenSSL reads it.
prove, refusal, check_answer, GREETING_BYTES: the proof that who connects is of the run.
framed, receive, length_at, LENGTH_BYTES: a message as it stands on a stream, and how long it is.
encode, decoded: a message, and what was received, or an error that says what was expected.
to_wire, from_wire, RemoteFailure: an error on its way to who asked.
end_in_silence, noticed_within_s: has the kernel end connections to machines that are gone.
PATIENT: the pauses between tries, each longer.
allocate, map_file: memory that several processes share, whose pages are there from the start.
"""

from __future__ import annotations

from gcore_core.store.client import allocate, map_file
from gcore_core.wire.frames import end_in_silence, noticed_within_s
from gcore_core.wire.framing import LENGTH_BYTES, framed, length_at, receive
from gcore_core.wire.proof import GREETING_BYTES, check_answer, prove, refusal
from gcore_core.wire.retry import PATIENT
from gcore_core.wire.service import RemoteFailure, decoded, encode, from_wire, to_wire
from gcore_core.wire.tls import Contexts, certificate_of, contexts, identity_file

__all__ = [
    "GREETING_BYTES",
    "LENGTH_BYTES",
    "PATIENT",
    "Contexts",
    "RemoteFailure",
    "allocate",
    "certificate_of",
    "check_answer",
    "contexts",
    "decoded",
    "encode",
    "end_in_silence",
    "framed",
    "from_wire",
    "identity_file",
    "length_at",
    "map_file",
    "noticed_within_s",
    "prove",
    "receive",
    "refusal",
    "to_wire",
]
