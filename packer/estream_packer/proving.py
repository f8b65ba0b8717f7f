"""Proves a package for the verbs that ask for every byte, with a progress bar."""

from __future__ import annotations

from estream_loader import Package
from estream_loader.integrity import check_padding, verify, verify_length
from estream_loader.progress import open_progress
from estream_spec.constants import SectionType


def prove(package: Package) -> int:
    """Prove every byte; returns how many there are. What is in free sections means nothing.

    Raises:
        FormatError: the first fault.
    """
    with open_progress() as progress:
        progress.begin("verifying", verify_length(package))
        verify(package, progress.advance)
    check_padding(package)
    free = sum(entry.stored_length for entry in package.container.entries if entry.type == SectionType.FREE)
    return package.container.superblock.file_length - free
