"""Keys of books and of contributors: ed25519, as PEM files that openssl can read."""

from __future__ import annotations

import os
import re
import tempfile
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

from ...store.errors import UserError, reason
from ...store.foreign.regular_file import read_file
from ...store.private_folders import make_private, refuse_open_folder

_MAX_BYTES: Final = 4096
_MAX_LIST_BYTES: Final = 2**24
_MAX_NAME: Final = 253
"""Characters of a contributor's name."""
_A_LINE: Final = "write in each line the 64 hexadecimal digits that `zerotune status` shows, and a name behind them"
_HEX: Final = re.compile("[0-9a-fA-F]{64}")


class Signer:
    """A private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def from_file(cls, path: Path) -> Signer:
        """The key in a PEM file; UserError if there is none, or others may read it."""
        try:
            if path.stat().st_mode & 0o077:
                raise UserError(f"others may read the private key {path}", f"chmod 600 {path}")
            key = load_pem_private_key(read_file(path, _MAX_BYTES), None)
        except (OSError, ValueError, TypeError) as error:
            remedy = "if it is damaged, move it away; `zerotune store book key FILE` makes one"
            raise UserError(f"{path} is no private key", remedy) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise UserError(f"{path} is no ed25519 key", "make one with `zerotune store book key FILE`")
        return cls(key)

    @classmethod
    def kept(cls, path: Path, elsewhere: str) -> Signer:
        """The key that a program keeps for itself, made at its first use.

        `elsewhere` tells in the remedy how to name another path.

        Raises:
            UserError: it cannot be made, is no key, or others could read it or have put it there.
        """
        path = path.absolute()
        try:
            make_private(path.parent)
            refuse_open_folder(path, "the signing key", elsewhere)
            if not os.path.lexists(path):
                _write_key(path)
            read_file(path, _MAX_BYTES, owner=os.getuid(), follow=False)
        except OSError as error:
            raise UserError(f"cannot keep the signing key {path}: {reason(error)}", elsewhere) from error
        return cls.from_file(path)

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
        """A key from its PEM file's path, or from 64 hexadecimal digits; UserError for anything else."""
        if _HEX.fullmatch(text):
            return cls(Ed25519PublicKey.from_public_bytes(bytes.fromhex(text)))
        try:
            key = load_pem_public_key(read_file(Path(text), _MAX_BYTES))
        except (OSError, ValueError) as error:
            remedy = "name the .pub file that `zerotune store book key` wrote, or its 64 hexadecimal digits"
            raise UserError(f"{text} is no public key", remedy) from error
        if not isinstance(key, Ed25519PublicKey):
            raise UserError(f"{text} is no ed25519 key", "make one with `zerotune store book key FILE`")
        return cls(key)

    @property
    def public_hex(self) -> str:
        """64 hexadecimal digits."""
        return _hex(self._key)

    def is_signed(self, key: str, signature: str, data: bytes) -> bool:
        """Whether this very key signed the data; `key` is the claimed one, in hexadecimal."""
        return key.lower() == self.public_hex and is_signed(self.public_hex, signature, data)


def is_key(text: str) -> bool:
    """Whether a text is a public key in our spelling, the only one that we accept."""
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def is_signed(key: str, signature: str, data: bytes) -> bool:
    """Whether a key signed some data."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError):
        return False
    return True


def listed_keys(path: Path) -> dict[str, str]:
    """Names of contributors by key, in the spelling of `is_key`.

    Each line of the file has a public key and a name; # begins a comment.

    Raises:
        UserError: it cannot be read, or a line has no key.
    """
    try:
        lines = read_file(path, _MAX_LIST_BYTES).decode().splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no list of contributors: {reason(error)}", _A_LINE) from error
    found = {}
    for at, line in enumerate(lines, start=1):
        if words := line.partition("#")[0].split(maxsplit=1):
            if not is_key(key := words[0].lower()):
                raise UserError(f"{path}, line {at}: {words[0][:80]!r} is no public key", _A_LINE)
            found[key] = " ".join(words[1:])[:_MAX_NAME]
    if not found:
        raise UserError(f"{path} lists no contributor", _A_LINE)
    return found


def make_key(path: Path) -> str:
    """Write a new private key to `path`, and its public one beside it with the suffix .pub; returns the latter.

    The returned key has 64 hexadecimal digits. Raises UserError if one of the files exists, or cannot be written.
    """
    try:
        return _write_key(path)
    except OSError as error:
        remedy = "name a file that is not there yet, in a folder that you may write to"
        raise UserError(f"cannot write {error.filename2 or path}: {error.strerror}", remedy) from error


def _write_key(path: Path) -> str:
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for file, content, mode in ((path, private, 0o600), (public_path(path), public, 0o644)):
        # Written under another name first: after a crash, an incomplete key would block the name for ever.
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.") as partial:
            partial.write(content)
            partial.flush()
            os.fchmod(partial.fileno(), mode)
            os.fsync(partial.fileno())
            os.link(partial.name, file)
    return _hex(key.public_key())


def public_path(path: Path) -> Path:
    """Path of a private key's public key."""
    return path.with_name(path.name + ".pub")


def _hex(key: Ed25519PublicKey) -> str:
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
