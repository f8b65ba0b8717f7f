"""What a session keeps of tokens it has seen, so that a prompt that begins with them need not be computed anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from estream_runtime.batch import Ids
from estream_runtime.cache import KeyValues


class Context:
    """Token ids, with their keys and values of every layer.

    Attributes:
        cache: by layer.
    """

    def __init__(self, cache: Sequence[KeyValues]):
        self.cache = cache
        self._token_ids = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._token_ids)

    def unseen(self, prompt: Ids) -> Ids:
        """The part of a prompt that is still to be computed, at least its last token; what differs is forgotten."""
        both = min(len(self), len(prompt) - 1)
        differs = np.flatnonzero(self._token_ids[:both] != prompt[:both])
        self._cut(int(differs[0]) if len(differs) else both)
        return prompt[len(self) :]

    @contextmanager
    def extended(self, token_ids: Ids) -> Iterator[None]:
        """Around what computes these tokens. When that fails, all is as it was before."""
        before = len(self)
        try:
            yield
            self._token_ids = np.concatenate([self._token_ids, token_ids])
        except BaseException:
            self._cut(before)
            raise

    def _cut(self, length: int) -> None:
        self._token_ids = self._token_ids[:length]
        for each in self.cache:
            each.truncate(length)
