"""Compiles the native kernel, one shared library for each path.

Building loads this file by itself, where nothing else of the project can be imported; therefore it raises errors of
Python's own.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from estream_runtime.native.paths import KernelPath

SOURCE: Final = Path(__file__).with_name("kernel.c")

_COMPILERS: Final = ("cc", "gcc", "clang")
_FLAGS: Final = (
    *("-O3", "-std=gnu11", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # Nobody asks C for errno or for floating-point exceptions, and loops that need not keep them become vectors.
    *("-fno-math-errno", "-fno-trapping-math"),
)


def find_compiler() -> tuple[str, ...]:
    """The command that compiles C here: what `CC` says, which may have arguments, or else the first that is found.

    Raises:
        FileNotFoundError: there is none, or not the one that `CC` names.
    """
    try:
        named = tuple(shlex.split(os.environ.get("CC", "")))
    except ValueError as error:
        raise FileNotFoundError(f"no C compiler {os.environ['CC']!r}, which CC names: {error}") from None
    if named:
        if shutil.which(named[0]) is None:
            raise FileNotFoundError(f"no C compiler {named[0]!r}, which CC names")
        return named
    for command in _COMPILERS:
        if shutil.which(command) is not None:
            return (command,)
    raise FileNotFoundError(f"no C compiler, looked for: {', '.join(_COMPILERS)}")


def compile_path(path: KernelPath, output: Path, compiler: Sequence[str], extra: Sequence[str] = ()) -> None:
    """Compile the kernel for one path into a shared library.

    Args:
        path: which.
        output: where the library goes.
        compiler: the command, such as `find_compiler` gives.
        extra: more flags, such as for a sanitizer.

    Raises:
        ChildProcessError: the compiler refused, with what it said.
        OSError: it cannot be started.
    """
    # Under its name only when it is whole: who loads half a library is ended by the system.
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    command = [*compiler, *_FLAGS, *path.flags, path.define, *extra, "-o", str(unfinished), str(SOURCE), "-lm"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, errors="replace")  # noqa: S603
        if finished.returncode:
            raise ChildProcessError(finished.stderr.strip() or f"{compiler[0]} ended with status {finished.returncode}")
        if not unfinished.exists():
            raise ChildProcessError(f"{compiler[0]} wrote nothing")
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)


def compile_paths(paths: Sequence[KernelPath], folder: Path, compiler: Sequence[str]) -> dict[str, str]:
    """Compile the kernel for every path that the compiler knows the instructions of; an old one may not know all.

    Args:
        paths: which; the last is the plain one, without which no other is of use.
        folder: where the libraries go.
        compiler: the command, such as `find_compiler` gives.

    Returns:
        What the compiler said of each path that it refused, by the name of the path.

    Raises:
        OSError: it compiles not even the last.
    """
    *faster, plain = paths
    compile_path(plain, folder / plain.library, compiler)
    refused = {}
    for path in faster:
        try:
            compile_path(path, folder / path.library, compiler)
        except ChildProcessError as error:
            refused[path.name] = str(error)
    return refused
