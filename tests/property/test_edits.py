"""Edits of any kind, in any order, on packages with any other sections: what must stay stays, what must go goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import event, given, settings
from hypothesis import strategies as st

from estream_loader import Package, open_package
from estream_packer.compiling import compile_changes, decompile_changes
from estream_packer.configuring import configure_changes
from estream_packer.editing import Changes
from estream_packer.signing import sign, signature_changes
from estream_spec.chips import Chip, chip_named, chip_numbered
from estream_spec.constants import KNOWN_SECTIONS, SectionFlag, SectionType
from estream_spec.errors import PackError
from estream_spec.manifest import Binary, DeviceConfiguration
from estream_spec.records import DirectoryEntry
from fixtures.edits import edited
from fixtures.made import made_for
from fixtures.packages import Draft, Section
from fixtures.readers import loader_answer, second_answer

CHIPS = ("sm8650", "sm8750", "soc52-v73")
KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2)]
LOCAL = (SectionType.SIGNATURE, SectionType.DEVICE_CONFIGURATION, SectionType.SCHEDULE)


@dataclass(frozen=True)
class Step:
    """One edit.

    Attributes:
        name: what it is.
        decide: says what to change.
        signed: whether it changes what signatures are for.
        takes_out: the chip whose binary it takes out.
    """

    name: str
    decide: Callable[[Package], Changes]
    signed: bool
    takes_out: Chip | None = None

    def __repr__(self) -> str:
        return self.name


def compiling(chip: str, release: int) -> Step:
    return Step(
        f"compile {chip} {release}", lambda package: compile_changes(package, [made_for(chip, release)]), signed=True
    )


def taking_out(chip: str) -> Step:
    gone = chip_named(chip)
    return Step(f"remove {chip}", lambda package: decompile_changes(package, [gone]), signed=True, takes_out=gone)


def signing(key: Ed25519PrivateKey, counter: int) -> Step:
    return Step(
        f"sign {counter}", lambda package: signature_changes(package, sign(package.file_id, key, counter)), signed=False
    )


def configuring(name: str, depth: int) -> Step:
    choice = DeviceConfiguration(name=name, arena_bytes=1 << 20, group_size=1, prefetch_depth=depth)
    return Step(f"configure {name} {depth}", lambda package: configure_changes(package, [choice]), signed=False)


STEPS = st.one_of(
    st.builds(compiling, st.sampled_from(CHIPS), st.integers(1, 2)),
    st.builds(taking_out, st.sampled_from(CHIPS)),
    st.builds(signing, st.sampled_from(KEYS), st.just(0)),
    st.builds(configuring, st.sampled_from(["phone", "tablet"]), st.integers(0, 1)),
)
UNKNOWN = st.lists(
    st.tuples(
        st.integers(max(KNOWN_SECTIONS) + 1, max(KNOWN_SECTIONS) + 3),
        st.sampled_from([SectionFlag(0), SectionFlag.SAFE_TO_COPY, SectionFlag.UNSIGNED, SectionFlag(6)]),
    ),
    max_size=4,
)


def chip_of(binary: Binary) -> Chip:
    return chip_numbered(binary.soc_model, binary.architecture)


def others(entries: tuple[DirectoryEntry, ...]) -> list[DirectoryEntry]:
    """Sections that an edit can only keep or drop."""
    return [entry for entry in entries if entry.type not in KNOWN_SECTIONS]


@settings(max_examples=40, deadline=None)
@given(UNKNOWN, st.lists(STEPS, min_size=1, max_size=6))
def test_any_edits(unknown: list[tuple[int, SectionFlag]], steps: list[Step]) -> None:
    draft = Draft()
    for number, (section_type, flags) in enumerate(unknown):
        draft.sections.append(Section(section_type, b"unknown %d" % number, id=number, flags=flags))
    data = draft.seal()
    for step in steps:
        with open_package(data) as package:
            missing = step.takes_out is not None and step.takes_out not in map(chip_of, package.manifest.binaries)
        if missing:
            with pytest.raises(PackError, match="no binary for"):
                edited(data, step.decide)
            continue
        after = edited(data, step.decide)
        event(step.name.partition(" ")[0])
        assert loader_answer(after) == second_answer(after)
        assert loader_answer(after)[0] == "accepted"
        with open_package(data) as old, open_package(after) as new:
            assert new.manifest.content_id == old.manifest.content_id
            changed = new.manifest != old.manifest
            assert (new.file_id != old.file_id) == changed
            assert step.signed or not changed
            before = others(old.container.entries)
            if changed:
                assert others(new.container.entries) == [
                    entry for entry in before if entry.flags & SectionFlag.SAFE_TO_COPY
                ]
                assert new.signatures() == []
                assert new.device_configurations == old.device_configurations
            else:
                assert others(new.container.entries) == before
                assert {each.public_key for each in old.signatures()} <= {each.public_key for each in new.signatures()}
            at_home = {entry for entry in old.container.entries if entry.type in KNOWN_SECTIONS - set(LOCAL)}
            stay = {entry for entry in new.container.entries if entry.type in KNOWN_SECTIONS - set(LOCAL)}
            gone = {entry.type for entry in at_home - stay}
            assert gone <= {SectionType.MANIFEST, SectionType.BINARY, SectionType.FREE}
        data = after
