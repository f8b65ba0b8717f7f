"""Where the bytes of a package went, and how many bits its weights take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from estream_spec.constants import DATA_START, SectionType
from estream_spec.container import Container
from estream_spec.manifest import RecordLayout
from estream_spec.records import RecordTable

if TYPE_CHECKING:
    from rich.table import Table

ROLES: Final[Mapping[str, str]] = {
    "embedding": "embedding",
    "q": "attention",
    "k": "attention",
    "v": "attention",
    "o": "attention",
    "query_latent": "attention",
    "latent": "attention",
    "k_rotated": "attention",
    "entry": "convolution",
    "entry_gate": "convolution",
    "exit_gate": "convolution",
    "router": "router",
    "gate": "experts",
    "up": "experts",
    "down": "experts",
    "dense_gate": "dense blocks",
    "dense_up": "dense blocks",
    "dense_down": "dense blocks",
    "head": "head",
}
"""The role of each matrix; vectors are norms."""
NORMS: Final = "norms"
SMALL_SECTIONS: Final[Mapping[int, str]] = {
    SectionType.DENSE_TABLE: "tables",
    SectionType.EXPERT_TABLE: "tables",
    SectionType.GRAPH: "graphs",
    SectionType.BINARY: "binaries",
    SectionType.TOKENIZER: "tokenizer",
    SectionType.CHAT_TEMPLATE: "chat template",
    SectionType.PREFETCH_ROUTER: "prefetch router",
    SectionType.MANIFEST: "manifest",
    SectionType.DEVICE_CONFIGURATION: "device configurations",
    SectionType.SCHEDULE: "schedules",
    SectionType.SIGNATURE: "signatures",
    SectionType.FREE: "free",
}
"""What the bytes of sections without records are counted as."""


class RoleSize(Struct, frozen=True, kw_only=True):
    """The weights of one role, all layers together.

    Attributes:
        role: what they are for.
        weights: how many there are.
        stored_bytes: what they take, scales and multipliers included, padding not.
        bits_per_weight: the ratio of the two.
    """

    role: str
    weights: int
    stored_bytes: int
    bits_per_weight: float


class Summary(Struct, frozen=True, kw_only=True):
    """A package in figures.

    Attributes:
        file_length: bytes of the package.
        weights: weights in all roles.
        bits_per_weight: over all roles.
        roles: the weights by role.
        space: bytes by what they are for; they add up to `file_length`.
    """

    file_length: int
    weights: int
    bits_per_weight: float
    roles: tuple[RoleSize, ...]
    space: dict[str, int]


def summarise(
    container: Container, layouts: tuple[RecordLayout, ...], dense: RecordTable, experts: RecordTable
) -> Summary:
    """Count every byte of a package and every weight in it.

    Args:
        container: superblock and directory.
        layouts: the manifest's record layouts.
        dense: the table of dense records.
        experts: the table of expert records.
    """
    weights, stored = Counter[str](), Counter[str]()
    for record_range in (*dense.ranges, *experts.ranges):
        layout, count = layouts[record_range.layout], record_range.count
        in_matrices = {matrix.name: matrix.rows * matrix.columns for matrix in layout.matrices}
        for name, number in in_matrices.items():
            weights[ROLES[name]] += count * number
        for tensor in layout.tensors:
            name = tensor.name.partition(".")[0]
            if name in in_matrices:
                stored[ROLES[name]] += count * tensor.length
            else:
                stored[NORMS] += count * tensor.length
                weights[NORMS] += count * tensor.shape[0]
    roles = tuple(
        RoleSize(
            role=role,
            weights=weights[role],
            stored_bytes=stored[role],
            bits_per_weight=8 * stored[role] / weights[role],
        )
        for role in dict.fromkeys([*ROLES.values(), NORMS])
        if weights[role]
    )
    return Summary(
        file_length=container.superblock.file_length,
        weights=weights.total(),
        bits_per_weight=8 * stored.total() / weights.total(),
        roles=roles,
        space=_space(container, stored),
    )


def _space(container: Container, stored: Counter[str]) -> dict[str, int]:
    """Bytes by what they are for."""
    space = {"superblocks": DATA_START, **{role: stored[role] for role in dict.fromkeys([*ROLES.values(), NORMS])}}
    records = sum(container.section(kind).stored_length for kind in (SectionType.DENSE, SectionType.EXPERTS))
    space["record padding"] = records - stored.total()
    for entry in container.entries:
        if entry.type not in (SectionType.DENSE, SectionType.EXPERTS):
            label = SMALL_SECTIONS.get(entry.type, "unknown sections")
            space[label] = space.get(label, 0) + entry.stored_length
    sections = sum(entry.stored_length for entry in container.entries)
    space["section padding"] = container.superblock.directory_offset - DATA_START - sections
    space["directory"] = container.superblock.directory_length
    return {label: length for label, length in space.items() if length}


def summary_tables(summary: Summary) -> tuple[Table, Table]:
    """Two tables for a terminal: the weights by role, and the bytes by what they are for."""
    from rich.table import Table

    weights = Table("role", show_footer=True, box=None)
    weights.columns[0].footer = "all weights"
    weights.add_column("weights", f"{summary.weights:,}", justify="right")
    weights.add_column("bytes", f"{sum(role.stored_bytes for role in summary.roles):,}", justify="right")
    weights.add_column("bits per weight", f"{summary.bits_per_weight:.3f}", justify="right")
    for role in summary.roles:
        weights.add_row(role.role, f"{role.weights:,}", f"{role.stored_bytes:,}", f"{role.bits_per_weight:.3f}")

    space = Table("what the bytes are for", show_footer=True, box=None)
    space.columns[0].footer = "package"
    space.add_column("bytes", f"{summary.file_length:,}", justify="right")
    space.add_column("share", justify="right")
    for label, length in summary.space.items():
        space.add_row(label, f"{length:,}", f"{length / summary.file_length:.1%}")
    return weights, space
