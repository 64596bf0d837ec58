"""Makes the identity of a run: the one certificate that its processes on all machines show.

What opens TLS with it lies in the core (``gcore_core.kits.wire``).
"""

from __future__ import annotations

import datetime
import ssl

from gcore_core.contract.errors import ConfigError
from gcore_core.contract.installing import install_command
from gcore_core.kits.wire import identity_file

# Clocks of machines differ, and runs last for months. Nobody trusts the certificate after its run,
# so it needs no date of its own; the last date is RFC 5280's "no well-defined expiration date".
_VALID_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_VALID_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


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
            todo=install_command("cryptography>=44"),
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


def server_context(identity: bytes) -> ssl.SSLContext:
    """Makes the context of a server that lets in clients without a certificate.

    Such a server has to find out by other means who connects. Who connects gets the certificate and
    has to find out whether it is the right one.

    Raises ContractError when ``identity`` is not the PEM of a key and of its certificate.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.minimum_version = ssl.TLSVersion.TLSv1_3
    server.num_tickets = 0
    with identity_file(identity) as path:
        server.load_cert_chain(path)
    return server
