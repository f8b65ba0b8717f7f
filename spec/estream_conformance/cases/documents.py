"""Sections that are read whole: their digests, and the chat template's text. Rules SEC-018 and SEC-020."""

from __future__ import annotations

from functools import partial

from estream_conformance.builder import Draft, Sealed, Section
from estream_conformance.case import accepted, refused
from estream_conformance.changes import accept, refuse
from estream_conformance.files import entry_of, flipped
from estream_conformance.frames import raw
from estream_conformance.packages import full, smallest
from estream_spec.constants import SectionType

UNKNOWN = 99


def with_template(data: bytes, stored: bytes | None = None) -> Sealed:
    """A package with a chat template, which may be anything."""
    draft = smallest()
    draft.sections.insert(-1, Section(SectionType.CHAT_TEMPLATE, data, stored=stored))
    return draft.seal()


for _name, _data in {
    "ff": b"\xff",
    "fe": b"{{ \xfe }}",
    "a_lone_continuation": b"a\x80",
    "an_overlong_slash": b"\xc0\xaf",
    "an_overlong_nul": b"\xc0\x80",
    "an_overlong_form_of_3_bytes": b"\xe0\x9f\xbf",
    "an_overlong_form_of_4_bytes": b"\xf0\x8f\xbf\xbf",
    "a_high_surrogate": b"\xed\xa0\x80",
    "a_low_surrogate": b"\xed\xbf\xbf",
    "a_pair_of_surrogates": b"\xed\xa0\xbd\xed\xb8\x80",
    "a_code_point_above_10ffff": b"\xf4\x90\x80\x80",
    "a_form_of_5_bytes": b"\xf8\x88\x80\x80\x80",
    "a_character_cut_after_1_byte": b"snow\xe2",
    "a_character_cut_after_3_bytes": b"face\xf0\x9f\x98",
    "a_character_broken_by_another": b"\xe2\x98a",
    "latin_1": "größer".encode("latin-1"),
    "utf_16": "\N{BYTE ORDER MARK}snow\N{SNOWMAN}".encode("utf-16-le"),
}.items():
    refuse(
        "EMOE-SEC-020",
        f"chat_template_of_{_name}",
        f"The chat template's bytes are {_data.hex(' ')}, which is no UTF-8.",
        partial(with_template, _data),
        base="chat_template_of_ascii",
    )
for _name, _data in {
    "ascii": b"{{ messages }}",
    "nul": b"\0",
    "a_byte_order_mark": b"\xef\xbb\xbf{{ messages }}",
    "the_last_code_point": b"\xf4\x8f\xbf\xbf",
    "a_noncharacter": b"\xef\xbf\xbe\xef\xbf\xbf\xf0\x9f\xbf\xbf",
    "code_points_around_the_surrogates": b"\xed\x9f\xbf\xee\x80\x80",
    "the_first_forms_of_each_length": b"\x00\xc2\x80\xe0\xa0\x80\xf0\x90\x80\x80",
    "line_ends_of_all_kinds": b"\r\n\n\r\xe2\x80\xa8",
    "no_jinja": b"{{ {% {#",
}.items():
    accept(
        f"chat_template_of_{_name}",
        f"The chat template's bytes are {_data.hex(' ')}, which is UTF-8.",
        partial(with_template, _data),
    )


@refused("EMOE-SEC-020", "zstd", base="chat_template_of_ascii")
def compressed_chat_template_of_ff() -> Sealed:
    """The chat template is compressed, and what it decodes to is no UTF-8."""
    return with_template(b"\xff", raw(b"\xff"))


@accepted()
def tokenizer_that_is_no_json() -> Sealed:
    """The tokenizer is neither JSON nor text; the format does not look into it."""
    draft = smallest()
    draft.sections.insert(-1, Section(SectionType.TOKENIZER, b"\xff\0{"))
    return draft.seal()


@refused("EMOE-SEC-018")
def unknown_section_with_another_digest() -> Sealed:
    """The digest of a section of unknown type, which is not flagged `records`, is another."""
    draft = smallest()
    draft.sections.append(Section(UNKNOWN, b"any", changes={"sha256": bytes(32)}))
    return draft.seal()


@refused("EMOE-SEC-018")
def unknown_unsigned_section_with_another_digest() -> Sealed:
    """The digest of a section of unknown type that is outside `file_id` is another."""
    draft = smallest()
    draft.sections.append(Section(UNKNOWN, b"any", changes={"sha256": bytes(32), "flags": 4}))
    return draft.seal()


@refused("EMOE-SEC-018")
def unknown_section_of_unknown_codec_with_another_digest() -> Sealed:
    """The digest of a section of unknown type and codec is another."""
    draft = smallest()
    draft.sections.append(Section(UNKNOWN, b"any", changes={"sha256": bytes(32), "codec": 7}))
    return draft.seal()


def damaged(draft: Draft, section_type: int, section_id: int = 0, at: int = 0) -> Sealed:
    """A package with one bit of a section turned over; -1 is its last byte."""
    sealed = draft.seal()
    entry = entry_of(sealed, section_type, section_id)
    return flipped(sealed, entry["offset"] + at % entry["stored_length"])


for _type in (
    SectionType.MANIFEST,
    SectionType.DENSE_TABLE,
    SectionType.EXPERT_TABLE,
    SectionType.GRAPH,
    SectionType.TOKENIZER,
    SectionType.CHAT_TEMPLATE,
    SectionType.BINARY,
):
    for _place, _at in {"first": 0, "last": -1}.items():
        refuse(
            "EMOE-SEC-018",
            f"bit_of_{_place}_byte_of_{_type.name.lower()}_flipped",
            f"One bit of the {_place} byte of a section of type {_type.name} is turned over, its digest is not mended.",
            partial(lambda section_type, at: damaged(full(), section_type, at=at), _type, _at),
            base="full",
        )


def with_two_faults(section_type: int) -> Draft:
    """A package whose section of a type has a wrong digest, and whose manifest breaks a rule of the model."""
    draft = full()
    draft.section(section_type).changes["sha256"] = bytes(32)
    draft.model()["attentions"][0]["key_value_heads"] = 3
    return draft


@refused("EMOE-SEC-018", base="full")
def digest_of_manifest_before_its_content() -> Sealed:
    """The manifest has another digest, and breaks a rule: the digest is judged first."""
    return with_two_faults(SectionType.MANIFEST).seal()


for _type in (SectionType.GRAPH, SectionType.BINARY, SectionType.DENSE_TABLE, SectionType.TOKENIZER):
    refuse(
        "EMOE-MOD-004",
        f"model_before_digest_of_{_type.name.lower()}",
        f"A section of type {_type.name}, which is before the manifest, has another digest, and the model breaks a "
        "rule: the manifest is judged before the other sections.",
        partial(lambda section_type: with_two_faults(section_type).seal(), _type),
        base="full",
    )


@refused("EMOE-SEC-018", base="full")
def digest_of_last_section_before_chat_template() -> Sealed:
    """The chat template is no UTF-8, and a section behind it has another digest: all digests are judged first."""
    draft = full()
    draft.section(SectionType.CHAT_TEMPLATE).data = b"\xff"
    draft.sections.append(Section(UNKNOWN, b"any", changes={"sha256": bytes(32)}))
    return draft.seal()


@refused("EMOE-SEC-020", base="full")
def chat_template_before_tables() -> Sealed:
    """The chat template is no UTF-8, and a table has another magic: the template is judged first."""
    draft = full()
    draft.section(SectionType.CHAT_TEMPLATE).data = b"\xff"
    draft.section(SectionType.DENSE_TABLE).change = lambda table: b"e" + table[1:]
    return draft.seal()


@refused("EMOE-SEC-018", base="full")
def digest_of_graph_before_tables() -> Sealed:
    """A table has another magic, and a graph, which is behind it, another digest: all digests are judged first."""
    draft = full()
    draft.section(SectionType.DENSE_TABLE).change = lambda table: b"e" + table[1:]
    draft.section(SectionType.GRAPH, 1).changes["sha256"] = bytes(32)
    return draft.seal()
