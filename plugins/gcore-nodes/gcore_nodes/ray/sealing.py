"""Encrypts what only one keeper may read, to a key that the keeper has made.

What is told to an agent holds the run's secret. It goes through a call of Ray, which is in plain
unless the cluster was set up otherwise, and which may be kept in Ray's shared memory or be written
to disk. X25519, HKDF and ChaCha20-Poly1305, as in the base mode of RFC 9180: the sender has a new
key for each message, so each message has a key of its own, and its nonce may be constant.

This keeps the secret from whoever listens or looks into Ray's memory. It does not prove who the
keeper is: who can change what Ray sends, or may submit work to the cluster, runs code on its nodes
anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

_KEY_BYTES = 32
_INFO = b"g-core ray agent 1"
_NONCE = bytes(12)


class SealBroken(Exception):
    """What was received was not sealed for this key, or was changed on its way."""


class Receiver:
    """Opens what was sealed for it.

    public: 32 bytes, for ``seal``.
    """

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._key = X25519PrivateKey.generate()
        self.public = self._key.public_key().public_bytes_raw()

    def open(self, sealed: bytes) -> bytes:
        """Returns what was sealed. Raises SealBroken."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        if len(sealed) < _KEY_BYTES:
            raise SealBroken("it is too short")
        sender, content = sealed[:_KEY_BYTES], sealed[_KEY_BYTES:]
        try:
            key = _shared(self._key, sender, sender, self.public)
            return ChaCha20Poly1305(key).decrypt(_NONCE, content, None)
        except (InvalidTag, ValueError) as error:  # ValueError: a key that is none
            raise SealBroken("it was not sealed for this key, or it was changed") from error


def seal(content: bytes, receiver: bytes) -> bytes:
    """Encrypts ``content`` so that only the holder of ``receiver`` can read it.

    receiver: a receiver's ``public``. Raises ValueError when it is no key.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    key = X25519PrivateKey.generate()
    sender = key.public_key().public_bytes_raw()
    shared = _shared(key, receiver, sender, receiver)
    return sender + ChaCha20Poly1305(shared).encrypt(_NONCE, content, None)


def _shared(own: X25519PrivateKey, other: bytes, sender: bytes, receiver: bytes) -> bytes:
    """Returns the key of one message, which both public keys are part of."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = own.exchange(X25519PublicKey.from_public_bytes(other))
    return HKDF(SHA256(), _KEY_BYTES, salt=None, info=_INFO + sender + receiver).derive(secret)
