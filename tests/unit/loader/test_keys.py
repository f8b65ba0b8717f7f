"""Public keys and detached signatures from files."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from estream_loader import SignaturePolicy, read_public_key
from estream_loader.keys import read_signature
from estream_spec.errors import LinkError
from fixtures.packages import Draft

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
RAW = KEY.public_key().public_bytes_raw()
PEM = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
RSA = rsa.generate_private_key(65537, 2048).public_key()
VENDOR = "ask the package's vendor for its public key"
PACKAGE = Draft().seal()


def test_a_file_or_its_digits_make_a_policy(tmp_path: Path) -> None:
    path = tmp_path / "vendor.pub"
    path.write_bytes(PEM)
    for given in (path, str(path), RAW.hex(), RAW.hex().upper()):
        key = read_public_key(given)
        assert key == RAW
        assert SignaturePolicy((key,)).keys == (RAW,)


def test_a_name_of_digits_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cafe", "ab" * 20):
        Path(name).write_bytes(PEM)
        assert read_public_key(name) == RAW


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        (
            KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            "private key, expected a public one",
            "give the public one",
        ),
        (
            RSA.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
            "public key of another type, expected Ed25519",
            VENDOR,
        ),
        (
            KEY.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH),
            "key for SSH, expected an Ed25519 public key in PEM",
            VENDOR,
        ),
        (b"", "not a public key in PEM, expected an Ed25519 public key in PEM", VENDOR),
        (PACKAGE, "file is a package", "this is no key file"),
        (bytes(70000), "file length 70000 exceeds the limit of 65536 bytes", "this is no key file"),
    ],
)
def test_files_that_are_no_key(tmp_path: Path, data: bytes, message: str, hint: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(data)
    with pytest.raises(LinkError) as caught:
        read_public_key(path)
    error = caught.value
    assert (error.message, error.path) == (message, str(path))
    assert (error.hint or "").startswith(hint)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "name of a public key is empty", "give a PEM file or 64 hexadecimal digits"),
        (RAW.hex()[1:], "public key of 63 hexadecimal digits, and no file", "a key is 64 hexadecimal digits"),
        (RAW.hex() + "0", "public key of 65 hexadecimal digits, and no file", "a key is 64 hexadecimal digits"),
        ("absent.pub", "file cannot be opened: no such file or directory", ""),
        ("/", "'/' is not a regular file", ""),
    ],
)
def test_texts_that_are_no_key(text: str, message: str, hint: str) -> None:
    with pytest.raises(LinkError) as caught:
        read_public_key(text)
    assert caught.value.message.startswith(message)
    assert (caught.value.hint or "") == hint


def test_a_signature_is_the_bytes_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "model.sig"
    path.write_bytes(b"anything, judged later")
    assert read_signature(path) == b"anything, judged later"
    path.write_bytes(PACKAGE)
    with pytest.raises(LinkError, match="file is a package") as caught:
        read_signature(path)
    assert caught.value.hint == "this is no signature"
