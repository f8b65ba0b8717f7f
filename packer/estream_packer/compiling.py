"""Puts graphs compiled for accelerators into a package and takes them out, in place. FORMAT.md section 10.3."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count

from msgspec.structs import replace

from estream_loader import Package
from estream_packer.editing import Changes, NewSection
from estream_packer.htp.targets import Target
from estream_spec.chips import Chip, chip_numbered
from estream_spec.constants import SectionType
from estream_spec.errors import PackError
from estream_spec.manifest import Binary, Manifest
from estream_spec.messagepack import encode


def compile_changes(package: Package, targets: Sequence[Target]) -> Changes:
    """What an edit does that puts binaries into a package, in place of those for the same chips."""
    kept, gone = _by_chip(package, [each.chip for each in targets])
    taken = {each.section for each in kept}
    free = (number for number in count() if number not in taken)
    added = [(each.binary(section), each.compiled.data) for each, section in zip(targets, free, strict=False)]
    sections = [NewSection(type=SectionType.BINARY, id=binary.section, data=data) for binary, data in added]
    return _changes(package, [*kept, *(binary for binary, _ in added)], sections, gone)


def decompile_changes(package: Package, chips: Sequence[Chip]) -> Changes:
    """What an edit does that takes binaries out.

    Raises:
        PackError: the package has none for one of the chips.
    """
    kept, gone = _by_chip(package, chips)
    missing = [str(chip) for chip in chips if not any(_is_for(binary, chip) for binary in gone)]
    if missing:
        has = ", ".join(str(chip_numbered(each.soc_model, each.architecture)) for each in kept) or "none"
        raise PackError(f"no binary for {', '.join(missing)}", path=package.source.name, hint=f"there are: {has}")
    return _changes(package, kept, [], gone)


def _changes(
    package: Package, binaries: Sequence[Binary], sections: Sequence[NewSection], gone: Collection[Binary]
) -> Changes:
    manifest: Manifest = replace(package.manifest, binaries=tuple(binaries))
    sections = [*sections, NewSection(type=SectionType.MANIFEST, id=0, data=encode(manifest))]
    stale = {(SectionType.BINARY, each.section) for each in gone} | {(SectionType.MANIFEST, 0)}
    remove = [entry for entry in package.container.entries if (entry.type, entry.id) in stale]
    return Changes(add=sections, remove=remove)


def _by_chip(package: Package, chips: Sequence[Chip]) -> tuple[list[Binary], list[Binary]]:
    """The binaries for other chips, and those for these."""
    binaries = package.manifest.binaries
    gone = [each for each in binaries if any(_is_for(each, chip) for chip in chips)]
    return [each for each in binaries if each not in gone], gone


def _is_for(binary: Binary, chip: Chip) -> bool:
    return (binary.soc_model, binary.architecture) == (chip.soc_model, chip.architecture)
