"""What a package says of itself, from its tables alone: no record is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from msgspec import Struct
from msgspec.structs import asdict

from estream_loader import Package
from estream_loader.integrity import notices
from estream_loader.tokenizing import tokenizer_faults
from estream_packer.configuring import local_configurations
from estream_packer.prefetch.summary import PrefetchSummary, summarise_prefetch_router
from estream_packer.schedules import ScheduleSummary, summarise_schedules
from estream_packer.signing import SignatureSummary, summarise_signatures
from estream_packer.summary import Summary, summarise
from estream_spec.chips import chip_numbered
from estream_spec.constants import DATA_START, KNOWN_SECTIONS, Codec, SectionType
from estream_spec.container import Container
from estream_spec.errors import LinkError
from estream_spec.manifest import BinaryGraph, DeviceConfiguration, Graph, RecordLayout
from estream_spec.model import Attention, ExpertBlock, ModelDescription

SEVERAL: Final = (
    SectionType.GRAPH,
    SectionType.BINARY,
    SectionType.SCHEDULE,
    SectionType.DEVICE_CONFIGURATION,
    SectionType.SIGNATURE,
)
"""Types of which a package may have several sections, told apart by their ids."""


class Extent(Struct, frozen=True, kw_only=True):
    """A stretch of the package.

    Attributes:
        name: what is there, such as `experts` or `graph 3`.
        offset: bytes from the package's start.
        stored_length: bytes it takes.
        length: bytes it holds, decoded.
        codec: `none` or `zstd`, or the number of one this version does not know.
        share: of the package, 0 to 1.
    """

    name: str
    offset: int
    stored_length: int
    length: int
    codec: str
    share: float


class RecordGroup(Struct, frozen=True, kw_only=True):
    """Records of one section and one layout.

    Attributes:
        section: `dense` or `experts`.
        matrices: what is in each, and how it is stored: `gate w4g32`.
        count: records.
        record_length: bytes of one, padded.
        payload_length: bytes of one, without the padding.
        padding_share: of the record, 0 to 1.
    """

    section: str
    matrices: tuple[str, ...]
    count: int
    record_length: int
    payload_length: int
    padding_share: float


class RecordRangeSummary(Struct, frozen=True, kw_only=True):
    """Records that follow each other: the experts of one layer, or one dense record.

    Attributes:
        section: `dense` or `experts`.
        name: `embedding`, `layer 3`, or at the end `head` or `last norm`.
        layer: number of the layer; None for what belongs to none.
        matrices: what is in each record, and how it is stored.
        offset: bytes from the package's start to the first record.
        count: records.
        record_length: bytes of one, padded.
    """

    section: str
    name: str
    layer: int | None
    matrices: tuple[str, ...]
    offset: int
    count: int
    record_length: int


class ListedBinaryGraph(BinaryGraph, frozen=True, kw_only=True, omit_defaults=False):
    """A graph of a binary that is listed with every key, those at their default too."""


class BinarySummary(Struct, frozen=True, kw_only=True):
    """Graphs compiled for one chip.

    Attributes:
        section: id of its section.
        target: the kind of accelerator.
        chip: name of the chip, such as `sm8650`.
        title: what the chip is sold as.
        soc_model: the chip's number in the vendor's SDK.
        architecture: version of the accelerator.
        sdk: build of the SDK that made it.
        compiler: name and version of the program that made it.
        options: what the compiler was told.
        length: bytes, decoded.
        graphs: what is in it.
    """

    section: int
    target: str
    chip: str
    title: str
    soc_model: int
    architecture: int
    sdk: str
    compiler: str
    options: str
    length: int
    graphs: tuple[ListedBinaryGraph, ...]


class Source(Struct, frozen=True, kw_only=True):
    """A file the package was made from; its digest in hexadecimal."""

    name: str
    length: int
    sha256: str


class ListedConfiguration(DeviceConfiguration, frozen=True, kw_only=True, omit_defaults=False):
    """A device configuration that is listed with every key, those at their default too."""


class Inspection(Struct, frozen=True, kw_only=True):
    """Everything `inspect` shows.

    Attributes:
        name: the model's name.
        file_id: digest of this very file, hexadecimal.
        content_id: digest of the logical content, hexadecimal.
        format: version of the format, such as `0.12`.
        page_size: bytes in a page.
        model: the model description in words, by subject.
        extents: every stretch of the package in order; their stored lengths add up to its length.
        summary: weights by role, bytes by purpose.
        records: records by section and layout.
        ranges: where the records are, in order; a layer without experts has none there.
        graphs: portable graphs.
        binaries: graphs compiled for accelerators.
        local_device_configurations: how to run here, added where the package is used, the default device's first.
        device_configurations: how to run on kinds of devices; without local ones the first is the default device's.
        prefetch_router: what predicts experts; None where nothing does.
        schedules: the programs in the package, in the order of the directory.
        signatures: who signed it; none is a reason to trust it, see `verify`.
        writer: the program that wrote the package.
        licence: SPDX expression of the weights' licence, or empty.
        sources: the files it was made from.
        extensions: names of other parties' data.
        notices: what is odd about the package, though valid.
    """

    name: str
    file_id: str
    content_id: str
    format: str
    page_size: int
    model: dict[str, str]
    extents: tuple[Extent, ...]
    summary: Summary
    records: tuple[RecordGroup, ...]
    ranges: tuple[RecordRangeSummary, ...]
    graphs: tuple[Graph, ...]
    binaries: tuple[BinarySummary, ...]
    local_device_configurations: tuple[ListedConfiguration, ...]
    device_configurations: tuple[ListedConfiguration, ...]
    prefetch_router: PrefetchSummary | None
    schedules: tuple[ScheduleSummary, ...]
    signatures: tuple[SignatureSummary, ...]
    writer: str
    licence: str
    sources: tuple[Source, ...]
    extensions: tuple[str, ...]
    notices: tuple[str, ...]


def inspect_package(package: Package) -> Inspection:
    """Collect what a package says.

    Raises:
        FormatError: its tables are at fault.
    """
    manifest, superblock = package.manifest, package.container.superblock
    return Inspection(
        name=manifest.name,
        file_id=package.file_id.hex(),
        content_id=manifest.content_id.hex(),
        format=f"{superblock.format_major}.{superblock.format_minor}",
        page_size=package.container.page_size,
        model=describe_model(manifest.model) | _tokenizer(package),
        extents=tuple(_extents(package.container)),
        summary=summarise(package.container, manifest.layouts, package.dense.table, package.experts.table),
        records=tuple(_record_groups(package)),
        ranges=tuple(_ranges(package)),
        graphs=manifest.graphs,
        binaries=tuple(_binaries(package)),
        local_device_configurations=_listed(reversed(local_configurations(package).values())),
        device_configurations=_listed(manifest.device_configurations),
        prefetch_router=summarise_prefetch_router(package),
        schedules=tuple(summarise_schedules(package)),
        signatures=tuple(summarise_signatures(package)),
        writer=manifest.provenance.writer,
        licence=manifest.provenance.licence,
        sources=tuple(
            Source(name=source.name, length=source.length, sha256=source.sha256.hex())
            for source in manifest.provenance.sources
        ),
        extensions=tuple(manifest.extensions),
        notices=tuple(notices(package)),
    )


def _listed(choices: Iterable[DeviceConfiguration]) -> tuple[ListedConfiguration, ...]:
    return tuple(ListedConfiguration(**asdict(each)) for each in choices)


def section_name(section_type: int, section_id: int) -> str:
    """What people call a section: its type, and its id where there may be several."""
    if section_type not in KNOWN_SECTIONS:
        return f"unknown type {section_type}, id {section_id}"
    name = SectionType(section_type).name.lower().replace("_", " ")
    return f"{name} {section_id}" if section_type in SEVERAL else name


def _extents(container: Container) -> Iterator[Extent]:
    """Superblocks, sections, directory, and the padding between them."""
    superblock = container.superblock
    codecs = {codec.value: codec.name.lower() for codec in Codec}

    def extent(name: str, start: int, stop: int, length: int | None = None, codec: int = Codec.NONE) -> Extent:
        stored = stop - start
        return Extent(
            name=name,
            offset=start,
            stored_length=stored,
            length=stored if length is None else length,
            codec=codecs.get(codec, str(codec)),
            share=stored / superblock.file_length,
        )

    yield extent("superblocks", 0, DATA_START)
    end = DATA_START
    for entry in container.entries:
        if entry.offset > end:
            yield extent("padding", end, entry.offset)
        end = entry.end
        yield extent(section_name(entry.type, entry.id), entry.offset, end, entry.length, entry.codec)
    if superblock.directory_offset > end:
        yield extent("padding", end, superblock.directory_offset)
    yield extent("directory", superblock.directory_offset, superblock.file_length)


def _record_groups(package: Package) -> Iterator[RecordGroup]:
    for section, table in (("dense", package.dense.table), ("experts", package.experts.table)):
        filled = [each for each in table.ranges if each.count]  # a layer without experts has a range of none
        for index in dict.fromkeys(each.layout for each in filled):
            layout = package.manifest.layouts[index]
            alike = [each for each in filled if each.layout == index]
            length = alike[0].record_length
            yield RecordGroup(
                section=section,
                matrices=_matrices(layout),
                count=sum(each.count for each in alike),
                record_length=length,
                payload_length=layout.payload_length,
                padding_share=1 - layout.payload_length / length,
            )


def _ranges(package: Package) -> Iterator[RecordRangeSummary]:
    model, start = package.manifest.model, package.container.section
    end = "last norm" if model.tied_head else "head"
    dense = [("embedding", None), *((f"layer {layer}", layer) for layer in range(len(model.layers))), (end, None)]
    experts = [(f"layer {layer}", layer) for layer in range(len(model.layers))]
    sections = (
        ("dense", SectionType.DENSE, package.dense.table, dense),
        ("experts", SectionType.EXPERTS, package.experts.table, experts),
    )
    for section, kind, table, names in sections:
        for each, (name, layer) in zip(table.ranges, names, strict=True):
            if not each.count:
                continue
            yield RecordRangeSummary(
                section=section,
                name=name,
                layer=layer,
                matrices=_matrices(package.manifest.layouts[each.layout]),
                offset=start(kind).offset + each.base,
                count=each.count,
                record_length=each.record_length,
            )


def _binaries(package: Package) -> Iterator[BinarySummary]:
    for binary in package.manifest.binaries:
        chip = chip_numbered(binary.soc_model, binary.architecture)
        yield BinarySummary(
            section=binary.section,
            target=binary.target,
            chip=chip.name,
            title=chip.title,
            soc_model=binary.soc_model,
            architecture=binary.architecture,
            sdk=binary.sdk,
            compiler=binary.compiler,
            options=binary.options,
            length=package.container.section(SectionType.BINARY, binary.section).length,
            graphs=tuple(ListedBinaryGraph(**asdict(graph)) for graph in binary.graphs),
        )


def _matrices(layout: RecordLayout) -> tuple[str, ...]:
    """What is in a record, and how it is stored."""
    return tuple(f"{matrix.name} {matrix.encoding}" for matrix in layout.matrices)


def describe_identity(found: Inspection) -> dict[str, str]:
    """Who a package says it is, in words, by subject."""
    return {
        "model": found.name,
        "file id": found.file_id,
        "content id": found.content_id,
        "format": f"{found.format}, pages of {found.page_size:,} bytes",
        "written by": found.writer,
        "licence": found.licence or "not stated",
        **{f"made from {source.name}": f"{source.length:,} bytes, {source.sha256[:16]}…" for source in found.sources},
        **{f"extension {name}": "" for name in found.extensions},
        **{f"signature {each.section}": _signature(each) for each in found.signatures},
        **{f"notice {number}": text for number, text in enumerate(found.notices, 1)},
    }


def _signature(signature: SignatureSummary) -> str:
    verdict = "verifies, which is no reason to trust it" if signature.verifies else "does not verify"
    return f"by {signature.key}, counter {signature.security_counter}: {verdict}"


def _tokenizer(package: Package) -> dict[str, str]:
    """How many tokens the tokenizer knows of those the model has rows for."""
    if package.tokenizer_json is None:
        return {}
    try:
        with tokenizer_faults(package.source.name):
            known = package.tokenizer.get_vocab_size(with_added_tokens=True)
    except LinkError as error:
        return {"tokenizer": error.message}
    beyond = package.manifest.model.vocabulary - known
    rows = f"; {beyond} rows of the vocabulary stand for no token, and are never chosen" if beyond > 0 else ""
    return {"tokenizer": f"{known} tokens{rows}"}


def describe_model(model: ModelDescription) -> dict[str, str]:
    """A model description in words, by subject."""
    described = {
        "family": model.family,
        "layers": f"{len(model.layers)} of width {model.hidden}",
        "vocabulary": f"{model.vocabulary} rows, {'tied head' if model.tied_head else 'head of its own'}",
        "context": f"{model.context_length} tokens",
    }
    for index, attention in enumerate(model.attentions):
        where = _layers(number for number, layer in enumerate(model.layers) if layer.attention == index)
        described[f"attention{_where(where, len(model.layers))}"] = _attention(attention)
    for index, block in enumerate(model.expert_blocks):
        where = _layers(number for number, layer in enumerate(model.layers) if layer.experts == index)
        described[f"experts{_where(where, len(model.layers))}"] = _experts(block)
    for index, dense in enumerate(model.dense_blocks):
        where = _layers(number for number, layer in enumerate(model.layers) if layer.dense == index)
        shared = ", shared by a sigmoid of each token" if dense.share else ""
        described[f"dense block of layers {where}"] = f"width {dense.intermediate}, silu{shared}"
    for index, convolution in enumerate(model.convolutions):
        where = _layers(number for number, layer in enumerate(model.layers) if layer.convolution == index)
        described[f"convolution of layers {where}"] = f"over {convolution.taps} tokens"
    for window in sorted({layer.window for layer in model.layers if layer.window is not None}):
        where = _layers(number for number, layer in enumerate(model.layers) if layer.window == window)
        described[f"window of layers {where}"] = f"{window} tokens"
    described["norms"] = f"{'RMS' if model.norm == 'rms' else 'layer norms'}, epsilon {model.norm_epsilon:g}"
    begin = "none" if model.begin_token is None else str(model.begin_token)
    described["tokens"] = f"begin {begin}, end {', '.join(map(str, model.end_tokens)) or 'none'}"
    return described


def _attention(attention: Attention) -> str:
    parts = [
        f"{attention.heads} heads of {attention.head_dim}",
        f"{attention.key_value_heads} key and value heads",
        f"rotary theta {attention.rotary.theta:g}",
    ]
    if attention.rotated != attention.head_dim:
        parts.append(f"{attention.rotated} numbers of a head rotated")
    if attention.rotary.frequencies:
        parts.append("frequencies of its own")
    if attention.latent is not None:
        parts.append(f"latent rank {attention.latent.rank}")
    if attention.bias or attention.out_bias:
        parts.append("biases")
    if attention.sinks:
        parts.append("sinks")
    if attention.qk_norm != "none":
        parts.append(f"{attention.qk_norm} norm of queries and keys")
    if attention.clip_qkv is not None:
        parts.append(f"clipped at {attention.clip_qkv:g}")
    return ", ".join(parts)


def _experts(block: ExpertBlock) -> str:
    chosen = f"{block.router.top_k} of {block.experts} chosen by {block.router.family}"
    return f"{chosen}, width {block.intermediate}, {block.activation}{', biases' if block.bias else ''}"


def _where(layers: str, count: int) -> str:
    """Which layers, unless it is all of them."""
    return "" if layers == _layers(range(count)) else f" of layers {layers}"


def _layers(numbers: Iterable[int]) -> str:
    """Ascending numbers as ranges: `0-3, 7`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
