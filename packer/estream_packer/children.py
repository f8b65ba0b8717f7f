"""Processes of their own: to work beside this one, or because the work may end the process it is in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, pthread_sigmask
from threading import Thread
from typing import ParamSpec, TypeVar

from estream_spec.errors import PackError

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def child_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that begin anew, sharing nothing with this one, and end with it, whatever ends it.

    Where an error or an interrupt leaves the block, nobody waits for what they are at.
    """
    others = active_children()
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_end_with_parent)
    try:
        yield pool
    except BaseException:
        for child in active_children():
            if child not in others:
                child.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def begin(pool: ProcessPoolExecutor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Gives a task to children. An interrupt from a terminal, which goes to all processes, is for this one alone."""
    before = pthread_sigmask(SIG_BLOCK, {SIGINT})
    try:
        return pool.submit(work, *args, **kwargs)  # the process that it may begin starts with this mask
    finally:
        pthread_sigmask(SIG_SETMASK, before)


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


def _end_with_parent() -> None:
    """Begins a thread that ends this process when its parent is no more: nobody else would."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()
