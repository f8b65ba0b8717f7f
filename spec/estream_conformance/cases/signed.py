"""What a signature covers and what it does not, and when it is judged. FORMAT.md sections 9.1, 9.4 and 9.5."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from estream_conformance.builder import Draft, Sealed, Section
from estream_conformance.case import Made, accepted, refused
from estream_conformance.changes import accept, refuse
from estream_conformance.files import with_tail
from estream_conformance.frames import raw
from estream_conformance.packages import draft, full, smallest, smallest_model
from estream_conformance.signing import asking, sign, with_signatures
from estream_spec.constants import SectionType

UNKNOWN = 99
BASE = "signed_package_with_an_unknown_section"


def package() -> Draft:
    """A package with everything, and a section of unknown type that its signature covers."""
    made = full()
    made.sections += [
        # It ends at a multiple of 128, so what follows begins there whether it is aligned to 64 bytes or to 128.
        Section(SectionType.FREE, bytes(128), alignment_shift=7),
        Section(UNKNOWN, b"any", id=5, alignment_shift=7, changes={"flags": 2, "codec": 7}),
    ]
    return made


SIGNED = sign(1, package().seal().file_id)


def asked(made: Draft, *, covered: bool) -> Made:
    """A package with the signature of the one above, and a policy that asks for its key.

    Args:
        made: the package.
        covered: whether something that the signature covers is another than in the one above.
    """
    sealed = with_signatures(made, SIGNED)
    assert (sealed.file_id != package().seal().file_id) == covered
    return asking(sealed, 1, signatures=(SIGNED,))


def with_change(change: Callable[[Draft], Any], *, covered: bool) -> Made:
    """The package with something changed after it was signed; all digests are mended."""
    made = package()
    change(made)
    return asked(made, covered=covered)


@accepted("signature", base="full")
def signed_package_with_an_unknown_section() -> Made:
    """A package with everything and a section of unknown type, all of which the signature covers."""
    return asked(package(), covered=False)


def unknown(**changes: int) -> Callable[[Draft], None]:
    """The change of fields in the entry of the section of unknown type."""

    def change(made: Draft) -> None:
        made.sections[-1].changes |= changes

    return change


def set_template(made: Draft) -> None:
    """Another chat template."""
    made.section(SectionType.CHAT_TEMPLATE).data = b"{{ message }}"


def set_weight(made: Draft) -> None:
    """One weight of one expert is another."""
    made.tables[SectionType.EXPERTS][0].payloads[0][0] ^= 1


def set_arena(made: Draft) -> None:
    """The manifest's device configuration asks for more memory."""
    made.manifest["device_configurations"][0]["arena_bytes"] *= 2


def drop_tokenizer(made: Draft) -> None:
    """The tokenizer is gone."""
    made.sections.remove(made.section(SectionType.TOKENIZER))


def drop_unknown(made: Draft) -> None:
    """The section of unknown type is gone."""
    made.sections.pop()


def set_binary(made: Draft) -> None:
    """The binary has other bytes."""
    made.section(SectionType.BINARY).data = b"binary 1"


def set_sdk(made: Draft) -> None:
    """The binary is said to be of an older build."""
    made.manifest["binaries"][0]["sdk"] = "2.5"


def drop_binary(made: Draft) -> None:
    """The binary is gone, and the manifest says so."""
    made.sections.remove(made.section(SectionType.BINARY))
    del made.manifest["binaries"]


def swap_graphs(made: Draft) -> None:
    """Two graphs have changed places, each with its id."""
    first, second = (made.sections.index(made.section(SectionType.GRAPH, number)) for number in range(2))
    made.sections[first], made.sections[second] = made.sections[second], made.sections[first]


def swap_graphs_bytes(made: Draft) -> None:
    """Two graphs of one length have changed their bytes."""
    first, second = (made.section(SectionType.GRAPH, number) for number in range(2))
    first.data, second.data = second.data, first.data


def free_first(made: Draft) -> None:
    """An extent no longer in use stands before all sections, so that they begin later."""
    made.sections.insert(0, Section(SectionType.FREE, bytes(4096)))


def compress_tokenizer(made: Draft) -> None:
    """The tokenizer is compressed, and decodes to what it was."""
    section = made.section(SectionType.TOKENIZER)
    section.stored = raw(section.data or b"")


def align_unknown(made: Draft) -> None:
    """The section of unknown type is said to be aligned to 64 bytes; it begins where it did."""
    made.sections[-1].changes["alignment_shift"] = 6


def set_unknown(made: Draft) -> None:
    """The section of unknown type has other bytes."""
    made.sections[-1].data = b"all"


def add_section(made: Draft) -> None:
    """There is another section of unknown type, without flags."""
    made.sections.append(Section(UNKNOWN, b"any", id=6))


def set_unknown_id(made: Draft) -> None:
    """The section of unknown type has another id."""
    made.sections[-1].id = 6


def set_unknown_type(made: Draft) -> None:
    """The section of unknown type has another unknown type."""
    made.sections[-1].type = UNKNOWN + 1


for _name, _about, _change, _features in (
    ("chat_template", "the chat template is another", set_template, ()),
    ("weight", "one weight is another", set_weight, ()),
    ("device_configuration_of_the_manifest", "the manifest asks for another arena", set_arena, ()),
    ("tokenizer_dropped", "the tokenizer was dropped", drop_tokenizer, ()),
    ("tokenizer_compressed", "the tokenizer is compressed", compress_tokenizer, ("zstd",)),
    ("binary", "the binary is another", set_binary, ()),
    ("sdk_of_binary", "the binary is said to be of an older build", set_sdk, ()),
    ("binary_dropped", "the binary was dropped", drop_binary, ()),
    ("graphs_moved", "two graphs have changed places", swap_graphs, ()),
    ("graphs_swapped", "two graphs have changed their bytes", swap_graphs_bytes, ()),
    ("sections_moved_by_a_page", "all sections begin a page later", free_first, ()),
    ("unknown_section_added", "there is another section of unknown type", add_section, ()),
    ("unknown_section_dropped", "the section of unknown type was dropped", drop_unknown, ()),
    ("unknown_section", "the section of unknown type holds something else", set_unknown, ()),
    ("id_of_unknown_section", "the section of unknown type has another id", set_unknown_id, ()),
    ("type_of_unknown_section", "the section of unknown type has another type", set_unknown_type, ()),
    ("safe_to_copy", "the section of unknown type is no longer safe to copy", unknown(flags=0), ()),
    ("unsigned", "the section of unknown type is now unsigned", unknown(flags=6), ()),
    ("codec_of_unknown_section", "the section of unknown type has another codec", unknown(codec=8), ()),
    ("length_of_unknown_section", "the section of unknown type is said to decode to more", unknown(length=4), ()),
    ("alignment_of_unknown_section", "the section of unknown type has another alignment", align_unknown, ()),
):
    refuse(
        "EMOE-SIG-002",
        f"changed_after_signing_{_name}",
        f"After signing something was changed, and all digests were mended: {_about}.",
        partial(with_change, _change, covered=True),
        "signature",
        *_features,
        base=BASE,
    )


@refused("EMOE-SIG-002", "signature", base="signed_by_the_required_key")
def changed_after_signing_page_shift() -> Made:
    """After signing the package was written in larger pages; its first section begins where it did."""
    values = sign(1, smallest().seal().file_id)
    return asking(with_signatures(draft(smallest_model(), page_shift=13), values), 1)


@refused("EMOE-SIG-002", "signature", base="signed_by_the_required_key")
def changed_after_signing_page_shift_alone() -> Made:
    """After signing the superblocks were set to another page size, which only the tables contradict."""
    made = smallest()
    for section in made.sections[:2]:
        section.alignment_shift = 13
    values = sign(1, made.seal().file_id)
    made.superblock["page_shift"] = 13
    return asking(with_signatures(made, values), 1)


# What a signature does not cover.
def set_superblock(**superblock: int) -> Callable[[Draft], None]:
    """The change of fields of both superblocks."""

    def change(made: Draft) -> None:
        made.superblock |= superblock

    return change


def add_free(made: Draft) -> None:
    """An extent no longer in use follows the last section."""
    made.sections.append(Section(SectionType.FREE, b"any"))


def add_unsigned(made: Draft) -> None:
    """An unsigned section of unknown type follows."""
    made.sections.append(Section(UNKNOWN, b"any", id=6, changes={"flags": 4}))


for _name, _about, _change in (
    ("generation", "the superblocks have another generation", set_superblock(generation=9)),
    ("format_minor", "the superblocks have another minor version", set_superblock(format_minor=8)),
    ("optional_features", "the superblocks have an optional feature", set_superblock(optional_features=1)),
    ("free_extent", "an extent no longer in use was added", add_free),
    ("unsigned_section", "an unsigned section of unknown type was added", add_unsigned),
):
    accept(
        f"changed_outside_of_signature_{_name}",
        f"After signing something was changed that the signature does not cover: {_about}.",
        partial(with_change, _change, covered=False),
        "signature",
        base=BASE,
    )


@accepted("signature", base=BASE)
def changed_outside_of_signature_bytes_behind_the_end() -> Made:
    """After signing bytes were added behind the end of the package."""
    return asking(with_tail(with_signatures(package(), SIGNED), b"any"), 1, signatures=(SIGNED,))


# When it is judged.
def unmet(change: Callable[[Draft], Any]) -> Made:
    """The smallest package with a fault, and a policy that asks for a signature it does not have."""
    made = smallest()
    change(made)
    return asking(made.seal(), 1)


def break_manifest(made: Draft) -> None:
    """The manifest is no MessagePack."""
    made.section(SectionType.MANIFEST).change = lambda _: b"\xc1"


def break_digest(section_type: int) -> Callable[[Draft], None]:
    """The digest of a section is another."""

    def change(made: Draft) -> None:
        made.section(section_type).changes["sha256"] = bytes(32)

    return change


def break_model(made: Draft) -> None:
    """The model breaks a rule."""
    made.model()["attentions"][0]["head_dim"] = 3


def leave_manifest_out(made: Draft) -> None:
    """There is no manifest."""
    made.sections.remove(made.section(SectionType.MANIFEST))


def add_many_signatures(made: Draft) -> None:
    """There are 17 signatures."""
    made.sections += [Section(SectionType.SIGNATURE, b"any", id=number) for number in range(17)]


for _name, _about, _change in (
    ("manifest", "the manifest is no MessagePack", break_manifest),
    ("digest_of_manifest", "the manifest has another digest", break_digest(SectionType.MANIFEST)),
    ("digest_of_graph", "a graph has another digest", break_digest(SectionType.GRAPH)),
    ("model", "the model breaks a rule", break_model),
):
    refuse(
        "EMOE-SIG-002",
        f"signature_before_{_name}",
        f"No signature is there, and {_about}: nothing that only a signature vouches for is judged before.",
        partial(unmet, _change),
        "signature",
    )
refuse(
    "EMOE-SEC-015",
    "missing_section_before_signature",
    "There is no manifest, and no signature: the directory is judged before signatures.",
    partial(unmet, leave_manifest_out),
    "signature",
)
refuse(
    "EMOE-SEC-017",
    "too_many_signatures_before_signature",
    "There are 17 signatures, none of which is one: their number is judged before them.",
    partial(unmet, add_many_signatures),
    "signature",
)


@refused("EMOE-SIG-003", "signature", base="signed_by_the_required_key")
def counter_before_manifest() -> Made:
    """The security counter is too low, and the manifest is no MessagePack: the counter is judged first."""
    made = smallest()
    break_manifest(made)
    return asking(with_signatures(made, sign(1, made.seal().file_id, 1)), 1, counter=2)


def with_signature_sections(*sections: Section, broken_manifest: bool = False) -> Sealed:
    """The smallest package with sections of type `SIGNATURE`."""
    made = smallest()
    if broken_manifest:
        break_manifest(made)
    made.sections += sections
    return made.seal()


NO_SIGNATURE = b"E" * 120


def no_signature(number: int = 0, *, with_digest: bool = True) -> Section:
    """A section of type `SIGNATURE` whose bytes are none; its digest is right or wrong."""
    return Section(SectionType.SIGNATURE, NO_SIGNATURE, id=number, changes={} if with_digest else {"sha256": bytes(32)})


def undigested() -> Section:
    """A section of unknown type with a wrong digest."""
    return Section(UNKNOWN, b"any", changes={"sha256": bytes(32)})


@refused("EMOE-SEC-018", base="signed_and_no_policy")
def digest_of_signature_section() -> Sealed:
    """The digest of a signature's section is another; nobody asks for a signature."""
    return with_signature_sections(no_signature(with_digest=False))


@refused("EMOE-SEC-018", "signature", base="signed_by_the_required_key")
def digest_of_signature_section_before_its_structure() -> Made:
    """The only signature has another digest than its section, and is none: the digest is judged first."""
    return asking(with_signature_sections(no_signature(with_digest=False)), 1)


@refused("EMOE-SIG-001", "signature", base="signed_by_the_required_key")
def first_signature_before_digest_of_second() -> Made:
    """The first signature is none, the second one has another digest: they are judged one by one."""
    return asking(with_signature_sections(no_signature(), no_signature(1, with_digest=False)), 1)


@refused("EMOE-SEC-018", "signature", base="signed_by_the_required_key")
def digest_of_first_signature_before_second() -> Made:
    """The first signature has another digest, the second one is none: they are judged one by one."""
    return asking(with_signature_sections(no_signature(with_digest=False), no_signature(1)), 1)


@refused("EMOE-SEC-019", "signature", "zstd", base="compressed_signature")
def frame_of_signature_section() -> Made:
    """The signature's section is said to be compressed, but is no frame."""
    made = smallest()
    made.sections.append(Section(SectionType.SIGNATURE, bytes(120), stored=b"no frame"))
    return asking(made.seal(), 1)


@refused("EMOE-SEC-018", "signature", base="signed_inside_and_beside_the_package")
def signature_section_before_detached_signature() -> Made:
    """The signature's section has another digest, and the detached one is none: sections are judged first."""
    return asking(with_signature_sections(no_signature(with_digest=False)), 1, detached=NO_SIGNATURE)


@refused("EMOE-SIG-001", "signature", base="signed_beside_the_package")
def detached_signature_before_required_keys() -> Made:
    """The detached signature is none, and no other one is there: its structure is judged before the keys."""
    return asking(smallest().seal(), 1, detached=NO_SIGNATURE)


@refused("EMOE-SIG-001", "signature", base="signed_by_the_required_key")
def structure_of_signature_before_manifest() -> Made:
    """A signature is none, and the manifest is no MessagePack; a signature is asked for, so it is judged first."""
    return asking(with_signature_sections(no_signature(), broken_manifest=True), 1)


@refused("EMOE-MAN-001", base="signed_and_no_policy")
def manifest_before_structure_of_signature() -> Sealed:
    """A signature is none, and the manifest is no MessagePack; no signature is asked for, so it is judged later."""
    return with_signature_sections(no_signature(), broken_manifest=True)


@refused("EMOE-SIG-001", base="signed_and_no_policy")
def structure_of_signature_before_digest_of_next_section() -> Sealed:
    """A signature is none, and an unknown section behind it has another digest: sections are judged one by one."""
    return with_signature_sections(no_signature(), undigested())


@refused("EMOE-SEC-018", base="signed_and_no_policy")
def digest_of_section_before_structure_of_next_signature() -> Sealed:
    """An unknown section has another digest, and a signature behind it is none: sections are judged one by one."""
    return with_signature_sections(undigested(), no_signature())


@refused("EMOE-SIG-001", base="full")
def structure_of_signature_before_chat_template() -> Sealed:
    """The chat template is no UTF-8, and a signature behind it is none: all sections are judged before templates."""
    made = full()
    made.section(SectionType.CHAT_TEMPLATE).data = b"\xff"
    made.sections.append(no_signature())
    return made.seal()


@refused("EMOE-SIG-002", "signature", base="signed_by_the_required_key")
def signature_with_counter_of_other_byte_order() -> Made:
    """The message that was signed has the security counter with its bytes the other way round."""
    made = smallest()
    swapped = int.from_bytes(struct.pack(">Q", 5), "little")
    values = {**sign(1, made.seal().file_id, swapped), "security_counter": 5}
    return asking(with_signatures(made, values), 1)
