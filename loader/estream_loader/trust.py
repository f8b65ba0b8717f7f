"""Whom a caller trusts: which keys must have signed a package, and how old it may be. FORMAT.md section 9.5.

What a package says of itself proves nothing here: the caller brings the keys, and whatever is missing is a refusal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from estream_spec.errors import LinkError
from estream_spec.records import Signature, decode_signature
from estream_spec.rulebook import refusal

KEY_LENGTH: Final = 32
"""Bytes of an Ed25519 public key."""
READ_KEY: Final = "a key is 32 raw bytes: read_public_key reads them from a file or hexadecimal digits"
MAX_COUNTER: Final = (1 << 64) - 1
"""Highest security counter a signature can have."""


@dataclass(frozen=True, slots=True)
class SignaturePolicy:
    """What a caller asks of a package's signatures.

    A signature vouches for every byte through the digests in the directory, and only `full` compares all of them: that
    is why `open_package` takes `full` where a policy is given. Under `paged` a record is held to a checksum, which
    whoever can write the file can forge; it is enough once `full` has proven the file and nobody else can write it.

    Attributes:
        keys: raw Ed25519 public keys of 32 bytes, at least one; each of them must have signed. `read_public_key` gives
            one from a file.
        minimum_counter: lowest security counter that each key's newest signature may have, against rollback.
        detached: signatures that came beside the package, their files' bytes; they count as those inside do.

    Raises:
        LinkError: no key, a value of another type, length or range, or no library `cryptography` to verify with.
    """

    keys: tuple[bytes, ...]
    minimum_counter: int = 0
    detached: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        _check_bytes("keys", self.keys, READ_KEY)
        _check_bytes("detached", self.detached, "a signature is the bytes of its file")
        if not self.keys:
            raise LinkError(
                "signature policy without a key, expected at least one", hint="a policy without keys proves nothing"
            )
        for key in self.keys:
            if len(key) != KEY_LENGTH:
                message = f"public key of {len(key)} bytes, expected {KEY_LENGTH}"
                raise LinkError(message, hint=READ_KEY)
        _check_counter(self.minimum_counter)
        check_cryptography()


def _check_bytes(name: str, values: object, hint: str) -> None:
    """Refuse what is no tuple of bytes, which no type checker may have looked at."""
    if not isinstance(values, tuple):
        raise LinkError(
            f"{name} of a signature policy are of type {type(values).__name__}, expected a tuple", hint=hint
        )
    for value in values:
        if not isinstance(value, bytes):
            message = f"{name} of a signature policy hold a value of type {type(value).__name__}, expected bytes"
            raise LinkError(message, hint=hint)


def _check_counter(value: object) -> None:
    if not (isinstance(value, int) and 0 <= value <= MAX_COUNTER):
        message = f"minimum counter {value!r}, expected an integer from 0 to {MAX_COUNTER}"
        raise LinkError(message, hint="give the security counter of the oldest release you accept")


def check_cryptography() -> None:
    """Refuse to go on without the library that verifies signatures, which nothing else here needs.

    Raises:
        LinkError: it is not installed.
    """
    try:
        import cryptography.hazmat.primitives.asymmetric.ed25519  # noqa: F401
    except ImportError as error:
        message = f"signatures need the library cryptography, which cannot be used: {error}"
        raise LinkError(message, hint="install it: pip install cryptography") from error


def decode_detached(detached: Iterable[bytes]) -> list[Signature]:
    """Signatures that came beside a package, without those of unknown algorithms.

    Raises:
        MalformedError: one that is no signature.
    """
    found = (decode_signature(data, path=f"detached signature {number}") for number, data in enumerate(detached))
    return [signature for signature in found if signature is not None]


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
            message = f"security counter {max(counters)} of key {key.hex()}, expected at least {policy.minimum_counter}"
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
