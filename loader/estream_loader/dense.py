"""Dense weights: whole records into memory of their own, embedding rows one by one from the file.

Both happen in the background, so that computing with the first layer begins while later ones are being read. What is
read whole is read past the page cache, as experts are: it is needed once, and the system counts cached pages as memory
of the process that read them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import Self

import crc32c
import numpy as np
from numpy.typing import NDArray

from estream_loader.memory import page_aligned
from estream_loader.package import Package
from estream_loader.reading import Read, Reader, ReadState
from estream_loader.records import DTYPES, RecordPlace
from estream_loader.source import FileSource, read, read_exactly
from estream_loader.uncached import UncachedSource
from estream_spec.errors import IntegrityError, LinkError
from estream_spec.layout import round_up
from estream_spec.manifest import LANES
from estream_spec.rulebook import refusal

_PIECE = 1 << 14
"""Bytes with a checksum of their own, a divisor of what is read at a time: what is proven again for each row."""
_STRETCH = 1 << 22
"""Bytes read at a time to prove the whole."""
_AHEAD = 2
"""Records that are read beyond one that is taken."""


class DenseRecords:
    """Records on their way into memory of their own, each proven as the package's integrity policy asks.

    Reading begins at once and goes on in the background, until `postpone` says that there is something better to do for
    the disk. Use it as a context manager, or close it.

    Args:
        package: the open package.
        places: where the records are, those first that are needed first.

    Raises:
        LinkError: the threads cannot be had.
    """

    def __init__(self, package: Package, places: Sequence[RecordPlace]):
        self._places = tuple(places)
        self._memories = [_memory(place.length) for place in self._places]
        check = None if package.integrity == "open" else package.check_record
        self._reader = Reader(package.source, LANES, check=check)
        try:
            self._reads: list[Read | None] = [self._submit(number) for number in range(len(self._places))]
        except BaseException:
            self._reader.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def is_there(self, number: int) -> bool:
        """Whether one of the records is in memory and proven."""
        found = self._reads[number]
        return found is not None and found.state is ReadState.DONE

    def take(self, number: int) -> memoryview:
        """One of the records, as soon as it is there, and begin to read the next ones.

        One that could not be read is read again for who asks again.

        Args:
            number: which of the places.

        Returns:
            Its bytes, in page-aligned memory.

        Raises:
            IntegrityError: the checksum differs or bytes are missing.
            LinkError: the device failed.
        """
        found = self._read(number)
        for each in range(number + 1, min(number + 1 + _AHEAD, len(self._places))):
            self._read(each)
        if (error := found.outcome()) is not None:
            self._reads[number] = None
            raise error
        return self._memories[number]

    def postpone(self) -> None:
        """Withdraw reads that have not begun, but for the first missing one; `take` asks again two records ahead."""
        missing = [number for number in range(len(self._reads)) if not self.is_there(number)]
        for number in reversed(missing[1:]):
            each = self._reads[number]
            if each is not None and each.cancel():
                self._reads[number] = None

    def settle(self) -> None:
        """Return when all of it was read, well or not."""
        for each in [self._read(number) for number in range(len(self._reads))]:
            each.outcome()

    def close(self) -> None:
        """End all reading and let go of what was not taken. Closing twice is harmless."""
        self._reader.close()
        self._memories.clear()

    def _read(self, number: int) -> Read:
        """What brings a record, begun now unless it was before."""
        found = self._reads[number]
        if found is None:
            found = self._reads[number] = self._submit(number)
        return found

    def _submit(self, number: int) -> Read:
        place = self._places[number]
        return self._reader.submit(place.offset, self._memories[number], [place])


class EmbeddingRows:
    """The embedding, of which only the rows asked for are read.

    Unless the policy is `open`, the record is proven as a whole in the background: what is made of rows is not to be
    trusted before `prove` returns. The checksums of its pieces are kept from that, and whatever is read, before it or
    later, must agree with them. Use it as a context manager, or close it.

    Args:
        package: the open package.

    Raises:
        LinkError: the thread cannot be had.
    """

    def __init__(self, package: Package):
        self._package = package
        self._place = place = package.dense.place(0)
        by_name = {tensor.name: tensor for tensor in place.layout.tensors}
        self._rows, self._scales = by_name["embedding"], by_name.get("embedding.scale")
        self._row_bytes = self._rows.length // self._rows.shape[0]
        self._checksums: list[int] | None = None
        """Of each piece, once the whole is proven."""
        self._unproven = list[tuple[int, list[int]]]()
        """What was read before that: number of the first piece, and the checksums from there on."""
        self._fault: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        if package.integrity == "open":
            self._checksums = []
            return
        self._thread = threading.Thread(target=self._prove_aside, name="proof of the embedding", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise LinkError(f"cannot start a thread for the proof of the embedding: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def gather(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows of the embedding.

        Args:
            token_ids: [tokens], each in the vocabulary.

        Returns:
            [tokens, hidden] f32.

        Raises:
            IntegrityError: bytes are missing or not the ones that were proven.
            LinkError: the device failed.
        """
        offsets = [self._rows.offset + int(token) * self._row_bytes for token in token_ids]
        if isinstance(source := self._package.source, FileSource):
            for offset in offsets:
                source.expect(*self._pieces(offset, self._row_bytes))
        rows = [self._read(offset, self._row_bytes) for offset in offsets]
        stored = np.frombuffer(b"".join(rows), DTYPES[self._rows.dtype]).reshape(len(rows), -1)
        if self._scale is None:
            return stored
        return stored * self._scale[token_ids, None]

    @property
    def proven(self) -> bool:
        """Whether the whole is proven, and every row that was read."""
        return self._checksums is not None and not self._unproven

    def prove(self) -> None:
        """Return when the whole is proven, and every row that was read. After a failure, the next call tries again.

        Raises:
            IntegrityError: bytes are missing or not the ones that are described.
            LinkError: the device failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self._fault is not None:
                raise self._fault
        if self._checksums is None:
            self._checksums = self._prove()
        try:
            for first, found in self._unproven:
                self._check_pieces(first, found)
        except IntegrityError:
            self.__dict__.pop("_scale", None)  # it may be what is wrong: the next call reads it again
            raise
        finally:
            self._unproven = []

    def close(self) -> None:
        """End the proof, wherever it is. Closing twice is harmless."""
        self._closed = True
        if self._thread is not None:
            self._thread.join()

    @cached_property
    def _scale(self) -> NDArray[np.float32] | None:
        """Of each row; None where rows have none."""
        scales = self._scales
        return None if scales is None else np.frombuffer(self._read(scales.offset, scales.length), np.float32)

    def _prove_aside(self) -> None:
        """What the thread does."""
        try:
            self._checksums = self._prove()
        except BaseException as fault:  # a source of the caller's may raise anything; it belongs to whoever waits
            self._fault = fault

    def _prove(self) -> list[int]:
        """The checksum of each piece of the record, which is proven."""
        checksum, checksums, place = 0, list[int](), self._place
        buffer, source = _memory(min(_STRETCH, place.length)), UncachedSource(self._package.source)
        try:
            for start in range(0, place.length, _STRETCH):
                if self._closed:
                    raise LinkError("the embedding was closed before it was proven", path=place.path)
                data = buffer[: place.length - start]
                read_exactly(source, data, place.offset + start)
                checksum = crc32c.crc32c(data, checksum)
                checksums += _piece_checksums(data)
        finally:
            source.close()
        place.check(checksum)
        return checksums

    def _pieces(self, offset: int, length: int) -> tuple[int, int]:
        """Bytes of the record from `offset` widened to whole pieces: offset in the package, and length."""
        start, stop = offset - offset % _PIECE, min(round_up(offset + length, _PIECE), self._place.length)
        return self._place.offset + start, stop - start

    def _read(self, offset: int, length: int) -> bytes:
        """Bytes of the record from `offset`, read in whole pieces and compared with what is proven."""
        data = read(self._package.source, *self._pieces(offset, length))
        if self._package.integrity != "open":
            self._check_pieces(offset // _PIECE, _piece_checksums(data))
        start = offset % _PIECE
        return data[start : start + length]

    def _check_pieces(self, first: int, found: list[int]) -> None:
        """Compare what was read with what is proven, or keep it in mind until that is known."""
        if self._checksums is None:
            self._unproven.append((first, found))
        elif found != self._checksums[first : first + len(found)]:
            message = "the embedding has changed since it was proven"
            raise refusal("EMOE-REC-001", message, path=self._place.path, offset=self._place.offset + first * _PIECE)


def _piece_checksums(data: bytes | memoryview) -> list[int]:
    view = memoryview(data)
    return [crc32c.crc32c(view[at : at + _PIECE]) for at in range(0, len(data), _PIECE)]


def _memory(length: int) -> memoryview:
    """Memory for a record or a part of one.

    Raises:
        LinkError: it cannot be had.
    """
    try:
        return page_aligned(length)
    except (OSError, OverflowError, ValueError) as error:
        raise LinkError(f"cannot allocate {length} bytes for weights: {error}") from None
