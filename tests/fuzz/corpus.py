"""What damaging begins with: sound packages of several models, and pieces of them."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from estream_conformance.kinds import QUANTISED, everything
from estream_conformance.packages import draft as suite_draft
from estream_conformance.suite import load_vectors
from estream_loader.package import open_package
from estream_spec.constants import SIGNATURE_MAGIC, SUPERBLOCK_OFFSETS, Algorithm, SectionFlag, SectionType
from estream_spec.container import Container
from estream_spec.errors import EmoeError
from estream_spec.manifest import BinaryGraph, DeviceConfiguration, Manifest, Provenance, Source, content_id
from estream_spec.messagepack import encode
from estream_spec.model import ModelDescription
from estream_spec.prefetch_router import encode_prefetch_router
from estream_spec.records import RecordTable, Signature, Superblock
from estream_spec.weights import Encoding
from fixtures.packages import MODEL, TOKENIZER, Draft, Section, binary, with_binaries
from fixtures.prefetching import prefetch_router_for
from fuzz.inputs import TABLES_HEAD

MOST_VECTOR_BYTES: Final = 1 << 18
"""Longer files of the conformance suite are left out."""
MOST_FOR_A_RULE: Final = 1
"""Files of the conformance suite that are taken for each rule."""
_KEY: Final = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC_KEY: Final = _KEY.public_key().public_bytes_raw()


@dataclass(frozen=True, slots=True)
class Sample:
    """A sound package and what its pieces are judged against."""

    data: bytes
    manifest: Manifest
    container: Container

    def section(self, section_type: SectionType) -> bytes:
        """The stored bytes of a section."""
        entry = self.container.section(section_type)
        return self.data[entry.offset : entry.end]

    def container_input(self) -> bytes:
        """See `fuzz.inputs`."""
        superblock = self.container.superblock
        twins = [self.data[at : at + Superblock.SIZE] for at in SUPERBLOCK_OFFSETS]
        directory = self.data[superblock.directory_offset : superblock.file_length]
        return b"".join([*twins, struct.pack("<Q", len(self.data)), directory])

    def tables_input(self, number: int) -> bytes:
        """See `fuzz.inputs`; `number` is that of this sample."""
        dense, experts = self.section(SectionType.DENSE_TABLE), self.section(SectionType.EXPERT_TABLE)
        entries = [self.container.section(each).encode() for each in (SectionType.DENSE, SectionType.EXPERTS)]
        return TABLES_HEAD.pack(*entries, number, len(dense)) + dense + experts


@functools.cache
def samples() -> tuple[Sample, ...]:
    """One package of each kind of model and of section."""
    found = []
    made = [make().seal() for make in (_usual, _tied_in_f32, _two_classes, _odd_sections, _full_manifest, _predicted)]
    for data in (*made, suite_draft(everything(), QUANTISED, activations="dynamic-int8").seal().data):
        with open_package(data, integrity="full") as package:
            found.append(Sample(data, package.manifest, package.container))
    return tuple(found)


@functools.cache
def vectors() -> tuple[bytes, ...]:
    """Files of the conformance suite, a few for each rule and of those to accept: all of them would fill the memory."""
    small = (vector for vector in load_vectors() if vector.image.length <= MOST_VECTOR_BYTES)
    by_rule = groupby(small, key=lambda vector: vector.rule)
    few = (vector for _, group in by_rule for vector in islice(group, MOST_FOR_A_RULE))
    return tuple(vector.image.data() for vector in few)


def packages() -> list[bytes]:
    """Every whole package."""
    return [*(sample.data for sample in samples()), *vectors()]


def pieces(of: Callable[[Sample], bytes]) -> list[bytes]:
    """One piece of every sample, and of every vector that is sound as far as its manifest."""
    found = [of(sample) for sample in samples()]
    for data in vectors():
        try:
            with open_package(data) as package:
                found.append(of(Sample(data, package.manifest, package.container)))
        except EmoeError:
            continue
    return found


def _usual() -> Draft:
    """Four-bit experts under eight-bit dense weights, with compressed sections."""
    draft = Draft()
    draft.section(SectionType.GRAPH, 2).compress()
    draft.section(SectionType.TOKENIZER).compress()
    return draft


def _tied_in_f32() -> Draft:
    """A head tied to its embedding, and no weight quantised."""
    draft = Draft(model=replace(MODEL, tied_head=True), encodings={})
    draft.change_manifest(graphs=tuple(replace(graph, weights="f32") for graph in draft.manifest.graphs))
    return draft


def _two_classes() -> Draft:
    """Layers of two shape classes, normalised heads, clipped projections, groups of 64."""
    attention, block = replace(MODEL.attentions[0], head_dim=32), replace(MODEL.expert_blocks[0], intermediate=64)
    model = replace(
        MODEL,
        hidden=64,
        layers=(MODEL.layers[0], replace(MODEL.layers[1], attention=1, experts=1)),
        attentions=(attention, replace(attention, qk_norm="full", clip_qkv=8.0, heads=4, head_dim=16)),
        expert_blocks=(block, replace(block, experts=2, intermediate=128)),
    )
    encodings: dict[str, Encoding] = {"embedding": "w8", **dict.fromkeys(_MATRICES, "w4g64")}
    draft = Draft(model=model, encodings=encodings)
    graphs = draft.manifest.graphs
    more = [replace(graph, shape_class=1, section=graph.section + 10) for graph in graphs[:4]]
    draft.change_manifest(graphs=(*graphs, *more))
    draft.sections += [Section(SectionType.GRAPH, b"graph", id=graph.section) for graph in more]
    return draft


_MATRICES: Final = ("q", "k", "v", "o", "head", "gate", "up", "down")


def _odd_sections() -> Draft:
    """A chat template, free sections, a configuration and signatures, unknown sections of every kind."""
    encodings: dict[str, Encoding] = {"embedding": "f32", **dict.fromkeys(_MATRICES, "w8")}
    draft = Draft(encodings=encodings)
    template = Section(SectionType.CHAT_TEMPLATE, b"{% for message in messages %}{{ message.content }}{% endfor %}" * 4)
    _set_content_id(draft, draft.manifest.model, (TOKENIZER, template.data))
    template.compress()
    draft.section(SectionType.TOKENIZER).alignment_shift = 9
    draft.sections += [
        template,
        Section(SectionType.FREE, b"left behind by an edit"),
        Section(99, b"known to others", flags=SectionFlag.SAFE_TO_COPY),
        Section(0xFFFFFFFF, b"known to others", id=0xFFFFFFFF, codec=7, length=99, flags=SectionFlag.UNSIGNED),
        Section(100, bytes(4096), flags=SectionFlag.RECORDS, alignment_shift=12),
        Section(SectionType.FREE, b"left behind by an edit"),
        Section(SectionType.DEVICE_CONFIGURATION, encode(draft.manifest.device_configurations[0]), id=5),
    ]
    with open_package(draft.seal()) as package:
        file_id = package.file_id
    draft.sections.append(Section(SectionType.SIGNATURE, signature(file_id, 3), id=1))
    draft.sections.append(Section(SectionType.SIGNATURE, SIGNATURE_MAGIC + bytes([9, 0, 0, 0]) + bytes(50), id=2))
    return draft


def signature(file_id: bytes, counter: int) -> bytes:
    """A signature over a file id by the key of all samples."""
    unsigned = Signature(SIGNATURE_MAGIC, Algorithm.ED25519, counter, PUBLIC_KEY, bytes(64))
    return unsigned.encode()[:-64] + _KEY.sign(unsigned.message(file_id))


def _full_manifest() -> Draft:
    """Three layers, and a manifest in which no key is left out: tokens, binaries, sources, extensions."""
    encodings: tuple[Encoding, ...] = ("w4g32", "w4g32", "w4g32")
    expert = BinaryGraph(name="expert", role="expert", shape_class=0, tokens=64, encodings=encodings)
    binaries = (
        binary(0, graphs=(expert, *binary(0).graphs), options="a note"),
        binary(9, soc_model=69, architecture=79),
    )
    model = replace(MODEL, layers=3 * MODEL.layers[:1], begin_token=1, end_tokens=(2, 15, 3))
    draft = with_binaries(*binaries, model=model)
    generic = draft.manifest.device_configurations[0]
    small = DeviceConfiguration(name="small", arena_bytes=generic.arena_bytes, group_size=2, prefetch_depth=0)
    long = replace(small, lanes=4, policy="post-routing", prompt_tokens=512)
    source = Source(name="config.json", length=1234, sha256=bytes(range(32)))
    draft.change_manifest(
        device_configurations=(generic, small, long),
        provenance=Provenance(writer="tests", licence="Apache-2.0", sources=(source, replace(source, name="tensors"))),
        extensions={"com.example.note": b"a note", "org.example": bytes(100)},
    )
    return draft


def _predicted() -> Draft:
    """A prefetch router."""
    draft = Draft()
    with open_package(draft.seal()) as package:
        router = prefetch_router_for(package)
    source = Source(name="text.txt", length=99, sha256=bytes(range(32)))
    data = encode_prefetch_router(replace(router, sources=(source,)))
    draft.sections.append(Section(SectionType.PREFETCH_ROUTER, data))
    return draft


def _set_content_id(draft: Draft, model: ModelDescription, documents: tuple[bytes, ...]) -> None:
    types = (SectionType.DENSE_TABLE, SectionType.EXPERT_TABLE)
    dense, experts = (RecordTable.decode(draft.section(each).data, path="table") for each in types)
    draft.change_manifest(content_id=content_id(model, draft.manifest.layouts, dense, experts, documents))
