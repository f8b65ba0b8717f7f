"""One way to handle what the `tokenizers` library raises.

Its faults have no class of their own, and where its native code panics they are not even an `Exception`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from estream_spec.errors import EmoeError, LinkError


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
