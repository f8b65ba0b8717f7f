"""JSON that people and programs write for this project: profiles, facts of devices, traces."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from estream_spec.errors import MalformedError

T = TypeVar("T")


def decode_json(decoder: msgspec.json.Decoder[T], data: bytes | bytearray, what: str, path: str) -> T:
    """Parse a document, and say in one sentence what is wrong with another.

    Args:
        decoder: of its type.
        data: JSON text.
        what: it is, such as `a device profile`.
        path: what messages call it.

    Raises:
        MalformedError: not JSON, an unknown key, a value missing or out of range.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        text = text if text.startswith("JSON") else f"{text[:1].lower()}{text[1:]}"
        raise MalformedError(f"not {what}: {text}", path=path) from None
