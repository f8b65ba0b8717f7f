"""Expected failures: what a loader is known to get wrong. The list is strict, so that it cannot go stale."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from estream_conformance.errors import UsageError


def parse_expected_failures(text: str, known: Collection[str], path: str) -> frozenset[str]:
    """Names of tests that are expected to fail.

    Args:
        text: one name a line; `#` begins a comment.
        known: names of all tests.
        path: where the text comes from, for messages.

    Raises:
        UsageError: a name that no test has, or that stands there twice.
    """
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        name = line.partition("#")[0].strip()
        if not name:
            continue
        place = f"{path}, line {number}"
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "'estream-conformance list' shows all names"
            raise UsageError(f"there is no test {name!r}", path=place, hint=hint)
        if name in seen:
            message = f"{name!r} is expected to fail twice, first in line {seen[name]}"
            raise UsageError(message, path=place, hint="name it once")
        seen[name] = number
    return frozenset(seen)
