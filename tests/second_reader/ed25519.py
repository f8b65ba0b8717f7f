"""Signatures over the curve edwards25519, verified after RFC 8032 section 5.1.7.

A point is held as (X, Y, Z, T) with x = X / Z, y = Y / Z and x * y = T / Z (section 5.1.4).
"""

from __future__ import annotations

from hashlib import sha512
from typing import Final

P: Final = 2**255 - 19
"""Order of the field."""
L: Final = 2**252 + 27742317777372353535851937790883648493
"""Order of the base point."""
D: Final = -121665 * pow(121666, -1, P) % P
ROOT_OF_MINUS_ONE: Final = pow(2, (P - 1) // 4, P)
SIGN: Final = 1 << 255

Point = tuple[int, int, int, int]
NEUTRAL: Final[Point] = (0, 1, 1, 0)


def verify(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether the signature of the message was made with the key that belongs to the public key.

    The equation is the one without the cofactor, [S]B = R + [k]A, and R is compared as it is encoded.
    """
    if len(public_key) != 32 or len(signature) != 64:
        return False
    key = _decode(public_key)
    commitment, scalar = signature[:32], int.from_bytes(signature[32:], "little")
    if key is None or scalar >= L:
        return False
    challenge = int.from_bytes(sha512(commitment + public_key + message).digest(), "little") % L
    return _encode(_add(_multiply(scalar, BASE), _multiply(challenge, _negate(key)))) == commitment


def _decode(encoded: bytes) -> Point | None:
    """The point of section 5.1.3; None where there is none or where it has another, canonical encoding."""
    number = int.from_bytes(encoded, "little")
    odd, y = number >= SIGN, number % SIGN
    if y >= P:
        return None
    numerator, denominator = (y * y - 1) % P, (D * y * y + 1) % P
    x = numerator * denominator**3 * pow(numerator * denominator**7, (P - 5) // 8, P) % P
    if denominator * x * x % P == -numerator % P:
        x = x * ROOT_OF_MINUS_ONE % P
    if denominator * x * x % P != numerator or (x == 0 and odd):
        return None
    if x % 2 != odd:
        x = P - x
    return x, y, 1, x * y % P


def _encode(point: Point) -> bytes:
    x, y, z, _ = point
    inverse = pow(z, -1, P)
    return (y * inverse % P | (x * inverse % P & 1) * SIGN).to_bytes(32, "little")


def _negate(point: Point) -> Point:
    x, y, z, t = point
    return -x % P, y, z, -t % P


def _add(left: Point, right: Point) -> Point:
    """The sum. The formula is complete: it also holds for equal points and the neutral one."""
    x1, y1, z1, t1 = left
    x2, y2, z2, t2 = right
    a, b = (y1 - x1) * (y2 - x2) % P, (y1 + x1) * (y2 + x2) % P
    c, d = 2 * D * t1 * t2 % P, 2 * z1 * z2 % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % P, g * h % P, f * g % P, e * h % P


def _multiply(scalar: int, point: Point) -> Point:
    result = NEUTRAL
    while scalar:
        if scalar & 1:
            result = _add(result, point)
        point = _add(point, point)
        scalar >>= 1
    return result


def _base() -> Point:
    """The point with y = 4/5 and an even x."""
    point = _decode((4 * pow(5, -1, P) % P).to_bytes(32, "little"))
    assert point is not None
    return point


BASE: Final = _base()
