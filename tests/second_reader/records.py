"""What is inside a record: FORMAT.md sections 5.4 and 7."""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise
from typing import Any, Final

from second_reader.crc32c import crc32c
from second_reader.layouts import GROUPS
from second_reader.model_rules import tensor_end
from second_reader.rules import require
from second_reader.source import is_zero, round_up
from second_reader.tables import Place

LARGE_EXPONENT: Final = re.compile(rb"[\x7f\xff]")
"""The highest byte of an f32 that may not be finite; the next byte's highest bit decides."""
SIGN: Final = re.compile(rb"[\x80-\xff]")
MINUS_ZERO: Final = b"\0\0\0\x80"
MULTIPLIERS: Final = bytes([*range(1, 16), *range(256 - 15, 256)])
HIGH_EIGHT: Final = bytes(range(0x80, 0x90))
"""Bytes whose high four bits are 8."""

Json = dict[str, Any]


def check_record(data: bytes, layout: Json, place: Place) -> Json:
    """EMOE-REC-001 to EMOE-REC-009; the record as LOADER-CLI.md section 3 describes it, but for its layout.

    Args:
        data: the record's bytes, padding included.
        layout: as the manifest has it, known to obey section 7.
        place: of the record in the package.
    """
    payload_length, tensors = layout["payload_length"], layout["tensors"]
    require(crc32c(data) == place.checksum, "REC-001")
    require(hashlib.sha256(data[:payload_length]).digest() == place.sha256, "REC-002")
    require(is_zero(data[payload_length:]), "REC-003")
    for before, after in pairwise(tensors):
        require(is_zero(data[tensor_end(before) : after["offset"]]), "REC-004")
    stored = {tensor["name"]: data[tensor["offset"] : tensor_end(tensor)] for tensor in tensors}
    vectors = dict(stored)
    for matrix in layout["matrices"]:
        _check_matrix(matrix, stored)
        for part in ("", ".scale", ".nibbles", ".multipliers"):
            vectors.pop(matrix["name"] + part, None)
    for values in vectors.values():
        require(_is_finite(values), "REC-005")
    return {
        "offset": place.offset,
        "length": place.length,
        "checksum": place.checksum,
        "sha256": place.sha256,
        "tensors": [
            {
                "name": tensor["name"],
                "offset": place.offset + tensor["offset"],
                "sha256": hashlib.sha256(stored[tensor["name"]]).digest(),
            }
            for tensor in tensors
        ],
    }


def _check_matrix(matrix: Json, stored: dict[str, bytes]) -> None:
    name, encoding = matrix["name"], matrix["encoding"]
    if encoding == "f32":
        require(_is_finite(stored[name]), "REC-005")
        return
    scale = stored[f"{name}.scale"]
    require(_is_finite(scale) and not _has_negative(scale), "REC-006")
    if encoding == "w8":
        require(b"\x80" not in stored[name], "REC-007")
        return
    require(not stored[f"{name}.multipliers"].translate(None, MULTIPLIERS), "REC-008")
    _check_padding_rows(stored[f"{name}.nibbles"], matrix["rows"], matrix["columns"], GROUPS[encoding])


def _check_padding_rows(nibbles: bytes, rows: int, columns: int, group: int) -> None:
    """EMOE-REC-009. Only the last group has padding rows; `used` of its rows are real."""
    half = group // 2
    first = round_up(rows, group) - group
    used = rows - first
    last = nibbles[first // 2 * columns :]
    # Byte row b of the group holds row b in its low and row b + half in its high four bits.
    high_only = last[max(used - half, 0) * columns : min(used, half) * columns]
    both = last[min(used, half) * columns :]
    require(not high_only.translate(None, HIGH_EIGHT), "REC-009")
    require(both.count(0x88) == len(both), "REC-009")


def _is_finite(values: bytes) -> bool:
    """Whether every f32 is."""
    high, next_lower = values[3::4], values[2::4]
    return all(next_lower[found.start()] < 0x80 for found in LARGE_EXPONENT.finditer(high))


def _has_negative(values: bytes) -> bool:
    """Whether an f32 is below zero; minus zero is not."""
    at = (4 * found.start() for found in SIGN.finditer(values[3::4]))
    return any(values[start : start + 4] != MINUS_ZERO for start in at)
