"""Signatures and what a caller asks of them: FORMAT.md section 9.5."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final, NamedTuple

from second_reader.ed25519 import verify
from second_reader.rules import require
from second_reader.source import is_zero

SIGNATURE_MAGIC: Final = b"EMOESIG\0"
ED25519: Final = 1
COMMON_LENGTH: Final = 16
"""Bytes that signatures of every algorithm begin with."""
SIGNATURE: Final = Struct("<8sIIQ32s64s")


class Signature(NamedTuple):
    """A signature of the known algorithm."""

    algorithm: int
    security_counter: int
    public_key: bytes
    signature: bytes

    def verifies(self, file_id: bytes) -> bool:
        """Whether it was made with the key it names, over this file."""
        signed = Struct("<15sIIQ32s").pack(b"EMOE signature\0", self.algorithm, 0, self.security_counter, file_id)
        return verify(self.public_key, signed, self.signature)


class Policy(NamedTuple):
    """What the caller asks for; without keys it asks for nothing."""

    keys: Sequence[bytes]
    minimum_counter: int
    detached: Sequence[bytes]


def parse_signature(data: bytes) -> Signature | None:
    """The signature, None if its algorithm is not known. Checks EMOE-SIG-001."""
    require(len(data) >= COMMON_LENGTH and data.startswith(SIGNATURE_MAGIC) and is_zero(data[12:16]), "SIG-001")
    if int.from_bytes(data[8:12], "little") != ED25519:
        return None
    require(len(data) == SIGNATURE.size, "SIG-001")
    _, algorithm, _, counter, public_key, signature = SIGNATURE.unpack(data)
    return Signature(algorithm, counter, public_key, signature)


def check_policy(policy: Policy, stored: Iterable[bytes], file_id: bytes) -> None:
    """EMOE-SIG-001 of the stored signatures and then of the detached ones, then key by key SIG-002 and SIG-003."""
    parsed = [parse_signature(data) for data in stored] + [parse_signature(data) for data in policy.detached]
    for key in policy.keys:
        counters = [
            signature.security_counter
            for signature in parsed
            if signature is not None and signature.public_key == key and signature.verifies(file_id)
        ]
        require(len(counters) > 0, "SIG-002")
        require(max(counters) >= policy.minimum_counter, "SIG-003")
