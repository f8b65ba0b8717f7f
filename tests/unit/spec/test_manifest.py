"""The manifest has one encoding, and other bytes are refused by class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from estream_loader import open_package
from estream_spec.constants import SectionType
from estream_spec.errors import IntegrityError, InvalidError, MalformedError
from estream_spec.manifest import DeviceConfiguration, content_id, decode_device_configuration, decode_manifest
from estream_spec.messagepack import encode
from estream_spec.model import Router
from estream_spec.records import RecordTable
from fixtures.packages import MODEL, TOKENIZER, Draft, binary, replace_table, with_binaries

MANIFEST = with_binaries(binary(0)).manifest
DATA = encode(MANIFEST)


def test_a_policy_at_its_default_is_left_out_whoever_spelled_it() -> None:
    """Equal strings need not be one object."""
    spelled: Any = "-".join(["pre", "routing"])
    sizes: dict[str, Any] = {"name": "phone", "arena_bytes": 1 << 20, "group_size": 2, "prefetch_depth": 1}
    plain = encode(DeviceConfiguration(**sizes))
    assert encode(DeviceConfiguration(**sizes, policy=spelled, lanes=int("2"), prompt_tokens=int("0"))) == plain
    other = DeviceConfiguration(**sizes, policy="on-demand")
    assert encode(msgspec.structs.replace(other, policy=spelled)) == plain
    written = b"\x85" + plain[1:] + b"\xa6policy\xabpre-routing"
    with pytest.raises(InvalidError, match=r"\[EMOE-MAN-003\]"):
        decode_device_configuration(written, "configuration")


@pytest.mark.parametrize("spelled", [{"scale": 1.0}, {"epsilon": -0.0}, {"tolerance": 0.0}])
def test_a_float_at_its_default_is_left_out_and_refused_where_it_is_given(spelled: dict[str, float]) -> None:
    """Equal floats are hardly ever one object, and -0 equals 0."""
    router = Router(family="sigmoid-topk-renormalise", top_k=2)
    plain = encode(router)
    assert encode(msgspec.structs.replace(router, **spelled)) == plain
    given = changed(lambda manifest: manifest["model"]["expert_blocks"][0]["router"].update(spelled))
    with pytest.raises(InvalidError, match=r"\[EMOE-MAN-003\]"):
        decode_manifest(given)


def test_manifest_survives_encoding() -> None:
    assert decode_manifest(DATA) == MANIFEST
    extended = msgspec.structs.replace(MANIFEST, extensions={"org.example": b"\0", "com.example": b""})
    assert decode_manifest(encode(extended)) == extended


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The manifest after a change to it as plain maps and lists."""
    plain = msgspec.msgpack.decode(DATA)
    change(plain)
    return msgspec.msgpack.encode(plain)


def swap(old: bytes, new: bytes) -> bytes:
    assert old in DATA
    return DATA.replace(old, new, 1)


NOT_CANONICAL = {
    "default given": changed(lambda plain: plain["model"].update(tied_head=False)),
    "empty default given": changed(lambda plain: plain.update(extensions={})),
    "nested default given": changed(lambda plain: plain["layouts"][0].update(kind=1)),
    "other key order": changed(lambda plain: plain.update(name=plain.pop("name"))),
    "wider integer": swap(b"\xa6hidden\x20", b"\xa6hidden\xcc\x20"),
    "widest integer": swap(b"\xa6hidden\x20", b"\xa6hidden\xcf" + bytes(7) + b"\x20"),
    "signed integer": swap(b"\xa6hidden\x20", b"\xa6hidden\xd0\x20"),
    "integer for a float": swap(b"\xa5theta\xcb\x40\xc3\x88\0\0\0\0\0", b"\xa5theta\xcd\x27\x10"),
    "narrow float": swap(b"\xa5theta\xcb\x40\xc3\x88\0\0\0\0\0", b"\xa5theta\xca\x46\x1c\x40\0"),
    "wider text": swap(b"\xa4name\xa4tiny", b"\xa4name\xd9\x04tiny"),
    "wider map": b"\xde\x00" + bytes([DATA[0] & 15]) + DATA[1:],
    "wider array": swap(b"\xa6layers\x92", b"\xa6layers\xdc\0\2"),
    "unsorted extensions": changed(lambda plain: plain.update(extensions={"b": b"", "a": b""})),
    "duplicate key": bytes([DATA[0] + 1]) + b"\xa4name\xa5other" + DATA[1:],
}


@pytest.mark.parametrize("data", NOT_CANONICAL.values(), ids=NOT_CANONICAL)
def test_other_spellings_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidError, match="not in canonical encoding: byte") as caught:
        decode_manifest(data)
    assert (caught.value.rule, caught.value.path) == ("EMOE-MAN-003", "manifest")


def assign(path: str, value: object) -> bytes:
    """The manifest with one value, named by keys and indices, set to another."""

    def change(plain: Any) -> None:
        *way, last = path.split(".")
        for key in way:
            plain = plain[int(key) if key.isdigit() else key]
        plain[last] = value

    return changed(change)


INVALID = {
    "unknown key": assign("colour", 1),
    "unknown nested key": assign("model.attentions.0.window", 4),
    "missing key": changed(lambda plain: plain.pop("provenance")),
    "wrong type": assign("name", 5),
    "bytes for text": assign("name", b"tiny"),
    "not a map": msgspec.msgpack.encode([1, 2]),
    "nothing but nil": b"\xc0",
    "text that is not UTF-8": swap(b"\xa4name\xa4tiny", b"\xa4name\xa4\xff\xfe\xfd\xfc"),
    "key that is not UTF-8": b"\x81\xa2\xff\xfe\x01",
    "deep": b"\x81\xa4name" + b"\x91" * 100_000 + b"\xc0",
    "deep under an unknown key": b"\x81\xa4deep" + b"\x91" * 100_000 + b"\xc0",
    "short digest": assign("content_id", bytes(31)),
    "long digest": assign("content_id", bytes(33)),
    "unknown choice": assign("model.expert_blocks.0.router.family", "sigmoid"),
    "unknown layout kind": assign("layouts.0.kind", 2),
    "unknown target": assign("graphs.0.target", "htp"),
    "zero": assign("model.hidden", 0),
    "negative": assign("model.hidden", -1),
    "true for a number": assign("model.hidden", True),
    "fraction": assign("model.hidden", 32.5),
    "above its limit": assign("model.hidden", (1 << 24) + 1),
    "empty list": assign("model.layers", []),
    "not a number": assign("model.attentions.0.rotary.theta", float("nan")),
    "negative epsilon": assign("model.norm_epsilon", -1.0),
    "a timestamp": assign("name", msgspec.msgpack.Ext(1, b"\0\0\0\0")),
    "unknown accelerator": assign("binaries.0.target", "gpu"),
    "no chip": assign("binaries.0.soc_model", 0),
    "build with a letter": assign("binaries.0.sdk", "v2.51"),
    "build with a line feed": assign("binaries.0.sdk", "2.51\n"),
    "binary without graphs": assign("binaries.0.graphs", []),
    "no rows": assign("binaries.0.graphs.0.tokens", 0),
    "unknown encoding": assign("binaries.0.graphs.0.encodings", ["f16"]),
    "three dimensions": assign("layouts.0.tensors.0.shape", [1, 1, 1]),
}


@pytest.mark.parametrize("data", INVALID.values(), ids=INVALID)
def test_other_structures_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidError) as caught:
        decode_manifest(data)
    assert caught.value.rule == "EMOE-MAN-002"
    assert caught.value.path is not None
    assert caught.value.path.startswith("manifest")
    assert caught.value.message[0].islower()


def test_the_place_of_a_value_is_told() -> None:
    with pytest.raises(InvalidError) as caught:
        decode_manifest(INVALID["negative epsilon"])
    assert str(caught.value) == "expected 'float' >= 0.0 (at manifest.model.norm_epsilon) [EMOE-MAN-002]"


HUGE = (2**31, 2**32 - 1, 2**42 + 1, 2**63, 2**64 - 1)
NUMBERS = (
    "model.hidden",
    "model.vocabulary",
    "model.context_length",
    "model.layers.0.attention",
    "model.layers.0.experts",
    "model.attentions.0.heads",
    "model.attentions.0.key_value_heads",
    "model.attentions.0.head_dim",
    "model.expert_blocks.0.experts",
    "model.expert_blocks.0.intermediate",
    "model.expert_blocks.0.router.top_k",
    "layouts.0.payload_length",
    "layouts.0.matrices.0.rows",
    "layouts.0.matrices.0.columns",
    "layouts.0.tensors.0.offset",
    "graphs.0.section",
    "graphs.0.shape_class",
    "device_configurations.0.arena_bytes",
    "device_configurations.0.group_size",
    "device_configurations.0.prefetch_depth",
    "binaries.0.section",
    "binaries.0.architecture",
    "binaries.0.graphs.0.shape_class",
    "binaries.0.graphs.0.tokens",
    "binaries.0.graphs.0.keys",
)


@pytest.mark.parametrize("path", NUMBERS)
@pytest.mark.parametrize("value", HUGE)
def test_huge_numbers(path: str, value: int) -> None:
    """Digests mended: a number that means more than the file holds is refused, not computed with."""
    draft = with_binaries(binary(0))
    draft.section(SectionType.MANIFEST).data = assign(path, value)
    data = draft.seal()

    def use() -> None:
        with open_package(data) as package:
            assert package.experts.table.ranges

    if path == "device_configurations.0.arena_bytes" and value <= 1 << 44:
        use()  # memory the device may have
        return
    with pytest.raises(InvalidError) as caught:
        use()
    assert caught.value.rule in {
        "EMOE-MAN-002",  # beyond the range of the field
        *(
            f"EMOE-{kind}"
            for kind in ("MOD-004", "MOD-006", "MOD-008", "GRA-004", "BIN-001", "LAY-001", "LAY-005", "CFG-001")
        ),
    }
    assert caught.value.offset is not None


MALFORMED = {
    "empty": b"",
    "cut": DATA[:-1],
    "longer": DATA + b"\xc0",
    "unused code": b"\xc1",
    "array of four billion": b"\x81\xa7layouts\xdd\xff\xff\xff\xff",
    "map of four billion": b"\xdf\xff\xff\xff\xff",
    "text of four billion": b"\x81\xa4name\xdb\xff\xff\xff\xff",
    "bytes of four billion": b"\x81\xaacontent_id\xc6\xff\xff\xff\xff",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedError, match="not MessagePack: ") as caught:
        decode_manifest(data)
    assert (caught.value.rule, caught.value.path) == ("EMOE-MAN-001", "manifest")
    assert len(str(caught.value)) < 300


def test_a_manifest_is_placed_where_its_section_begins() -> None:
    for data, kind in (
        (MALFORMED["cut"], MalformedError),
        (INVALID["zero"], InvalidError),
        (NOT_CANONICAL["wider text"], InvalidError),
    ):
        draft = Draft()
        draft.section(SectionType.MANIFEST).data = data
        package = draft.seal()
        with pytest.raises(kind) as caught:
            open_package(package)
        assert caught.value.offset == package.index(data)


class TestContentId:
    def content(self, draft: Draft, **changes: Any) -> bytes:
        given: dict[str, Any] = {
            "model": MODEL,
            "layouts": draft.manifest.layouts,
            "dense": RecordTable.decode(draft.section(SectionType.DENSE_TABLE).data, path=""),
            "experts": RecordTable.decode(draft.section(SectionType.EXPERT_TABLE).data, path=""),
            "documents": (TOKENIZER, b""),
        }
        return content_id(**{**given, **changes})

    def test_page_size_and_codec_do_not_matter(self) -> None:
        draft = Draft(page_shift=14)
        draft.section(SectionType.TOKENIZER).compress()
        draft.sections.insert(0, draft.sections.pop())
        with open_package(draft.seal(), integrity="full") as package:
            assert package.manifest.content_id == MANIFEST.content_id

    def test_numbering_of_layouts_does_not_matter_but_their_use_does(self) -> None:
        draft = Draft()
        experts = RecordTable.decode(draft.section(SectionType.EXPERT_TABLE).data, path="")
        dense = RecordTable.decode(draft.section(SectionType.DENSE_TABLE).data, path="")
        count = len(draft.manifest.layouts)

        def renumbered(table: RecordTable) -> RecordTable:
            return replace_table(
                table, ranges=tuple(replace(each, layout=count - 1 - each.layout) for each in table.ranges)
            )

        same = self.content(
            draft, layouts=draft.manifest.layouts[::-1], dense=renumbered(dense), experts=renumbered(experts)
        )
        assert same == MANIFEST.content_id
        assert self.content(draft, dense=renumbered(dense)) != same

    def test_everything_else_matters(self) -> None:
        draft = Draft()
        experts = RecordTable.decode(draft.section(SectionType.EXPERT_TABLE).data, path="")
        others = [
            self.content(draft, model=msgspec.structs.replace(MODEL, end_tokens=(1,))),
            self.content(draft, experts=replace_table(experts, digests=experts.digests[::-1])),
            self.content(draft, documents=(b"", TOKENIZER)),
            self.content(draft, documents=(b"", b"")),
            MANIFEST.content_id,
        ]
        assert len(set(others)) == len(others)

    def test_it_is_proven_in_full_only(self) -> None:
        draft = Draft()
        draft.change_manifest(content_id=bytes(32))
        open_package(draft.seal()).close()
        with pytest.raises(IntegrityError) as caught:
            open_package(draft.seal(), integrity="full")
        assert (caught.value.rule, caught.value.path) == ("EMOE-IDN-001", "manifest.content_id")
