"""Which jobs of AI Hub were submitted for what, kept in a small file so that an interrupted run can be taken up."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from estream_spec.errors import PackError, reason

FILE: Final = "aihub.json"
_JOBS: Final = msgspec.json.Decoder(dict[str, str])


def key_of(*parts: str | bytes) -> str:
    """Digest of everything that decides what a job makes."""
    digest = sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class SubmittedJobs:
    """Ids of jobs by the digest of what they make. Every change is on disk before the method returns.

    Attributes:
        path: the file; there is none while no job is known.
    """

    def __init__(self, folder: Path):
        """Reads what an earlier run left.

        Args:
            folder: where the file is kept; made when there is something to keep.

        Raises:
            PackError: the file cannot be read.
        """
        self.path = folder / FILE
        try:
            self._jobs = _JOBS.decode(self.path.read_bytes())
        except FileNotFoundError:
            self._jobs = {}
        except (OSError, msgspec.DecodeError) as error:
            said = reason(error) if isinstance(error, OSError) else str(error)
            message = f"notes of jobs in AI Hub cannot be read: {said}"
            raise PackError(message, path=str(self.path), hint="remove the file to submit everything again") from error

    def __getitem__(self, key: str) -> str | None:
        return self._jobs.get(key)

    def note(self, key: str, job_id: str) -> None:
        """Keep the id of a job.

        Raises:
            PackError: the file cannot be written.
        """
        self._jobs[key] = job_id
        self._write()

    def forget(self, keys: Iterable[str]) -> None:
        """Drop jobs; the file goes with the last one, and its folder if nothing else is there.

        Raises:
            PackError: the file cannot be written.
        """
        for key in keys:
            self._jobs.pop(key, None)
        self._write()

    def _write(self) -> None:
        partial = self.path.with_name(f".{FILE}.{os.getpid()}")
        try:
            if not self._jobs:
                self.path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    self.path.parent.rmdir()
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(self._jobs)))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise PackError(f"notes of jobs in AI Hub cannot be kept: {reason(error)}", path=str(self.path)) from error
