"""Signatures that verify only where Ed25519 is computed carelessly. FORMAT.md section 9.5, rule SIG-002."""

from __future__ import annotations

from functools import partial

from estream_conformance.builder import Values
from estream_conformance.case import Made, accepted, refused
from estream_conformance.changes import refuse
from estream_conformance.packages import smallest
from estream_conformance.signing import ORDER, asking, challenge, public_key, scalar, sign, with_signatures

FILE_ID = smallest().seal().file_id
RIGHT = sign(1, FILE_ID)
SIGNATURE = RIGHT["signature"]
BASE = "signed_by_the_required_key"

NONCE = 987654321
NONCE_POINT = bytes.fromhex("7db0dc9222f3c183457ddde4c708de8e5ea6bf3d5c4404cca14b32729a05c32a")
"""`NONCE` times the base point."""
NONCE_POINT_AND_TORSION = bytes.fromhex("6999d5cb5126005c325892f1c6eab824b310708befff12fbaf45dda050cb12f0")
"""The same and a point of order 8, which disappears where both sides are multiplied by the cofactor."""
KEY_AND_TORSION = bytes.fromhex("9ea3f11f5bd34f0cd7147fd0a436c088f624c6100c1df6a53c0a29e05d60cea0")
"""The first signer's public key and a point of order 8."""
NEUTRAL = bytes.fromhex("0100000000000000000000000000000000000000000000000000000000000000")
"""The neutral point: with it as key and point, `S` = 0 satisfies the equation whatever was signed."""
FIELD = 2**255 - 19


def with_signature(values: Values) -> Made:
    """The smallest package with a signature, and a policy that asks for its key."""
    return asking(with_signatures(smallest(), values), values["public_key"], signatures=(values,))


def made_by_hand(point: bytes, key: bytes) -> Values:
    """A signature by the first signer's secret, with a point and a key as they are given."""
    values = {**RIGHT, "public_key": key}
    number = (NONCE + challenge(point, values, FILE_ID) * scalar(1)) % ORDER
    return {**values, "signature": point + number.to_bytes(32, "little")}


def without_secret(key: bytes, point: bytes = NEUTRAL) -> Values:
    """A signature whose `S` is 0."""
    return {**RIGHT, "public_key": key, "signature": point + bytes(32)}


@accepted("signature", base="signed_and_no_policy")
def signature_with_another_nonce() -> Made:
    """The signature is right, but not the one that RFC 8032 would make of the same message."""
    return with_signature(made_by_hand(NONCE_POINT, public_key(1)))


def plus_order(times: int) -> bytes:
    """The right signature with a multiple of the group order added to its `S`."""
    number = int.from_bytes(SIGNATURE[32:], "little") + times * ORDER
    return bytes(SIGNATURE[:32] + number.to_bytes(32, "little"))


for _times in (1, 2, 7, 14):
    refuse(
        "EMOE-SIG-002",
        f"signature_with_s_plus_{_times}_times_the_order",
        "The group order was added to the signature's `S`, which changes nothing in the equation but its encoding.",
        partial(with_signature, {**RIGHT, "signature": plus_order(_times)}),
        "signature",
        base=BASE,
    )
for _bit in (0, 252, 253, 254, 255):
    refuse(
        "EMOE-SIG-002",
        f"bit_{_bit}_of_s_flipped",
        f"Bit {_bit} of the signature's `S` is turned over.",
        partial(
            with_signature,
            {
                **RIGHT,
                "signature": SIGNATURE[:32]
                + (int.from_bytes(SIGNATURE[32:], "little") ^ 1 << _bit).to_bytes(32, "little"),
            },
        ),
        "signature",
        base=BASE,
    )
for _bit in (0, 128, 255):
    refuse(
        "EMOE-SIG-002",
        f"bit_{_bit}_of_r_flipped",
        f"Bit {_bit} of the signature's point is turned over.",
        partial(
            with_signature,
            {
                **RIGHT,
                "signature": (int.from_bytes(SIGNATURE[:32], "little") ^ 1 << _bit).to_bytes(32, "little")
                + SIGNATURE[32:],
            },
        ),
        "signature",
        base=BASE,
    )


@refused("EMOE-SIG-002", "signature", base=BASE)
def signature_of_64_zeros() -> Made:
    """The signature's point and `S` are zeros."""
    return with_signature({**RIGHT, "signature": bytes(64)})


@refused("EMOE-SIG-002", "signature", base=BASE)
def signature_with_halves_swapped() -> Made:
    """The signature's point and `S` have changed places."""
    return with_signature({**RIGHT, "signature": SIGNATURE[32:] + SIGNATURE[:32]})


@refused("EMOE-SIG-002", "signature", base="signature_with_another_nonce")
def signature_right_but_for_torsion_of_its_point() -> Made:
    """The signature's point is off by one of order 8: it verifies only where the cofactor is multiplied in."""
    return with_signature(made_by_hand(NONCE_POINT_AND_TORSION, public_key(1)))


@refused("EMOE-SIG-002", "signature", base="signature_with_another_nonce")
def signature_right_but_for_torsion_of_its_key() -> Made:
    """The key is off by a point of order 8: the signature verifies only where the cofactor is multiplied in."""
    values = made_by_hand(NONCE_POINT, KEY_AND_TORSION)
    assert challenge(NONCE_POINT, values, FILE_ID) % 8
    return with_signature(values)


@refused("EMOE-SIG-002", "signature", base=BASE)
def required_key_is_no_point() -> Made:
    """There is no point with the coordinate that the key that is asked for encodes."""
    return with_signature({**RIGHT, "public_key": b"\2".ljust(32, b"\0")})


for _name, _about, _key in (
    ("above_the_field", "the coordinate 1 of the neutral point is written as 2^255 - 18", FIELD + 1),
    ("above_the_field_with_sign", "the same, with the sign of x set, which is 0", FIELD + 1 | 1 << 255),
    ("with_sign_of_0", "the sign of the neutral point's x is set, which is 0", 1 | 1 << 255),
):
    refuse(
        "EMOE-SIG-002",
        f"point_of_signature_not_canonical_{_name}",
        f"The signature's point is not encoded as it must be: {_about}; the key is the neutral point.",
        partial(with_signature, without_secret(NEUTRAL, _key.to_bytes(32, "little"))),
        "signature",
        base=BASE,
    )
