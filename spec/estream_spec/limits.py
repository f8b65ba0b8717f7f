"""Every limit of the format in one place. FORMAT.md section 11.

A count, length or offset is compared with its limit before it is used for anything, allocation above all.
"""

from __future__ import annotations

from typing import Final

MAX_FILE_LENGTH: Final = 1 << 44
"""16 TiB. Sums of two legal offsets stay far below 2**63."""
MAX_SECTIONS: Final = 4096
"""Directory entries. Bounds the directory to 320 KiB."""
MAX_MANIFEST_LENGTH: Final = 1 << 20
"""1 MiB: of the manifest, a chat template, a device configuration or a signature, stored and decoded."""
MAX_SMALL_SECTION_LENGTH: Final = 1 << 26
"""64 MiB: any section that is read whole (graphs, tokenizer, tables), stored and decoded."""
MAX_PREFETCH_ROUTER_LENGTH: Final = 1 << 29
"""512 MiB: of the prefetch router, stored and decoded. It has the size of all routers together, at 2 bytes a weight."""
MAX_COMPRESSION_RATIO: Final = 256
"""Decoded over stored bytes of a zstd section."""
MAX_LAYERS: Final = 1024
MAX_EXPERTS: Final = 4096
"""Experts in one layer."""
MAX_RANGES: Final = MAX_LAYERS + 2
"""Ranges in one table: an embedding, the layers, and what follows them."""
MAX_RECORDS: Final = 1 << 17
"""Records in one table, all layers together."""
MAX_RECORD_LENGTH: Final = (1 << 31) - (1 << 21)
"""One record, padded. An NPU maps a buffer below 2 GiB."""
MAX_DIMENSION: Final = 1 << 24
"""Rows or columns of a matrix. The product of two stays below 2**48."""
MAX_INTEGER_ROWS: Final = 1 << 17
"""Rows of a quantised matrix: so many products of 8-bit numbers fit a 32-bit sum."""
MAX_SHAPE_CLASSES: Final = 64
MAX_FREQUENCIES: Final = 4096
"""Rotary frequencies of one attention shape class."""
MAX_TAPS: Final = 64
"""Tokens that one output of a convolution depends on."""
MAX_TENSORS: Final = 64
"""Tensors in one record layout."""
MAX_GRAPHS: Final = 1024
MAX_BINARIES: Final = 64
"""Targets of an accelerator that a package carries compiled graphs for."""
MAX_BINARY_GRAPHS: Final = 1024
"""Graphs in one binary: roles, shape classes, tiles and numbers of keys."""
MAX_DEVICE_CONFIGURATIONS: Final = 64
"""In the manifest, and as many in sections of their own."""
MAX_LANES: Final = 64
"""Reads outstanding at a time. Storage gains nothing from more."""
MAX_SIGNATURES: Final = 16
"""Each may cost a reader one verification for each key it requires."""
MAX_SCHEDULES: Final = 384
"""Programs: for each device configuration there can be, one to load, one to prefill and one to decode."""
MAX_INSTRUCTIONS: Final = 1 << 18
"""In one program: bounds what it takes to verify it. Some 65,000 groups."""
MAX_EXTENSIONS: Final = 64
MAX_SOURCES: Final = 4096
"""Source files named in the provenance."""
MAX_END_TOKENS: Final = 64
MAX_NAME: Final = 128
"""Characters in a name."""
MAX_TEXT: Final = 4096
"""Characters in a text such as a licence identifier or a source path."""
MIN_PAGE_SHIFT: Final = 12
MAX_PAGE_SHIFT: Final = 21
