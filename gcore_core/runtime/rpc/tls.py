"""Secures streams between machines: TLS 1.3, with one certificate for all processes of a run.

A run makes one key and one self-signed certificate, its *identity*, and tells it to its processes
together with the run's secret. Whoever connects and whoever is connected to must both show this
very certificate and prove that they have its key. No other certificate is trusted: none that an
authority of the system signed, and none that this one signed. So there is nothing to configure.

Names of hosts are not checked. Every process of the run has the same certificate, and no process
outside the run has it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

from gcore_core.contract.errors import ConfigError, ContractError
from gcore_core.contract.installing import install_command

_BEGIN = b"-----BEGIN CERTIFICATE-----"
_END = b"-----END CERTIFICATE-----"
# Clocks of machines differ, and runs last for months. Nobody trusts the certificate after its run,
# so it needs no date of its own; the last date is RFC 5280's "no well-defined expiration date".
_VALID_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_VALID_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Contexts:
    """Holds what the two ends of a stream need. Streams and threads may share them.

    server: for the end that is connected to.
    client: for the end that connects. No host name is checked, so ``server_hostname`` may be empty.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext


def contexts(identity: bytes) -> Contexts:
    """Makes both contexts of an identity, see ``make_identity``.

    Raises ContractError when ``identity`` is not the PEM of a key and of its certificate.
    """
    certificate = certificate_of(identity)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Tickets would only let a client come back without its certificate.
    server.num_tickets = 0
    with _explaining_no_identity(), _file_of(identity) as path:
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(path)
            context.load_verify_locations(cadata=certificate.decode("ascii"))
    return Contexts(server, client)


def server_context(identity: bytes) -> ssl.SSLContext:
    """Makes the context of a server that lets in clients without a certificate.

    Such a server has to find out by other means who connects. Who connects gets the certificate and
    has to find out whether it is the right one.

    Raises ContractError when ``identity`` is not the PEM of a key and of its certificate.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.minimum_version = ssl.TLSVersion.TLSv1_3
    server.num_tickets = 0
    with _explaining_no_identity(), _file_of(identity) as path:
        server.load_cert_chain(path)
    return server


def certificate_of(identity: bytes) -> bytes:
    """Returns the certificate of an identity, PEM; what is secret is not in it."""
    return identity[identity.find(_BEGIN) : identity.find(_END) + len(_END)]


@contextlib.contextmanager
def _explaining_no_identity() -> Iterator[None]:
    try:
        yield
    except (ssl.SSLError, ValueError):
        # Without the cause: nothing that may quote the identity is shown.
        raise ContractError(
            "the run's identity is not the PEM of a key and of its certificate",
            where="launcher",
            todo="make it with gcore_core.kits.launching.make_identity",
        ) from None


@contextlib.contextmanager
def _file_of(identity: bytes) -> Iterator[str]:
    """Yields a path at which this process alone reads ``identity``: OpenSSL takes keys by path.

    The file lies in memory and has no name, and it ends with the block.
    """
    descriptor = os.memfd_create("identity")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(identity)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def make_identity() -> bytes:
    """Makes the identity of a run: the PEM of an EC P-256 key and of its self-signed certificate.

    Only a launcher calls it, once a run: nobody else needs the package ``cryptography``.

    The identity is as secret as the run's secret. It is passed on in an ``AgentSpec`` and a
    ``WorkerSpec``, never in a file, an argument, an environment variable or a log.

    Raises ConfigError when the package is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError as error:
        raise ConfigError(
            "a run on several machines needs the package cryptography for TLS between them",
            where="launcher",
            why=f"{error}",
            todo=install_command("gcore-core[tls]"),
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "g-core run")])
    both_ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both_ends), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoded_key = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return encoded_key + certificate.public_bytes(serialization.Encoding.PEM)
