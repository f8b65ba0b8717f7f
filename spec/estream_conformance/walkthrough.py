"""The smallest package byte by byte, as FORMAT.md annex B shows it.

`python -m estream_conformance.walkthrough` prints the annex; a test compares it with the text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

from estream_conformance.builder import DIGEST, ENTRY, RANGE, SUPERBLOCK, Sealed, Values
from estream_conformance.messagepack import encode, map_head
from estream_conformance.packages import smallest
from estream_spec.constants import SectionType

_BYTES_SHOWN: Final = 16

Line = tuple[int, bytes, str]


def annex() -> str:
    """The text of the annex, without its heading."""
    sealed = smallest().seal()
    parts: list[str] = []
    for title, lines in _chapters(sealed):
        parts += [title, "", "```", *(row for line in lines for row in _rows(*line)), "```", ""]
    return "\n".join(parts)


def _chapters(sealed: Sealed) -> Iterator[tuple[str, list[Line]]]:
    """Each part of the file: a sentence about it, and its lines."""
    data = sealed.data
    first = {each["type"]: each for each in reversed(sealed.entries)}
    title = "The first superblock. Its twin, the same bytes, stands at `0x4000`; all else below `0x8000` is zero."
    yield title, list(_fields(data, 0, {**SUPERBLOCK, "checksum": "I"}))

    title = "Four records of one page each: three dense ones, one expert. Tensors begin 128 bytes behind each other."
    yield title, list(_records(sealed))

    title = "The dense table: its header, the first of its ranges and the first of its digest entries, three of each."
    start, head = first[SectionType.DENSE_TABLE]["offset"], {"magic": "8s", "range_count": "I", "record_count": "I"}
    lines = [*_fields(data, start, head), *_fields(data, start + 16, RANGE, "ranges[0].")]
    yield title, [*lines, *_fields(data, start + 112, DIGEST, "digests[0].")]

    title = "The first of five graphs, of which this package has only the name; a real one is an ONNX model."
    graph = first[SectionType.GRAPH]
    yield title, [(graph["offset"], graph["content"], "graph of section id 0")]

    title = "The manifest. Arrays of maps are shown by their first element."
    values = {**sealed.draft.manifest, "content_id": sealed.draft.content_id()}
    yield title, list(_map(first[SectionType.MANIFEST]["offset"], values, ""))

    count = len(sealed.entries)
    title = f"The directory: its header and the first of {count} entries. The package ends with the last one."
    start, head = sealed.superblock["directory_offset"], {"magic": "8s", "count": "I", "entry_size": "I"}
    yield title, [*_fields(data, start, head), *_fields(data, start + 16, ENTRY, "entries[0].")]


def _records(sealed: Sealed) -> Iterator[Line]:
    """The beginning of each record, and what follows."""
    names = {SectionType.DENSE: ("embedding", "layer", "final"), SectionType.EXPERTS: ("expert",)}
    for section_type, kinds in names.items():
        for kind, (place,) in zip(kinds, sealed.records[section_type], strict=True):
            layout = sealed.draft.manifest["layouts"][place["layout"]]
            head, *others = (tensor["name"] for tensor in layout["tensors"])
            then = f"; then {', '.join(others)}" if others else ""
            yield place["offset"], bytes(place["payload"][:4]), f"{kind} record: {head}{then}"


def _fields(data: bytes, start: int, layout: dict[str, str], prefix: str = "") -> Iterator[Line]:
    """A structure field by field."""
    for name, kind in layout.items():
        size = struct.calcsize(f"<{kind}")
        piece = data[start : start + size]
        shown = "" if kind.endswith("s") else f" {struct.unpack(f'<{kind}', piece)[0]}"
        yield start, piece, f"{prefix}{name.removesuffix('_too')}{'' if name == 'checksum' else shown}"
        start += size


def _map(start: int, values: Values, path: str) -> Iterator[Line]:
    """A MessagePack map key by key."""
    yield start, map_head(len(values)), f"{path or 'manifest'}: a map of {len(values)}"
    start += len(map_head(len(values)))
    for key, value in values.items():
        name = f"{path}.{key}".lstrip(".")
        yield start, encode(key), f'"{key}"'
        start += len(encode(key))
        yield from _value(start, value, name)
        start += len(encode(value))


def _value(start: int, value: Any, name: str) -> Iterator[Line]:
    match value:
        case dict():
            yield from _map(start, value, name)
        case list() if value and isinstance(value[0], dict):
            head = encode(value)[: len(encode(value)) - sum(len(encode(each)) for each in value)]
            yield start, head, f"{name}: an array of {len(value)}"
            start += len(head)
            yield from _map(start, value[0], f"{name}[0]")
            if len(value) > 1:
                rest = sum(len(encode(each)) for each in value[1:])
                yield start + len(encode(value[0])), b"", f"{len(value) - 1} more, {rest} bytes"
        case bytes():
            yield start, encode(value), f"{name}, {len(value)} bytes"
        case _:
            yield start, encode(value), f"{name} {value!r}"


def _rows(offset: int, data: bytes, note: str) -> Iterator[str]:
    """A line of the walk-through, or several where the bytes are many."""
    for at in range(0, max(len(data), 1), _BYTES_SHOWN):
        piece = data[at : at + _BYTES_SHOWN].hex(" ") if data else "..."
        yield f"{offset + at:08x}  {piece:<{3 * _BYTES_SHOWN}} {note if at == 0 else ''}".rstrip()


if __name__ == "__main__":
    print(annex())  # noqa: T201 (what it is for)
