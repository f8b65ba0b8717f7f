"""The manifest's encoding: what is no MessagePack, what is MessagePack but no manifest. FORMAT.md section 6.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from estream_conformance.builder import Sealed
from estream_conformance.case import accepted, refused
from estream_conformance.changes import refuse, with_manifest, with_value
from estream_conformance.messagepack import encode
from estream_conformance.packages import smallest
from estream_spec.limits import MAX_MANIFEST_LENGTH

DEEP: Final = 100_000
MILLION: Final = 1_000_000


def _bytes(
    rule: str,
    name: str,
    about: str,
    change: Callable[[bytes], bytes],
    *,
    base: str = "smallest",
    committed: bool = True,
) -> None:
    refuse(rule, f"manifest_{name}", about, lambda: with_manifest(change), base=base, committed=committed)


def _always(data: bytes) -> Callable[[bytes], bytes]:
    return lambda _: data


NO_MESSAGEPACK: Final[list[tuple[str, str, Callable[[bytes], bytes]]]] = [
    ("of_the_undefined_tag", "The manifest is the one tag that MessagePack leaves undefined.", lambda _: b"\xc1"),
    ("with_a_byte_behind", "A byte stands behind the manifest.", lambda data: data + b"\0"),
    ("with_a_nil_behind", "A nil stands behind the manifest.", lambda data: data + b"\xc0"),
    ("twice", "The manifest stands twice, one behind the other.", lambda data: data + data),
    ("behind_a_nil", "A nil stands before the manifest.", lambda data: b"\xc0" + data),
    ("without_its_last_byte", "The last byte of the manifest is missing.", lambda data: data[:-1]),
    ("cut_in_half", "The second half of the manifest is missing.", lambda data: data[: len(data) // 2]),
    ("of_one_byte", "The manifest is just the first byte of a map.", lambda data: data[:1]),
    ("cut_in_a_tag", "The manifest ends within the count of an array.", lambda _: b"\x81\xa1a\xdc\0"),
    ("cut_in_a_float", "The manifest ends within a float.", lambda _: b"\xcb" + bytes(7)),
    ("cut_in_an_integer", "The manifest ends within an integer.", lambda _: b"\xcf" + bytes(7)),
    ("of_a_map_that_promises_all", "A map promises 2^32 - 1 pairs and has none.", lambda _: b"\xdf\xff\xff\xff\xff"),
    ("of_an_array_that_promises_all", "An array promises 2^32 - 1 elements.", lambda _: b"\xdd\xff\xff\xff\xff"),
    ("of_a_string_that_promises_all", "A string promises 2^32 - 1 bytes.", lambda _: b"\xdb\xff\xff\xff\xffn"),
    ("of_bytes_that_promise_all", "A byte string promises 2^32 - 1 bytes.", lambda _: b"\xc6\xff\xff\xff\xffn"),
    ("of_an_extension_that_promises_all", "An ext promises 2^32 - 1 bytes.", lambda _: b"\xc9\xff\xff\xff\xff\1n"),
    ("of_a_string_short_by_one", "A string promises one byte more than there are.", lambda _: b"\xa3nn"),
    ("of_a_map_without_its_last_value", "A map ends with a key.", lambda _: b"\x82\xa1a\0\xa1b"),
    ("of_open_arrays", "The manifest opens 100,000 arrays and ends.", lambda _: b"\x91" * DEEP),
    ("of_open_maps", "The manifest opens 100,000 maps and ends.", lambda _: b"\x81\xa1a" * DEEP),
]
for _name, _about, _change in NO_MESSAGEPACK:
    _bytes("EMOE-MAN-001", _name, _about, _change, committed="open" not in _name)

OTHER_VALUES: Final[list[tuple[str, str, bytes]]] = [
    ("of_nil", "The manifest is nil.", b"\xc0"),
    ("of_true", "The manifest is true.", b"\xc3"),
    ("of_zero", "The manifest is the integer 0.", b"\0"),
    ("of_an_ext", "The manifest is an ext of one byte.", b"\xd4\1n"),
    ("of_a_timestamp", "The manifest is the ext that means a time.", b"\xd6\xff\0\0\0\0"),
    ("of_an_empty_map", "The manifest is a map without keys.", b"\x80"),
    ("of_an_empty_array", "The manifest is an array without elements.", b"\x90"),
    ("of_a_string", "The manifest is a string.", b"\xa1n"),
    ("of_bad_utf_8", "The manifest is a string that is not UTF-8; to MessagePack that is no matter.", b"\xa1\xff"),
    ("of_nested_arrays", "The manifest is 100,000 arrays, one in the other.", b"\x91" * DEEP + b"\x90"),
    ("of_nested_maps", "The manifest is 100,000 maps, one in the other.", b"\x81\xa1a" * DEEP + b"\x80"),
    (
        "of_maps_nested_in_keys",
        "The manifest is maps that are keys of maps, 10,000 deep.",
        b"\x81" * 10_000 + b"\xc0" * 10_001,
    ),
    (
        "nested_in_its_name",
        "A value nested 100,000 deep stands for the name.",
        b"\x81\xa4name" + b"\x91" * DEEP + b"\x90",
    ),
]
for _name, _about, _data in OTHER_VALUES:
    _bytes("EMOE-MAN-002", _name, _about, _always(_data), committed="nested" not in _name)


@refused("EMOE-MAN-001", committed=False)
def manifest_of_the_greatest_length_of_nils() -> Sealed:
    """The manifest is as long as it may be, and every byte of it is a nil."""
    return with_manifest(lambda _: b"\xc0" * MAX_MANIFEST_LENGTH)


@refused("EMOE-MAN-001", committed=False)
def manifest_of_a_million_open_arrays() -> Sealed:
    """The manifest opens a million arrays and ends."""
    return with_manifest(lambda _: b"\x91" * MILLION)


@refused("EMOE-MAN-002", committed=False)
def manifest_of_an_array_of_a_million_nils() -> Sealed:
    """The manifest is an array of a million nils."""
    return with_manifest(lambda _: b"\xdd" + MILLION.to_bytes(4, "big") + b"\xc0" * MILLION)


def _of_length(length: int) -> Sealed:
    draft = smallest()
    draft.manifest["extensions"] = {"a": bytes(1 << 16)}
    short = length - len(encode({**draft.manifest, "content_id": bytes(32)}))
    return with_value(("extensions",), {"a": bytes((1 << 16) + short)}, draft)


@accepted(committed=False)
def manifest_of_the_greatest_length() -> Sealed:
    """The manifest has exactly 1 MiB, most of it another party's data."""
    return _of_length(MAX_MANIFEST_LENGTH)


@refused("EMOE-SEC-011", base="manifest_of_the_greatest_length", committed=False)
def manifest_a_byte_too_long() -> Sealed:
    """The manifest has a byte more than 1 MiB."""
    return _of_length(MAX_MANIFEST_LENGTH + 1)
