"""What the exceptions of AI Hub's client mean for whoever reads the message.

The client raises a few classes whose text is drawn for a terminal, with the cause hidden behind them, and lets through
what the libraries below it raise.
"""

from __future__ import annotations

import configparser
import json
from collections.abc import Iterator
from typing import Final

from estream_spec.errors import EmoeError, LinkError, PackError

_CONFIGURE: Final = "take a token from your AI Hub account page and run: qai-hub configure --api_token TOKEN"
_AGAIN: Final = "run it again when it works: jobs already submitted are taken up"
_UNCONFIGURED: Final = 1000
"""The client's own status of a configuration that lacks a field."""


def http_status(error: BaseException) -> int | None:
    """Status of the answer behind an exception of the client; None where there was no answer."""
    return next(
        (status for each in _chain(error) if isinstance(status := getattr(each, "status_code", None), int)), None
    )


def refusal(error: Exception, what: str) -> EmoeError:
    """One message for an exception.

    Args:
        error: what the client raised.
        what: what was asked, as it goes on after `when asked`.
    """
    chain = list(_chain(error))
    status = http_status(error)
    if status == _UNCONFIGURED or _unreadable(chain):
        return LinkError("AI Hub's client has no API token", hint=_CONFIGURE)
    if status is not None:
        return _answered(status, _detail(chain), what)
    return _unanswered(chain, what)


def _unreadable(chain: list[BaseException]) -> bool:
    """Whether the client's configuration is not there or damaged: it hides a missing file behind a class of its own."""
    return any(isinstance(each, configparser.Error) for each in chain) or any(
        isinstance(each, FileNotFoundError) for each in chain[1:]
    )


def _answered(status: int, detail: str, what: str) -> EmoeError:
    """What an HTTP status other than success means."""
    said = f", saying {detail!r}" if detail else ""
    match status:
        case 401:
            return LinkError("AI Hub refused the API token", hint=_CONFIGURE)
        case 426:
            return LinkError("AI Hub no longer serves this version of its client", hint="pip install --upgrade qai-hub")
        case 429:
            return LinkError(f"AI Hub takes no more for now when asked {what}{said}", hint=_AGAIN)
        case 400 | 409 | 413 | 422:
            return PackError(f"AI Hub refused when asked {what}{said}")
        case _ if status < 400:
            message = f"what answers in place of AI Hub does not speak its protocol when asked {what}"
            return LinkError(message, hint="is there a proxy, or a network that wants you to log in?")
        case _ if status >= 500:
            return LinkError(f"AI Hub failed with status {status} when asked {what}", hint=_AGAIN)
        case _:
            return LinkError(f"AI Hub answered with status {status} when asked {what}{said}")


def _unanswered(chain: list[BaseException], what: str) -> EmoeError:
    """What a failure below HTTP means, told by the names of its classes: the libraries may not be installed."""
    kinds = {kind.__name__ for each in chain for kind in type(each).__mro__}
    text = " ".join(str(chain[0]).split())
    if "RetryError" in kinds:
        return LinkError(f"AI Hub kept failing when asked {what}", hint=_AGAIN)
    if kinds & {"Timeout", "ReadTimeoutError"}:
        return LinkError(f"AI Hub did not answer in time when asked {what}", hint=_AGAIN)
    if "ChunkedEncodingError" in kinds or "ContentDecodingError" in kinds:
        return LinkError(f"AI Hub broke off when asked {what}", hint=_AGAIN)
    if "ConnectionError" in kinds:
        return LinkError(f"AI Hub cannot be reached when asked {what}", hint=f"is there a network? {_AGAIN}")
    return LinkError(
        f"AI Hub's client failed when asked {what}: {type(chain[0]).__name__}: {text or 'no reason given'}"
    )


def _detail(chain: list[BaseException]) -> str:
    """What the service says, which is JSON with a field `detail`, text, or nothing."""
    text = next((str(each) for each in chain if isinstance(getattr(each, "status_code", None), int)), "")
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    if isinstance(found, dict):
        found = found.get("detail", text)
    return " ".join(str(found).split())[:400]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and what stands behind it, also where the client hides that from tracebacks."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
