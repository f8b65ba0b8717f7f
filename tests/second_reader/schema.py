"""Types that the manifest's tables are written in. Each reads a value by EMOE-MAN-002 and writes it canonically.

Reading follows bytes whose syntax was checked, and goes no deeper than the tables do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from second_reader import messagepack
from second_reader.messagepack import Head, check_syntax, read_head
from second_reader.rules import RefusedError, require

RULE: Final = "MAN-002"
DIGITS: Final = frozenset("0123456789")
MISSING: Final = object()
"""The default of a key that must be there."""


class Type(Protocol):
    """What a value may be."""

    def read(self, data: bytes, at: int) -> tuple[Any, int]:
        """The value at an offset and where it ends."""

    def write(self, value: Any) -> bytes:
        """The value's one encoding."""


def _head(data: bytes, at: int, *kinds: str) -> Head:
    head = read_head(data, at)
    require(head.kind in kinds, RULE)
    return head


def _string(data: bytes, at: int) -> tuple[str, int]:
    head = _head(data, at, "str")
    end = head.end + head.size
    try:
        return data[head.end : end].decode(), end
    except UnicodeDecodeError as error:
        raise RefusedError(RULE) from error


@dataclass(frozen=True)
class String:
    """So many characters."""

    least: int
    most: int

    def read(self, data: bytes, at: int) -> tuple[str, int]:
        value, end = _string(data, at)
        require(self.least <= len(value) <= self.most, RULE)
        return value, end

    def write(self, value: str) -> bytes:
        return messagepack.encode_str(value)


@dataclass(frozen=True)
class Choice:
    """One of some strings."""

    values: tuple[str, ...]

    def read(self, data: bytes, at: int) -> tuple[str, int]:
        value, end = _string(data, at)
        require(value in self.values, RULE)
        return value, end

    def write(self, value: str) -> bytes:
        return messagepack.encode_str(value)


@dataclass(frozen=True)
class Version:
    """Numbers joined by dots: 1 to 8 of them, each of 1 to 18 digits, at most so many characters in all."""

    most: int

    def read(self, data: bytes, at: int) -> tuple[str, int]:
        value, end = _string(data, at)
        numbers = value.split(".")
        require(len(value) <= self.most and len(numbers) <= 8, RULE)
        require(all(1 <= len(number) <= 18 and set(number) <= DIGITS for number in numbers), RULE)
        return value, end

    def write(self, value: str) -> bytes:
        return messagepack.encode_str(value)


@dataclass(frozen=True)
class Integer:
    """A number that is not negative."""

    least: int
    most: int

    def read(self, data: bytes, at: int) -> tuple[int, int]:
        head = _head(data, at, "int")
        assert isinstance(head.value, int)
        require(self.least <= head.value <= self.most, RULE)
        return head.value, head.end

    def write(self, value: int) -> bytes:
        return messagepack.encode_unsigned(value)


@dataclass(frozen=True)
class Float:
    """A number of at least 0, or above it, up to another one."""

    may_be_zero: bool
    most: float = math.inf

    def read(self, data: bytes, at: int) -> tuple[float, int]:
        head = _head(data, at, "float", "int")
        assert head.value is not None
        # A value that is not a number fails every comparison.
        require(head.value >= 0 if self.may_be_zero else head.value > 0, RULE)
        require(head.value <= self.most, RULE)
        return float(head.value), head.end

    def write(self, value: float) -> bytes:
        return messagepack.encode_float(value)


@dataclass(frozen=True)
class Boolean:
    def read(self, data: bytes, at: int) -> tuple[bool, int]:
        head = _head(data, at, "bool")
        return head.value is True, head.end

    def write(self, value: bool) -> bytes:
        return messagepack.encode_bool(value)


@dataclass(frozen=True)
class Binary:
    """A byte string, of one length if one is given."""

    length: int | None = None

    def read(self, data: bytes, at: int) -> tuple[bytes, int]:
        head = _head(data, at, "bin")
        require(self.length in (None, head.size), RULE)
        return data[head.end : head.end + head.size], head.end + head.size

    def write(self, value: bytes) -> bytes:
        return messagepack.encode_bin(value)


@dataclass(frozen=True)
class OrNil:
    type: Type

    def read(self, data: bytes, at: int) -> tuple[Any, int]:
        head = read_head(data, at)
        return (None, head.end) if head.kind == "nil" else self.type.read(data, at)

    def write(self, value: Any) -> bytes:
        return b"\xc0" if value is None else self.type.write(value)


@dataclass(frozen=True)
class Array:
    """So many elements of one type."""

    type: Type
    least: int
    most: int

    def read(self, data: bytes, at: int) -> tuple[list[Any], int]:
        head = _head(data, at, "array")
        require(self.least <= head.size <= self.most, RULE)
        values, at = [], head.end
        for _ in range(head.size):
            value, at = self.type.read(data, at)
            values.append(value)
        return values, at

    def write(self, value: list[Any]) -> bytes:
        return messagepack.encode_array([self.type.write(item) for item in value])


@dataclass(frozen=True)
class NamedBytes:
    """A map from names to byte strings, held as pairs in the order in which they stand."""

    name: String
    most: int

    def read(self, data: bytes, at: int) -> tuple[list[list[Any]], int]:
        head = _head(data, at, "map")
        require(head.size <= self.most, RULE)
        pairs: list[list[Any]] = []
        at = head.end
        for _ in range(head.size):
            key, at = self.name.read(data, at)
            value, at = Binary().read(data, at)
            pairs.append([key, value])
        return pairs, at

    def write(self, value: list[list[Any]]) -> bytes:
        once = {key: messagepack.encode_bin(data) for key, data in value}
        return messagepack.encode_map(sorted(once.items(), key=lambda pair: pair[0].encode()))


@dataclass(frozen=True)
class Field:
    """A row of a struct's table."""

    name: str
    type: Type
    default: Any = MISSING


class Record:
    """A struct. Its value is a dictionary with every key."""

    def __init__(self, *fields: Field) -> None:
        self.fields: Final[Sequence[Field]] = fields
        self.by_key: Final = {field.name.encode(): field for field in fields}

    def read(self, data: bytes, at: int) -> tuple[dict[str, Any], int]:
        head = _head(data, at, "map")
        values: dict[str, Any] = {}
        at = head.end
        for _ in range(head.size):
            key = _head(data, at, "str")
            at = key.end + key.size
            field = self.by_key.get(data[key.end : at])
            if field is None:
                raise RefusedError(RULE)
            values[field.name], at = field.type.read(data, at)
        for field in self.fields:
            value = values.setdefault(field.name, field.default)
            require(value is not MISSING, RULE)
        return values, at

    def write(self, value: dict[str, Any]) -> bytes:
        return messagepack.encode_map(
            [
                (field.name, field.type.write(value[field.name]))
                for field in self.fields
                if field.default is MISSING or value[field.name] != field.default
            ]
        )


def read_document(record: Record, data: bytes) -> dict[str, Any]:
    """A struct that is a document of its own, by EMOE-MAN-001, EMOE-MAN-002 and EMOE-MAN-003 in turn."""
    check_syntax(data)
    value, _ = record.read(data, 0)
    require(record.write(value) == data, "MAN-003")
    return value
