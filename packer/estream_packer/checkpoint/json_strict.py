"""JSON without its traps: two equal keys, numbers that are not finite and bottomless nesting are refused.

Two readers that meet the same key twice may each keep another one, so such a document means nothing.
"""

from __future__ import annotations

import json
import math
from typing import NoReturn

from estream_spec.errors import PackError


def parse_object(data: bytes, path: str) -> dict[str, object]:
    """The JSON object that `data` holds.

    Args:
        data: the whole document, UTF-8.
        path: what to call it in a message.

    Raises:
        PackError: not UTF-8, not JSON, not an object, a duplicate key, or a number that is not finite.
    """
    try:
        value: object = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_not_a_number,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise PackError(f"text is not UTF-8: byte {data[error.start]:#04x}", path=path, offset=error.start) from None
    except PackError as error:
        raise PackError(error.message, path=path) from None
    except RecursionError:
        raise PackError("JSON is nested too deeply", path=path) from None
    except ValueError as error:
        raise PackError(f"text is not JSON: {error}", path=path) from None
    if not isinstance(value, dict):
        raise PackError(f"found a JSON {type(value).__name__}, expected an object", path=path)
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise PackError(f"duplicate key {key[:80]!r}")
            seen.add(key)
    return value


def _not_a_number(text: str) -> NoReturn:
    raise PackError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise PackError(f"number {text[:32]} is out of range")
    return value
