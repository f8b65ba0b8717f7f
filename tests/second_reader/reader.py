"""The checks in the order of FORMAT.md section 9.4, and what LOADER-CLI.md has a program say of a package."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from second_reader import container as sections_of
from second_reader import manifest as structs
from second_reader.binaries import check_binaries
from second_reader.canonical import canonical_json
from second_reader.container import Container, Entry, Superblock, check_padding, file_id, read_container
from second_reader.identity import content_id
from second_reader.layouts import Layouts
from second_reader.model_rules import check_graphs, check_model, check_payload_lengths, tensor_end
from second_reader.prefetch import check_prefetch_router, check_routers
from second_reader.records import check_record
from second_reader.rules import RefusedError, require
from second_reader.schedules import Layer, check_program
from second_reader.schema import read_document
from second_reader.sections import check_digest, content
from second_reader.signatures import Policy, check_policy, parse_signature
from second_reader.source import Source
from second_reader.tables import Table, check_layouts_named, check_table, parse_table

ACCEPTED: Final = 0
REFUSED: Final = 1

Json = dict[str, Any]


def judge(
    read: Callable[[int, int], bytes],
    length: int,
    *,
    keys: Sequence[bytes] = (),
    minimum_counter: int = 0,
    detached: Sequence[bytes] = (),
) -> tuple[int, str]:
    """The exit status for a package and the line to print.

    Args:
        read: gives the bytes at an offset from the package's start, so many; only asked for what is there.
        length: bytes from the package's start to the end of its file.
        keys: public keys that must have signed.
        minimum_counter: the lowest security counter accepted.
        detached: signatures that are not in the package.
    """
    try:
        read_package = _Reader(Source(read, length))
        return ACCEPTED, canonical_json(read_package.validate(Policy(keys, minimum_counter, detached)))
    except RefusedError as refusal:
        return REFUSED, json.dumps({"class": refusal.error_class, "rule": refusal.rule})


class _Reader:
    """One package while it is checked."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.container: Container = read_container(source)
        self.content_sha256: dict[tuple[int, int], bytes] = {}

    def validate(self, policy: Policy) -> Json:
        """All checks, and what was read."""
        container = self.container
        identity = file_id(container)
        if policy.keys:
            check_policy(policy, self._contents(sections_of.SIGNATURE), identity)
        manifest = read_document(structs.MANIFEST, content(self.source, container.only(sections_of.MANIFEST)))
        check_model(manifest["model"])
        graphs = check_graphs(manifest, [entry.id for entry in container.of_type(sections_of.GRAPH)])
        check_binaries(manifest, [entry.id for entry in container.of_type(sections_of.BINARY)])
        check_payload_lengths(manifest["layouts"])
        signatures = self._check_other_sections()
        dense, experts = self._check_tables(manifest)
        Layouts(manifest, graphs).check(_layouts(dense), _layouts(experts))
        configurations = self._check_configurations(manifest, experts)
        schedules = self._check_schedules(manifest, experts)
        prefetch_routers = [
            check_prefetch_router(data, manifest) for data in self._contents(sections_of.PREFETCH_ROUTER)
        ]
        dense_records = self._check_records(manifest, dense, sections_of.DENSE)
        expert_records = self._check_records(manifest, experts, sections_of.EXPERTS)
        for prefetch_router in prefetch_routers:
            check_routers(prefetch_router, lambda layer: self._stored(dense_records[layer + 1][0], manifest))
        tokenizer, template = (
            self.content_sha256.get((section_type, 0), hashlib.sha256().digest())
            for section_type in (sections_of.TOKENIZER, sections_of.CHAT_TEMPLATE)
        )
        require(content_id(manifest, dense, experts, tokenizer, template) == manifest["content_id"], "IDN-001")
        check_padding(self.source, container)
        return {
            "file_id": identity,
            "superblock": _superblock_json(container.superblock),
            "sections": [self._section_json(entry) for entry in container.entries],
            "manifest": manifest,
            "device_configurations": configurations,
            "schedules": schedules,
            "signatures": signatures,
            "dense": dense_records,
            "experts": expert_records,
        }

    def _contents(self, section_type: int) -> Iterator[bytes]:
        """Each section of a type, checked when its turn comes."""
        return (content(self.source, entry) for entry in self.container.of_type(section_type))

    def _check_other_sections(self) -> list[Json]:
        """All sections that are read whole, and unknown ones by their digest. Gives the known signatures."""
        signatures = []
        template_is_utf8 = True
        for entry in self.container.entries:
            if entry.type == sections_of.FREE or entry.has_records:
                continue
            if not entry.is_known:
                check_digest(self.source, entry)
                continue
            data = content(self.source, entry)
            self.content_sha256[entry.type, entry.id] = hashlib.sha256(data).digest()
            if entry.type == sections_of.SIGNATURE and (signature := parse_signature(data)) is not None:
                signatures.append(signature._asdict())
            if entry.type == sections_of.CHAT_TEMPLATE:
                template_is_utf8 = _is_utf8(data)
        require(template_is_utf8, "SEC-020")
        return signatures

    def _check_tables(self, manifest: Json) -> tuple[Table, Table]:
        container, layouts, layers = self.container, manifest["layouts"], manifest["model"]["layers"]
        dense = parse_table(content(self.source, container.only(sections_of.DENSE_TABLE)))
        experts = parse_table(content(self.source, container.only(sections_of.EXPERT_TABLE)))
        check_layouts_named((dense, experts), len(layouts))
        page = 1 << container.superblock.page_shift
        dense_counts = [1] * (len(layers) + 2)
        check_table(dense, container.only(sections_of.DENSE), dense_counts, layouts, page)
        blocks = manifest["model"]["expert_blocks"]
        classes = [layer["experts"] for layer in layers]
        expert_counts = [0 if number is None else blocks[number]["experts"] for number in classes]
        check_table(experts, container.only(sections_of.EXPERTS), expert_counts, layouts, page)
        return dense, experts

    def _check_configurations(self, manifest: Json, experts: Table) -> list[Json]:
        """Those of the manifest, then those of sections. Gives the latter, highest section id first."""
        seen: set[tuple[str, int]] = set()
        for configuration in manifest["device_configurations"]:
            _check_configuration(configuration, experts, seen)
        seen = set()
        found = {}
        for entry in self.container.of_type(sections_of.DEVICE_CONFIGURATION):
            found[entry.id] = read_document(structs.DEVICE_CONFIGURATION, content(self.source, entry))
            _check_configuration(found[entry.id], experts, seen)
        return [found[section] for section in sorted(found, reverse=True)]

    def _check_schedules(self, manifest: Json, experts: Table) -> list[Json]:
        """All programs; gives their headers."""
        layers = [
            Layer(records.record_count, layer["dense"] is not None, _top_k(manifest["model"], layer))
            for records, layer in zip(experts.ranges, manifest["model"]["layers"], strict=True)
        ]
        headers = [check_program(data, layers, _longest(experts)) for data in self._contents(sections_of.SCHEDULE)]
        return [_structure_json(header._asdict()) for header in headers]

    def _check_records(self, manifest: Json, table: Table, section_type: int) -> list[list[Json]]:
        """Every record, range by range."""
        checked = []
        section = self.container.only(section_type)
        for records, places in zip(table.ranges, table.places(section), strict=True):
            layout = manifest["layouts"][records.layout]
            checked.append(
                [
                    check_record(self.source.slice(place.offset, place.offset + place.length), layout, place)
                    | {"layout": records.layout}
                    for place in places
                ]
            )
        return checked

    def _stored(self, record: Json, manifest: Json) -> dict[str, bytes]:
        """The bytes of each tensor of a record."""
        start = record["offset"]
        return {
            tensor["name"]: self.source.slice(start + tensor["offset"], start + tensor_end(tensor))
            for tensor in manifest["layouts"][record["layout"]]["tensors"]
        }

    def _section_json(self, entry: Entry) -> Json:
        return _structure_json(entry._asdict()) | {"content_sha256": self.content_sha256.get((entry.type, entry.id))}


def _layouts(table: Table) -> list[int]:
    return [records.layout for records in table.ranges]


def _top_k(model: Json, layer: Json) -> int:
    """How many experts a token is routed to in a layer."""
    return 0 if layer["experts"] is None else model["expert_blocks"][layer["experts"]]["router"]["top_k"]


def _longest(experts: Table) -> int:
    """Bytes of the longest expert record."""
    return max(records.record_length for records in experts.ranges)


def _check_configuration(configuration: Json, experts: Table, seen: set[tuple[str, int]]) -> None:
    """EMOE-CFG-001 to EMOE-CFG-003; adds its device and length to those seen in the same place."""
    banks, size = configuration["prefetch_depth"] + 1, configuration["group_size"]
    require(configuration["arena_bytes"] >= banks * size * _longest(experts), "CFG-001")
    if configuration["policy"] == "resident":
        require(banks >= sum(math.ceil(records.record_count / size) for records in experts.ranges), "CFG-002")
    key = configuration["name"], configuration["prompt_tokens"]
    require(key not in seen, "CFG-003")
    seen.add(key)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _structure_json(fields: Json) -> Json:
    """A structure's fields but those that LOADER-CLI.md leaves out of every one."""
    return {key: value for key, value in fields.items() if key not in ("magic", "reserved", "more_reserved")}


def _superblock_json(superblock: Superblock) -> Json:
    fields = _structure_json(superblock._asdict())
    return {key: value for key, value in fields.items() if key != "checksum"}
