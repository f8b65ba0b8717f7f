"""One Zstandard frame, unpacked after RFC 8878.

Section numbers are those of the RFC. Where libzstd refuses more or less than the RFC, this reader follows libzstd and
says so at the place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from second_reader.xxh64 import xxh64

MAGIC: Final = 0xFD2FB528
MAX_BLOCK: Final = 128 << 10
MAX_WINDOW_EXPONENT: Final = 31 - 10
"""The RFC goes on to 3.75 TiB; libzstd ends below 4 GiB."""
MAX_DISTRIBUTION: Final = 512
"""Bytes: 256 symbols of at most 16 bits."""
MAX_HUFFMAN_BITS: Final = 12
"""Of one code. The RFC says 11, and libzstd writes no more but reads 12."""
MAX_WEIGHTS: Final = 255


class ZstdError(ValueError):
    """The bytes are not one frame as this reader expects it."""


class LooseEndError(ZstdError):
    """A Huffman stream lacks its final bit, leaves bits over at its last symbol, or has too few.

    libzstd lets many of these pass. Which ones, and with what content, depends on the processor it runs on, so it
    cannot be followed here: nothing can be said by comparing the two.
    """


class _Header(NamedTuple):
    content_size: int | None
    block_limit: int
    has_checksum: bool


class _Cell(NamedTuple):
    """One state of an FSE table: what it stands for and how to go on from it."""

    symbol: int
    bits: int
    base: int


class _Huffman(NamedTuple):
    bits: int
    cells: list[int]
    """For each value of that many bits the symbol that begins there, times 16, plus the length of its code."""


class _Kind(NamedTuple):
    """One of the three parts of a sequence."""

    name: str
    max_log: int
    bases: Sequence[int]
    extras: Sequence[int]
    """A part's value is its code's base plus a number of so many bits."""
    standard: list[_Cell]


def decompress(frame: bytes, limit: int) -> bytes:
    """The content of the one frame that the bytes are, at most `limit` bytes.

    Raises:
        ZstdError: the bytes are not exactly one valid frame that states its size, or that size exceeds the limit.
    """
    source = _Input(frame)
    header = _read_header(source)
    size = header.content_size
    _require(size is not None, "frame does not state its content size")
    assert size is not None
    _require(size <= limit, "content size exceeds the limit")
    content = _Decoder(size, header.block_limit).blocks(source)
    _require(len(content) == size, "content is shorter than stated")
    if header.has_checksum:
        _require(source.number(4) == xxh64(content) & 0xFFFFFFFF, "content checksum differs")
    _require(source.left == 0, "bytes behind the frame")
    return content


def content_size(frame: bytes) -> int | None:
    """The size the frame's header states, None where it states none.

    Raises:
        ZstdError: the bytes do not begin with a valid frame header.
    """
    return _read_header(_Input(frame)).content_size


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ZstdError(message)


class _Input:
    """Bytes read from the front."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int) -> bytes:
        _require(count <= self.left, "data ends early")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")


class _Bits:
    """A bit stream, read from its end (section 4.1). Before its beginning lie zeros, counted by `left` below 0."""

    def __init__(self, stream: bytes) -> None:
        _require(len(stream) > 0 and stream[-1] > 0, "bit stream without its final bit")
        self.stream = stream
        self.at = len(stream) - 1
        """Where the bytes end that are not held yet."""
        self.held_bits = stream[-1].bit_length() - 1
        self.held = stream[-1] - (1 << self.held_bits)
        self.left = 8 * self.at + self.held_bits

    def take(self, count: int) -> int:
        """The next number of up to 64 bits."""
        if self.held_bits < count:
            self.refill()
        self.held_bits -= count
        self.left -= count
        value = self.held >> self.held_bits
        self.held -= value << self.held_bits
        return value

    def refill(self) -> None:
        """Hold 64 more bits."""
        start = max(self.at - 8, 0)
        chunk = self.stream[start : self.at]
        self.held = self.held << 64 | int.from_bytes(chunk, "little") << 64 - 8 * len(chunk)
        self.held_bits += 64
        self.at = start


def _read_header(source: _Input) -> _Header:
    """Section 3.1.1.1."""
    _require(source.number(4) == MAGIC, "no Zstandard frame")
    descriptor = source.number(1)
    _require(descriptor & 0x08 == 0, "reserved bit of the frame header is set")
    single_segment = descriptor & 0x20 != 0
    window = 0
    if not single_segment:
        exponent, eighths = divmod(source.number(1), 8)
        _require(exponent <= MAX_WINDOW_EXPONENT, "window is too large")
        window = (1 << 10 + exponent) // 8 * (8 + eighths)
    _require(source.number((0, 1, 2, 4)[descriptor & 3]) == 0, "frame needs a dictionary")
    size_length = (1 if single_segment else 0, 2, 4, 8)[descriptor >> 6]
    size = source.number(size_length) + (256 if size_length == 2 else 0)
    block_limit = min(size if single_segment else window, MAX_BLOCK)
    return _Header(size if size_length else None, block_limit, descriptor & 0x04 != 0)


def _read_distribution(source: _Input, max_log: int, max_symbol: int) -> tuple[list[int], int]:
    """Section 4.1.1: how many states each symbol has, -1 for one that is rarer than that; and the table's log."""
    data = source.data[source.at : source.at + MAX_DISTRIBUTION]
    number, at = int.from_bytes(data, "little"), 4
    log = (number & 15) + 5
    _require(log <= max_log, "FSE table is too large")
    counts: list[int] = []
    left = 1 << log
    while left:
        _require(len(counts) <= max_symbol, "FSE table has too many symbols")
        # A number of 0 to left + 1. What a width leaves over makes the smallest numbers one bit shorter.
        width = (left + 1).bit_length()
        half, spare = 1 << width - 1, (1 << width) - left - 2
        value = number >> at & half - 1
        at += width - 1
        if value >= spare:
            high = number >> at & 1
            at += 1
            value += high * (half - spare)
        counts.append(value - 1)
        left -= abs(value - 1)
        repeat = 3 if value == 1 else 0
        while repeat == 3:
            repeat = number >> at & 3
            at += 2
            counts += [0] * repeat
            _require(len(counts) <= max_symbol + 1, "FSE table has too many symbols")
    # Where the description goes on beyond the block, libzstd in rare cases reads bits twice and takes the outcome.
    source.take((at + 7) // 8)
    return counts, log


def _fse_table(counts: Sequence[int], log: int) -> list[_Cell]:
    """Section 4.1.1, from the counts to the cells."""
    size = 1 << log
    symbols = [0] * size
    end = size
    for symbol, count in enumerate(counts):
        if count == -1:
            end -= 1
            symbols[end] = symbol
    at, step = 0, (size >> 1) + (size >> 3) + 3
    for symbol, count in enumerate(counts):
        for _ in range(count):
            symbols[at] = symbol
            at = (at + step) % size
            while at >= end:
                at = (at + step) % size
    visits = [abs(count) for count in counts]
    cells = []
    for symbol in symbols:
        bits = log + 1 - visits[symbol].bit_length()
        cells.append(_Cell(symbol, bits, (visits[symbol] << bits) - size))
        visits[symbol] += 1
    return cells


def _read_huffman(source: _Input) -> _Huffman:
    """Section 4.2.1."""
    head = source.number(1)
    if head >= 128:
        count = head - 127
        packed = source.take((count + 1) // 2)
        weights = [weight for byte in packed for weight in (byte >> 4, byte & 15)][:count]
    else:
        weights = _read_weights(_Input(source.take(head)))
    _require(max(weights) <= MAX_HUFFMAN_BITS, "Huffman code is too long")
    total = sum(1 << weight >> 1 for weight in weights)
    bits = total.bit_length()
    _require(0 < bits <= MAX_HUFFMAN_BITS, "Huffman table is too large or empty")
    rest = (1 << bits) - total
    _require(rest.bit_count() == 1, "Huffman table is not full")
    weights.append(rest.bit_length())
    _require(weights.count(1) >= 2, "Huffman table without two longest codes")
    cells: list[int] = []
    for weight in range(1, bits + 1):
        for symbol, other in enumerate(weights):
            if other == weight:
                cells += [symbol << 4 | bits + 1 - weight] * (1 << weight - 1)
    return _Huffman(bits, cells)


def _read_weights(source: _Input) -> list[int]:
    """Section 4.2.1.2: two states take turns until the bits do not suffice for the next one."""
    cells = _fse_table(*_read_distribution(source, 6, MAX_WEIGHTS))
    log = len(cells).bit_length() - 1
    bits = _Bits(source.take(source.left))
    first, second = cells[bits.take(log)], cells[bits.take(log)]
    _require(bits.left >= 0, "Huffman weights end early")
    weights: list[int] = []
    while bits.left >= 0:
        _require(len(weights) <= MAX_WEIGHTS - 2, "too many Huffman weights")
        weights.append(first.symbol)
        first, second = second, cells[first.base + bits.take(first.bits)]
    return [*weights, first.symbol]


def _huffman_stream(table: _Huffman, stream: bytes, count: int) -> bytes:
    """Section 4.2.2: exactly so many symbols out of all bits of the stream."""
    if stream.endswith(b"\0"):
        raise LooseEndError("Huffman stream without its final bit")
    bits = _Bits(stream)
    width, cells = table
    mask = (1 << width) - 1
    # The stream's state lives in local names: this loop is where time goes.
    held, held_bits, padding = bits.held, bits.held_bits, bits.held_bits - bits.left
    symbols = bytearray(count)
    for index in range(count):
        if held_bits < width:
            bits.held, bits.held_bits = held & mask, held_bits
            bits.refill()
            held, held_bits = bits.held, bits.held_bits
            padding += 64
        cell = cells[held >> held_bits - width & mask]
        symbols[index] = cell >> 4
        held_bits -= cell & 15
    if held_bits != padding:
        raise LooseEndError("Huffman stream does not end with its last symbol")
    return bytes(symbols)


def _bases(first: int, extras: Sequence[int]) -> list[int]:
    """Codes follow each other without a gap."""
    return [first + sum(1 << extra for extra in extras[:code]) for code in range(len(extras))]


LITERAL_EXTRAS: Final = (*[0] * 16, 1, 1, 1, 1, 2, 2, 3, 3, 4, *range(6, 17))
MATCH_EXTRAS: Final = (*[0] * 32, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, *range(7, 17))
OFFSET_EXTRAS: Final = range(32)
LITERALS: Final = _Kind(
    "literal lengths",
    9,
    _bases(0, LITERAL_EXTRAS),
    LITERAL_EXTRAS,
    _fse_table((4, 3, *[2] * 11, 1, 1, 1, *[2] * 9, 3, 2, *[1] * 5, *[-1] * 4), 6),
)
OFFSETS: Final = _Kind(
    "offsets",
    8,
    _bases(1, OFFSET_EXTRAS),
    OFFSET_EXTRAS,
    _fse_table((*[1] * 6, 2, 2, 2, *[1] * 15, *[-1] * 5), 5),
)
MATCHES: Final = _Kind(
    "match lengths",
    9,
    _bases(3, MATCH_EXTRAS),
    MATCH_EXTRAS,
    _fse_table((1, 4, 3, *[2] * 6, *[1] * 37, *[-1] * 7), 6),
)
KINDS: Final = (LITERALS, OFFSETS, MATCHES)
"""Sections 3.1.1.3.2.1.1 and 3.1.1.3.2.2, in the order in which a block describes them."""


class _Decoder:
    """What blocks hand on to the next: content, tables and recent offsets (section 3.1.1.3)."""

    def __init__(self, size: int, block_limit: int) -> None:
        self.size = size
        self.block_limit = block_limit
        self.content = bytearray()
        self.huffman: _Huffman | None = None
        self.tables: dict[str, list[_Cell]] = {}
        self.recent = [1, 4, 8]

    def blocks(self, source: _Input) -> bytes:
        """Section 3.1.1.2: all blocks up to the one marked as the last."""
        last = False
        while not last:
            head = source.number(3)
            last, kind, size = head & 1 == 1, head >> 1 & 3, head >> 3
            # The RFC limits every block. libzstd, unpacking in one step, holds only compressed ones to it.
            if kind == 0:
                self._append(source.take(size))
            elif kind == 1:
                self._repeat(source.take(1), size)
            else:
                _require(kind == 2, "block of the reserved type")
                _require(size <= self.block_limit, "block is too large")
                self._block(_Input(source.take(size)))
        return bytes(self.content)

    def _append(self, data: bytes) -> None:
        self._reserve(len(data))
        self.content += data

    def _repeat(self, data: bytes, length: int) -> None:
        """Append so many bytes of the data repeated."""
        self._reserve(length)
        self.content += (data * (length // len(data) + 1))[:length]

    def _reserve(self, length: int) -> None:
        _require(len(self.content) + length <= self.size, "content is longer than stated")

    def _block(self, source: _Input) -> None:
        """A compressed block: literals, then sequences that place them between matches."""
        start = len(self.content)
        literals = _Input(self._literals(source))
        count = _read_sequence_count(source)
        if count:
            modes = source.number(1)
            _require(modes & 3 == 0, "reserved bits of the sequences are set")
            tables = [self._table(kind, modes >> at & 3, source) for kind, at in zip(KINDS, (6, 4, 2), strict=True)]
            self._sequences(tables, count, _Bits(source.take(source.left)), literals)
        _require(source.left == 0, "bytes behind the sequences")
        self._append(literals.take(literals.left))
        # libzstd goes beyond where it happens to have room for it.
        _require(len(self.content) - start <= self.block_limit, "block's content is too large")

    def _literals(self, source: _Input) -> bytes:
        """Section 3.1.1.3.1."""
        head = source.number(1)
        kind, form = head & 3, head >> 2 & 3
        if kind < 2:
            length = (1, 2, 1, 3)[form]
            size = (head | source.number(length - 1) << 8) >> (3 if length == 1 else 4)
            _require(size <= self.block_limit, "too many literals")
            return source.take(size) if kind == 0 else source.take(1) * size
        length, width = ((3, 10), (3, 10), (4, 14), (5, 18))[form]
        sizes = (head | source.number(length - 1) << 8) >> 4
        size, packed = sizes & (1 << width) - 1, _Input(source.take(sizes >> width))
        _require(size <= self.block_limit, "too many literals")
        if kind == 2:
            self.huffman = _read_huffman(packed)
        _require(self.huffman is not None, "literals repeat a Huffman table that is not there")
        assert self.huffman is not None
        if form == 0:
            return _huffman_stream(self.huffman, packed.take(packed.left), size)
        return _huffman_streams(self.huffman, packed, size)

    def _table(self, kind: _Kind, mode: int, source: _Input) -> list[_Cell]:
        """Section 3.1.1.3.2.1: the table of one part of the sequences."""
        if mode == 0:
            self.tables[kind.name] = kind.standard
        elif mode == 1:
            symbol = source.number(1)
            _require(symbol < len(kind.bases), f"code of {kind.name} is out of range")
            self.tables[kind.name] = [_Cell(symbol, 0, 0)]
        elif mode == 2:
            self.tables[kind.name] = _fse_table(*_read_distribution(source, kind.max_log, len(kind.bases) - 1))
        _require(kind.name in self.tables, f"{kind.name} repeat a table that is not there")
        return self.tables[kind.name]

    def _sequences(self, tables: Sequence[list[_Cell]], count: int, bits: _Bits, literals: _Input) -> None:
        """Section 3.1.1.3.2.1.2, and section 3.1.1.4 for what a sequence does."""
        take = bits.take
        length_cells, offset_cells, match_cells = tables
        length_cell, offset_cell, match_cell = (cells[take(len(cells).bit_length() - 1)] for cells in tables)
        while True:
            code = offset_cell.symbol
            offset = OFFSETS.bases[code] + take(OFFSETS.extras[code])
            code = match_cell.symbol
            match = MATCHES.bases[code] + take(MATCHES.extras[code])
            code = length_cell.symbol
            length = LITERALS.bases[code] + take(LITERALS.extras[code])
            self._append(literals.take(length))
            self._copy(self._offset(offset, length), match)
            count -= 1
            if count == 0:
                break
            length_cell = length_cells[length_cell.base + take(length_cell.bits)]
            match_cell = match_cells[match_cell.base + take(match_cell.bits)]
            offset_cell = offset_cells[offset_cell.base + take(offset_cell.bits)]
        _require(bits.left == 0, "sequences do not end with their last bit")

    def _offset(self, value: int, length: int) -> int:
        """Section 3.1.1.5: values up to 3 name a recent offset."""
        first, second, third = self.recent
        if value > 3:
            self.recent = [value - 3, first, second]
        elif length > 0 or value < 3:
            index = value - 1 if length > 0 else value
            self.recent = ([first, second, third], [second, first, third], [third, first, second])[index]
        else:
            self.recent = [first - 1, first, second]
        return self.recent[0]

    def _copy(self, offset: int, length: int) -> None:
        """Append a match. It may reach into what it appends itself."""
        start = len(self.content) - offset
        _require(offset > 0 and start >= 0, "match begins before the content")
        self._repeat(bytes(self.content[start : start + length]), length)


def _huffman_streams(table: _Huffman, source: _Input, size: int) -> bytes:
    """Section 4.2.2, four streams: the last takes what the others leave."""
    # Fewer literals cannot be cut in four; the RFC does not say so.
    _require(size >= 6, "too few literals for four streams")
    lengths = [source.number(2) for _ in range(3)]
    share = (size + 3) // 4
    parts = [_huffman_stream(table, source.take(length), share) for length in lengths]
    return b"".join([*parts, _huffman_stream(table, source.take(source.left), size - 3 * share)])


def _read_sequence_count(source: _Input) -> int:
    """Section 3.1.1.3.2.1."""
    head = source.number(1)
    if head < 128:
        return head
    if head < 255:
        return (head - 128 << 8) + source.number(1)
    return source.number(2) + 0x7F00
