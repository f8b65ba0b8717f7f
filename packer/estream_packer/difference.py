"""How two packages differ: in their bytes, in their content, or not at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from estream_loader import Package
from estream_loader.integrity import verify_content_id
from estream_loader.records import RecordPlace, RecordSection, tensors
from estream_loader.source import available, read_pieces
from estream_packer.inspection import section_name
from estream_spec.binary_interface import label_of
from estream_spec.chips import chip_numbered
from estream_spec.constants import SectionType

Level = Literal["same file", "same signed content", "same content", "different"]
"""`same file`: equal bytes.

`same signed content`: equal file ids, so other signatures or device configurations that were added, or unused bytes,
at most.

`same content`: equal content ids, so other pages, order, codec, graphs, binaries, configuration or provenance at most.
"""

COMPARED: Final = (
    SectionType.GRAPH,
    SectionType.BINARY,
    SectionType.TOKENIZER,
    SectionType.CHAT_TEMPLATE,
    SectionType.PREFETCH_ROUTER,
    SectionType.DEVICE_CONFIGURATION,
    SectionType.SCHEDULE,
    SectionType.SIGNATURE,
)
"""Types of sections whose content is compared as it is."""


class Field(Struct, frozen=True, kw_only=True):
    """A value of the manifest that differs; None where one side has none."""

    path: str
    first: Any
    second: Any


class Records(Struct, frozen=True, kw_only=True):
    """Records of one range that differ.

    Attributes:
        where: `embedding`, `layer 3`, `final`, or `experts of layer 3`.
        differing: how many differ.
        first: records in the first package.
        second: records in the second.
        indices: which experts differ.
        tensors: for each matrix or vector, in how many of the records it differs; empty where layouts differ.
    """

    where: str
    differing: int
    first: int
    second: int
    indices: tuple[int, ...]
    tensors: dict[str, int]


class Difference(Struct, frozen=True, kw_only=True):
    """What two packages differ in.

    Attributes:
        level: how equal they are.
        fields: differing values of the manifest.
        records: differing records by range.
        sections: sections only in one, or of other content: name to `only in the first`, `only in the second`,
            `differs`. Where files with equal file ids have none, what else it is.
    """

    level: Level
    fields: tuple[Field, ...]
    records: tuple[Records, ...]
    sections: dict[str, str]


def compare_packages(
    first: Package, second: Package, advance: Callable[[int], None] = lambda length: None
) -> Difference:
    """Compare two packages. Records are read only where their digests differ.

    Args:
        first: an open package.
        second: another.
        advance: told the length of the records that are done with, about; `record_bytes` gives their sum.

    Raises:
        FormatError: one of them is at fault.
    """
    for package in (first, second):
        verify_content_id(package)
    level: Level = "different"
    if first.file_id == second.file_id:
        level = "same file" if _equal_bytes(first, second, advance) else "same signed content"
    elif first.manifest.content_id == second.manifest.content_id:
        level = "same content"
    sections = _sections(first, second)
    if level == "same signed content" and not sections:
        sections["places of sections, or bytes of none"] = "differ"
    return Difference(
        level=level,
        fields=tuple(_differing(_plain(first), _plain(second))),
        records=tuple(_records(first, second, advance)) if level == "different" else (),
        sections=sections,
    )


def _equal_bytes(first: Package, second: Package, advance: Callable[[int], None]) -> bool:
    """Whether both are the same byte for byte; stops at the first piece that differs."""
    length = available(first.source)
    if available(second.source) != length:
        return False
    pieces = (read_pieces(package.source, 0, length) for package in (first, second))
    for one, other in zip(*pieces, strict=True):
        if one != other:
            return False
        advance(len(one) + len(other))
    return True


def record_bytes(first: Package, second: Package) -> int:
    """Bytes of all records of both."""
    return sum(section.entry.length for each in (first, second) for section in (each.dense, each.experts))


def _plain(package: Package) -> dict[str, Any]:
    """The manifest as plain values, without what follows from the others: content id, places of tensors.

    Binaries go by their chip and graphs of a binary by their label, so that one more does not make all others differ.
    """
    plain: dict[str, Any] = msgspec.to_builtins(package.manifest, builtin_types=(bytes,))
    del plain["content_id"]
    plain["layouts"] = [
        {matrix.name: f"{matrix.encoding} {matrix.rows}x{matrix.columns}" for matrix in layout.matrices}
        for layout in package.manifest.layouts
    ]
    plain["binaries"] = {
        f"{binary.target} {chip_numbered(binary.soc_model, binary.architecture).name}": {
            **{name: getattr(binary, name) for name in ("section", "sdk", "compiler", "options")},
            "graphs": {label_of(graph): graph.name for graph in binary.graphs},
        }
        for binary in package.manifest.binaries
    }
    return plain


def _differing(first: dict[str, Any], second: dict[str, Any]) -> Iterator[Field]:
    """Values that differ, by their path."""
    one, other = (dict(_leaves(each, "")) for each in (first, second))
    for path in dict.fromkeys([*one, *other]):
        if one.get(path) != other.get(path):
            yield Field(path=path, first=_shown(one.get(path)), second=_shown(other.get(path)))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every single value below another, with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def _shown(value: Any) -> Any:
    """A value as JSON can hold it."""
    return value.hex() if isinstance(value, bytes) else value


def _sections(first: Package, second: Package) -> dict[str, str]:
    """Sections of one package only, and those that are neither the manifest nor records whose content differs."""
    there = [{(each.type, each.id): each for each in package.container.entries} for package in (first, second)]
    found = {}
    for key in sorted(there[0].keys() | there[1].keys()):
        if key[0] == SectionType.FREE:
            continue
        name = section_name(*key)
        if key not in there[1]:
            found[name] = "only in the first"
        elif key not in there[0]:
            found[name] = "only in the second"
        elif key[0] in COMPARED:
            contents = first.read_section(there[0][key]), second.read_section(there[1][key])
            if contents[0] != contents[1]:
                found[name] = "differs"
    return found


def _records(first: Package, second: Package, advance: Callable[[int], None]) -> Iterator[Records]:
    dense = first.dense, second.dense
    names = [["embedding", *(f"layer {n}" for n in range(len(each.table.ranges) - 2)), "final"] for each in dense]
    for name in dict.fromkeys([*names[0], *names[1]]):
        indices = [each.index(name) if name in each else None for each in names]
        yield from _range(name, (first, second), dense, (indices[0], indices[1]), advance)
    experts = first.experts, second.experts
    for layer in range(max(len(each.table.ranges) for each in experts)):
        where = [layer if layer < len(each.table.ranges) else None for each in experts]
        yield from _range(f"experts of layer {layer}", (first, second), experts, (where[0], where[1]), advance)


def _range(
    name: str,
    packages: tuple[Package, Package],
    sections: tuple[RecordSection, RecordSection],
    ranges: tuple[int | None, int | None],
    advance: Callable[[int], None],
) -> Iterator[Records]:
    """What differs between two ranges of records, of which one may be missing."""
    places = [_places(section, index) for section, index in zip(sections, ranges, strict=True)]
    pairs = list(zip(*places, strict=False))
    differing = [
        index for index, (one, other) in enumerate(pairs) if one.digest != other.digest or one.layout != other.layout
    ]
    counted = Counter[str]()
    for index in differing:
        one, other = pairs[index]
        if one.layout == other.layout:
            counted.update(_tensors(packages, one, other))
    advance(sum(place.length for each in places for place in each))
    indices = [*differing, *range(len(pairs), max(map(len, places)))]
    if indices:
        yield Records(
            where=name,
            differing=len(indices),
            first=len(places[0]),
            second=len(places[1]),
            indices=tuple(indices),
            tensors=dict(counted),
        )


def _places(section: RecordSection, index: int | None) -> list[RecordPlace]:
    if index is None:
        return []
    return [section.place(index, record) for record in range(section.table.ranges[index].count)]


def _tensors(packages: tuple[Package, Package], one: RecordPlace, other: RecordPlace) -> list[str]:
    """Matrices and vectors that differ between two records of one layout, in its order."""
    found = []
    for package, place in zip(packages, (one, other), strict=True):
        buffer = memoryview(bytearray(place.length))
        package.read_record(place, buffer)
        found.append(tensors(place.layout, buffer))
    first, second = found
    differing = [name for name in first if first[name].tobytes() != second[name].tobytes()]
    return list(dict.fromkeys(name.partition(".")[0] for name in differing))
