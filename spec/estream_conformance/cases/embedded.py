"""Packages that begin within a file. FORMAT.md section 1.3: every offset counts from the package's first byte."""

from __future__ import annotations

from functools import partial

from estream_conformance.builder import Sealed
from estream_conformance.case import Made, accepted, refused
from estream_conformance.changes import accept, refuse
from estream_conformance.files import flipped, hollow, with_tail
from estream_conformance.image import LINE, Image
from estream_conformance.packages import smallest
from estream_conformance.signing import asking, sign, with_signatures
from estream_spec.constants import MAGIC


def text(length: int) -> bytes:
    """Text to stand before a package: zeros but for its first and last 256 bytes."""
    whole = b"any text " * 57
    head, tail = whole[: min(length, 256)], whole[: min(max(length - 256, 0), 256)]
    return head + bytes(length - len(head) - len(tail)) + tail


def another() -> Sealed:
    """A package that is not the one that is meant."""
    made = smallest()
    made.superblock |= {"generation": 9, "optional_features": 1}
    return made.seal()


def behind(before: bytes, sealed: Sealed | None = None, *, asked: int | None = None) -> Made:
    """A package behind other bytes.

    Args:
        before: the bytes.
        sealed: the package; the smallest one without.
        asked: where it is said to begin, if that is not behind them.
    """
    package = smallest().seal() if sealed is None else sealed
    arguments = ("--offset", str(len(before) if asked is None else asked))
    return Made(package=package, image=Image.of((0, before + package.data)), arguments=arguments)


def at(offset: int, sealed: Sealed | None = None, *, asked: int | None = None) -> Made:
    """A package at an offset, behind text."""
    return behind(text(offset), sealed, asked=asked)


def cut_at(offset: int, length: int) -> Made:
    """The same with only so many bytes of the file left."""
    made = at(offset)
    assert made.image is not None
    return Made(image=Image.of((0, made.image.data()[:length])), arguments=made.arguments)


@accepted("embedded")
def embedded_at_0() -> Made:
    """The package is said to begin at 0, and does."""
    return at(0)


for _offset in (1, 13, 128, 511, 512, 4095, 4096, 16384, 16385, 65536):
    accept(
        f"embedded_at_{_offset}",
        f"The package begins at byte {_offset} of its file, behind text.",
        partial(at, _offset),
        "embedded",
    )
for _asked in (0, 512, 514):
    refuse(
        "EMOE-SUP-001",
        f"embedded_at_513_and_asked_for_at_{_asked}",
        f"The package begins at byte 513 of its file and is asked for at {_asked}.",
        partial(at, 513, asked=_asked),
        "embedded",
    )


@accepted("embedded")
def embedded_behind_zeros() -> Made:
    """The package begins at byte 4096, behind zeros."""
    return behind(bytes(4096))


@accepted("embedded")
def embedded_behind_magics() -> Made:
    """The package begins behind magics, one after the other."""
    return behind(MAGIC * 64)


@accepted("embedded")
def embedded_behind_another_package() -> Made:
    """The package begins where another one of a higher generation ends."""
    return behind(another().data)


@accepted("embedded")
def embedded_before_another_package() -> Made:
    """The package begins at byte 77, and another one of a higher generation follows it."""
    return at(77, with_tail(smallest().seal(), another().data))


@accepted("embedded")
def embedded_behind_superblocks_of_another_package() -> Made:
    """The package begins at byte 32768, behind both superblocks of another one."""
    return behind(another().data[:32768])


def behind_a_superblock(asked: int) -> Made:
    """A package at 16384, where the second twin of one at 0 would stand, and a copy of its first twin at 0."""
    sealed = smallest().seal()
    return behind(sealed.data[:16384], sealed, asked=asked)


@accepted("embedded")
def embedded_where_a_second_twin_would_be() -> Made:
    """The package begins at byte 16384, and a superblock of the same generation stands at 0."""
    return behind_a_superblock(16384)


@refused("EMOE-DIR-001", "embedded", base="embedded_where_a_second_twin_would_be")
def embedded_where_a_second_twin_would_be_and_asked_for_at_0() -> Made:
    """The package begins at byte 16384, and is asked for at 0, where a superblock stands: its directory does not."""
    return behind_a_superblock(0)


@accepted("embedded", "signature", base="signed_by_the_required_key")
def embedded_and_signed() -> Made:
    """The package begins at byte 1001, and the key that is asked for has signed it: where it begins is not signed."""
    values = sign(1, smallest().seal().file_id)
    sealed = with_signatures(smallest(), values)
    asked, embedded = asking(sealed, 1, signatures=(values,)), at(1001, sealed)
    return Made(
        package=sealed,
        image=embedded.image,
        signatures=asked.signatures,
        arguments=(*embedded.arguments, *asked.arguments),
    )


@accepted("embedded", "large")
def embedded_at_4_gib_and_1() -> Made:
    """The package begins one byte behind 4 GiB."""
    sealed = smallest().seal()
    offset = (1 << 32) + 1
    return Made(package=sealed, image=Image.of((offset, sealed.data)), arguments=("--offset", str(offset)))


@accepted("embedded", "large")
def embedded_at_2_gib_with_a_hole_of_2_gib() -> Made:
    """The package begins at 2 GiB, and an extent of 2 GiB that is no longer in use begins it."""
    made = hollow(smallest(), 1 << 31)
    assert made.image is not None
    offset = 1 << 31
    lines = {start + offset: line for start, line in made.image.lines.items()}
    assert offset % LINE == 0
    return Made(
        package=made.package, image=Image(offset + made.image.length, lines), arguments=("--offset", str(offset))
    )


@refused("EMOE-SUP-011", "embedded", base="embedded_at_4096")
def embedded_and_1_byte_short() -> Made:
    """The package begins at byte 4096, and the last byte of the file is missing."""
    return cut_at(4096, 4096 + len(smallest().seal().data) - 1)


@refused("EMOE-SUP-011", "embedded", base="embedded_at_4096")
def embedded_in_a_file_as_long_as_the_package() -> Made:
    """The package begins at byte 4096 of a file that has as many bytes as the package alone."""
    return cut_at(4096, len(smallest().seal().data))


@refused("EMOE-SUP-003", "embedded", base="embedded_at_4096")
def embedded_with_half_a_superblock() -> Made:
    """The file ends 64 bytes behind where the package begins."""
    return cut_at(4096, 4096 + 64)


@refused("EMOE-SUP-001", "embedded", base="embedded_at_4096")
def embedded_where_the_file_ends() -> Made:
    """The package is said to begin where the file ends."""
    return cut_at(4096, 4096)


@refused("EMOE-SUP-001", "embedded", base="embedded_at_4096")
def embedded_behind_the_end_of_the_file() -> Made:
    """The package is said to begin behind the end of the file."""
    return cut_at(4096, 100)


@refused("EMOE-SUP-001", "embedded", base="embedded_at_4096")
def embedded_at_2_to_40() -> Made:
    """The package is said to begin at 2^40."""
    return at(0, asked=1 << 40)


@refused("EMOE-PAD-001", "embedded", "padding", base="embedded_at_13")
def embedded_with_padding_not_zero() -> Made:
    """The package begins at byte 13, and a byte of its first slot is not zero."""
    return at(13, flipped(smallest().seal(), 500))


@refused("EMOE-DIR-001", "embedded", base="embedded_at_13")
def embedded_with_offsets_of_the_file() -> Made:
    """The package begins at byte 13, and its directory's offset counts from the start of the file."""
    made = smallest()
    right = made.seal().superblock
    made.superblock = {"directory_offset": right["directory_offset"] + 13, "file_length": right["file_length"] + 13}
    return at(13, with_tail(made.seal(), bytes(13)))
