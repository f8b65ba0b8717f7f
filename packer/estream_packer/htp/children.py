"""Processes of their own for the vendor's compiler and simulator, which may end the one they are in."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

from estream_spec.errors import PackError

T = TypeVar("T")


@contextmanager
def child_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that begin anew, sharing nothing with this one; what they have not begun is dropped at the end."""
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def result_of(future: Future[T], what: str) -> T:
    """The result of what a child did.

    Args:
        future: of a task of the children.
        what: it was at, as a message names it.

    Raises:
        PackError: the child ended without a result.
    """
    try:
        return future.result()
    except BrokenProcessPool:
        message = f"the vendor's library ended the process while {what}"
        raise PackError(message, hint="memory may have run out; otherwise it is a fault of the library") from None
