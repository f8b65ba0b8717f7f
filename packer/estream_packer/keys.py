"""Ed25519 keys in the files that other tools know too: PKCS8 and SubjectPublicKeyInfo, both as PEM."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from estream_packer.checkpoint.files import InputFile
from estream_packer.small_files import write_new
from estream_spec.errors import PackError

MAX_KEY_FILE_LENGTH: Final = 1 << 16
"""Bytes; an Ed25519 key takes 119."""
PRIVATE: Final = b"PRIVATE KEY-----"
"""What every PEM of a private key has in its first line, encrypted ones among them."""


def public_file(path: Path) -> Path:
    """Where the public key lies that goes with a private one."""
    return path.with_name(f"{path.name}.pub")


def write_key_pair(path: Path) -> bytes:
    """Make a key and write it to `path`, for its owner alone to read, and its public part beside it.

    Returns:
        The public key, 32 bytes.

    Raises:
        PackError: there is a file of one of those names, or one cannot be written; then neither is.
    """
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    write_new(path, private, 0o600)
    try:
        write_new(public_file(path), public, 0o666)
    except BaseException:
        path.unlink()
        raise
    return key.public_key().public_bytes_raw()


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Read the key to sign with.

    Raises:
        PackError: it cannot be read, is protected by a password, or is none.
    """
    data = _read(path)
    if b"PUBLIC KEY-----" in data:
        raise PackError("public key, expected a private one", path=str(path), hint="give the file without .pub")
    try:
        key = load_pem_private_key(data, None)
    except TypeError:
        message = "private key is protected by a password, expected one that is not"
        hint = "decrypt it first: openssl pkey -in KEY -out NEW"
        raise PackError(message, path=str(path), hint=hint) from None
    except (ValueError, UnsupportedAlgorithm):
        raise _no_key("private", path) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise _other_type("private", path)
    return key


def read_public_key(text: str) -> bytes:
    """Read a key to trust: 64 hexadecimal digits, or the name of a PEM file.

    Returns:
        The key, 32 bytes.

    Raises:
        PackError: the file cannot be read or holds no public key.
    """
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text)
    path = Path(text)
    data = _read(path)
    if PRIVATE in data:
        hint = f"give the public one, {str(public_file(path))!r} if keygen made it"
        raise PackError("private key, expected a public one", path=str(path), hint=hint)
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise _no_key("public", path) from None
    if not isinstance(key, Ed25519PublicKey):
        raise _other_type("public", path)
    return key.public_bytes_raw()


def _read(path: Path) -> bytes:
    with InputFile(path) as file:
        return file.read_all(MAX_KEY_FILE_LENGTH)


def _no_key(kind: str, path: Path) -> PackError:
    return PackError(f"not a {kind} key in PEM", path=str(path), hint="keygen makes one")


def _other_type(kind: str, path: Path) -> PackError:
    return PackError(f"{kind} key of another type, expected Ed25519", path=str(path), hint="keygen makes one")
