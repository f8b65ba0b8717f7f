"""The program that takes this loader through the conformance suite. LOADER-CLI.md.

python -m estream_loader.verdict PATH [--offset N] [--key HEX]... [--minimum-counter N] [--detached FILE]...
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgspec

from estream_loader.integrity import check_padding, verify
from estream_loader.package import Package, open_package
from estream_loader.records import RecordPlace, RecordSection
from estream_loader.source import read
from estream_loader.trust import SignaturePolicy
from estream_spec.constants import KNOWN_SECTIONS, SectionFlag, SectionType
from estream_spec.errors import EmoeError, FormatError, TrustError
from estream_spec.records import DirectoryEntry, Structure

CANNOT_JUDGE: Final = 3
CRASHED: Final = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge one package, print the verdict, and return the exit status."""
    parser = argparse.ArgumentParser(prog="estream_loader.verdict", description="Judge one package.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--key", type=bytes.fromhex, action="append", default=[])
    parser.add_argument("--minimum-counter", type=int, default=0)
    parser.add_argument("--detached", type=Path, action="append", default=[])
    given = parser.parse_args(arguments)
    detached = tuple(path.read_bytes() for path in given.detached)
    policy = SignaturePolicy(tuple(given.key), given.minimum_counter, detached) if given.key else None
    status, text = judge(given.path, given.offset, policy)
    sys.stdout.buffer.write(f"{text}\n".encode())
    return status


def judge(source: Path | bytes, offset: int = 0, policy: SignaturePolicy | None = None) -> tuple[int, str]:
    """The verdict on a package.

    Args:
        source: the file or its bytes.
        offset: where the package begins.
        policy: who must have signed it.

    Returns:
        Exit status and the line to print.

    Raises:
        EmoeError: nothing can be said of the package, as when the file is not there.
    """
    try:
        with open_package(source, offset=offset, policy=policy, integrity="paged") as package:
            return 0, describe(package)
    except (FormatError, TrustError) as error:
        return 1, json.dumps({"class": error.slug, "rule": error.rule, "message": str(error)})


def describe(package: Package) -> str:
    """Prove all of a package and say what was read of it, as canonical JSON.

    Raises:
        FormatError: the package is refused.
    """
    verify(package)
    check_padding(package)
    added = len(package.device_configurations) - len(package.manifest.device_configurations)
    value = {
        "file_id": package.file_id,
        "superblock": _structure(package.container.superblock),
        "sections": [
            {**_structure(entry), "content_sha256": _content_digest(package, entry)}
            for entry in package.container.entries
        ],
        "manifest": package.manifest,
        "device_configurations": package.device_configurations[:added],
        "schedules": [_structure(program.header) for program in package.schedules.values()],
        "signatures": [_structure(signature) for signature in package.signatures()],
        "dense": _records(package, package.dense),
        "experts": _records(package, package.experts),
    }
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _structure(structure: Structure) -> dict[str, Any]:
    """Fields of a structure by name."""
    return {each.name: getattr(structure, each.name) for each in fields(structure) if each.name != "magic"}  # type: ignore[arg-type]


def _content_digest(package: Package, entry: DirectoryEntry) -> bytes | None:
    """SHA-256 of what a section holds, where it is read whole."""
    if entry.type not in KNOWN_SECTIONS or entry.type == SectionType.FREE or entry.flags & SectionFlag.RECORDS:
        return None
    return sha256(package.read_section(entry)).digest()


def _records(package: Package, section: RecordSection) -> list[list[dict[str, Any]]]:
    return [
        [_record(package, section.place(number, index), record_range.layout) for index in range(record_range.count)]
        for number, record_range in enumerate(section.table.ranges)
    ]


def _record(package: Package, place: RecordPlace, layout: int) -> dict[str, Any]:
    tensors = [
        {
            "name": tensor.name,
            "offset": place.offset + tensor.offset,
            "sha256": sha256(read(package.source, place.offset + tensor.offset, tensor.length)).digest(),
        }
        for tensor in place.layout.tensors
    ]
    about = {"offset": place.offset, "length": place.length, "checksum": place.checksum, "sha256": place.digest}
    return {**about, "layout": layout, "tensors": tensors}


def _plain(value: Any) -> Any:
    """A value as the JSON has it: structs with all their keys, bytes and floats as hexadecimal digits."""
    match value:
        case msgspec.Struct():
            keys = msgspec.structs.asdict(value)
            if "extensions" in keys:
                keys["extensions"] = list(keys["extensions"].items())
            return _plain(keys)
        case bytes():
            return value.hex()
        case float():
            return struct.pack(">d", value).hex()
        case dict():
            return {name: _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
    return value


if __name__ == "__main__":
    try:
        status = main()
    except (EmoeError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        status = CANNOT_JUDGE
    except Exception:  # which would end the program with the status of a refusal
        traceback.print_exc()
        status = CRASHED
    sys.exit(status)
