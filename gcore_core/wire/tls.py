"""Secures streams between machines: TLS 1.3, with one certificate for all processes of a run.

A run makes one key and one self-signed certificate, its *identity*, and tells it to its processes
together with the run's secret. The side that connects and the other must both show this
very certificate and prove that they have its key. No other certificate is trusted: none that an
authority of the system signed, and none that this one signed. So there is nothing to configure.

Names of hosts are not checked. Every process of the run has the same certificate, and no process
outside the run has it.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

from gcore_core.contract.errors import ContractError

_BEGIN = b"-----BEGIN CERTIFICATE-----"
_END = b"-----END CERTIFICATE-----"


@dataclass(frozen=True)
class Contexts:
    """Holds what the two ends of a stream need. Streams and threads may share them.

    server: for the end that is connected to.
    client: for the end that connects. No host name is checked, so ``server_hostname`` may be empty.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext


def contexts(identity: bytes) -> Contexts:
    """Makes both contexts of an identity, which a launcher for several machines has made.

    Raises ContractError when ``identity`` is not the PEM of a key and of its certificate.
    """
    certificate = certificate_of(identity)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Tickets would only let a client come back without its certificate.
    server.num_tickets = 0
    with identity_file(identity) as path:
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(path)
            context.load_verify_locations(cadata=certificate.decode("ascii"))
    return Contexts(server, client)


def certificate_of(identity: bytes) -> bytes:
    """Returns the certificate of an identity, PEM; what is secret is not in it."""
    return identity[identity.find(_BEGIN) : identity.find(_END) + len(_END)]


@contextlib.contextmanager
def identity_file(identity: bytes) -> Iterator[str]:
    """Yields a path at which this process alone reads ``identity``: OpenSSL takes keys by path.

    The file lies in memory and has no name, and it ends with the block. Raises ContractError where
    the block finds that ``identity`` is not the PEM of a key and of its certificate.
    """
    descriptor = os.memfd_create("identity")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(identity)
        yield f"/proc/self/fd/{descriptor}"
    except (ssl.SSLError, ValueError):
        # Without the cause: nothing that may quote the identity is shown.
        raise ContractError(
            "the run's identity is not the PEM of a key and of its certificate",
            where="launcher",
            todo="make it with gcore_nodes.identity.make_identity",
        ) from None
    finally:
        os.close(descriptor)
