"""A match in words: why, with both sides named, and what can be done about it."""

from __future__ import annotations

from shlex import quote
from typing import Final

from estream_spec.chips import OLDEST_ARCHITECTURE, chip_numbered
from estream_spec.manifest import Binary
from estream_spec.matching import Match, Needs

_ON_CPU: Final = "the portable graphs run on its CPU"


def explain(found: Match) -> str:
    """Why a match is what it is. Where it is about a binary, both sides are named: chip, architecture and SDK."""
    device, needs = found.device, found.needs
    if found.judged is not None:
        return f"{_binary_text(found.judged)}; the device is {device}"
    match found.reason:
        case "page-size":
            pages = f"the package has pages of {needs.page_bytes} bytes"
            return f"{pages}, expected a multiple of the device's, which have {device.page_bytes}"
        case "memory":
            return _too_small(f"memory of {device.memory_bytes} bytes", needs.memory_room(device), needs)
        case "npu-memory":
            return f"{_too_small('the NPU', needs.npu_room(device), needs)}; {_ON_CPU}"
        case "no-npu":
            return f"no NPU is known on the device; {_ON_CPU}"
        case "no-fp16":
            return f"the device is {device}, and fp16 begins with Hexagon v{OLDEST_ARCHITECTURE}; {_ON_CPU}"
        case "no-binary":
            return f"the package has no binary for any NPU; the device is {device}"
        case _:
            return f"the device is {device}; {_ON_CPU}"


def advice(found: Match, package: str) -> str | None:
    """What can be done where a package does not use the device's NPU or is refused; None where that is nothing.

    Args:
        found: what it is to the device.
        package: the package's path.
    """
    device = found.device
    target = f"htp:{chip_numbered(device.soc_model, device.architecture).name}"
    compile_ = f"estream-pack compile {quote(package)} --target {target}"
    if found.reason == "newer-sdk":
        assert found.judged is not None
        newer = found.judged.sdk
        return f"give the device SDK {newer} or later, or compile with its own: {compile_}"
    if found.verdict == "recompile":
        return f"compile for it: {compile_}"
    if found.reason == "page-size":
        return f"build it with page_shift = {device.page_bytes.bit_length() - 1} in the recipe"
    if found.reason == "memory":
        return "give it more memory, or build it with fewer bits"
    if found.reason == "no-sdk":
        return "the vendor's library comes with pip install 'estream-pack[npu]'"
    return None


def _binary_text(binary: Binary) -> str:
    chip = chip_numbered(binary.soc_model, binary.architecture)
    return f"the binary of section {binary.section} is for {chip}, SDK {binary.sdk}"


def _too_small(what: str, room: int, needs: Needs) -> str:
    beside = f"beside {needs.dense_bytes} bytes of dense weights"
    return f"{what} leaves {max(room, 0)} bytes for the arena {beside}, expected {needs.record_bytes} for one expert"
