"""Records: checksums, digests, padding and numbers. FORMAT.md sections 5.4 and 7.1."""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final

import crc32c

from estream_conformance.builder import Draft, Sealed, Values
from estream_conformance.case import accepted, refused
from estream_conformance.cases.tensors import quantised, wide
from estream_conformance.changes import accept, refuse
from estream_conformance.packages import smallest
from estream_spec.constants import SectionType

DENSE, EXPERTS = SectionType.DENSE, SectionType.EXPERTS
Place = tuple[int, int, int]
"""A record: the section's type, the range, the number in it."""
EMBEDDING: Final[Place] = (DENSE, 0, 0)
LAYER: Final[Place] = (DENSE, 1, 0)
FINAL: Final[Place] = (DENSE, 2, 0)
EXPERT: Final[Place] = (EXPERTS, 0, 0)
SECOND: Final[Place] = (EXPERTS, 0, 1)


def tensor_of(made: Draft, place: Place, name: str) -> Values:
    """A tensor of the layout that a record has."""
    records, number, _ = place
    layout = made.manifest["layouts"][made.tables[records][number].layout]
    return next(dict(each) for each in layout["tensors"] if each["name"] == name)


def write(made: Draft, place: Place, name: str, data: bytes, at: int = 0) -> Draft:
    """Put bytes into a tensor, `at` bytes from its first; negative to count from its end."""
    records, number, record = place
    tensor = tensor_of(made, place, name)
    length = 4 if tensor["dtype"] == "f32" else 1
    for dimension in tensor["shape"]:
        length *= dimension
    start = tensor["offset"] + (at if at >= 0 else length + at)
    made.tables[records][number].payloads[record][start : start + len(data)] = data
    return made


def flip(sealed: Sealed, at: int) -> bytes:
    """The file with one bit flipped, nothing mended."""
    return sealed.data[:at] + bytes([sealed.data[at] ^ 1]) + sealed.data[at + 1 :]


def _flipped(name: str, about: str, place: Place, at: int) -> None:
    records, number, record = place

    def build() -> bytes:
        sealed = wide().seal()
        return flip(sealed, int(sealed.records[records][number][record]["offset"]) + at)

    refuse("EMOE-REC-001", name, about, build, "records", base="all_dimensions_apart")


_flipped("bit_flipped_in_first_byte_of_embedding", "A bit of the embedding is flipped.", EMBEDDING, 0)
_flipped("bit_flipped_in_a_vector", "A bit of the final norm is flipped.", FINAL, 7)
_flipped("bit_flipped_in_an_expert", "A bit of the second expert is flipped.", SECOND, 100)
_flipped("bit_flipped_between_tensors", "A bit between two tensors is flipped.", EXPERT, 127)
_flipped("bit_flipped_in_padding", "A bit of a record's padding is flipped; the checksum covers it.", EXPERT, 4000)
_flipped("bit_flipped_in_last_byte_of_padding", "The last bit of the last record is flipped.", SECOND, 4095)


def _digests(rule: str, name: str, about: str, place: Place, **changes: Any) -> None:
    records, number, record = place

    def build() -> Sealed:
        made = wide()
        made.tables[records][number].digests[record] = changes
        return made.seal()

    refuse(rule, name, about, build, "records", base="all_dimensions_apart")


_digests("EMOE-REC-001", "checksum_of_dense_record_wrong", "A checksum is 0.", LAYER, checksum=0)
_digests("EMOE-REC-001", "checksum_of_second_expert_wrong", "A checksum is 2^32 - 1.", SECOND, checksum=0xFFFFFFFF)
_digests("EMOE-REC-002", "digest_of_dense_record_wrong", "The digest of a record is zero.", LAYER, sha256=bytes(32))
_digests(
    "EMOE-REC-002",
    "digest_of_second_expert_wrong",
    "The digest is that of no bytes.",
    SECOND,
    sha256=sha256(b"").digest(),
)
_digests(
    "EMOE-REC-001",
    "checksum_and_digest_wrong",
    "Checksum and digest of a record are wrong; the checksum comes first.",
    EXPERT,
    checksum=0,
    sha256=bytes(32),
)


@refused("EMOE-REC-002", "records", base="all_dimensions_apart")
def digest_over_the_padding_too() -> Sealed:
    """A record's digest is over the whole record and not over its payload."""
    made = wide()
    one = made.tables[EXPERTS][0]
    one.digests[1] = {"sha256": sha256(bytes(one.payloads[1]).ljust(4096, b"\0")).digest()}
    return made.seal()


@refused("EMOE-REC-001", "records", base="all_dimensions_apart")
def checksum_over_the_payload_alone() -> Sealed:
    """A record's checksum is over its payload and not over the whole record."""
    made = wide()
    one = made.tables[EXPERTS][0]
    one.digests[1] = {"checksum": crc32c.crc32c(bytes(one.payloads[1]))}
    return made.seal()


@refused("EMOE-REC-001", "records", base="all_dimensions_apart")
def experts_exchanged() -> bytes:
    """Two experts have changed places, and their entries in the table have not."""
    sealed = wide().seal()
    first, second = (int(each["offset"]) for each in sealed.records[EXPERTS][0])
    data = bytearray(sealed.data)
    data[first : first + 4096], data[second : second + 4096] = data[second : second + 4096], data[first : first + 4096]
    return bytes(data)


@accepted("records", base="all_dimensions_apart")
def experts_alike() -> Sealed:
    """Two experts have the same weights."""
    made = wide()
    payloads = made.tables[EXPERTS][0].payloads
    payloads[1] = payloads[0]
    return made.seal()


# Padding


def _padded(name: str, about: str, place: Place, at: int) -> None:
    records, number, record = place

    def build() -> Sealed:
        made = wide()
        one = made.tables[records][number]
        left = 4096 - len(one.payloads[record])
        one.padding[record] = bytes(at if at >= 0 else left + at) + b"\1"
        return made.seal()

    refuse("EMOE-REC-003", name, about, build, "records", base="all_dimensions_apart")


_padded("padding_of_embedding_set", "The byte behind the embedding's payload is 1.", EMBEDDING, 0)
_padded("padding_of_expert_set", "The byte behind an expert's payload is 1.", SECOND, 0)
_padded("padding_of_record_set_at_its_end", "The last byte of a record's padding is 1.", LAYER, -1)
_padded("padding_of_last_record_set_at_its_end", "The last byte of the last record is 1.", SECOND, -1)


def _bytes(rule: str, name: str, about: str, place: Place, at: int, data: bytes) -> None:
    records, number, record = place

    def build() -> Sealed:
        made = wide()
        made.tables[records][number].payloads[record][at : at + len(data)] = data
        return made.seal()

    refuse(rule, name, about, build, "records", base="all_dimensions_apart")


_bytes("EMOE-REC-004", "byte_behind_a_tensor_set", "The byte behind the first tensor is 1.", EXPERT, 84, b"\1")
_bytes("EMOE-REC-004", "byte_before_a_tensor_set", "The byte before the second tensor is 1.", SECOND, 127, b"\1")
_bytes("EMOE-REC-004", "byte_before_the_last_tensor_set", "The byte before the last is 1.", EXPERT, 255, b"\x80")
_bytes("EMOE-REC-004", "byte_behind_a_vector_set", "The byte behind the final norm is 1.", FINAL, 12, b"\1")


@refused("EMOE-REC-004", "records", base="all_dimensions_apart")
def minus_zero_between_tensors() -> Sealed:
    """Between two tensors stands a float of -0.0, whose sign bit is set."""
    made = wide()
    made.tables[DENSE][1].payloads[0][124:128] = struct.pack("<f", -0.0)
    return made.seal()


# Numbers


def _number(
    rule: str | None, name: str, about: str, place: Place, tensor: str, data: bytes, at: int, make: Callable[[], Draft]
) -> None:
    def build() -> Sealed:
        return write(make(), place, tensor, data, at).seal()

    base = {wide: "all_dimensions_apart", quantised: "all_dimensions_apart_quantised"}[make]
    if rule is None:
        accept(name, about, build, "records", base=base)
    else:
        refuse(rule, name, about, build, "records", base=base)


NOT_FINITE: Final = {
    "nan": bytes.fromhex("0000c07f"),
    "signalling_nan": bytes.fromhex("0100807f"),
    "nan_with_sign": bytes.fromhex("ffffffff"),
    "infinity": bytes.fromhex("0000807f"),
    "minus_infinity": bytes.fromhex("000080ff"),
}
FINITE: Final = {
    "greatest_f32": bytes.fromhex("ffff7f7f"),
    "least_f32": bytes.fromhex("ffff7fff"),
    "subnormal": bytes.fromhex("01000000"),
    "minus_zero": bytes.fromhex("00000080"),
}
TENSORS: Final[list[tuple[Place, str]]] = [
    (EMBEDDING, "embedding"),
    (LAYER, "attention_norm"),
    (LAYER, "router"),
    (FINAL, "head"),
    (SECOND, "down"),
]
for (_place, _tensor), (_what, _data) in zip(TENSORS, NOT_FINITE.items(), strict=True):
    _name = f"{_tensor}_with_{_what}"
    _number("EMOE-REC-005", _name, f"The first number of {_tensor} is {_what}.", _place, _tensor, _data, 0, wide)
_INF = NOT_FINITE["infinity"]
_number(
    "EMOE-REC-005", "last_of_expert_infinite", "An expert's last number is infinite.", SECOND, "down", _INF, -4, wide
)
_number("EMOE-REC-005", "last_of_head_infinite", "The head's last number is infinite.", FINAL, "head", _INF, -4, wide)
_number(
    "EMOE-REC-005", "last_of_norm_infinite", "The norm's last number is infinite.", FINAL, "final_norm", _INF, -4, wide
)
for _what, _data in FINITE.items():
    _number(None, f"weight_{_what}", f"A weight is {_what.replace('_', ' ')}.", EXPERT, "up", _data, 0, wide)

ONE: Final = struct.pack("<f", -1.0)
SCALES: Final = [
    ("nan", "not a number", NOT_FINITE["nan"]),
    ("infinite", "infinite", NOT_FINITE["infinity"]),
    ("minus_infinity", "minus infinity", NOT_FINITE["minus_infinity"]),
    ("negative", "-1", ONE),
    ("least_below_zero", "the negative number next to 0", bytes.fromhex("01000080")),
]
for _place, _tensor in ((EMBEDDING, "embedding.scale"), (LAYER, "k.scale"), (SECOND, "up.scale")):
    _own = _tensor.partition(".")[0]
    for _what, _about, _data in SCALES:
        _number(
            "EMOE-REC-006",
            f"{_own}_scale_{_what}",
            f"The last scale of {_own} is {_about}.",
            _place,
            _tensor,
            _data,
            -4,
            quantised,
        )
for _what, _data in (
    ("0", bytes(4)),
    ("minus_zero", FINITE["minus_zero"]),
    ("of_the_greatest_f32", FINITE["greatest_f32"]),
):
    _number(None, f"scale_{_what}", f"A scale is {_what.replace('_', ' ')}.", EXPERT, "gate.scale", _data, 0, quantised)

_number("EMOE-REC-007", "embedding_of_minus_128", "A w8 weight is -128.", EMBEDDING, "embedding", b"\x80", 0, quantised)
_number("EMOE-REC-007", "last_weight_of_minus_128", "The last w8 weight is -128.", LAYER, "v", b"\x80", -1, quantised)
_number(None, "weight_of_minus_127", "A w8 weight is -127.", LAYER, "q", b"\x81", 0, quantised)
_number(None, "weight_of_127", "A w8 weight is 127.", LAYER, "q", b"\x7f", -1, quantised)

for _value in (0, 16, -16, 127, -128):
    _word = str(_value).replace("-", "minus_")
    for _tensor, _at in (("gate.multipliers", 0), ("down.multipliers", -1)):
        _name = f"{_tensor.partition('.')[0]}_multiplier_{_word}"
        _data = _value.to_bytes(1, "little", signed=True)
        _number("EMOE-REC-008", _name, f"A multiplier is {_value}.", SECOND, _tensor, _data, _at, quantised)
for _value in (15, -15, 1, -1):
    _word = str(_value).replace("-", "minus_")
    _data = _value.to_bytes(1, "little", signed=True)
    _number(None, f"multiplier_{_word}", f"A multiplier is {_value}.", SECOND, "up.multipliers", _data, 0, quantised)

# `gate` has 3 rows of 7 columns, in nibbles of 16 rows: rows 0 to 2 are in the low bits of the first three.
# `down`, of w4g64, has 7 rows of 3 columns, in nibbles of 32 rows.
NIBBLES: Final = [
    ("high_half_of_the_first_row", "gate.nibbles", 0, b"\x78"),
    ("high_half_of_the_last_row", "gate.nibbles", -1, b"\x98"),
    ("low_half_behind_the_rows", "gate.nibbles", 21, b"\x87"),
    ("low_half_of_the_last_row", "gate.nibbles", -1, b"\x89"),
    ("both_halves", "gate.nibbles", 40, b"\x00"),
    ("w4g64_low_half_behind_the_rows", "down.nibbles", 21, b"\x80"),
    ("w4g64_high_half_of_the_first_row", "down.nibbles", 0, b"\x08"),
    ("w4g64_last_byte", "down.nibbles", -1, b"\xff"),
]
for _what, _tensor, _at, _data in NIBBLES:
    _about = f"A padding row of `{_tensor}` is not 8: {_what.replace('_', ' ')}."
    _number("EMOE-REC-009", f"padding_row_in_{_what}", _about, SECOND, _tensor, _data, _at, quantised)
for _what, _tensor, _at, _data in (
    ("of_least_values", "gate.nibbles", 0, b"\x80"),
    ("of_greatest_values", "gate.nibbles", 20, b"\x8f"),
    ("of_w4g64_values", "down.nibbles", 20, b"\x80"),
):
    _number(
        None,
        f"row_{_what}",
        "The last row before the padding may hold anything.",
        SECOND,
        _tensor,
        _data,
        _at,
        quantised,
    )


# Which fault comes first


def _faults(rule: str, name: str, about: str, change: Callable[[Draft], Any]) -> None:
    def build() -> Sealed:
        made = quantised()
        change(made)
        return made.seal()

    refuse(rule, name, about, build, "records", base="all_dimensions_apart_quantised")


def _set(made: Draft, place: Place, at: int, value: int) -> None:
    made.tables[place[0]][place[1]].payloads[place[2]][at] = value


def _pad(made: Draft, place: Place) -> None:
    made.tables[place[0]][place[1]].padding[place[2]] = b"\1"


def _scale_and_multiplier(made: Draft) -> None:
    write(made, EXPERT, "gate.multipliers", b"\0")
    write(made, EXPERT, "gate.scale", ONE)


def _matrices(made: Draft) -> None:
    write(made, EXPERT, "gate.nibbles", b"\0")
    write(made, EXPERT, "up.scale", ONE)


def _vector_and_matrix(made: Draft) -> None:
    write(made, LAYER, "attention_norm", NOT_FINITE["nan"])
    write(made, LAYER, "q", b"\x80")


def _between_and_number(made: Draft) -> None:
    write(made, LAYER, "q", b"\x80")
    _set(made, LAYER, 12, 1)


def _padding_and_between(made: Draft) -> None:
    _pad(made, LAYER)
    _set(made, LAYER, 12, 1)


def _records(made: Draft) -> None:
    write(made, EXPERT, "gate.nibbles", b"\0")
    made.tables[EXPERTS][0].digests[1] = {"checksum": 0}


def _expert_and_dense(made: Draft) -> None:
    made.tables[EXPERTS][0].digests[0] = {"checksum": 0}
    _pad(made, FINAL)


def _router_and_q(made: Draft) -> None:
    write(made, LAYER, "router", NOT_FINITE["nan"])
    write(made, LAYER, "q", b"\x80")


def _multiplier_and_nibble(made: Draft) -> None:
    write(made, EXPERT, "gate.nibbles", b"\0")
    write(made, EXPERT, "gate.multipliers", b"\0")


_faults("EMOE-REC-006", "scale_and_multiplier_wrong", "A scale and a multiplier are wrong.", _scale_and_multiplier)
_faults(
    "EMOE-REC-008", "multiplier_and_padding_row_wrong", "A multiplier and a value are wrong.", _multiplier_and_nibble
)
_faults("EMOE-REC-009", "padding_row_before_a_scale", "Matrices are judged one by one.", _matrices)
_faults("EMOE-REC-007", "weight_and_vector_wrong", "Matrices are judged before vectors.", _vector_and_matrix)
_faults("EMOE-REC-005", "router_and_weight_wrong", "The router is judged before the queries.", _router_and_q)
_faults("EMOE-REC-004", "byte_between_and_weight_wrong", "Bytes between are judged first.", _between_and_number)
_faults("EMOE-REC-003", "padding_and_byte_between_wrong", "The padding is judged first.", _padding_and_between)
_faults("EMOE-REC-009", "expert_s_values_before_the_next_one_s_checksum", "Records are judged one by one.", _records)
_faults("EMOE-REC-003", "dense_padding_before_an_expert_s_checksum", "Dense records come first.", _expert_and_dense)


@refused("EMOE-REC-002", "records", base="all_dimensions_apart")
def digest_and_padding_wrong() -> Sealed:
    """A record's digest is wrong and its padding not zero: the digest comes first."""
    made = wide()
    _pad(made, EXPERT)
    made.tables[EXPERTS][0].digests[0] = {"sha256": bytes(32)}
    return made.seal()


@accepted("records", base="smallest")
def weights_all_zero() -> Sealed:
    """All weights are zero."""
    made = smallest()
    for ranges in made.tables.values():
        for one in ranges:
            one.payloads = [bytearray(len(each)) for each in one.payloads]
    return made.seal()
