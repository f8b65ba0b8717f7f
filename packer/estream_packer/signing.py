"""Signs packages, and tells whose signatures are in one. FORMAT.md section 9.5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from estream_loader import Package
from estream_loader.sections import section_path
from estream_loader.trust import is_genuine
from estream_packer.checkpoint.files import InputFile
from estream_packer.editing import Changes, NewSection
from estream_spec.constants import SIGNATURE_MAGIC, Algorithm, SectionType
from estream_spec.errors import PackError
from estream_spec.limits import MAX_SIGNATURES
from estream_spec.records import DirectoryEntry, Signature, decode_signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_COUNTER: Final = (1 << 64) - 1
MAX_DETACHED_LENGTH: Final = 1 << 16
"""Bytes of a detached signature; those of known algorithms take 120."""


class SignatureSummary(Struct, frozen=True, kw_only=True):
    """A signature that was found.

    Attributes:
        key: the public key it names, hexadecimal.
        security_counter: what it says of the release.
        verifies: whether that key made it over this package; anyone can make one, so this is no reason to trust.
    """

    key: str
    security_counter: int
    verifies: bool


def sign(file_id: bytes, key: Ed25519PrivateKey, security_counter: int) -> Signature:
    """A signature over a file id."""
    public = key.public_key().public_bytes_raw()
    unsigned = Signature(SIGNATURE_MAGIC, Algorithm.ED25519, security_counter, public, bytes(64))
    return replace(unsigned, signature=key.sign(unsigned.message(file_id)))


def signature_changes(package: Package, signature: Signature) -> Changes:
    """What an edit does that puts a signature into a package: it replaces those by the same key.

    Raises:
        FormatError: a signature there is at fault.
        PackError: there is no room for another one.
    """
    there = [entry for entry in package.container.entries if entry.type == SectionType.SIGNATURE]
    own = [entry for entry in there if _key_of(package, entry) == signature.public_key]
    if len(there) - len(own) >= MAX_SIGNATURES:
        message = f"package has {len(there)} signatures by other keys, the limit is {MAX_SIGNATURES}"
        raise PackError(message, path=package.source.name, hint="write the signature beside the package, with -o")
    taken = {entry.id for entry in there if entry not in own}
    free_id = next(number for number in range(MAX_SIGNATURES) if number not in taken)
    return Changes(add=(NewSection(type=SectionType.SIGNATURE, id=free_id, data=signature.encode()),), remove=own)


def _key_of(package: Package, entry: DirectoryEntry) -> bytes | None:
    """The key a signature names; None where its algorithm is not known."""
    signature = decode_signature(package.read_section(entry), path=section_path(entry), offset=entry.offset)
    return None if signature is None else signature.public_key


def read_detached(path: Path) -> bytes:
    """The bytes of a detached signature.

    Raises:
        PackError: it cannot be read, or is far too long to be one.
    """
    with InputFile(path) as file:
        return file.read_all(MAX_DETACHED_LENGTH)


def summarise_signatures(package: Package, detached: tuple[bytes, ...] = ()) -> Iterator[SignatureSummary]:
    """Every signature of a known algorithm, those in the package first.

    Raises:
        FormatError: one of them is at fault.
    """
    beside = (decode_signature(data, path="detached signature", offset=0) for data in detached)
    for signature in (*package.signatures(), *beside):
        if signature is not None:
            yield SignatureSummary(
                key=signature.public_key.hex(),
                security_counter=signature.security_counter,
                verifies=is_genuine(signature, package.file_id),
            )
