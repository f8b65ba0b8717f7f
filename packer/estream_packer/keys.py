"""Ed25519 keys to sign with, in the files that other tools know too: PKCS8 and SubjectPublicKeyInfo, both as PEM."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from estream_loader.small_files import write_new
from estream_packer.checkpoint.files import InputFile
from estream_spec.constants import MAGIC
from estream_spec.errors import PackError

MAX_KEY_FILE_LENGTH: Final = 1 << 16
"""Bytes; an Ed25519 key takes 119."""
KEYGEN: Final = "make one with 'estream-pack keygen'"


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
        found = "key for SSH" if b"OPENSSH PRIVATE KEY" in data else "not a private key in PEM"
        message = f"{found}, expected an Ed25519 private key in PEM"
        raise PackError(message, path=str(path), hint=KEYGEN) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise PackError("private key of another type, expected Ed25519", path=str(path), hint=KEYGEN)
    return key


def _read(path: Path) -> bytes:
    with InputFile(path) as file:
        head = bytearray(min(file.length, len(MAGIC)))
        file.read_into(memoryview(head), 0)
        if head == MAGIC:
            raise PackError("file is a package", path=str(path), hint="this is no key file")
        return file.read_all(MAX_KEY_FILE_LENGTH)
