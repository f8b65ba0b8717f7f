"""What is held to account: functions that take any bytes and let nothing but an `EmoeError` pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from estream_loader import Package, open_package
from estream_loader.dense import DenseRecords, EmbeddingRows
from estream_loader.integrity import check_padding, notices, verify
from estream_loader.pager import Pager
from estream_loader.records import tensors
from estream_loader.trust import SignaturePolicy, check_signatures
from estream_spec.constants import PREFETCH_MAGIC, SectionType
from estream_spec.container import Container, check_superblock, choose_superblock, decode_container
from estream_spec.errors import EmoeError
from estream_spec.manifest import decode_manifest
from estream_spec.messagepack import encode
from estream_spec.prefetch_predictor import LayerPredictor
from estream_spec.prefetch_router import check_prefetch_router, decode_prefetch_router, encode_prefetch_router
from estream_spec.records import DirectoryEntry, RecordTable, Superblock, decode_signature, encode_directory
from estream_spec.rules import check_device_configurations, check_manifest, check_tables
from fixtures.paging import divided_pager
from fuzz import messagepack
from fuzz.corpus import PUBLIC_KEY, Sample, packages, pieces, samples, signature
from fuzz.inputs import DIRECTORY_AT, TABLES_HEAD, container_field, signature_field, tables_field
from fuzz.mending import mend_container, mend_manifest, mend_package, mend_prefetch_router, mend_tables
from fuzz.mutators import PACKAGE_MUTATORS, Mutator, cross, entries, fields, longer_section, some_bytes


@dataclass(frozen=True, slots=True)
class Target:
    """Code to run on any bytes.

    Attributes:
        name: what reports call it.
        share: how many of all inputs are for it.
        run: the code; an `EmoeError` is an answer, any other exception a fault.
        seeds: inputs to begin with.
        mutators: ways to damage an input, each as likely as the others.
        mend: makes digests and checksums of an input right.
    """

    name: str
    share: float
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    mutators: tuple[Mutator, ...]
    mend: Callable[[bytes], bytes]


def read_container(data: bytes) -> None:
    """Choose a superblock, judge it, decode the directory and judge that."""
    twins = data[: Superblock.SIZE], data[Superblock.SIZE : 2 * Superblock.SIZE]
    superblock = choose_superblock(twins)
    check_superblock(superblock, int.from_bytes(data[2 * Superblock.SIZE : DIRECTORY_AT], "little"))
    directory = data[DIRECTORY_AT:]
    container = decode_container(superblock, directory)
    assert encode_directory(container.entries) == directory
    assert superblock.encode() in twins
    assert len(container.file_id()) == 32


def read_manifest(data: bytes) -> None:
    """Decode a manifest and judge it against the directory of a sample with as many graphs and binaries."""
    manifest = decode_manifest(data)
    assert encode(manifest) == data
    counts = len(manifest.graphs), len(manifest.binaries)
    fitting = (
        each.container for each in samples() if (len(each.manifest.graphs), len(each.manifest.binaries)) == counts
    )
    check_manifest(manifest, next(fitting, samples()[0].container))


def read_tables(data: bytes) -> None:
    """Decode two record tables and judge them against the model of a sample."""
    if len(data) < TABLES_HEAD.size:
        return
    *stored, model, length = TABLES_HEAD.unpack_from(data)
    sample = samples()[model % len(samples())]
    kept = [each for each in sample.container.entries if each.type not in (SectionType.DENSE, SectionType.EXPERTS)]
    described = [DirectoryEntry.decode(entry, path="entry") for entry in stored]
    # Without one of each, with id 0, the directory would not have been taken.
    named = [
        replace(entry, type=kind, id=0)
        for entry, kind in zip(described, (SectionType.DENSE, SectionType.EXPERTS), strict=True)
    ]
    container = Container(sample.container.superblock, (*kept, *named))
    halves = data[TABLES_HEAD.size :][:length], data[TABLES_HEAD.size :][length:]
    dense, experts = (RecordTable.decode(half, path="table") for half in halves)
    assert (dense.encode(), experts.encode()) == halves
    check_tables(sample.manifest, container, dense, experts)
    check_device_configurations(sample.manifest, experts)


_FILE_ID: Final = bytes(32)
_SIGNATURES: Final = [signature(_FILE_ID, counter) for counter in (3, 1 << 40, 2, 0)]
_POLICY: Final = SignaturePolicy((PUBLIC_KEY,), minimum_counter=3)


def read_signature(data: bytes) -> None:
    """Decode a signature and hold a package to it. Who has not the key cannot make one."""
    decoded = decode_signature(data, path="signature")
    if decoded is not None:
        check_signatures(_POLICY, [decoded], _FILE_ID, 0)
        assert data in _SIGNATURES


def read_prefetch_router(data: bytes) -> None:
    """Decode what stands behind a prefetch router's magic, judge it against the model of a sample, and predict."""
    [sample] = _predicted()
    router = decode_prefetch_router(PREFETCH_MAGIC + data, "prefetch router")
    assert encode_prefetch_router(router) == PREFETCH_MAGIC + data
    check_prefetch_router(router, sample.manifest, "prefetch router")
    rows = np.linspace(-1e30, 1e30, 3 * sample.manifest.model.hidden, dtype=np.float32)
    for layer in router.layers:
        predictor = LayerPredictor.of(layer, sample.manifest.model)
        ranked = predictor.rank(rows.reshape(3, -1))
        experts = ranked.experts.shape[1]
        assert np.array_equal(np.sort(ranked.experts), np.tile(np.arange(experts), (3, 1)))
        extras = predictor.extras(ranked)
        assert (extras >= 0).all()
        assert (extras <= experts - predictor.top_k).all()


def _predicted() -> list[Sample]:
    """The samples that have a prefetch router."""
    return [each for each in samples() if each.container.find(SectionType.PREFETCH_ROUTER) is not None]


def validate(data: bytes) -> None:
    """Prove a whole package; one that is proven must load."""
    with open_package(data) as package:
        notices(package)
        verify(package)
        check_padding(package)
    try:
        page_in(data)
    except EmoeError as error:
        raise AssertionError(f"proven, but it does not load: {error}") from error


def page_in(data: bytes) -> None:
    """Load everything: graphs, binaries, dense records, embedding rows, and each expert through the arena."""
    with open_package(data, integrity="paged") as package:
        for graph in package.manifest.graphs:
            package.graph(graph)
        for each in package.manifest.binaries:
            package.binary(each)
        choice = package.device_configurations[0]
        groups = sum(package.expert_shape.group_counts(choice.group_size))
        banks = min(choice.prefetch_depth + 1, groups)
        places = [package.dense.place(number) for number in range(1, len(package.dense.table.ranges))]
        with DenseRecords(package, places) as records, EmbeddingRows(package) as embedding:
            for number, place in enumerate(places):
                tensors(place.layout, records.take(number))
            with np.errstate(all="ignore"):  # the policy `paged` does not look at values
                embedding.gather(np.array([0, package.manifest.model.vocabulary - 1]))
            embedding.prove()
        with divided_pager(package, bank_count=banks, group_size=choice.group_size) as pager:
            _page_experts(package, pager)


def _page_experts(package: Package, pager: Pager) -> None:
    for layer, groups in enumerate(package.expert_shape.group_counts(pager.group_size)):
        layout = package.experts.place(layer).layout
        for group in range(groups):
            pager.fill(layer, group, 0)
            pager.await_(layer, group, 0)
            bound = pager.use(0)
            for expert in pager.wanted(layer, group):
                tensors(layout, pager.record(bound, expert))
            pager.release(0)


TARGETS: Final = (
    Target(
        "container",
        0.31,
        read_container,
        lambda: pieces(lambda sample: sample.container_input()),
        (
            fields(container_field),
            fields(container_field),
            entries(DIRECTORY_AT + 16, 80),
            longer_section,
            some_bytes,
            cross,
        ),
        mend_container,
    ),
    Target(
        "manifest",
        0.31,
        read_manifest,
        lambda: pieces(lambda sample: sample.section(SectionType.MANIFEST)),
        (*5 * (messagepack.damaged,), some_bytes, cross),
        mend_manifest,
    ),
    Target(
        "tables",
        0.27,
        read_tables,
        lambda: [sample.tables_input(number) for number, sample in enumerate(samples())],
        (*3 * (fields(tables_field),), entries(TABLES_HEAD.size + 16, 40), some_bytes, cross),
        mend_tables,
    ),
    Target("signature", 0.03, read_signature, lambda: _SIGNATURES, (fields(signature_field), some_bytes, cross), bytes),
    Target(
        "prefetch router",
        0.04,
        read_prefetch_router,
        lambda: [each.section(SectionType.PREFETCH_ROUTER).removeprefix(PREFETCH_MAGIC) for each in _predicted()],
        (*3 * (messagepack.damaged,), some_bytes, cross),
        mend_prefetch_router,
    ),
    Target("validate", 0.02, validate, packages, PACKAGE_MUTATORS, mend_package),
    Target("page in", 0.02, page_in, packages, PACKAGE_MUTATORS, mend_package),
)
