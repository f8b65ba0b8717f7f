"""Whom a caller trusts: which keys must have signed a package, and how old it may be. FORMAT.md section 9.5.

What a package says of itself proves nothing here: the caller brings the keys, and whatever is missing is a refusal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from estream_spec.errors import LinkError
from estream_spec.records import Signature
from estream_spec.rulebook import refusal

KEY_LENGTH: Final = 32
"""Bytes of an Ed25519 public key."""


@dataclass(frozen=True, slots=True)
class SignaturePolicy:
    """What a caller asks of a package's signatures.

    Attributes:
        keys: raw Ed25519 public keys of 32 bytes, at least one; each of them must have signed.
        minimum_counter: lowest security counter that each of those signatures may have, against rollback.
        detached: signatures that came beside the package, 120 bytes each; they count as those inside do.

    Raises:
        LinkError: no key, or one of another length.
    """

    keys: tuple[bytes, ...]
    minimum_counter: int = 0
    detached: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if not self.keys:
            raise LinkError(
                "signature policy without a key, expected at least one", hint="a policy without keys proves nothing"
            )
        for key in self.keys:
            if len(key) != KEY_LENGTH:
                raise LinkError(f"public key of {len(key)} bytes, expected {KEY_LENGTH}")


def check_signatures(policy: SignaturePolicy, signatures: Iterable[Signature], file_id: bytes, offset: int) -> None:
    """Hold a package to a policy.

    Args:
        policy: what the caller asks.
        signatures: all there are, inside the package and detached.
        file_id: what they must cover.
        offset: of the directory, which the file id is made from.

    Raises:
        TrustError: a key has not signed this package, or only with a security counter that is too low.
    """
    signatures = list(signatures)
    for key in policy.keys:
        counters = [
            each.security_counter for each in signatures if each.public_key == key and is_genuine(each, file_id)
        ]
        if not counters:
            own = sum(each.public_key == key for each in signatures)
            message = (
                f"no signature by key {key.hex()} over file id {file_id.hex()}: "
                f"{own} of {len(signatures)} signatures name the key, expected one that verifies"
            )
            raise refusal("EMOE-SIG-002", message, path="signatures", offset=offset)
        if max(counters) < policy.minimum_counter:
            message = f"security counter {max(counters)}, expected at least {policy.minimum_counter}"
            hint = "the package is older than the caller accepts; get a newer one"
            raise refusal("EMOE-SIG-003", message, path="signatures", offset=offset, hint=hint)


def is_genuine(signature: Signature, file_id: bytes) -> bool:
    """Whether the key a signature names has made it over this file id."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(signature.public_key)
        key.verify(signature.signature, signature.message(file_id))
    except InvalidSignature:
        return False
    return True
