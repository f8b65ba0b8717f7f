"""The paths of the native kernel: the instruction sets for which its one C file is compiled.

Building loads this file by itself, where nothing else of the project can be imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_X86: Final = ("x86_64", "amd64")
_ARM: Final = ("aarch64", "arm64")


@dataclass(frozen=True, slots=True)
class KernelPath:
    """One way through the kernel.

    Attributes:
        name: what the kernel calls it.
        machines: names of the machines that may have its instructions, in lower case; none where every machine has.
        flags: compiler flags that allow those instructions.
    """

    name: str
    machines: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def define(self) -> str:
        """The compiler flag that tells the C file which path it is compiled for."""
        return f"-DPATH_{self.name.upper()}"

    @property
    def library(self) -> str:
        """Name of its library, of one spelling on every system: libraries are loaded by their whole path."""
        return f"kernel-{self.name}.so"


PLAIN: Final = KernelPath("plain", (), ())
"""Runs everywhere, and says which of the others run here."""

PATHS: Final = (
    KernelPath("avx512vnni", _X86, ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mavx2", "-mfma")),
    KernelPath("avxvnni", _X86, ("-mavx2", "-mfma", "-mavxvnni")),
    KernelPath("avx2", _X86, ("-mavx2", "-mfma")),
    KernelPath("i8mm", _ARM, ("-march=armv8.2-a+dotprod+i8mm",)),
    KernelPath("dotprod", _ARM, ("-march=armv8.2-a+dotprod",)),
    PLAIN,
)
"""Every path, the fastest first."""


def paths_of(machine: str) -> tuple[KernelPath, ...]:
    """The paths to compile for a machine, the fastest first.

    Args:
        machine: what `platform.machine()` calls it, such as `x86_64`, `AMD64` or `aarch64`.
    """
    return tuple(path for path in PATHS if not path.machines or machine.lower() in path.machines)
