"""Keys of books: ed25519, as PEM files that openssl reads, too."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from zerotune.store.errors import UserError
from zerotune.store.foreign.regular_file import read_file

_MAX_BYTES: Final = 4096
_HEX: Final = re.compile("[0-9a-fA-F]{64}")


class Signer:
    """A private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def from_file(cls, path: Path) -> Signer:
        """The key in a PEM file.

        Raises:
            UserError: there is none, or others may read it.
        """
        try:
            if path.stat().st_mode & 0o077:
                raise UserError(f"others may read the private key {path}", f"chmod 600 {path}")
            key = load_pem_private_key(read_file(path, _MAX_BYTES), None)
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path} is no private key", f"make one with `zerotune book key {path}`") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise UserError(f"{path} is no ed25519 key", "make one with `zerotune book key FILE`")
        return cls(key)

    @property
    def public_hex(self) -> str:
        """The public key, 64 hexadecimal digits."""
        return _hex(self._key.public_key())

    def sign(self, data: bytes) -> str:
        """The signature, 128 hexadecimal digits."""
        return self._key.sign(data).hex()


class Verifier:
    """The public key that a user has pinned."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key

    @classmethod
    def of(cls, text: str) -> Verifier:
        """A key by the path of its PEM file, or as 64 hexadecimal digits.

        Raises:
            UserError: it is none.
        """
        if _HEX.fullmatch(text):
            return cls(Ed25519PublicKey.from_public_bytes(bytes.fromhex(text)))
        try:
            key = load_pem_public_key(read_file(Path(text), _MAX_BYTES))
        except (OSError, ValueError) as error:
            remedy = "name the .pub file that `zerotune book key` wrote, or its 64 hexadecimal digits"
            raise UserError(f"{text} is no public key", remedy) from error
        if not isinstance(key, Ed25519PublicKey):
            raise UserError(f"{text} is no ed25519 key", "make one with `zerotune book key FILE`")
        return cls(key)

    @property
    def public_hex(self) -> str:
        """64 hexadecimal digits."""
        return _hex(self._key)

    def is_signed(self, key: str, signature: str, data: bytes) -> bool:
        """Whether this very key signed the data.

        Args:
            key: that claims to have signed it, in hexadecimal.
            signature: in hexadecimal.
            data: what was signed.

        Returns:
            Whether it did.
        """
        if key.lower() != self.public_hex:
            return False
        try:
            self._key.verify(bytes.fromhex(signature), data)
        except (InvalidSignature, ValueError):
            return False
        return True


def make_key(path: Path) -> str:
    """Write a new private key to `path`, and its public one beside it with the suffix .pub.

    Returns:
        The public key, 64 hexadecimal digits.

    Raises:
        UserError: one of them exists, or cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for file, content, mode in ((path, private, 0o600), (public_path(path), public, 0o644)):
        try:
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
                opened.write(content)
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}", "name a file that is not there yet") from error
    return _hex(key.public_key())


def public_path(path: Path) -> Path:
    """Where the public key of a private one is."""
    return path.with_name(path.name + ".pub")


def _hex(key: Ed25519PublicKey) -> str:
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
