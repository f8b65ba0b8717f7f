"""Facts of devices to match packages with: of this machine, and of a chip by itself. MATCHING.md section 2."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final

from estream_runtime.host_memory import usable_memory
from estream_runtime.vendor_sdk import installed_sdk
from estream_spec.chips import Chip, chip_named
from estream_spec.matching import DeviceFacts
from estream_spec.profile import DeviceProfile
from estream_spec.profiles import shipped_profile, shipped_profiles
from estream_spec.workload import RUNTIME_BYTES

KERNEL_NUMBERS: Final = {
    "457": "sm8450",
    "519": "sm8550",
    "557": "sm8650",
    "618": "sm8750",
    "660": "sm8850",
    "555": "x1e80100",
}
"""Linux numbers chips otherwise than the vendor's SDK: `include/dt-bindings/arm/qcom,ids.h` of its sources."""
CHIP_MEMORY_BYTES: Final = 8 << 30
"""Memory of a device of which only the chip is known, if no profile of it comes with this project."""
CHIP_PAGE_BYTES: Final = 4096
"""A page of such a device."""
NPU_BUFFER_BYTES: Final = 1 << 31
"""A buffer that an NPU maps is smaller, unless a profile says otherwise."""
_DEVICES: Final = Path("/sys/devices")


def facts_here(*, chip: Chip | None = None, memory_bytes: int | None = None) -> DeviceFacts:
    """Facts of this machine.

    Args:
        chip: its chip; None takes what the system says, which may be nothing.
        memory_bytes: memory for everything; None takes what this process may use.

    Raises:
        LinkError: the system does not tell how much memory it has.
    """
    memory = usable_memory()[0] if memory_bytes is None else memory_bytes
    return _facts(chip_here() if chip is None else chip, mmap.PAGESIZE, memory)


def facts_of_chip(chip: Chip, *, memory_bytes: int | None = None) -> DeviceFacts:
    """Facts of a device of which the chip is known, with the SDK that is installed here.

    Args:
        chip: its chip.
        memory_bytes: memory for everything; None takes that of the chip's profile.
    """
    profile = profile_of(chip)
    known = profile.memory_bytes if profile else None
    if memory_bytes is None:
        memory_bytes = known.value if known else CHIP_MEMORY_BYTES
    return _facts(chip, CHIP_PAGE_BYTES, memory_bytes)


def weights_memory(memory_bytes: int) -> int:
    """Bytes for weights out of memory for everything, the program taken off; what a prompt needs is not known here."""
    return max(memory_bytes - RUNTIME_BYTES, 0)


def chip_here(devices: Path = _DEVICES) -> Chip | None:
    """The chip of this machine where the system tells one that is known.

    Args:
        devices: where the system tells about its devices.
    """
    for path in sorted(devices.glob("soc*/soc_id")):
        try:
            number = path.read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if number in KERNEL_NUMBERS:
            return chip_named(KERNEL_NUMBERS[number])
    return None


def _facts(chip: Chip | None, page_bytes: int, memory_bytes: int) -> DeviceFacts:
    weights_bytes = weights_memory(memory_bytes)
    if chip is None:
        return DeviceFacts(page_bytes=page_bytes, memory_bytes=weights_bytes, sdk=installed_sdk())
    profile = profile_of(chip)
    npu = profile.npu if profile else None
    return DeviceFacts(
        page_bytes=page_bytes,
        memory_bytes=weights_bytes,
        soc_model=chip.soc_model,
        architecture=chip.architecture,
        sdk=installed_sdk(),
        npu_buffer_bytes=npu.buffer_bytes.value if npu else NPU_BUFFER_BYTES,
        npu_session_bytes=npu.session_bytes.value if npu else None,
        configuration=profile.name if profile else "",
    )


def profile_of(chip: Chip) -> DeviceProfile | None:
    """The chip's profile that comes with this project, if there is one."""
    name = chip.title.lower().replace(" ", "-")
    return shipped_profile(name) if name in shipped_profiles() else None
