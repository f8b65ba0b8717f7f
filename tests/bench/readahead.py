"""How much the kernel reads ahead of mapped pages of a file: a setting of the device that the file is on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


def readahead(file: Path) -> str:
    """The setting for a file, in words."""
    setting = _setting(file)
    return f"{setting.read_text().strip()} KiB" if setting.exists() else "not known"


def can_change(file: Path) -> bool:
    """Whether this process may change the setting for a file."""
    return os.access(_setting(file), os.W_OK)


@contextmanager
def changed(file: Path, kib: int | None) -> Iterator[None]:
    """Another setting for a file, and all others on its device, opened meanwhile; put back whatever happens.

    Told to end meanwhile, the process ends as by an error, so that what it runs and has made goes with it.

    Args:
        file: which one.
        kib: KiB; None leaves the setting as it is.
    """
    setting, ends = _setting(file), (signal.SIGTERM, signal.SIGHUP)
    before = None if kib is None else setting.read_text()
    handlers = {each: signal.signal(each, _leave) for each in ends}
    try:
        if kib is not None:
            setting.write_text(str(kib))
        yield
    finally:
        if before is not None:
            setting.write_text(before)
        for each, handler in handlers.items():
            signal.signal(each, handler)


def _setting(file: Path) -> Path:
    device = file.stat().st_dev
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    whole = folder if (folder / "queue").is_dir() else folder.parent  # partitions have no queue of their own
    return whole / "queue" / "read_ahead_kb"


def _leave(number: int, frame: FrameType | None) -> None:
    """End as an error does, by which everything is put back."""
    sys.exit(128 + number)
