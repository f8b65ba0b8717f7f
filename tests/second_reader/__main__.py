"""The program of LOADER-CLI.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from second_reader.reader import judge


def _public_key(text: str) -> bytes:
    key = bytes.fromhex(text)
    if len(key) != 32:
        raise ValueError("a public key has 32 bytes")
    return key


def main() -> int:
    """Judge the package that the command line names."""
    parser = argparse.ArgumentParser(prog="second_reader")
    parser.add_argument("path", type=Path)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--key", type=_public_key, action="append", default=[])
    parser.add_argument("--minimum-counter", type=int, default=0)
    parser.add_argument("--detached", type=Path, action="append", default=[])
    options = parser.parse_args()
    start: int = options.offset
    try:
        file = options.path.open("rb")
        detached = [path.read_bytes() for path in options.detached]
    except OSError as error:
        parser.error(str(error))
    with file:

        def read(offset: int, length: int) -> bytes:
            file.seek(start + offset)
            data: bytes = file.read(length)
            return data

        status, line = judge(
            read,
            max(file.seek(0, 2) - start, 0),
            keys=options.key,
            minimum_counter=options.minimum_counter,
            detached=detached,
        )
    sys.stdout.buffer.write(line.encode() + b"\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
