"""Signs packages, and tells whose signatures are in one. FORMAT.md section 9.5."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from estream_loader import Package
from estream_loader.sections import section_path
from estream_loader.trust import decode_detached, is_genuine
from estream_packer.checkpoint.files import InputFile
from estream_packer.editing import Changes, NewSection
from estream_spec.constants import SIGNATURE_MAGIC, Algorithm, SectionType
from estream_spec.errors import FormatError, PackError
from estream_spec.limits import MAX_SIGNATURES
from estream_spec.records import DirectoryEntry, Signature, decode_signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_DETACHED_LENGTH: Final = 1 << 16
"""Bytes of a detached signature; those of known algorithms take 120."""


class SignatureSummary(Struct, frozen=True, kw_only=True):
    """A signature that was found.

    Attributes:
        section: id of the section it is in; None if it came beside the package.
        key: the public key it names, hexadecimal.
        security_counter: what it says of the release.
        verifies: whether that key made it over this package; anyone can make one, so this is no reason to trust.
    """

    section: int | None
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

    Nothing is done where that very signature is there already.

    Raises:
        FormatError: a signature there is at fault.
        PackError: it would take a security counter back, or there is no room for another one.
    """
    there = [entry for entry in package.container.entries if entry.type == SectionType.SIGNATURE]
    own = {entry: each for entry, each in _signatures(package).items() if each.public_key == signature.public_key}
    changed = [renews(signature, each, package.file_id, package.source.name) for each in own.values()]
    if changed == [False]:
        return Changes()
    if len(there) - len(own) >= MAX_SIGNATURES:
        message = f"package has {len(there)} signatures by other keys, the limit is {MAX_SIGNATURES}"
        raise PackError(message, path=package.source.name, hint="write the signature beside the package, with -o")
    taken = {entry.id for entry in there if entry not in own}
    free_id = next(number for number in range(MAX_SIGNATURES) if number not in taken)
    return Changes(add=(NewSection(type=SectionType.SIGNATURE, id=free_id, data=signature.encode()),), remove=own)


def renews(signature: Signature, there: Signature | None, file_id: bytes, path: str) -> bool:
    """Whether a signature differs from the one in whose place it would come.

    Args:
        signature: the new one.
        there: the old one, if any. It binds only if the same key made it over the same file id: anyone can name a key.
        file_id: what the new one covers.
        path: where the old one is.

    Raises:
        PackError: the security counter would go back.
    """
    if there is None or there.public_key != signature.public_key or not is_genuine(there, file_id):
        return True
    new, old = signature.security_counter, there.security_counter
    if new < old:
        message = f"security counter {new}, the signature there has {old}, expected at least that"
        raise PackError(message, path=path, hint=f"give --counter {old} or more")
    return signature != there


def _signatures(package: Package) -> dict[DirectoryEntry, Signature]:
    """The signatures of known algorithms in a package, by their entry.

    Raises:
        FormatError: one of them is at fault.
    """
    found = {}
    for entry in package.container.entries:
        if entry.type == SectionType.SIGNATURE:
            data = package.read_section(entry)
            if (signature := decode_signature(data, path=section_path(entry), offset=entry.offset)) is not None:
                found[entry] = signature
    return found


def is_signature_file(path: Path) -> bool:
    """Whether a plain file is there that begins as a detached signature does.

    Raises:
        PackError: it cannot be read.
    """
    if not os.path.isfile(path):  # noqa: PTH113 (which does not mind names that no file can have)
        return False
    with InputFile(path) as file:
        head = bytearray(min(file.length, len(SIGNATURE_MAGIC)))
        file.read_into(memoryview(head), 0)
    return head == SIGNATURE_MAGIC


def read_replaceable(path: Path) -> Signature | None:
    """The signature in a file that another one may replace; None where there is no file, or none that can be decoded.

    Raises:
        PackError: there is something else of that name, which is never replaced, or it cannot be read.
    """
    if not os.path.exists(path):  # noqa: PTH110 (which does not mind names that no file can have)
        return None
    if not os.path.isfile(path):  # noqa: PTH113
        kind = "a folder" if path.is_dir() else "no plain file"
        raise PackError(f"output is {kind}", path=str(path), hint="give the name of the signature file")
    if not is_signature_file(path):
        message = "there is a file of that name, no signature, which is never replaced"
        raise PackError(message, path=str(path), hint="give another name")
    with InputFile(path) as file, contextlib.suppress(FormatError):
        return decode_signature(file.read_all(MAX_DETACHED_LENGTH), path=str(path))
    return None


def summarise_signatures(package: Package, detached: tuple[bytes, ...] = ()) -> Iterator[SignatureSummary]:
    """Every signature of a known algorithm, those in the package first.

    Raises:
        FormatError: one of them is at fault.
    """
    inside = ((entry.id, signature) for entry, signature in _signatures(package).items())
    beside = ((None, signature) for signature in decode_detached(detached))
    for section, signature in (*inside, *beside):
        if signature is not None:
            yield SignatureSummary(
                section=section,
                key=signature.public_key.hex(),
                security_counter=signature.security_counter,
                verifies=is_genuine(signature, package.file_id),
            )
