"""Signatures, right or wrong. FORMAT.md section 9.5.

Keys are made from fixed seeds, and Ed25519 has no chance in it: the same package always gets the same signature.
"""

from __future__ import annotations

from hashlib import sha512
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from estream_conformance.builder import Draft, Sealed, Section, Values, pack
from estream_conformance.case import Made
from estream_spec.constants import SIGNATURE_CONTEXT, SIGNATURE_MAGIC, SectionType

SIGNATURE: Final = {
    "magic": "8s",
    "algorithm": "I",
    "reserved": "4s",
    "security_counter": "Q",
    "public_key": "32s",
    "signature": "64s",
}
ORDER: Final = (1 << 252) + 27742317777372353535851937790883648493
"""Order of the group that signatures are made in."""


def _seed(number: int) -> bytes:
    return bytes([number]) * 32


def public_key(number: int) -> bytes:
    """The public key of one of as many signers as are wanted."""
    return Ed25519PrivateKey.from_private_bytes(_seed(number)).public_key().public_bytes_raw()


def message(values: Values, file_id: bytes) -> bytes:
    """What is signed."""
    return SIGNATURE_CONTEXT + pack(SIGNATURE, values)[8:24] + file_id


def sign(number: int, file_id: bytes, counter: int = 0, **changes: int | bytes) -> Values:
    """A signature's fields.

    Args:
        number: the signer.
        file_id: what it covers.
        counter: its security counter.
        changes: fields to set to something else before it is signed.
    """
    key = Ed25519PrivateKey.from_private_bytes(_seed(number))
    values: Values = {
        "magic": SIGNATURE_MAGIC,
        "algorithm": 1,
        "security_counter": counter,
        "public_key": public_key(number),
        **changes,
    }
    return {"signature": key.sign(message(values, file_id)), **values}


def scalar(number: int) -> int:
    """The secret scalar of a signer. RFC 8032, section 5.1.5."""
    digest = bytearray(sha512(_seed(number)).digest()[:32])
    digest[0] &= 248
    digest[31] = digest[31] & 127 | 64
    return int.from_bytes(digest, "little")


def challenge(point: bytes, values: Values, file_id: bytes) -> int:
    """The number that ties a signature's point to key and message. RFC 8032, section 5.1.7."""
    digest = sha512(point + values["public_key"] + message(values, file_id)).digest()
    return int.from_bytes(digest, "little") % ORDER


def described(values: Values) -> Values:
    """What is said of a signature once it is read."""
    return {name: values[name] for name in ("algorithm", "security_counter", "public_key", "signature")}


def with_signatures(draft: Draft, *signatures: Values | bytes) -> Sealed:
    """A package with signatures for its last sections; its `file_id` stays what it was."""
    for number, values in enumerate(signatures):
        data = values if isinstance(values, bytes) else pack(SIGNATURE, values)
        draft.sections.append(Section(SectionType.SIGNATURE, data, id=number))
    return draft.seal()


def asking(
    sealed: Sealed,
    *keys: int | bytes,
    counter: int | None = None,
    detached: Values | bytes | None = None,
    signatures: tuple[Values, ...] = (),
) -> Made:
    """A package, and a policy that a loader is to hold it to.

    Args:
        sealed: the package.
        keys: signers, or public keys, that must have signed.
        counter: lowest security counter.
        detached: a signature beside the package.
        signatures: those in it, for its JSON.
    """
    arguments: list[str] = []
    for key in keys:
        arguments += ["--key", (public_key(key) if isinstance(key, int) else key).hex()]
    if counter is not None:
        arguments += ["--minimum-counter", str(counter)]
    beside = pack(SIGNATURE, detached) if isinstance(detached, dict) else detached
    if beside is not None:
        arguments += ["--detached", "{detached}"]
    told = [described(each) for each in signatures]
    return Made(package=sealed, signatures=told, arguments=tuple(arguments), detached=beside)
