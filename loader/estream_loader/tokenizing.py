"""What of a tokenizer is safe to read, and one way to handle what the `tokenizers` library raises.

Its faults have no class of their own, and where its native code panics they are not even an `Exception`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from estream_spec.errors import EmoeError, LinkError

LONGEST_TOKEN: Final = 4096
"""Characters of a token. The library makes a tree as deep as the longest one, and its stack overflows at some depth."""
_NO_TOKENS: Final = frozenset({"merges", "precompiled_charsmap", "Regex"})
"""Keys of what may be longer than a token, and goes into no such tree."""


@contextmanager
def tokenizer_faults(path: str, refusal: type[EmoeError] = LinkError) -> Iterator[None]:
    """Turn every fault of the library inside the block into one refusal; refusals pass as they are.

    Args:
        path: whose tokenizer it is.
        refusal: what to raise.

    Raises:
        EmoeError: the library failed; of class `refusal`.
    """
    try:
        yield
    except (EmoeError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise refusal(f"the tokenizer cannot be used: {error}", path=path) from None


def tokenizer_text(data: bytes, path: str, refusal: type[EmoeError] = LinkError) -> str:
    """A `tokenizer.json` once no key and no text of it is longer than a token may be; only such are for the library.

    All are looked at, also those of keys that are there twice: which of two the library reads is its own business.

    Args:
        data: the whole document.
        path: whose tokenizer it is.
        refusal: what to raise.

    Raises:
        EmoeError: one is longer, or it is no JSON; of class `refusal`.
    """

    def check(pairs: list[tuple[str, object]]) -> None:
        rest: list[object] = [value for name, value in pairs if name not in _NO_TOKENS]
        rest.extend(name for name, _ in pairs)
        while rest:
            found = rest.pop()
            if isinstance(found, list):
                rest.extend(found)
            elif isinstance(found, str) and len(found) > LONGEST_TOKEN:
                what = f"{found[:32]!r}... has {len(found)} characters, expected at most {LONGEST_TOKEN}"
                raise refusal(f"token {what}", path=path)

    # An object that was checked is None from then on.
    with tokenizer_faults(path, refusal):
        text = data.decode()
        check([("", json.loads(text, object_pairs_hook=check))])
    return text
