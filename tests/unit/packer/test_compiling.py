"""Binaries put into packages and taken out, in place. Proves EMOE-EDT-003 where the file id changes."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from estream_loader import Package, open_package
from estream_loader.integrity import check_padding, notices, verify
from estream_packer.compiling import compile_changes, decompile_changes
from estream_packer.editing import Changes, edit_package
from estream_packer.htp.targets import Target
from estream_spec.chips import chip_named
from estream_spec.constants import SectionFlag, SectionType
from estream_spec.errors import PackError
from fixtures.edits import die_at_every_write, edited, failing
from fixtures.made import made_for
from fixtures.packages import Draft, Section
from fixtures.readers import loader_answer, second_answer

OLD = Draft().seal()
Binaries = dict[str, tuple[int, bytes]]


def adding(*targets: Target) -> Callable[[Package], Changes]:
    return lambda package: compile_changes(package, targets)


def removing(*chips: str) -> Callable[[Package], Changes]:
    return lambda package: decompile_changes(package, [chip_named(chip) for chip in chips])


def binaries(source: Path | bytes) -> Binaries:
    """Section and bytes of each binary of a package that is proven, by SoC and SDK."""
    with open_package(source) as package:
        verify(package)
        check_padding(package)
        assert notices(package) == []
        return {
            f"{each.soc_model} {each.sdk}": (each.section, bytes(package.binary(each)))
            for each in package.manifest.binaries
        }


def identity(source: Path | bytes) -> tuple[bytes, bytes]:
    with open_package(source) as package:
        return package.file_id, package.manifest.content_id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.emoe"
    path.write_bytes(OLD)
    return path


ONE, TWO = made_for("sm8650"), made_for("sm8750")


def test_both_readers_accept_what_comes_out_and_the_content_is_the_same() -> None:
    found = edited(OLD, adding(ONE, TWO))
    assert binaries(found) == {"57 2.51.1": (0, ONE.compiled.data), "69 2.51.1": (1, TWO.compiled.data)}
    assert loader_answer(found) == second_answer(found)
    assert loader_answer(found)[0] == "accepted"
    (old_file, old_content), (new_file, new_content) = identity(OLD), identity(found)
    assert old_file != new_file
    assert old_content == new_content


def test_one_by_one_comes_to_the_same_as_all_at_once() -> None:
    at_once, one_by_one = edited(OLD, adding(ONE, TWO)), edited(edited(OLD, adding(ONE)), adding(TWO))
    with open_package(at_once) as first, open_package(one_by_one) as second:
        assert first.manifest == second.manifest


def test_the_binary_for_the_same_chip_is_replaced_and_others_stay() -> None:
    both = edited(OLD, adding(ONE, TWO))
    found = binaries(edited(both, adding(made_for("sm8650", 2))))
    assert found == {
        "57 2.51.2": (0, made_for("sm8650", 2).compiled.data),
        "69 2.51.1": (1, TWO.compiled.data),
    }
    assert list(found) == ["57 2.51.2", "69 2.51.1"]


def test_what_is_there_already_is_left_alone(path: Path) -> None:
    edit_package(path, adding(ONE, TWO))
    before = path.read_bytes()
    _, changes = edit_package(path, adding(TWO, ONE))
    assert not changes
    assert path.read_bytes() == before
    _, changes = edit_package(path, adding(ONE, made_for("sm8750", 2)))
    assert [(each.type, each.id) for each in changes.add] == [(SectionType.BINARY, 1), (SectionType.MANIFEST, 0)]
    assert list(binaries(path)) == ["57 2.51.1", "69 2.51.2"]


def test_other_bytes_or_another_compiler_are_something_else(path: Path) -> None:
    edit_package(path, adding(ONE))
    for changed in (replace(ONE.compiled, data=b"other bytes"), replace(ONE.compiled, compiler="another")):
        _, changes = edit_package(path, adding(replace(ONE, compiled=changed)))
        assert changes
    with open_package(path) as package:
        [binary] = package.manifest.binaries
        assert (binary.compiler, package.binary(binary)) == ("another", ONE.compiled.data)


def test_a_binary_that_is_stored_compressed_is_put_in_as_it_is() -> None:
    with open_package(edited(OLD, adding(ONE))) as package:
        manifest = package.manifest
    draft = Draft()
    draft.change_manifest(binaries=manifest.binaries)
    draft.sections.append(Section(SectionType.BINARY, ONE.compiled.data))
    draft.sections[-1].compress()
    assert binaries(edited(draft.seal(), adding(ONE))) == {"57 2.51.1": (0, ONE.compiled.data)}


def test_chips_of_one_number_and_different_versions_are_different() -> None:
    found = edited(OLD, adding(made_for("soc52-v73"), made_for("soc60-v75")))
    assert len(binaries(edited(found, removing("soc52-v73")))) == 1
    assert len(binaries(edited(found, adding(made_for("soc52-v73", 2))))) == 2


def test_what_is_taken_out_is_gone_and_its_number_is_used_again() -> None:
    both = edited(OLD, adding(ONE, TWO))
    assert binaries(edited(both, removing("sm8650"))) == {"69 2.51.1": (1, TWO.compiled.data)}
    assert binaries(edited(both, removing("sm8650", "sm8750"))) == {}
    third = made_for("sm8850")
    assert binaries(edited(edited(both, removing("sm8650")), adding(third))) == {
        "69 2.51.1": (1, TWO.compiled.data),
        "87 2.51.1": (0, third.compiled.data),
    }
    with open_package(edited(both, removing("sm8650", "sm8750"))) as package, open_package(OLD) as before:
        assert package.manifest == before.manifest


def test_what_is_not_there_cannot_be_taken_out(path: Path) -> None:
    with pytest.raises(PackError) as refusal:
        edit_package(path, removing("sm8750"))
    assert refusal.value.message == "no binary for Snapdragon 8 Elite (sm8750, Hexagon v79)"
    assert (refusal.value.path, refusal.value.hint) == (str(path), "there are no binaries at all")
    assert path.read_bytes() == OLD
    edit_package(path, adding(ONE))
    before = path.read_bytes()
    with pytest.raises(PackError) as refusal:
        edit_package(path, removing("sm8650", "sm8750"))
    assert refusal.value.message == "no binary for Snapdragon 8 Elite (sm8750, Hexagon v79)"
    assert refusal.value.hint == "there are binaries for Snapdragon 8 Gen 3 (sm8650, Hexagon v75)"
    assert path.read_bytes() == before


def test_sections_that_nobody_says_are_safe_to_copy_are_dropped() -> None:
    """EMOE-EDT-003: their bytes may be about what has changed."""
    draft = Draft()
    kinds = SectionFlag(0), SectionFlag.SAFE_TO_COPY, SectionFlag.UNSIGNED
    for number, flags in enumerate((*kinds, SectionFlag.SAFE_TO_COPY | SectionFlag.UNSIGNED)):
        draft.sections.append(Section(99, b"unknown" * 9, id=number, flags=flags))
    found = edited(draft.seal(), adding(ONE))
    assert loader_answer(found)[0] == second_answer(found)[0] == "accepted"
    with open_package(found) as package:
        assert [entry.id for entry in package.container.entries if entry.type == 99] == [1, 3]


def test_signatures_of_the_old_file_are_given_up() -> None:
    draft = Draft()
    draft.sections.append(Section(SectionType.SIGNATURE, b"of some algorithm" * 9))
    data = draft.seal()
    for decide in (adding(ONE), adding(ONE, TWO)):
        with open_package(edited(data, decide)) as package:
            assert not [entry for entry in package.container.entries if entry.type == SectionType.SIGNATURE]


def test_the_same_targets_make_the_same_bytes() -> None:
    assert edited(OLD, adding(ONE, TWO)) == edited(OLD, adding(made_for("sm8650"), made_for("sm8750")))


def test_many_edits_leave_a_short_directory(path: Path) -> None:
    counts = set()
    for release in range(5):
        edit_package(path, adding(made_for("sm8650", release)))
        with open_package(path) as package:
            counts.add(len(package.container.entries))
    assert len(counts) <= 2
    assert list(binaries(path)) == ["57 2.51.4"]


def test_more_binaries_than_a_package_holds_are_refused(path: Path) -> None:
    targets = [made_for(f"soc{number}-v73") for number in range(100, 165)]
    with pytest.raises(
        PackError, match=r"the result would be refused: .*binaries|the result would be refused: .* length <= 64"
    ):
        edit_package(path, adding(*targets))
    assert path.read_bytes() == OLD
    edit_package(path, adding(*targets[:64]))
    assert len(binaries(path)) == 64


@pytest.mark.parametrize("before", [OLD, edited(OLD, adding(made_for("sm8650", 7), TWO))], ids=["first", "another"])
def test_killed_at_every_write(path: Path, before: bytes) -> None:
    path.write_bytes(before + b"left by an editor that died")
    old, new = binaries_of(before), binaries_of(edited(before, adding(ONE)))
    outcomes = []
    for copy in die_at_every_write(path, compile_changes, [ONE]):
        found = binaries_of(copy)
        assert found in (old, new)
        outcomes.append(found == new)
        edit_package(copy, adding(made_for("sm8650", 3)))
        assert "57 2.51.3" in binaries(copy)
    assert outcomes == sorted(outcomes)
    assert (outcomes[0], outcomes[-1]) == (False, True)


def binaries_of(source: Path | bytes) -> Binaries:
    """Those of a package that may have bytes behind its end."""
    with open_package(source) as package:
        verify(package)
        return {
            f"{each.soc_model} {each.sdk}": (each.section, bytes(package.binary(each)))
            for each in package.manifest.binaries
        }


@pytest.mark.parametrize("number", range(1, 9))
def test_a_disk_that_is_full_at_any_write(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    path.write_bytes(OLD + b"left by an editor that died")
    with monkeypatch.context() as patched:
        failing(patched, number, errno.ENOSPC)
        with pytest.raises(PackError, match="no space left on device") as refusal:
            edit_package(path, adding(ONE))
    assert refusal.value.hint == "free some space there"
    done = refusal.value.message.startswith("package is edited, but its second superblock cannot be written")
    assert binaries_of(path) == (binaries_of(edited(OLD, adding(ONE))) if done else {})
    assert done == (number > 6)
    edit_package(path, adding(made_for("sm8650", 2)))
    assert list(binaries(path)) == ["57 2.51.2"]


def test_nothing_is_added_where_the_package_is_refused(path: Path) -> None:
    bad = OLD[:-1] + b"\1"
    path.write_bytes(bad)
    with pytest.raises(ValueError, match="digest"):
        edit_package(path, partial(compile_changes, targets=[ONE]))
    assert path.read_bytes() == bad
