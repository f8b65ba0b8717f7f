"""What a package is to a device, told from the package's header alone. MATCHING.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self

import msgspec
from msgspec import Meta, Struct

from estream_spec import limits
from estream_spec.chips import OLDEST_ARCHITECTURE, chip_numbered
from estream_spec.constants import SectionType
from estream_spec.container import Container
from estream_spec.devices import of_device
from estream_spec.errors import MalformedError
from estream_spec.json_text import decode_json
from estream_spec.layout import round_up
from estream_spec.manifest import SDK_PATTERN, Binary, Manifest

Verdict = Literal["exact", "usable", "recompile", "refuse"]
Reason = Literal[
    "page-size",
    "memory",
    "no-npu",
    "no-fp16",
    "no-sdk",
    "npu-memory",
    "no-binary",
    "other-architecture",
    "other-chip",
    "newer-sdk",
    "same-sdk",
    "older-sdk",
]

VERDICTS: Final[dict[Reason, Verdict]] = {
    "page-size": "refuse",
    "memory": "refuse",
    "no-npu": "usable",
    "no-fp16": "usable",
    "no-sdk": "usable",
    "npu-memory": "usable",
    "no-binary": "recompile",
    "other-architecture": "recompile",
    "other-chip": "recompile",
    "newer-sdk": "recompile",
    "same-sdk": "exact",
    "older-sdk": "usable",
}
"""What each reason means for the package, in the order in which they are looked for. MATCHING.md section 4."""
ON_NPU: Final[frozenset[Reason]] = frozenset({"same-sdk", "older-sdk"})
"""Reasons with which a binary is used."""
MAX_FACTS_LENGTH: Final = 1 << 16
"""64 KiB; facts have a few hundred bytes."""
UNBOUNDED: Final = (1 << 63) - 1

Bytes = Annotated[int, Meta(ge=0, le=UNBOUNDED)]


class DeviceFacts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a device. MATCHING.md section 2.

    Attributes:
        page_bytes: a page of its memory.
        memory_bytes: what dense weights and the arena may take together.
        soc_model: the chip's number in the vendor's SDK; 0 where no NPU is known.
        architecture: version of the NPU, 75 for Hexagon v75; 0 where no NPU is known.
        sdk: build of the vendor's library; empty where there is none.
        npu_buffer_bytes: a buffer that the NPU maps is smaller; None where that is not known.
        npu_session_bytes: all that one session of the NPU maps is smaller; None where that is not known.
        configuration: name of the device's configurations; empty for the default device's.
    """

    page_bytes: Annotated[int, Meta(ge=1, le=1 << 30)]
    memory_bytes: Bytes
    soc_model: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    architecture: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    sdk: Annotated[str, Meta(pattern=rf"^\Z|{SDK_PATTERN}", max_length=limits.MAX_NAME)] = ""
    npu_buffer_bytes: Bytes | None = None
    npu_session_bytes: Bytes | None = None
    configuration: Annotated[str, Meta(max_length=limits.MAX_NAME)] = ""

    def __post_init__(self) -> None:
        if self.page_bytes.bit_count() != 1:
            raise ValueError(f"page_bytes is {self.page_bytes}, expected a power of two")

    def __str__(self) -> str:
        chip = chip_numbered(self.soc_model, self.architecture) if self.has_npu else "one without a known NPU"
        return f"{chip}, {f'SDK {self.sdk}' if self.sdk else 'no SDK'}"

    @property
    def has_npu(self) -> bool:
        """Whether an NPU is known."""
        return self.soc_model > 0 and self.architecture > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a package asks of a device. MATCHING.md section 3.

    Attributes:
        page_bytes: a page of the package.
        dense_bytes: dense weights that stay in memory.
        record_bytes: the longest expert record.
        arena_bytes: the arena it is configured for.
    """

    page_bytes: int
    dense_bytes: int
    record_bytes: int
    arena_bytes: int

    @classmethod
    def of(cls, container: Container, manifest: Manifest, configuration: str = "") -> Self:
        """What the header says.

        Args:
            container: superblock and directory.
            manifest: the manifest.
            configuration: name of the device's configurations; the default device's count where there are none.
        """
        page = container.page_size

        def records(matrix: str) -> list[int]:
            """Bytes of the records that hold a matrix of that name, one for each layout."""
            return [
                round_up(layout.payload_length, page)
                for layout in manifest.layouts
                if any(each.name == matrix for each in layout.matrices)
            ]

        dense = container.section(SectionType.DENSE).length
        # Of an embedding that is not the head too, rows are read as they are needed.
        rows_alone = 0 if manifest.model.tied_head else max(records("embedding"), default=0)
        shipped = manifest.device_configurations
        known = any(each.name == configuration for each in shipped)
        choices = of_device((), shipped, configuration if known else None)
        return cls(
            page_bytes=page,
            dense_bytes=dense - rows_alone,
            record_bytes=max(records("gate"), default=0),
            arena_bytes=max(each.arena_bytes for each in choices),
        )

    def memory_room(self, device: DeviceFacts) -> int:
        """Bytes for the arena beside dense weights in the device's memory; may be below 0."""
        return device.memory_bytes - self.dense_bytes

    def npu_room(self, device: DeviceFacts) -> int:
        """Bytes of the largest arena that the NPU maps beside dense weights; may be below 0."""
        buffer, session = (
            UNBOUNDED if each is None else each for each in (device.npu_buffer_bytes, device.npu_session_bytes)
        )
        return min(buffer, session - self.dense_bytes) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a package is to a device.

    Attributes:
        reason: why.
        binary: id of the section of the binary to use, or None: then the portable graphs run on the CPU.
        arena_bytes: the arena to expect; 0 where the package is refused.
        sections: type and id of each section that the device needs, in the order of the directory.
        device: what was known of the device.
        needs: what the package asks for.
        judged: the binary that the reason is about, used or not; None where it is about none.
    """

    reason: Reason
    binary: int | None
    arena_bytes: int
    sections: tuple[tuple[int, int], ...]
    device: DeviceFacts
    needs: Needs
    judged: Binary | None

    @property
    def verdict(self) -> Verdict:
        """What that means: `recompile` still runs, on the CPU; `refuse` does not."""
        return VERDICTS[self.reason]


def match(device: DeviceFacts, container: Container, manifest: Manifest) -> Match:
    """Match a package that obeys the rules of the format with a device. MATCHING.md section 4.

    Args:
        device: what is known of the device.
        container: superblock and directory.
        manifest: the manifest.
    """
    needs = Needs.of(container, manifest, device.configuration)
    reason, judged = _reason(device, needs, manifest.binaries)
    used = judged if reason in ON_NPU else None
    refused = VERDICTS[reason] == "refuse"
    rooms = [needs.memory_room(device), *([needs.npu_room(device)] if used else [])]
    return Match(
        reason=reason,
        binary=used.section if used else None,
        arena_bytes=0 if refused else min(needs.arena_bytes, *rooms),
        sections=() if refused else _sections(container, manifest, used),
        device=device,
        needs=needs,
        judged=judged,
    )


def sdk_numbers(sdk: str) -> tuple[int, ...]:
    """The numbers of an SDK build, such that older builds are smaller. Those that are missing at the end count as 0."""
    numbers = [int(each) for each in sdk.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def decode_facts(data: bytes | bytearray, path: str) -> DeviceFacts:
    """Parse facts of a device.

    Args:
        data: JSON text.
        path: what messages call it.

    Raises:
        MalformedError: not JSON, an unknown key, a value missing or out of range.
    """
    if len(data) > MAX_FACTS_LENGTH:
        raise MalformedError("device facts have more than 64 KiB", path=path)
    return decode_json(_decoder, data, "device facts", path)


_decoder: Final = msgspec.json.Decoder(DeviceFacts)


def _reason(device: DeviceFacts, needs: Needs, binaries: Sequence[Binary]) -> tuple[Reason, Binary | None]:
    """The first reason that holds, and the binary it is about."""
    if needs.page_bytes % device.page_bytes:
        return "page-size", None
    if needs.memory_room(device) < needs.record_bytes:
        return "memory", None
    if not device.has_npu:
        return "no-npu", None
    if device.architecture < OLDEST_ARCHITECTURE:
        return "no-fp16", None
    if not device.sdk:
        return "no-sdk", None
    if needs.npu_room(device) < needs.record_bytes:
        return "npu-memory", None
    if not binaries:  # `htp` is the only target there is
        return "no-binary", None
    alike = [each for each in binaries if each.architecture == device.architecture]
    if not alike:
        return "other-architecture", binaries[0]
    fitting = next((each for each in alike if each.soc_model == device.soc_model), None)
    if fitting is None:
        return "other-chip", alike[0]
    made, has = sdk_numbers(fitting.sdk), sdk_numbers(device.sdk)
    return "newer-sdk" if made > has else "same-sdk" if made == has else "older-sdk", fitting


def _sections(container: Container, manifest: Manifest, used: Binary | None) -> tuple[tuple[int, int], ...]:
    """What a device needs: all that is neither free, nor a binary it does not use, nor a graph in the one it uses."""
    compiled = {(graph.role, graph.shape_class) for graph in used.graphs} if used else set()
    unneeded = {
        *((SectionType.BINARY, each.section) for each in manifest.binaries if each != used),
        *((SectionType.GRAPH, each.section) for each in manifest.graphs if (each.role, each.shape_class) in compiled),
    }
    return tuple(
        (entry.type, entry.id)
        for entry in container.entries
        if entry.type != SectionType.FREE and (entry.type, entry.id) not in unneeded
    )
