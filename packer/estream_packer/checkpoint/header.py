"""The header of a safetensors file: from bytes to a checked table of tensors.

A JSON library would build whatever the text describes before anyone can object, and would keep the last of two equal
keys. The grammar needed here is small and flat, so it is matched directly, one tensor at a time, and no match that is
kept can be long. Positions in messages are those in the file.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from sys import intern
from typing import Final

from estream_packer.checkpoint.json_strict import parse_object
from estream_spec import limits
from estream_spec.errors import PackError

LENGTH_SIZE: Final = 8
"""Bytes of the little-endian header length that starts the file."""
MAX_HEADER_LENGTH: Final = 100_000_000
MAX_RANK: Final = 8
MAX_TENSOR_NAME: Final = 512
"""Bytes of a tensor's name as the header spells it."""

BITS: Final = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of one element by dtype."""

_SPACE = rb"[ \t\r\n]*+"
_CHARACTER = rb'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))'
_NAME = rb'("%s{0,%d}+")' % (_CHARACTER, MAX_TENSOR_NAME)
_OPEN = re.compile(rb"%s\{%s" % (_SPACE, _SPACE))
_CLOSE = re.compile(rb"%s\}%s" % (_SPACE, _SPACE))
_COMMA = re.compile(rb"%s,%s" % (_SPACE, _SPACE))
_KEY = re.compile(rb"%s%s:%s" % (_NAME, _SPACE, _SPACE))
_TENSOR = re.compile(rb"\{[^{}]{0,1024}+\}")
_NAMELESS = re.compile(r"[\0\ud800-\udfff]")
_TEXT = re.compile(rb'"%s*+"' % _CHARACTER)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
        dtype: a key of `BITS`.
        shape: in elements, row-major; empty for a single number.
        begin: first byte in the file.
        end: one past its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def decode_header(header: bytearray, file_length: int, path: str) -> dict[str, TensorInfo]:
    """The tensors that a header describes.

    Args:
        header: its bytes, without the length before them.
        file_length: bytes of the whole file.
        path: the file's name for messages.

    Returns:
        The tensors by name, in the order of the header. Together they cover the file from the header to its end.

    Raises:
        PackError: the header is not one, contradicts itself, or does not fit the file.
    """
    _check_text(header, path)
    tensors = _Reader(header, path).tensors()
    _check_ranges(tensors, LENGTH_SIZE + len(header), file_length, path)
    return tensors


def _check_text(header: bytearray, path: str) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    step = 1 << 20
    try:
        for start in range(0, len(header), step):
            decoder.decode(bytes(header[start : start + step]))
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise PackError("safetensors header is not UTF-8", path=path) from None


class _Reader:
    """Walks a header once, from left to right."""

    def __init__(self, header: bytearray, path: str):
        self._header, self._path, self._at = header, path, 0

    def tensors(self) -> dict[str, TensorInfo]:
        """The whole header: an object of tensors, among them perhaps `__metadata__`."""
        if not self._skip(_OPEN):
            raise self._error("safetensors header is not a JSON object")
        tensors: dict[str, TensorInfo] = {}
        metadata = False
        more = not self._skip(_CLOSE)
        while more:
            name = self._key()
            if name in tensors or (metadata and name == "__metadata__"):
                raise self._error(f"duplicate key {name!r} in the safetensors header")
            if name == "__metadata__":
                metadata = True
                self._skip_metadata()
            else:
                self._check_name(name)
                tensors[name] = self._tensor(name)
            more = self._another()
        if self._at < len(self._header):
            raise self._error("text after the end of the safetensors header")
        return tensors

    def _check_name(self, name: str) -> None:
        """Refuse what JSON can spell but no name has: half a surrogate pair, and the NUL that ends names in digests."""
        if _NAMELESS.search(name):
            raise self._error(f"tensor name {name!r} has a NUL or a lone surrogate")

    def _skip_metadata(self) -> None:
        """Check that the metadata is an object of texts. What it says is of no use here."""
        if not self._skip(_OPEN):
            raise self._error("'__metadata__' is not an object")
        seen: set[str] = set()
        more = not self._skip(_CLOSE)
        while more:
            key = self._key()
            if key in seen:
                raise self._error(f"duplicate key {key!r} in '__metadata__'")
            seen.add(key)
            if not self._skip(_TEXT):
                raise self._error(f"'__metadata__' entry {key!r} is not a text")
            more = self._another()

    def _tensor(self, name: str) -> TensorInfo:
        match = _TENSOR.match(self._header, self._at)
        if match is None:
            raise self._error(f"tensor {name!r} is not described by an object of dtype, shape and data_offsets")
        found = parse_object(match[0], f"{self._path}: header of tensor {name!r}")
        if found.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._error(f"tensor {name!r} has keys {sorted(found)}, expected dtype, shape and data_offsets")
        dtype, shape, offsets = found["dtype"], _numbers(found["shape"]), _numbers(found["data_offsets"])
        if not isinstance(dtype, str) or dtype not in BITS:
            raise self._error(f"tensor {name!r} has unknown dtype {dtype!r}")
        if shape is None or len(shape) > MAX_RANK:
            raise self._error(
                f"tensor {name!r} has shape {found['shape']!r}, expected at most {MAX_RANK} whole numbers"
            )
        if offsets is None or len(offsets) != 2:
            raise self._error(f"tensor {name!r} has data_offsets {found['data_offsets']!r}, expected two whole numbers")
        begin, end = offsets
        if begin > end:
            raise self._error(f"inconsistent header: tensor {name!r} begins at {begin}, after its end at {end}")
        bits = BITS[dtype]
        for dimension in shape:
            bits *= dimension
        if bits != 8 * (end - begin):
            raise self._error(
                f"inconsistent header: tensor {name!r} has {end - begin} bytes,"
                f" but shape {list(shape)} of {dtype} takes {bits / 8:g}"
            )
        start = LENGTH_SIZE + len(self._header)
        self._at = match.end()
        return TensorInfo(intern(dtype), shape, start + begin, start + end)

    def _key(self) -> str:
        match = _KEY.match(self._header, self._at)
        if match is None:
            raise self._error(f"expected a name of at most {MAX_TENSOR_NAME} bytes in the safetensors header")
        self._at = match.end()
        name = json.loads(match[1].decode())
        assert isinstance(name, str)
        return name

    def _another(self) -> bool:
        """Whether a comma follows rather than the closing brace."""
        if self._skip(_COMMA):
            return True
        if self._skip(_CLOSE):
            return False
        raise self._error("expected a comma or the end of an object in the safetensors header")

    def _skip(self, pattern: re.Pattern[bytes]) -> bool:
        match = pattern.match(self._header, self._at)
        if match is not None:
            self._at = match.end()
        return match is not None

    def _error(self, message: str) -> PackError:
        return PackError(message, path=self._path, offset=LENGTH_SIZE + self._at)


def _numbers(value: object) -> tuple[int, ...] | None:
    """A list of sizes or offsets, or None if it is anything else."""
    if not isinstance(value, list):
        return None
    if not all(type(number) is int and 0 <= number <= limits.MAX_FILE_LENGTH for number in value):
        return None
    return tuple(value)


def _check_ranges(tensors: dict[str, TensorInfo], start: int, file_length: int, path: str) -> None:
    """Refuse holes, overlaps, missing bytes and bytes too many."""
    position = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            fault = "overlaps the one before" if tensor.begin < position else "leaves a hole before it"
            raise PackError(
                f"inconsistent header: tensor {name!r} {fault}, expected it at {position:#x}",
                path=path,
                offset=tensor.begin,
            )
        position = tensor.end
    if position > file_length:
        raise PackError(
            f"file is shorter than its header declares: {file_length} bytes of {position}: incomplete download?",
            path=path,
            offset=file_length,
            hint="download the file again",
        )
    if position < file_length:
        raise PackError(
            f"inconsistent header: {file_length - position} bytes after the last tensor", path=path, offset=position
        )
