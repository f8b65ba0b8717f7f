"""Public keys and detached signatures, read from the files in which a vendor hands them out."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from estream_loader.source import FileSource, read
from estream_loader.trust import check_cryptography
from estream_spec.constants import MAGIC
from estream_spec.errors import LinkError

MAX_FILE_LENGTH: Final = 1 << 16
"""Bytes of such a file; an Ed25519 key takes 113, a signature of a known algorithm 120."""
PRIVATE: Final = b"PRIVATE KEY-----"
"""What every PEM of a private key has in its first line, encrypted ones among them."""
SSH: Final = b"ssh-", b"ecdsa-", b"---- BEGIN SSH2"
"""How public keys begin that are made for SSH."""
ASK: Final = "ask the package's vendor for its public key: keygen's .pub file, or 64 hexadecimal digits"


def read_public_key(text_or_path: str | os.PathLike[str]) -> bytes:
    """Read a key to trust: 64 hexadecimal digits, or the name of a PEM file such as keygen's NAME.pub.

    Returns:
        The raw key of 32 bytes, as `SignaturePolicy` takes it.

    Raises:
        LinkError: there is no such file, it cannot be read, or it holds no Ed25519 public key.
    """
    text = os.fspath(text_or_path)
    if not text:
        raise LinkError("name of a public key is empty", hint="give a PEM file or 64 hexadecimal digits")
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text)
    path = Path(text)
    if re.fullmatch(r"[0-9a-fA-F]{16,}", text) and not path.exists():
        message = f"public key of {len(text)} hexadecimal digits, and no file of that name"
        raise LinkError(message, hint="a key is 64 hexadecimal digits")
    return _parse_public_key(_read_small_file(path, "this is no key file"), path)


def read_signature(path: Path) -> bytes:
    """The bytes of a detached signature, as `SignaturePolicy` takes them.

    Raises:
        LinkError: it cannot be read, or is far too long to be one.
    """
    return _read_small_file(path, "this is no signature")


def _parse_public_key(data: bytes, path: Path) -> bytes:
    check_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    if PRIVATE in data:
        hint = f"give the public one, {f'{path}.pub'!r} if keygen made it"
        raise LinkError("private key, expected a public one", path=str(path), hint=hint)
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        found = "key for SSH" if data.startswith(SSH) else "not a public key in PEM"
        raise LinkError(f"{found}, expected an Ed25519 public key in PEM", path=str(path), hint=ASK) from None
    if not isinstance(key, Ed25519PublicKey):
        raise LinkError("public key of another type, expected Ed25519", path=str(path), hint=ASK)
    return key.public_bytes_raw()


def _read_small_file(path: Path, hint: str) -> bytes:
    """All of a file; `hint` is what to say of one that is too long, or a package."""
    source = FileSource.open(path)
    try:
        length = source.available()
        if read(source, 0, min(length, len(MAGIC))) == MAGIC:
            raise LinkError("file is a package", path=str(path), hint=hint)
        if length > MAX_FILE_LENGTH:
            message = f"file length {length} exceeds the limit of {MAX_FILE_LENGTH} bytes"
            raise LinkError(message, path=str(path), hint=hint)
        return read(source, 0, length)
    finally:
        source.close()
