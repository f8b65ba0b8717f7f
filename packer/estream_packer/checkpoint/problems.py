"""Problems gathered and told in one message: how many of each kind, and the first few by name."""

from __future__ import annotations

from estream_spec.errors import PackError

SHOWN = 8
"""Names per kind that a message spells out."""


class Problems:
    """A growing list of problems by kind. Memory does not grow with their number."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, list[str]] = {}

    def add(self, kind: str, what: str) -> None:
        """Note one problem: `kind` as a plural heading such as `missing tensors`, `what` as one entry below it."""
        self._counts[kind] = self._counts.get(kind, 0) + 1
        first = self._first.setdefault(kind, [])
        if len(first) < SHOWN:
            first.append(what)

    def refuse(self, subject: str, path: str, hint: str | None = None) -> None:
        """Raise one error if anything was added.

        Raises:
            PackError: something was; the message starts with `subject` and lists every kind.
        """
        if self._counts:
            kinds = "; ".join(self._describe(kind) for kind in self._counts)
            raise PackError(f"{subject}: {kinds}", path=path, hint=hint)

    def _describe(self, kind: str) -> str:
        count, first = self._counts[kind], self._first[kind]
        more = f" and {count - len(first)} more" if count > len(first) else ""
        return f"{count} {kind} ({', '.join(first)}{more})"
