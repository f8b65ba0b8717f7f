"""What a SentencePiece model file says: its pieces, and how it treats a text before it splits it.

The file is one protocol buffer message of a few fields, read here field by field, so that it is known what was read
whatever version of whichever library is installed.
Source: `sentencepiece_model.proto` of the SentencePiece project.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Final

from estream_loader.tokenizing import LONGEST_TOKEN
from estream_spec.errors import PackError

_LONGEST_NUMBER: Final = 10
"""Bytes of one of 64 bits."""
_MOST_PIECES: Final = 1 << 20
_MOST_FIELDS: Final = 1 << 16
"""Of a message, pieces not counted; one that trains on symbols of users lists them all."""
_MOST_WORK: Final = 1 << 28
"""The squares of the lengths of all pieces together: how long it takes to find the halves each is merged from."""


class Algorithm(IntEnum):
    """How a model splits a text."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


class PieceType(IntEnum):
    """What a piece is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece; its id is its place in the file.

    Attributes:
        text: a space is written U+2581.
        score: of several ways to split, those with higher scores win.
        type: what it is for.
    """

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """A model file.

    Attributes:
        pieces: all pieces, by id.
        algorithm: how it splits.
        byte_fallback: characters that are no pieces become pieces of their bytes.
        space_after: words end with their space instead of beginning with it.
        normalisation: the name of the rules that replace characters.
        character_map: those rules, compiled; empty where there are none.
        prefix: a space is put before every text.
        single_spaces: spaces at both ends are dropped, and of several in a row one is left.
        escape: a space is written U+2581 in pieces.
        rewrites_output: what was decoded is changed by further rules.
    """

    pieces: tuple[Piece, ...]
    algorithm: Algorithm
    byte_fallback: bool
    space_after: bool
    normalisation: str
    character_map: bytes
    prefix: bool
    single_spaces: bool
    escape: bool
    rewrites_output: bool

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each piece, by its text."""
        return {piece.text: number for number, piece in enumerate(self.pieces)}

    @property
    def unknown(self) -> str:
        """The text of the piece that stands for what is unknown."""
        return next(piece.text for piece in self.pieces if piece.type == PieceType.UNKNOWN)


Value = int | bytes
"""Of a field: a number, or the bytes of a text, a float or a message."""


def read_model(data: bytes, path: str) -> SentencePieceModel:
    """Decode a model file.

    Raises:
        PackError: it is none, or has more or longer pieces than can be handled.
    """
    try:
        pieces, messages = _read_file(data)
        trainer, normaliser, output_rules = (_message(messages.get(number, b"")) for number in (2, 3, 5))
        model = SentencePieceModel(
            pieces=pieces,
            algorithm=Algorithm(_number(trainer.get(3, Algorithm.UNIGRAM))),
            byte_fallback=bool(trainer.get(35, 0)),
            space_after=bool(trainer.get(24, 0)),
            normalisation=_bytes(normaliser.get(1, b"")).decode(),
            character_map=_bytes(normaliser.get(2, b"")),
            prefix=bool(normaliser.get(3, 1)),
            single_spaces=bool(normaliser.get(4, 1)),
            escape=bool(normaliser.get(5, 1)),
            rewrites_output=bool(output_rules.get(2, b"")),
        )
    except (ValueError, struct.error) as error:
        raise PackError(f"not a SentencePiece model: {error}", path=path) from None
    if not model.pieces:
        raise PackError("not a SentencePiece model: it has no pieces", path=path)
    return model


def _read_file(data: bytes) -> tuple[tuple[Piece, ...], dict[int, Value]]:
    """The pieces, and of every other field the last value."""
    pieces, others = list[Piece](), dict[int, Value]()
    work = count = 0
    for number, value in _fields(data):
        if number == 1:
            piece = _piece(_message(value))
            pieces.append(piece)
            work += len(piece.text) ** 2
        else:
            others[number] = value
            count += 1
        if len(pieces) > _MOST_PIECES:
            raise ValueError(f"found over {_MOST_PIECES} pieces")
        if count > _MOST_FIELDS:
            raise ValueError(f"found over {_MOST_FIELDS} fields that are no pieces")
        if work > _MOST_WORK:
            raise ValueError(f"the squares of the lengths of all pieces sum up to over {_MOST_WORK}")
    return tuple(pieces), others


def _message(value: Value) -> dict[int, Value]:
    """The fields of a message within another; of each the last value."""
    fields = {}
    for count, (number, found) in enumerate(_fields(_bytes(value)), 1):
        if count > _MOST_FIELDS:
            raise ValueError(f"found a message of over {_MOST_FIELDS} fields")
        fields[number] = found
    return fields


def _piece(fields: dict[int, Value]) -> Piece:
    (score,) = struct.unpack("<f", _bytes(fields.get(2, bytes(4))))
    text = _bytes(fields.get(1, b"")).decode()
    if not 0 < len(text) <= LONGEST_TOKEN:
        raise ValueError(f"found a piece of {len(text)} characters, expected 1 to {LONGEST_TOKEN}")
    if not math.isfinite(score):
        raise ValueError(f"piece {text[:32]!r} has the score {score}")
    return Piece(text, score, PieceType(_number(fields.get(3, PieceType.NORMAL))))


def _number(value: Value) -> int:
    if isinstance(value, bytes):
        raise ValueError("bytes where a number was expected")
    return value


def _bytes(value: Value) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where bytes were expected")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message, by number, in order."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"field {number} is of the unknown kind {wire}")
        if at + length > len(data):
            raise ValueError(f"field {number} ends after the file")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    for byte in data[at : at + _LONGEST_NUMBER]:
        at += 1
        if byte < 0x80:
            return value | byte << shift, at
        value |= (byte & 0x7F) << shift
        shift += 7
    raise ValueError(
        "a number is longer than 64 bits" if shift == 7 * _LONGEST_NUMBER else "a number ends after the file"
    )
