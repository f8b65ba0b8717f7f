"""Opening and reading: what is read, what is proven under which policy, compressed sections, tensors."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import zstandard

from estream_loader import Integrity, open_package
from estream_loader.records import tensors
from estream_spec.constants import MAGIC, SectionType
from estream_spec.errors import EmoeError, IntegrityError, LinkError, MalformedError
from estream_spec.records import Superblock
from fixtures.packages import TOKENIZER, Draft, Section, binary, with_binaries
from fixtures.sources import CountingSource

PACKAGE = Draft().seal()


def test_opening_reads_superblocks_directory_and_manifest_only() -> None:
    source = CountingSource(PACKAGE)
    with open_package(source) as package:
        superblock, manifest = package.container.superblock, package.container.section(SectionType.MANIFEST)
    assert source.reads == [
        (0, Superblock.SIZE),
        (16384, Superblock.SIZE),
        (superblock.directory_offset, superblock.directory_length),
        (manifest.offset, manifest.stored_length),
    ]


def test_tables_are_read_once_when_asked_for() -> None:
    source = CountingSource(PACKAGE)
    with open_package(source) as package:
        opened = len(source.reads)
        assert package.experts.table.ranges
        assert package.dense.table.ranges
        tables = [package.container.section(each) for each in (SectionType.DENSE_TABLE, SectionType.EXPERT_TABLE)]
        assert source.reads[opened:] == [(entry.offset, entry.length) for entry in tables]


def test_closing_and_failing_close_the_source() -> None:
    source = CountingSource(PACKAGE)
    with open_package(source):
        assert source.closed == 0
    assert source.closed == 1
    cut = CountingSource(PACKAGE[:-1])
    with pytest.raises(IntegrityError, match=r"\[EMOE-SUP-011\]"):
        open_package(cut)
    assert cut.closed == 1


def test_graphs_and_documents() -> None:
    draft = Draft()
    draft.section(SectionType.GRAPH, 1).compress()
    draft.section(SectionType.TOKENIZER).compress()
    template = "{{ messages }} \u00e9".encode()
    draft.sections.append(Section(SectionType.CHAT_TEMPLATE, template))
    with open_package(draft.seal()) as package:
        assert package.graph(package.manifest.graphs[0]) == b"graph of qkv " * 9
        assert package.graph(package.manifest.graphs[1]) == b"graph of attend " * 9
        assert package.tokenizer_json == TOKENIZER
        assert package.tokenizer.get_vocab_size() == 2
        assert package.chat_template == template


@pytest.mark.parametrize("compressed", [False, True])
def test_binaries(compressed: bool) -> None:
    draft = with_binaries(binary(7))
    if compressed:
        draft.section(SectionType.BINARY, 7).compress()
    with open_package(draft.seal()) as package:
        [found] = package.manifest.binaries
        assert found == binary(7)
        assert package.binary(found) == b"graphs of a chip " * 9


def test_a_binary_is_proven_before_it_is_given_away() -> None:
    data = with_binaries(binary(7)).seal()
    damaged = flipped(data, data.index(b"graphs of a chip"))
    with open_package(damaged, integrity="open") as package, pytest.raises(IntegrityError) as caught:
        package.binary(package.manifest.binaries[0])
    assert (caught.value.rule, caught.value.path) == ("EMOE-SEC-018", "binary section 7")
    with pytest.raises(IntegrityError, match=r"\[EMOE-SEC-018\]"):
        open_package(damaged, integrity="full")


def test_package_without_documents() -> None:
    draft = Draft()
    draft.sections.remove(draft.section(SectionType.TOKENIZER))
    with open_package(draft.seal()) as package:
        assert package.tokenizer_json is None
        assert package.chat_template is None
        with pytest.raises(LinkError, match="no tokenizer") as caught:
            package.tokenizer.get_vocab_size()
        assert caught.value.hint == "only token ids, from Python, can be given"


PANICS = TOKENIZER.replace(b'"normalizer":null', b'"normalizer":{"type":"Precompiled","precompiled_charsmap":""}')
"""On which the library's native code panics."""


@pytest.mark.parametrize("data", [b"{}", b"\xff\xfe", b"[" * 5000, TOKENIZER[:-1], b'{"model":{"type":"BPE"}}', PANICS])
def test_tokenizer_that_is_none(data: bytes) -> None:
    draft = Draft()
    draft.section(SectionType.TOKENIZER).data = data
    with open_package(draft.seal()) as package, pytest.raises(LinkError, match="tokenizer cannot be used"):
        package.tokenizer.get_vocab_size()


def test_a_tokenizer_neither_cuts_texts_off_nor_fills_them_up() -> None:
    draft = Draft()
    truncation = b'{"direction":"Right","max_length":1,"strategy":"LongestFirst","stride":0}'
    padding = (
        b'{"strategy":{"Fixed":9},"direction":"Right","pad_to_multiple_of":null,'
        b'"pad_id":1,"pad_type_id":0,"pad_token":"b"}'
    )
    section = draft.section(SectionType.TOKENIZER)
    section.data = section.data.replace(b'"truncation":null', b'"truncation":' + truncation)
    section.data = section.data.replace(b'"padding":null', b'"padding":' + padding)
    section.data = section.data.replace(b'"pre_tokenizer":null', b'"pre_tokenizer":{"type":"Whitespace"}')
    with open_package(draft.seal()) as package:
        assert package.tokenizer.encode("a b a").ids == [0, 1, 0]


def flipped(package_bytes: bytes, position: int) -> bytes:
    return package_bytes[:position] + bytes([package_bytes[position] ^ 1]) + package_bytes[position + 1 :]


def use(data: bytes, integrity: Integrity) -> None:
    """What a run does: open, read every graph and every record."""
    with open_package(data, integrity=integrity) as package:
        for graph in package.manifest.graphs:
            package.graph(graph)
        for place in (*package.dense.places(), *package.experts.places()):
            package.read_record(place, memoryview(bytearray(place.length)))


class TestPolicies:
    """Which policy notices which damage, when."""

    def test_unknown_policy(self) -> None:
        with pytest.raises(LinkError, match="'none', expected one of open, paged, full"):
            open_package(PACKAGE, integrity="none")  # type: ignore[arg-type]

    @pytest.mark.parametrize("integrity", get_args(Integrity))
    @pytest.mark.parametrize("section_type", [SectionType.MANIFEST, SectionType.GRAPH, SectionType.EXPERT_TABLE])
    def test_what_is_read_whole_is_always_proven(self, integrity: Integrity, section_type: SectionType) -> None:
        with open_package(PACKAGE) as package:
            entry = package.container.section(section_type)
        with pytest.raises(IntegrityError, match=r"section has digest [0-9a-f]{64}, the directory says") as caught:
            use(flipped(PACKAGE, entry.offset + 3), integrity)
        error = caught.value
        path = f"{section_type.name.lower()} section 0"
        assert (error.rule, error.path, error.offset) == ("EMOE-SEC-018", path, entry.offset)

    @pytest.mark.parametrize("what", ["dense", "experts"])
    def test_records(self, what: str) -> None:
        with open_package(PACKAGE) as package:
            place = getattr(package, what).place(1)
        damaged = flipped(PACKAGE, place.offset + 5)
        use(damaged, "open")
        with open_package(damaged):
            pass
        with pytest.raises(IntegrityError, match="record has checksum") as caught:
            use(damaged, "paged")
        error = caught.value
        assert (error.rule, error.path, error.offset) == ("EMOE-REC-001", f"{what}[1][0]", place.offset)
        with pytest.raises(IntegrityError, match=r"record has checksum.*\[EMOE-REC-001\]"):
            open_package(damaged, integrity="full")

    def test_record_whose_checksum_was_mended(self) -> None:
        """crc32c is against accident: only the digest notices."""
        draft = Draft()
        table = draft.section(SectionType.EXPERT_TABLE).data
        before = draft.section(SectionType.EXPERTS).sha256
        draft.change_record(SectionType.EXPERTS, 4, lambda record: record.__setitem__(0, record[0] ^ 1))
        forged = bytearray(draft.section(SectionType.EXPERT_TABLE).data)
        at = 16 + 2 * 32 + 4 * 40
        forged[at + 8 : at + 40] = table[at + 8 : at + 40]
        draft.section(SectionType.EXPERT_TABLE).data = bytes(forged)
        draft.section(SectionType.EXPERTS).sha256 = before
        use(draft.seal(), "paged")
        with pytest.raises(IntegrityError, match="record has digest") as caught:
            open_package(draft.seal(), integrity="full")
        assert (caught.value.rule, caught.value.path) == ("EMOE-REC-002", "experts[1][1]")
        assert caught.value.offset is not None

    def test_unread_section(self) -> None:
        with open_package(PACKAGE) as package:
            position = package.container.section(SectionType.TOKENIZER).offset
        use(flipped(PACKAGE, position), "paged")
        with pytest.raises(IntegrityError) as caught:
            open_package(flipped(PACKAGE, position), integrity="full")
        assert (caught.value.rule, caught.value.offset) == ("EMOE-SEC-018", position)


def bomb(stated: int, blocks: int, *, window: bool) -> bytes:
    """A zstd frame of run-length blocks, 128 KiB each, that says it holds `stated` bytes."""
    head = b"\x28\xb5\x2f\xfd" + (b"\x80\x40" if window else b"\xa0") + struct.pack("<I", stated)
    block = ((1 << 17 << 3) | (1 << 1)).to_bytes(3, "little") + b"\0"
    last = ((1 << 17 << 3) | (1 << 1) | 1).to_bytes(3, "little") + b"\0"
    return head + block * (blocks - 1) + last


STATED = 1 << 20
COMPRESSOR = zstandard.ZstdCompressor(write_content_size=True)
FRAMES = {
    "goes on beyond its size": bomb(STATED, 4000, window=False),
    "goes on beyond its size, windowed": bomb(STATED, 4000, window=True),
    "ends before its size": bomb(STATED, 7, window=False),
    "states another size": bomb(STATED // 2, 4, window=False),
    "states no size": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(STATED)),
    "cut": COMPRESSOR.compress(bytes(range(256)) * (STATED // 256))[:-1],
    "two frames": COMPRESSOR.compress(bytes(STATED)) + COMPRESSOR.compress(b""),
    "trailing byte": COMPRESSOR.compress(bytes(STATED)) + b"\0",
    "skippable": struct.pack("<II", 0x184D2A50, STATED),
    "not zstd": b"gzip" * 20,
    "one byte": b"\x28",
}


class TestCompression:
    @pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
    def test_refused(self, frame: bytes) -> None:
        draft = Draft()
        section = draft.section(SectionType.TOKENIZER)
        section.compress()
        section.data, section.length = frame, min(STATED, len(frame) * 256)
        with open_package(draft.seal()) as package:
            offset = package.container.section(SectionType.TOKENIZER).offset
            with pytest.raises(IntegrityError) as caught:
                assert package.tokenizer_json
        error = caught.value
        assert (error.rule, error.path, error.offset) == ("EMOE-SEC-019", "tokenizer section 0", offset)

    def test_frame_beyond_its_size_takes_no_memory(self) -> None:
        import tracemalloc

        draft = Draft()
        section = draft.section(SectionType.TOKENIZER)
        section.compress()
        section.data, section.length = bomb(STATED, 4000, window=True), STATED
        with open_package(draft.seal()) as package:
            tracemalloc.start()
            with pytest.raises(IntegrityError, match=r"\[EMOE-SEC-019\]"):
                assert package.tokenizer_json
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 4 * STATED

    def test_whole_frame(self) -> None:
        draft = Draft()
        section = draft.section(SectionType.TOKENIZER)
        section.compress()
        text = np.arange(STATED // 4, dtype=np.uint32).tobytes()
        section.data, section.length = COMPRESSOR.compress(text), STATED
        with open_package(draft.seal()) as package:
            assert package.tokenizer_json == text


class TestTensors:
    def test_views_of_a_record(self) -> None:
        with open_package(PACKAGE) as package:
            place = package.dense.place(1)
            buffer = memoryview(bytearray(place.length))
            package.read_record(place, buffer)
        views = tensors(place.layout, buffer)
        assert views["router"].shape == (32, 3)
        assert views["router"].dtype == np.float32
        assert views["q"].dtype == np.int8
        views["router"][0, 0] = 42.0
        offset = next(tensor.offset for tensor in place.layout.tensors if tensor.name == "router")
        assert struct.unpack_from("<f", buffer, offset) == (42.0,)

    def test_every_tensor_is_aligned(self) -> None:
        with open_package(PACKAGE) as package:
            for place in package.experts.places():
                assert all((place.offset + tensor.offset) % 128 == 0 for tensor in place.layout.tensors)


def test_identity_does_not_depend_on_where_it_was_opened() -> None:
    with open_package(PACKAGE) as one, open_package(b"xyz" + PACKAGE + b"x", offset=3, integrity="open") as other:
        assert one.file_id == other.file_id
        assert len(one.file_id) == 32


@pytest.mark.parametrize(
    ("data", "kind", "rule"),
    [
        (b"", MalformedError, "EMOE-SUP-001"),
        (b"\x89", MalformedError, "EMOE-SUP-001"),
        (PACKAGE[:8], MalformedError, "EMOE-SUP-003"),
        (bytes(100_000), MalformedError, "EMOE-SUP-001"),
        (MAGIC * 5000, IntegrityError, "EMOE-SUP-002"),
    ],
)
def test_small_and_foreign_files(data: bytes, kind: type[EmoeError], rule: str) -> None:
    with pytest.raises(kind) as caught:
        open_package(data)
    assert (caught.value.rule, caught.value.path, caught.value.offset) == (rule, "superblock[0]", 0)


def test_an_open_file_stays_open(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_bytes(b"something before it" + PACKAGE)
    with (tmp_path / "bundle").open("rb") as file:
        with open_package(file, offset=19, integrity="full") as package:
            assert package.manifest.name == "tiny"
        assert not file.closed
        assert file.read(9) == b"something"


@pytest.mark.parametrize("source", [None, 1.5, io.BytesIO(PACKAGE), ["package"]])
def test_what_no_package_can_be_read_from(source: Any) -> None:
    with pytest.raises(LinkError, match="a package cannot be read from"):
        open_package(source)


def test_an_offset_into_a_byte_source_is_refused() -> None:
    with pytest.raises(LinkError, match="begins where it says"):
        open_package(CountingSource(PACKAGE), offset=99)


def test_opening_needs_no_graph_library(tmp_path: Path) -> None:
    """An app that opens a package and reads its records imports no graph library, tokenizer or terminal."""
    (tmp_path / "p.emoe").write_bytes(PACKAGE)
    program = (
        "import sys; before = set(sys.modules); from estream_loader import open_package; import estream_loader.pager\n"
        "with open_package(sys.argv[1], integrity='full') as package: package.experts\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "p.emoe")], check=True, capture_output=True, text=True
    )
    imported = set(found.stdout.split())
    assert {"crc32c", "msgspec", "numpy", "zstandard"} <= imported
    assert imported.isdisjoint({"click", "onnx", "onnxruntime", "rich", "tokenizers"})
