"""What a session keeps of tokens it has seen, so that a prompt that begins with them need not be computed anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from estream_runtime.batch import Ids
from estream_runtime.cache import Kept, KeyValues


class Context:
    """Token ids, and what every layer keeps of them.

    Args:
        new_cache: gives what the layers keep of no token.

    Attributes:
        cache: what they keep, by layer.
        uses: prompts that were begun in it; whoever goes on with one must find it at the number that theirs had.
    """

    def __init__(self, new_cache: Callable[[], Sequence[Kept]]):
        self.uses, self._new_cache = 0, new_cache
        self.cache, self._token_ids = new_cache(), np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._token_ids)

    def is_made_by(self, new_cache: Callable[[], Sequence[Kept]]) -> bool:
        """Whether what the layers keep in it comes from there."""
        return self._new_cache == new_cache

    def unseen(self, prompt: Ids) -> Ids:
        """The part of a prompt that is still to be computed, at least its last token; what differs is forgotten."""
        self.uses += 1
        both = min(len(self), len(prompt) - 1)
        differs = np.flatnonzero(self._token_ids[:both] != prompt[:both])
        self._cut(int(differs[0]) if len(differs) else both)
        return prompt[len(self) :]

    @contextmanager
    def extended(self, token_ids: Ids) -> Iterator[None]:
        """Around what computes these tokens. When that fails, they are forgotten."""
        before = len(self)
        try:
            yield
            self._token_ids = np.concatenate([self._token_ids, token_ids])
        except BaseException:
            self._cut(before)
            raise

    def _cut(self, length: int) -> None:
        """Forget all but the first tokens, or all of them where a layer keeps but a sum of what it has seen."""
        self._token_ids = self._token_ids[:length]
        for each in self.cache:
            if isinstance(each, KeyValues):
                each.truncate(length)
            elif each.length != length:
                self.cache, self._token_ids = self._new_cache(), self._token_ids[:0]
                return
