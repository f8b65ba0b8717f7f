"""Strings of the manifest, and values at their limits that are right. FORMAT.md section 6."""

from __future__ import annotations

from typing import Final

from estream_conformance.builder import Sealed
from estream_conformance.case import accepted
from estream_conformance.changes import SOURCE, Path, accept, put, refuse, spelled, with_source, with_value
from estream_conformance.messagepack import Raw
from estream_conformance.packages import smallest
from estream_spec import limits
from estream_spec.constants import SectionType

BAD: Final = [
    ("ending_in_a_character", "ends within a character", b"\xe2\x82"),
    ("with_a_stray_byte", "has a continuation byte without a character", b"n\x80"),
    ("with_the_byte_ff", "has the byte FF", b"\xff"),
    ("with_a_lone_surrogate", "has a surrogate, U+D800", b"\xed\xa0\x80"),
    ("with_a_surrogate_pair", "has a pair of surrogates of three bytes each", b"\xed\xa0\x80\xed\xb0\x80"),
    ("with_a_long_nul", "has a zero of two bytes", b"\xc0\x80"),
    ("with_a_long_slash", "has a character of three bytes for which one is enough", b"\xe0\x80\xaf"),
    ("past_the_last_character", "has the code point U+110000", b"\xf4\x90\x80\x80"),
    ("of_five_bytes", "has a character of five bytes", b"\xf8\x88\x80\x80\x80"),
]


def _bad(name: str, what: str, data: bytes) -> None:
    raw = Raw(bytes([0xA0 | len(data)]) + data)
    refuse("EMOE-MAN-002", f"name_{name}", f"The name {what}.", lambda: spelled(("name",), raw))


for _name, _what, _data in BAD:
    _bad(_name, _what, _data)

refuse(
    "EMOE-MAN-002",
    "name_of_129_wide_characters",
    "The name has 129 characters of four bytes each.",
    lambda: spelled(("name",), "\U00010000" * (limits.MAX_NAME + 1)),
)
refuse("EMOE-MAN-002", "role_cut_short", "A graph's role is `qk`.", lambda: spelled(("graphs", 0, "role"), "qk"))
refuse("EMOE-MAN-002", "role_in_capitals", "A graph's role is `QKV`.", lambda: spelled(("graphs", 0, "role"), "QKV"))
refuse("EMOE-MAN-002", "role_empty", "A graph's role is empty.", lambda: spelled(("graphs", 0, "role"), ""))
refuse(
    "EMOE-MAN-002",
    "role_with_a_nul",
    "A zero byte stands behind a graph's role.",
    lambda: spelled(("graphs", 0, "role"), "qkv\0"),
)

GOOD: Final[list[tuple[str, str, Path, str]]] = [
    ("name_of_128_characters", "The name has 128 characters.", ("name",), "n" * 128),
    ("name_of_128_wide_characters", "The name has 128 characters of four bytes.", ("name",), "\U00010000" * 128),
    ("name_of_31_bytes", "The name has 31 bytes, the most for the shortest form.", ("name",), "n" * 31),
    ("name_of_32_bytes", "The name has 32 bytes.", ("name",), "n" * 32),
    ("name_of_a_nul", "The name is a zero byte, which is a character like any other.", ("name",), "\0"),
    ("name_with_control_characters", "The name has control characters.", ("name",), '\t\n\r\b\f\x1b\x7f\x80"\\/'),
    (
        "name_with_noncharacters",
        "The name has code points that will never be characters.",
        ("name",),
        "\ufffe\U0010ffff",
    ),
    ("name_of_combining_characters", "The name has an accent of its own, which nobody joins.", ("name",), "e\u0301"),
    ("name_that_ends_a_path", "The name looks like a path.", ("name",), "../../etc"),
    ("family_unknown", "The family is one that nobody knows; nothing depends on it.", ("model", "family"), "\u2603"),
    ("family_of_128_characters", "The family has 128 characters.", ("model", "family"), "f" * 128),
    ("writer_of_128_characters", "The writer has 128 characters.", ("provenance", "writer"), "w" * 128),
    ("licence_of_4096_characters", "The licence has 4096 characters.", ("provenance", "licence"), "\xe9" * 4096),
    (
        "configuration_name_of_128_characters",
        "The name of a configuration has 128 characters.",
        ("device_configurations", 0, "name"),
        "d" * 128,
    ),
]


def _good(name: str, about: str, path: Path, value: str) -> None:
    accept(name, about, lambda: with_value(path, value))


for _name, _about, _path, _value in GOOD:
    _good(_name, _about, _path, _value)


@accepted()
def extensions_in_order() -> Sealed:
    """Extensions are sorted by their UTF-8 bytes, which is neither by length nor by UTF-16 units."""
    names = ["B", "a", "aa", "ab", "b", "\ufffd", "\U00010000"]
    return with_value(("extensions",), {name: name.encode() for name in names})


@accepted()
def extensions_equal_once_normalised() -> Sealed:
    """Two extensions have names that only Unicode normalisation makes equal: they are two."""
    return with_value(("extensions",), {"e\u0301": b"1", "\xe9": b"2"})


@accepted()
def extensions_of_the_greatest_number() -> Sealed:
    """There are 64 extensions."""
    return with_value(("extensions",), {f"{number:03}": b"" for number in range(limits.MAX_EXTENSIONS)})


@accepted()
def extension_of_any_bytes() -> Sealed:
    """An extension's data is no UTF-8 and its name has 128 characters."""
    return with_value(("extensions",), {"n" * limits.MAX_NAME: b"\xff\xc1\0"})


@accepted()
def context_length_at_its_limit() -> Sealed:
    """The context length is 2^24."""
    return with_value(("model", "context_length"), limits.MAX_DIMENSION)


@accepted()
def configuration_at_its_limits() -> Sealed:
    """A configuration has the greatest numbers that there are."""
    greatest = {"arena_bytes": 1 << 44, "group_size": limits.MAX_EXPERTS, "prefetch_depth": limits.MAX_EXPERTS}
    greatest |= {"lanes": limits.MAX_LANES, "prompt_tokens": limits.MAX_DIMENSION}
    return with_value(("device_configurations", 0), {"name": "generic", **greatest})


@accepted()
def configurations_of_the_greatest_number() -> Sealed:
    """The manifest has 64 device configurations, all of one name and for prompts of other lengths."""
    draft = smallest()
    [generic] = draft.manifest["device_configurations"]
    every = [generic, *({**generic, "prompt_tokens": number} for number in range(1, 64))]
    return with_value(("device_configurations",), every, draft)


@accepted(base="one_source")
def source_at_its_limits() -> Sealed:
    """A source has a name of 4096 characters and the greatest length."""
    draft = with_source()
    put(draft.manifest, ("provenance", "sources", 0, "name"), "s" * limits.MAX_TEXT)
    put(draft.manifest, ("provenance", "sources", 0, "length"), limits.MAX_FILE_LENGTH)
    return draft.seal()


@accepted(base="one_source", committed=False)
def sources_of_the_greatest_number() -> Sealed:
    """The provenance names 4096 sources, all alike."""
    return with_value(("provenance", "sources"), [SOURCE] * limits.MAX_SOURCES)


@accepted()
def graph_sections_of_great_ids() -> Sealed:
    """The graphs are in sections with ids up to 2^32 - 1, in no order."""
    draft = smallest()
    for number, section_id in enumerate((0xFFFFFFFF, 0x80000000, 7, 65536, 0)):
        draft.section(SectionType.GRAPH, number).id = section_id | 1 << 33
        draft.manifest["graphs"][number]["section"] = section_id
    for section in draft.sections:
        section.id &= 0xFFFFFFFF
    return draft.seal()
