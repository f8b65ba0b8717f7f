"""`content_id`: what it covers and what it does not. FORMAT.md section 9.2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final

from estream_conformance.builder import Draft, Range, Sealed, Section
from estream_conformance.case import accepted, refused
from estream_conformance.cases.records import EMBEDDING, EXPERT, write
from estream_conformance.changes import refuse
from estream_conformance.messagepack import encode
from estream_conformance.packages import draft, full, smallest, smallest_model
from estream_spec.constants import CONTENT_ID_CONTEXT, SectionType

RULE: Final = "EMOE-IDN-001"
DENSE, EXPERTS = SectionType.DENSE, SectionType.EXPERTS
TOKENIZER, CHAT_TEMPLATE = SectionType.TOKENIZER, SectionType.CHAT_TEMPLATE


def _identified(name: str, about: str, change: Callable[[bytes], bytes]) -> None:
    def build() -> Sealed:
        made = smallest()
        made.manifest["content_id"] = change(made.content_id())
        return made.seal()

    refuse(RULE, f"content_id_{name}", about, build, "records")


_identified("zero", "`content_id` is zero.", lambda _: bytes(32))
_identified("with_first_bit_flipped", "The first bit is wrong.", lambda own: bytes([own[0] ^ 0x80]) + own[1:])
_identified("with_last_bit_flipped", "The last bit is wrong.", lambda own: own[:-1] + bytes([own[-1] ^ 1]))
_identified("reversed", "The bytes of `content_id` come in reverse.", lambda own: own[::-1])


def _stale(name: str, about: str, change: Callable[[Draft], Any], make: Callable[[], Draft] = smallest) -> None:
    """`content_id` is that of the package before a change that it covers."""

    def build() -> Sealed:
        made = make()
        made.manifest["content_id"] = made.content_id()
        change(made)
        return made.seal()

    refuse(RULE, name, about, build, "records", base=make.__name__)


def _family(made: Draft) -> None:
    made.model()["family"] = "g"


def _theta(made: Draft) -> None:
    made.model()["attentions"][0]["rotary"]["theta"] = 2.0


def _begin_token(made: Draft) -> None:
    made.model()["begin_token"] = 0


def _minus_zero(made: Draft) -> None:
    made.model()["norm_epsilon"] = -0.0


def _dense_weight(made: Draft) -> None:
    write(made, EMBEDDING, "embedding", b"\0\0\x80\x3f")


def _expert_weight(made: Draft) -> None:
    write(made, EXPERT, "gate", b"\0\0\x80\x3f")


def _document(section_type: int, data: bytes) -> Callable[[Draft], Any]:
    def change(made: Draft) -> None:
        made.section(section_type).data = data

    return change


def _without(section_type: int) -> Callable[[Draft], Any]:
    return lambda made: made.sections.remove(made.section(section_type))


def _with(section_type: int) -> Callable[[Draft], Any]:
    return lambda made: made.sections.insert(-1, Section(section_type, b"x"))


def _experts_exchanged(made: Draft) -> None:
    payloads = made.tables[EXPERTS][0].payloads
    payloads[0], payloads[1] = payloads[1], payloads[0]


_stale("family_changed_and_content_id_not", "`content_id` is that of another family.", _family)
_stale("theta_changed_and_content_id_not", "`content_id` is that of another `theta`.", _theta)
_stale("begin_token_added_and_content_id_not", "`content_id` is that of a model without begin token.", _begin_token)
_stale("norm_epsilon_minus_zero_and_content_id_not", "`content_id` is that of 0.0, for -0.0.", _minus_zero)
_stale("dense_weight_changed_and_content_id_not", "`content_id` is that of another embedding.", _dense_weight)
_stale("expert_changed_and_content_id_not", "`content_id` is that of another expert.", _expert_weight)
_stale("experts_exchanged_and_content_id_not", "Two experts are exchanged, table and all.", _experts_exchanged, full)
_stale("tokenizer_added_and_content_id_not", "`content_id` is that without the tokenizer.", _with(TOKENIZER))
_stale("chat_template_added_and_content_id_not", "`content_id` is that without the template.", _with(CHAT_TEMPLATE))
_stale("tokenizer_changed_and_content_id_not", "The tokenizer is another one.", _document(TOKENIZER, b"{}"), full)
_stale("chat_template_changed_and_content_id_not", "The template is another one.", _document(CHAT_TEMPLATE, b"x"), full)
_stale("tokenizer_dropped_and_content_id_not", "`content_id` is that with a tokenizer.", _without(TOKENIZER), full)
_stale(
    "chat_template_dropped_and_content_id_not",
    "The chat template was dropped, and the content id is that with it.",
    _without(CHAT_TEMPLATE),
    full,
)


@refused(RULE, "records", base="full")
def content_id_of_documents_exchanged() -> Sealed:
    """`content_id` takes the tokenizer for the template and the template for the tokenizer."""
    made = full()
    first, second = made.section(TOKENIZER), made.section(CHAT_TEMPLATE)
    first.data, second.data = second.data, first.data
    made.manifest["content_id"] = made.content_id()
    first.data, second.data = second.data, first.data
    return made.seal()


def _preimage(made: Draft, context: bytes = CONTENT_ID_CONTEXT, *, layouts: bool = True) -> bytes:
    """The bytes under `content_id`, or others that a reader might take."""
    parts = [context, sha256(encode(made.manifest["model"])).digest()]
    for ranges in (made.tables[DENSE], made.tables[EXPERTS]):
        described = (
            made.manifest["layouts"] if not layouts else [made.manifest["layouts"][one.layout] for one in ranges]
        )
        payloads = b"".join(sha256(payload).digest() for one in ranges for payload in one.payloads)
        parts += [sha256(encode(described)).digest(), sha256(payloads).digest()]
    return b"".join(parts) + sha256(b"").digest() * 2


@refused(RULE, "records")
def content_id_without_its_context() -> Sealed:
    """`content_id` is taken without the words that its preimage begins with."""
    made = smallest()
    made.manifest["content_id"] = sha256(_preimage(made, b"")).digest()
    return made.seal()


@refused(RULE, "records")
def content_id_over_all_layouts() -> Sealed:
    """`content_id` is over all layouts of the manifest, and not over those of each table's ranges."""
    made = smallest()
    made.manifest["content_id"] = sha256(_preimage(made, layouts=False)).digest()
    return made.seal()


@refused(RULE, "records")
def content_id_with_zeros_for_missing_documents() -> Sealed:
    """`content_id` has zeros for documents that are not there, instead of the digest of no bytes."""
    made = smallest()
    made.manifest["content_id"] = sha256(_preimage(made)[:-64] + bytes(64)).digest()
    return made.seal()


# What it does not cover


def _same(change: Callable[[Draft], Any], make: Callable[[], Draft] = smallest) -> Sealed:
    made = make()
    made.manifest["content_id"] = make().content_id()
    change(made)
    return made.seal()


@accepted("records", base="full")
def content_id_of_other_graphs() -> Sealed:
    """A graph's bytes are others; `content_id` is the same."""
    return _same(lambda made: setattr(made.section(SectionType.GRAPH, 0), "data", b"other"), full)


@accepted("records")
def content_id_under_another_name() -> Sealed:
    """The name, the writer and the licence are others; `content_id` is the same."""

    def change(made: Draft) -> None:
        made.manifest["name"] = "m"
        made.manifest["provenance"] = {"writer": "v", "licence": "MIT"}

    return _same(change)


@accepted("records")
def content_id_of_sections_in_another_order() -> Sealed:
    """The sections lie the other way round; `content_id` is the same."""
    return _same(lambda made: made.sections.reverse())


@accepted("records", base="full")
def documents_changed_and_content_id_too() -> Sealed:
    """The tokenizer is another one, the template is missing, and `content_id` is right for that."""
    made = full()
    made.section(TOKENIZER).data = b"{}"
    made.sections.remove(made.section(CHAT_TEMPLATE))
    return made.seal()


@accepted("records", base="layouts_alike")
def content_id_of_one_layout_for_two() -> Sealed:
    """Two layers share a layout that they could have twice; `content_id` is the same as then."""
    made = draft({**smallest_model(), "layers": smallest_model()["layers"] * 2})
    other = copy.deepcopy(made)
    other.manifest["layouts"].append(other.manifest["layouts"][3])
    other.tables[EXPERTS][1] = Range(4, other.tables[EXPERTS][1].payloads)
    made.manifest["content_id"] = other.content_id()
    return made.seal()


@refused("EMOE-REC-005", "records")
def weight_and_content_id_wrong() -> Sealed:
    """The last expert's last weight is not a number, and `content_id` wrong: records come first."""
    made = smallest()
    made.manifest["content_id"] = bytes(32)
    return write(made, EXPERT, "down", b"\xff" * 4).seal()


@refused(RULE, "records", "padding")
def content_id_and_padding_wrong() -> Sealed:
    """`content_id` is wrong, and the padding before the directory not zero: the former comes first."""
    made = smallest()
    made.manifest["content_id"] = bytes(32)
    made.gap = b"\1"
    return made.seal()
