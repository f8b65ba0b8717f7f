"""Every way in which a package, its input or its run can be refused.

A class says what kind of refusal it is; the fields say where and why. The class slug (`malformed`, `invalid`, ...) is
stable: it is what `estream-pack validate --json` prints and what a conformance vector expects.

Text is one lower-case sentence without a full stop, found before expected, foreign text in `repr`, the place last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class EmoeError(Exception):
    """Base of every refusal this project raises.

    Attributes:
        message: what was found and what was expected, one sentence.
        path: the field, section, tensor or file concerned, such as `directory[2].offset`; None where there is none.
        offset: byte offset from the package's start; None where there is none.
        hint: what the reader of the message can do about it; None where nothing helps.
        rule: id of the rule of FORMAT.md concerned; None where there is none.
    """

    slug: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        offset: int | None = None,
        hint: str | None = None,
        rule: str | None = None,
    ):
        super().__init__(message)
        self.message, self.path, self.offset, self.hint, self.rule = message, path, offset, hint, rule

    def __str__(self) -> str:
        place = [f"offset {self.offset:#x}"] if self.offset is not None else []
        if self.path is not None:
            place.append(self.path)
        text = f"{self.message} (at {', '.join(place)})" if place else self.message
        return printable(text if self.rule is None else f"{text} [{self.rule}]")


class FormatError(EmoeError, ValueError):
    """The package itself is at fault."""

    slug = "format"


class MalformedError(FormatError):
    """Bytes that cannot be decoded: wrong magic, short record, bad MessagePack."""

    slug = "malformed"


class InvalidError(FormatError):
    """Bytes that decode, but break a rule of FORMAT.md."""

    slug = "invalid"


class IntegrityError(FormatError):
    """A checksum or digest differs, or bytes that were promised are missing."""

    slug = "integrity"


class UnsupportedError(FormatError):
    """A version, required feature, codec or critical section this reader does not know."""

    slug = "unsupported"


class LimitError(FormatError):
    """A count or length above a limit of FORMAT.md section 11."""

    slug = "limit"


class TrustError(EmoeError):
    """A signature that the caller requires is missing, does not verify, or is older than the caller accepts."""

    slug = "untrusted"


class LinkError(EmoeError):
    """A sound package that cannot run here: arena too small, no such backend or target."""

    slug = "link"


class TrapError(EmoeError):
    """A run that had to stop: a prompt too long, a value that is not finite."""

    slug = "trap"


class PackError(EmoeError):
    """A checkpoint, a recipe or the place to write to is at fault."""

    slug = "pack"


@contextmanager
def located(offset: int) -> Iterator[None]:
    """Say of refusals from inside that know no offset where the section begins that is decoded or judged."""
    try:
        yield
    except EmoeError as error:
        if error.offset is None:
            error.offset = offset
        raise


def reason(error: OSError | ValueError) -> str:
    """What the system says of a call that failed, or Python of a path no system would take."""
    return str(getattr(error, "strerror", None) or error).lower()


def printable(text: str) -> str:
    """Text for a terminal. A name out of a file or a command line must not break the line or steer the screen."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
