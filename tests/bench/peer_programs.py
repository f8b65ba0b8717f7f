"""Get the programs that ours is compared with: sources from PyPI, built here for this very processor, each once.

Their own tools are all that is built. Versions are pinned, so that figures stay comparable. Needs pip, cmake and
a compiler of C and C++; takes about twenty minutes on two cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

FOLDER: Final = Path("build", "peers")
FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",  # so that what was built can be moved
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
)
"""What cmake is told of every program."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A program to compare with.

    Attributes:
        name: of the program.
        distribution: on PyPI, whose source archive has the program's sources in it.
        version: of the distribution.
        sources: folder of the program in that archive.
        flags: more that cmake is told.
        missing: files that its sources need and the archive lacks, by path.
    """

    name: str
    distribution: str
    version: str
    sources: str
    flags: tuple[str, ...]
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def release(self) -> str:
        """Which sources these are."""
        return f"{self.name} of {self.distribution} {self.version}"

    @property
    def folder(self) -> Path:
        """Where it is built."""
        return FOLDER / f"{self.name}-{self.version}"


class UnavailableError(Exception):
    """A program could not be got, and why."""


LLAMA: Final = Peer(
    "llama.cpp",
    "llama-cpp-python",
    "0.3.36",
    "vendor/llama.cpp",
    ("-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_TOOLS=ON"),
)
IK: Final = Peer(
    "ik_llama.cpp",
    "ik-llama-cpp-python",
    "0.1.5",
    "vendor/ik_llama.cpp",
    ("-DLLAMA_BUILD_EXAMPLES=ON", "-DGGML_IQK_FA_ALL_QUANTS=OFF"),
    {
        # The build makes it by a script of a name that archives leave out.
        "common/build-info.cpp": "int LLAMA_BUILD_NUMBER = 0;\n"
        'char const *LLAMA_COMMIT = "unknown", *LLAMA_COMPILER = "unknown", *LLAMA_BUILD_TARGET = "unknown";\n'
    },
)


def bench_program(peer: Peer, name: str = "llama-bench") -> Path:
    """The `llama-bench` of a program, or another tool of it, built unless it is there.

    Raises:
        UnavailableError: it could not be fetched or built.
    """
    program = peer.folder / "build" / "bin" / name
    if not program.exists():
        sources = _sources(peer)
        print(f"building {peer.name}, which takes minutes", file=sys.stderr)
        build = ["-S", str(sources), "-B", str(peer.folder / "build")]
        _run(peer, "cmake", *build, *FLAGS, *peer.flags)
        jobs = str(os.cpu_count() or 1)
        _run(peer, "cmake", "--build", build[-1], "--target", name, "--parallel", jobs)
    return program.resolve()


def converter(peer: Peer) -> Path:
    """The script of a program that makes a GGUF file of a checkpoint, fetched unless it is there.

    Raises:
        UnavailableError: it could not be fetched.
    """
    return (_sources(peer) / "convert_hf_to_gguf.py").resolve()


def on_demand_library(peer: Peer) -> Path:
    """A library which, loaded ahead of a program, makes its mapped files come in as they are touched and not before.

    Raises:
        UnavailableError: it could not be built.
    """
    library = FOLDER / "on_demand.so"
    source = Path(__file__).with_name("on_demand.c")
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        _run(peer, "cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library))
    return library.resolve()


def _sources(peer: Peer) -> Path:
    """The folder of a program's sources, fetched unless it is there."""
    folder = peer.folder / "sources"
    if not folder.exists():
        peer.folder.mkdir(parents=True, exist_ok=True)
        wanted = f"{peer.distribution}=={peer.version}"
        options = ["--no-deps", "--no-binary", peer.distribution, "--dest", str(peer.folder)]
        _run(peer, sys.executable, "-m", "pip", "download", *options, wanted)
        archive = next(peer.folder.glob("*.tar.gz"))
        unpacked = peer.folder / "unpacking"
        shutil.rmtree(unpacked, ignore_errors=True)
        with tarfile.open(archive) as opened:
            opened.extractall(unpacked, _under(opened, PurePosixPath(peer.sources)), filter="data")
        for path, text in peer.missing.items():
            (unpacked / path).write_text(text)
        unpacked.rename(folder)
        archive.unlink()
    return folder


def _under(archive: tarfile.TarFile, folder: PurePosixPath) -> Iterator[tarfile.TarInfo]:
    """What an archive has in a folder of its top folder, by its path from there."""
    for member in archive:
        inner = PurePosixPath(*PurePosixPath(member.name).parts[1:])
        if inner != folder and inner.is_relative_to(folder) and (member.isfile() or member.isdir()):
            yield member.replace(name=str(inner.relative_to(folder)), deep=False)


def _run(peer: Peer, *command: str) -> None:
    """Run a command, what it says going to a file beside what it makes."""
    log = peer.folder / "log.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    if shutil.which(command[0]) is None:
        raise UnavailableError(f"{peer.name}: {command[0]} is not installed")
    with log.open("a") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        raise UnavailableError(f"{peer.name}: {' '.join(command[:3])} ended with {done.returncode}, see {log}")
