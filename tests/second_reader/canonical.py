"""The one JSON text of what was read: LOADER-CLI.md section 3."""

from __future__ import annotations

import json
from struct import pack
from typing import Any


def canonical_json(value: Any) -> str:
    """One line without a line feed, out of structs, arrays, strings, byte strings and numbers."""
    return json.dumps(_plain(value), ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """The same value with byte strings and floats as strings."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return pack(">d", value).hex()
    return value
