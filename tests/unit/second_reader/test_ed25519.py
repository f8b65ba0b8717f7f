"""The second reader's Ed25519: the vectors of RFC 8032, a library's answers, and encodings that must be refused."""

from __future__ import annotations

import random

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from second_reader.ed25519 import L, P, verify

VECTORS = [
    (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24"
        "655141438e7a100b",
    ),
    (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aee"
        "b00d291612bb0c00",
    ),
    (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28d"
        "c027beceea1ec40a",
    ),
]


def _signed(seed: int, message: bytes) -> tuple[bytes, bytes]:
    """A public key and a signature made with it."""
    key = Ed25519PrivateKey.from_private_bytes(random.Random(seed).randbytes(32))
    return key.public_key().public_bytes_raw(), key.sign(message)


def _library(public_key: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _number(value: int) -> bytes:
    return value.to_bytes(32, "little")


@pytest.mark.parametrize(("key", "message", "signature"), VECTORS)
def test_vectors_of_the_rfc(key: str, message: str, signature: str) -> None:
    public_key, text, signed = bytes.fromhex(key), bytes.fromhex(message), bytes.fromhex(signature)
    assert verify(public_key, text, signed)
    assert not verify(public_key, text + b"\0", signed)


@pytest.mark.parametrize("length", [0, 1, 32, 1000])
def test_what_a_library_signed(length: int) -> None:
    message = random.Random(length).randbytes(length)
    assert verify(_signed(length, message)[0], message, _signed(length, message)[1])


def test_one_wrong_bit_anywhere() -> None:
    message = b"a message"
    public_key, signature = _signed(1, message)
    source = random.Random(2)
    for _ in range(120):
        parts = [bytearray(public_key), bytearray(message), bytearray(signature)]
        part = source.choice(parts)
        part[source.randrange(len(part))] ^= 1 << source.randrange(8)
        damaged = [bytes(part) for part in parts]
        assert not verify(damaged[0], damaged[1], damaged[2])
        assert not _library(damaged[0], damaged[1], damaged[2])


@pytest.mark.parametrize(("key_length", "length"), [(0, 64), (31, 64), (33, 64), (32, 0), (32, 63), (32, 65)])
def test_wrong_lengths(key_length: int, length: int) -> None:
    public_key, signature = _signed(3, b"")
    assert not verify((public_key + b"\0")[:key_length], b"", (signature + b"\0")[:length])


@pytest.mark.parametrize("times", [1, 2, 15])
def test_scalar_not_below_the_order(times: int) -> None:
    """The equation would hold; the signature would have a second spelling."""
    public_key, signature = _signed(4, b"text")
    scalar = int.from_bytes(signature[32:], "little") + times * L
    other = signature[:32] + _number(scalar)
    assert not verify(public_key, b"text", other)
    assert not _library(public_key, b"text", other)


def test_points_of_small_order_hold_without_the_cofactor() -> None:
    """With the neutral point as key and as R, and S = 0, the equation holds for any message."""
    neutral = _number(1)
    assert verify(neutral, b"any", neutral + bytes(32))
    assert _library(neutral, b"any", neutral + bytes(32))


def test_equation_is_the_one_without_the_cofactor() -> None:
    """R and the key of order two: only multiplied by the cofactor would all of these hold."""
    half = _number(P - 1)
    signature = half + bytes(32)
    answers = [verify(half, bytes([text]), signature) for text in range(16)]
    assert answers == [_library(half, bytes([text]), signature) for text in range(16)]
    assert set(answers) == {True, False}


@pytest.mark.parametrize("point", [P, P + 1, 2**255 - 1, 1 | 1 << 255, P - 1 | 1 << 255, P + 1 | 1 << 255])
def test_points_not_in_their_canonical_encoding(point: int) -> None:
    """y not below the field's order, or a sign at x = 0: refused as key and as R, whatever the equation says."""
    neutral = _number(1)
    assert not verify(_number(point), b"text", neutral + bytes(32))
    assert not verify(neutral, b"text", _number(point) + bytes(32))


def test_key_that_is_no_point() -> None:
    """Half of all y have no x."""
    assert not verify(_number(2), b"text", _number(1) + bytes(32))
