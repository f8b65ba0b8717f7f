from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest

from estream_loader import open_package
from estream_loader.values import check_values
from estream_spec.constants import SectionType
from estream_spec.errors import InvalidError
from estream_spec.weights import Encoding
from fixtures.packages import ENCODINGS, Draft

F32: dict[str, Encoding] = {**ENCODINGS, "embedding": "f32"}
DENSE, EXPERTS = SectionType.DENSE, SectionType.EXPERTS


def number(value: float) -> bytes:
    return struct.pack("<f", value)


@pytest.mark.parametrize(
    ("encodings", "section", "record", "tensor", "element", "value", "message"),
    [
        (ENCODINGS, DENSE, 0, "embedding", 5, b"\x80", "a weight is -128, expected -127 to 127"),
        (ENCODINGS, DENSE, 0, "embedding.scale", 4, number(np.nan), "a scale is negative or not finite"),
        (ENCODINGS, DENSE, 1, "attention_norm", 8, number(np.inf), "a weight is not finite"),
        (ENCODINGS, DENSE, 1, "router", 8, number(np.nan), "a weight is not finite"),
        (ENCODINGS, DENSE, 2, "q.scale", 0, number(-1.0), "a scale is negative or not finite"),
        (ENCODINGS, DENSE, 3, "head", 511, b"\x80", "a weight is -128, expected -127 to 127"),
        (ENCODINGS, EXPERTS, 4, "gate.scale", 12, number(np.inf), "a scale is negative or not finite"),
        (ENCODINGS, EXPERTS, 4, "up.multipliers", 3, b"\0", "a multiplier is zero or beyond 15 in size"),
        (ENCODINGS, EXPERTS, 5, "down.multipliers", 3, b"\x10", "a multiplier is zero or beyond 15 in size"),
        (F32, DENSE, 0, "embedding", 40, number(-np.inf), "a weight is not finite"),
    ],
)
def test_illegal_values_are_refused_by_name(
    encodings: dict[str, Encoding],
    section: SectionType,
    record: int,
    tensor: str,
    element: int,
    value: bytes,
    message: str,
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
    assert refused.value.message == message
    assert refused.value.path == f"{place.path}.{tensor.partition('.')[0]}"
    with pytest.raises(InvalidError, match=message):
        open_package(data, integrity="full")


def test_bytes_between_tensors_are_zero() -> None:
    draft = Draft()
    with open_package(draft.seal()) as package:
        first, second = package.dense.place(0).layout.tensors
    assert (first.offset + first.length, second.offset) == (512, 512)
    with open_package(draft.seal()) as package:
        tensors = package.experts.place(1, 2).layout.tensors
    gap = next(a.offset + a.length for a, b in itertools.pairwise(tensors) if a.offset + a.length < b.offset)
    draft.change_record(EXPERTS, 5, lambda payload: payload.__setitem__(gap, 1))
    with pytest.raises(InvalidError, match="byte between tensors is not zero"):
        open_package(draft.seal(), integrity="full")


def test_large_tensors_are_looked_at_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("estream_loader.values._BLOCK", 1)
    draft = Draft(encodings=F32)
    with open_package(draft.seal(), integrity="full"):
        pass
    draft.change_record(DENSE, 0, lambda payload: payload.__setitem__(slice(2044, 2048), number(np.nan)))
    with pytest.raises(InvalidError, match="a weight is not finite"):
        open_package(draft.seal(), integrity="full")
