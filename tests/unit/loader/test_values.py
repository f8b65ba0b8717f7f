from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest
from msgspec.structs import replace

from estream_loader import open_package
from estream_loader.values import check_values
from estream_spec.constants import SectionType
from estream_spec.errors import InvalidError
from estream_spec.weights import Encoding
from fixtures.packages import ENCODINGS, MODEL, Draft

F32: dict[str, Encoding] = {**ENCODINGS, "embedding": "f32"}
DENSE, EXPERTS = SectionType.DENSE, SectionType.EXPERTS


def number(value: float) -> bytes:
    return struct.pack("<f", value)


@pytest.mark.parametrize(
    ("encodings", "section", "record", "tensor", "element", "value", "rule"),
    [
        (ENCODINGS, DENSE, 0, "embedding", 5, b"\x80", "EMOE-REC-007"),
        (ENCODINGS, DENSE, 0, "embedding.scale", 4, number(np.nan), "EMOE-REC-006"),
        (ENCODINGS, DENSE, 1, "attention_norm", 8, number(np.inf), "EMOE-REC-005"),
        (ENCODINGS, DENSE, 1, "router", 8, number(np.nan), "EMOE-REC-005"),
        (ENCODINGS, DENSE, 2, "q.scale", 0, number(-1.0), "EMOE-REC-006"),
        (ENCODINGS, DENSE, 3, "head", 511, b"\x80", "EMOE-REC-007"),
        (ENCODINGS, EXPERTS, 4, "gate.scale", 12, number(np.inf), "EMOE-REC-006"),
        (ENCODINGS, EXPERTS, 4, "up.multipliers", 3, b"\0", "EMOE-REC-008"),
        (ENCODINGS, EXPERTS, 5, "down.multipliers", 3, b"\x10", "EMOE-REC-008"),
        (F32, DENSE, 0, "embedding", 40, number(-np.inf), "EMOE-REC-005"),
    ],
)
def test_illegal_values_are_refused_by_name(
    encodings: dict[str, Encoding],
    section: SectionType,
    record: int,
    tensor: str,
    element: int,
    value: bytes,
    rule: str,
) -> None:
    draft = Draft(encodings=encodings)
    with open_package(draft.seal(), integrity="full") as package:
        records = package.dense if section == DENSE else package.experts
        place = list(records.places())[record]
    found = next(each for each in place.layout.tensors if each.name == tensor)

    def change(payload: bytearray) -> None:
        at = found.offset + element
        payload[at : at + len(value)] = value

    draft.change_record(section, record, change)
    data = draft.seal()
    with open_package(data) as package, pytest.raises(InvalidError) as refused:
        check_values(package, place)
    error = refused.value
    assert (error.rule, error.path) == (rule, f"{place.path}.{tensor.partition('.')[0]}")
    assert error.offset == place.offset
    with pytest.raises(InvalidError, match=rf"\[{rule}\]"):
        open_package(data, integrity="full")


def test_bytes_between_tensors_are_zero() -> None:
    draft = Draft()
    with open_package(draft.seal()) as package:
        first, second = package.dense.place(0).layout.tensors
    assert (first.offset + first.length, second.offset) == (512, 512)
    with open_package(draft.seal()) as package:
        place = package.experts.place(1, 2)
        tensors = place.layout.tensors
    gap = next(a.offset + a.length for a, b in itertools.pairwise(tensors) if a.offset + a.length < b.offset)
    draft.change_record(EXPERTS, 5, lambda payload: payload.__setitem__(gap, 1))
    with pytest.raises(InvalidError, match="padding between tensors holds 0x01, expected 0") as caught:
        open_package(draft.seal(), integrity="full")
    error = caught.value
    assert (error.rule, error.path, error.offset) == ("EMOE-REC-004", place.path, place.offset + gap)


def test_padding_rows_of_a_group_hold_zeros() -> None:
    draft = Draft(model=replace(MODEL, hidden=40))  # rows of gate and up: 8 of the second group are weights
    with open_package(draft.seal()) as package:
        place = package.experts.place(0, 1)
    gate, up = (each for each in place.layout.tensors if each.name in {"gate.nibbles", "up.nibbles"})

    def with_last_nibbles(value: int) -> bytes:
        def change(payload: bytearray) -> None:
            for tensor in (gate, up):
                half = tensor.length // 2
                payload[tensor.offset + half : tensor.offset + tensor.length] = b"\x88" * half
            payload[gate.offset + gate.length - 1] = value

        draft.change_record(EXPERTS, 1, change)
        return draft.seal()

    with open_package(with_last_nibbles(0x88)) as package:
        check_values(package, package.experts.place(0, 1))
    with open_package(with_last_nibbles(0x98)) as package, pytest.raises(InvalidError) as caught:
        check_values(package, package.experts.place(0, 1))
    error = caught.value
    assert (error.rule, error.path, error.offset) == ("EMOE-REC-009", "experts[0][1].gate", place.offset)


def test_large_tensors_are_looked_at_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("estream_loader.values._BLOCK", 1)
    draft = Draft(encodings=F32)
    with open_package(draft.seal(), integrity="full"):
        pass
    draft.change_record(DENSE, 0, lambda payload: payload.__setitem__(slice(2044, 2048), number(np.nan)))
    with pytest.raises(InvalidError, match=r"a weight is nan, expected a finite number.*\[EMOE-REC-005\]"):
        open_package(draft.seal(), integrity="full")
