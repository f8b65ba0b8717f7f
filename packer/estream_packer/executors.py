"""Who makes records: threads, processes, the workers of a Dask cluster, or any other executor of `concurrent.futures`.

What an executor's workers are given can be sent to other machines: the checkpoint's place, what to read of it, and the
layout. They open the checkpoint themselves, and refuse one that is not the same, or if they are another version.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from estream_packer.children import begin, child_processes
from estream_packer.journal import StoppedError
from estream_packer.remote import SEPARATOR
from estream_packer.writer import PackedRecord
from estream_spec.errors import EmoeError, PackError

if TYPE_CHECKING:
    from distributed import Client

P = ParamSpec("P")
T = TypeVar("T")

THREADS: Final = "threads"
PROCESSES: Final = "processes"
DASK: Final = f"dask{SEPARATOR}"
_PORT_DIGITS: Final = 5
CONNECT_SECONDS: Final = 10
"""How long a scheduler is waited for, and then its first worker."""
IN_FLIGHT_BYTES: Final = 1 << 29
"""Memory for records being made or waiting to be written, 512 MiB; a single larger record has it to itself."""


@dataclass(frozen=True, slots=True)
class Task:
    """One record to make.

    Attributes:
        make: makes it.
        length: bytes of the record.
        payload_length: bytes of it without the padding.
        working_bytes: what making it takes besides.
        amount: how far it brings the progress.
    """

    make: Callable[[], PackedRecord]
    length: int
    payload_length: int
    working_bytes: int
    amount: int


@dataclass(frozen=True, slots=True)
class Workers:
    """Who makes the records of a package.

    Attributes:
        executor: takes the tasks.
        jobs: how many records are made at a time.
        shared: whether the executor works in this very process, and on what it has open.
    """

    executor: Executor
    jobs: int
    shared: bool

    @property
    def depth(self) -> int:
        """Records in flight, at most, besides the one that is waited for. What is far away should never wait for us."""
        return self.jobs if self.shared else 2 * self.jobs

    def cost(self, task: Task) -> int:
        """Bytes that a task in flight takes in this process."""
        return task.length + (task.working_bytes if self.shared else 0)

    def submit(self, task: Task) -> Future[PackedRecord]:
        """Have a record made.

        Raises:
            StoppedError: nobody takes tasks any more.
        """
        if self.shared:
            return self.executor.submit(task.make)
        try:
            return self.executor.submit(task.make)
        except Exception as error:
            raise _failed(error) from error

    def result(self, task: Task, future: Future[PackedRecord]) -> PackedRecord:
        """The record that was made.

        Raises:
            PackError: it cannot be made; `StoppedError` where that is the fault of the worker.
        """
        if self.shared:
            return future.result()
        try:
            record = future.result()
        except EmoeError:
            raise
        except Exception as error:
            raise _failed(error) from error
        if not isinstance(record, PackedRecord):
            raise StoppedError(f"a worker made {type(record).__name__}, expected a record")
        sealed = PackedRecord.seal(record.data, task.payload_length)
        found, expected = ((each.checksum, each.digest) for each in (record, sealed))
        if len(record.data) != task.length or found != expected:
            raise StoppedError("a record that a worker made arrived damaged")
        return record


def _failed(error: Exception) -> StoppedError:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    hint = "look at the worker's log; each needs the same estream-pack, and enough memory"
    return StoppedError(f"a worker failed: {said}", hint=hint)


def job_count(jobs: int | None) -> int:
    """How many records are made at a time: as many as asked for, or one for each processor this process may use."""
    return jobs or len(os.sched_getaffinity(0))


@contextlib.contextmanager
def worker_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that drop what they have not begun when the work ends early."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def open_workers(jobs: int | None, executor: Executor | None = None) -> Iterator[Workers]:
    """Threads of this process, or the workers of an executor, which stays open.

    Args:
        jobs: records made at a time; None takes as many as there are workers, as far as the executor tells.
        executor: None takes threads.
    """
    if executor is not None:
        told = getattr(executor, "_max_workers", None)
        yield Workers(executor, jobs or told or job_count(None), shared=False)
        return
    count = job_count(jobs)
    with worker_threads(count) as threads:
        yield Workers(threads, count, shared=True)


def is_executor(name: str) -> bool:
    """Whether a command line may name an executor so."""
    host, colon, port = name.removeprefix(DASK).rpartition(":")
    there = host and colon and port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS
    return name in (THREADS, PROCESSES) or (name.startswith(DASK) and bool(there))


@contextlib.contextmanager
def open_executor(name: str, jobs: int | None) -> Iterator[Executor | None]:
    """The executor that a command line names.

    Args:
        name: `threads`, `processes`, or `dask://HOST:PORT`.
        jobs: how many workers to begin where they are ours; None takes one for each processor.

    Yields:
        None for threads of this process.

    Raises:
        PackError: there is no such executor, or it cannot be reached.
    """
    if name == THREADS:
        yield None
    elif name == PROCESSES:
        count = job_count(jobs)
        with child_processes(count) as pool:
            yield _Children(pool, count)
    elif name.startswith(DASK):
        with _dask_client(name.removeprefix(DASK), name) as client:
            yield _Cluster(client)
    else:
        raise PackError(f"unknown executor {name!r}, expected {THREADS}, {PROCESSES} or {DASK}HOST:PORT")


class _Children(Executor):
    """Processes that begin when they are needed. An interrupt from a terminal is for their parent alone."""

    def __init__(self, pool: ProcessPoolExecutor, count: int):
        self._pool, self._max_workers = pool, count

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return begin(self._pool, fn, *args, **kwargs)


class _Cluster(Executor):
    """The workers of a Dask cluster."""

    def __init__(self, client: Client):
        self._executor = client.get_executor(pure=False)
        self._max_workers = sum(client.nthreads().values())

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = self._executor.submit(fn, *args, **kwargs)
        return future


@contextlib.contextmanager
def _dask_client(address: str, name: str) -> Iterator[Any]:
    """A connection to a scheduler that has workers."""
    try:
        from distributed import Client
    except ImportError:
        hint = "pip install 'estream-pack[dask]', here and on every worker"
        raise PackError("Dask is not installed", path=name, hint=hint) from None
    try:
        client = Client(f"tcp://{address}", timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:  # a timeout is an OSError
        hint = "begin one with 'dask scheduler', and workers with 'dask worker HOST:PORT'"
        raise PackError(f"scheduler cannot be reached: {_first_line(error)}", path=name, hint=hint) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        except TimeoutError:
            hint = "begin some with 'dask worker HOST:PORT'"
            raise PackError("scheduler has no workers", path=name, hint=hint) from None
        yield client


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
