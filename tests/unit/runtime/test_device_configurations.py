"""Sessions of a device with configurations for several lengths of the prompt, all in one arena."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from estream_loader import open_package
from estream_packer.configuring import configure_changes
from estream_packer.editing import edit_package
from estream_runtime import Session
from estream_spec.errors import LinkError
from estream_spec.manifest import DeviceConfiguration, PolicyName
from estream_spec.schedule import BankState
from fixtures.olmoe import EXPERTS, LAYERS, token_ids
from fixtures.packed import PackageFactory

RECORD = 16384
SHORT, MIDDLE, LONG = token_ids("short", 5), token_ids("middle", 40), token_ids("long", 150)


def configuration(
    prompt_tokens: int, group_size: int, prefetch_depth: int, policy: PolicyName, lanes: int = 2
) -> DeviceConfiguration:
    return DeviceConfiguration(
        name="phone",
        arena_bytes=group_size * (prefetch_depth + 1) * RECORD,
        group_size=group_size,
        prefetch_depth=prefetch_depth,
        lanes=lanes,
        policy=policy,
        prompt_tokens=prompt_tokens,
    )


PAGED = (
    configuration(8, 1, 0, "on-demand"),
    configuration(64, 2, 2, "post-routing", 5),
    configuration(512, 5, 1, "pre-routing"),
)
RESIDENT_WHEN_SHORT = (configuration(64, 1, EXPERTS * LAYERS - 1, "resident"), configuration(512, 3, 1, "pre-routing"))
RESIDENT_IN_TWO_WAYS = (
    configuration(8, 1, EXPERTS * LAYERS - 1, "resident"),
    configuration(64, EXPERTS, LAYERS - 1, "resident"),
    configuration(0, 4, 0, "on-demand"),
)
DEVICES = {
    "paged": PAGED,
    "resident when short": RESIDENT_WHEN_SHORT,
    "resident in two ways": RESIDENT_IN_TWO_WAYS,
}


def configured(path: Path, folder: Path, choices: Sequence[DeviceConfiguration]) -> Path:
    copy = folder / "configured.emoe"
    shutil.copy(path, copy)
    edit_package(copy, lambda package: configure_changes(package, choices))
    return copy


@pytest.fixture(params=DEVICES)
def choices(request: pytest.FixtureRequest) -> tuple[DeviceConfiguration, ...]:
    return DEVICES[request.param]


@pytest.fixture
def session(choices: tuple[DeviceConfiguration, ...], packed: PackageFactory, tmp_path: Path) -> Iterator[Session]:
    with open_package(configured(packed(), tmp_path, choices)) as package, Session(package, threads=1) as opened:
        yield opened


@pytest.fixture
def expected(packed: PackageFactory) -> dict[int, npt.NDArray[np.float32]]:
    """Logits of each prompt, by its length, in an arena of another device."""
    with open_package(packed()) as package, Session(package, threads=1, arena_bytes=3 * RECORD) as opened:
        return {len(prompt): opened.forward(prompt) for prompt in (SHORT, MIDDLE, LONG)}


def test_each_length_runs_as_configured_and_gives_the_same_bits(
    session: Session, choices: tuple[DeviceConfiguration, ...], expected: dict[int, npt.NDArray[np.float32]]
) -> None:
    largest = max(each.arena_bytes for each in choices)
    for prompt in (SHORT, LONG, SHORT, MIDDLE, LONG, MIDDLE, SHORT):
        own = next((each for each in choices if each.prompt_tokens >= len(prompt)), choices[-1])
        stats = session.prefill(prompt).stats
        assert (stats.policy, stats.peak_arena_bytes) == (own.policy, largest)
        assert stats.lanes == max(each.lanes for each in choices)
        assert len(session.interpreter.pager.arena.banks) == own.prefetch_depth + 1
        assert session.interpreter.pager.group_size == own.group_size
        assert np.array_equal(session.forward(prompt), expected[len(prompt)])


@pytest.mark.parametrize("choices", [RESIDENT_WHEN_SHORT])
def test_experts_stay_when_the_arena_is_divided_anew_until_others_take_their_place(session: Session) -> None:
    everything = EXPERTS * LAYERS * RECORD
    assert session.prefill(SHORT).stats.bytes_read == everything
    assert session.prefill(MIDDLE).stats.bytes_read == 0
    assert session.prefill(LONG).stats.bytes_read == 0
    banks = session.interpreter.pager.arena.banks
    assert len(banks) == 2  # of three experts, and what passed through them last lay elsewhere
    assert session.prefill(SHORT).stats.bytes_read == 2 * 3 * RECORD


def test_a_trace_shows_the_banks_of_its_own_configuration(
    session: Session, choices: tuple[DeviceConfiguration, ...]
) -> None:
    for prompt in (SHORT, LONG, MIDDLE, SHORT):
        own = next((each for each in choices if each.prompt_tokens >= len(prompt)), choices[-1])
        trace = session.trace(prompt)
        banks = [name for name in trace.tracks() if name.startswith("bank ")]
        assert len(banks) == own.prefetch_depth + 1
        assert (trace.other_data.group_size, trace.other_data.policy) == (own.group_size, own.policy)


@pytest.mark.parametrize("choices", [RESIDENT_WHEN_SHORT])
def test_what_brings_all_experts_in_is_no_part_of_the_prefill_traced(session: Session) -> None:
    for prompt, resident in ((LONG, False), (SHORT, True)):
        stats = session.trace(prompt).other_data.stats
        assert ("experts" in stats.start_up_s) == resident
        assert (stats.bytes_read == 0) == (stats.pieces == 0) == resident
        assert resident == (stats.activity_s["wait"] == 0)


def test_a_program_of_the_package_runs_for_each_length(
    session: Session, choices: tuple[DeviceConfiguration, ...]
) -> None:
    own = list(session.package.schedules.values())
    assert session._programs.choices == choices
    for programs in map(session._programs.of, choices):
        assert any(programs.many is each for each in own)
        assert programs.load is None or any(programs.load is each for each in own)


def test_text_goes_on_as_configured_for_single_tokens(
    session: Session, choices: tuple[DeviceConfiguration, ...], packed: PackageFactory
) -> None:
    with open_package(packed()) as package, Session(package, threads=1) as other:
        tokens = list(other.generate(LONG, 4))
    assert list(session.generate(LONG, 4)) == tokens
    assert session.interpreter.pager.group_size == choices[0].group_size


def test_a_call_that_fails_leaves_an_arena_that_can_be_divided_anew(
    session: Session, expected: dict[int, npt.NDArray[np.float32]]
) -> None:
    def fail(layer: int, expert_ids: object, weights: object) -> None:
        raise ZeroDivisionError

    for prompt in (SHORT, LONG, MIDDLE):
        with pytest.raises(ZeroDivisionError):
            session.forward(prompt, fail)
        assert all(bank.state is BankState.AVAILABLE for bank in session.interpreter.pager.arena.banks)
    assert np.array_equal(session.forward(SHORT), expected[len(SHORT)])


def test_what_is_asked_for_goes_for_all_lengths(packed: PackageFactory, tmp_path: Path) -> None:
    path = configured(packed(), tmp_path, PAGED)
    with open_package(path) as package:
        with Session(package, lanes=1) as session:
            found = [session.prefill(prompt).stats for prompt in (SHORT, LONG)]
            assert [(each.policy, each.lanes) for each in found] == [("on-demand", 1), ("pre-routing", 1)]
        with Session(package, policy="on-demand") as session:
            found = [session.prefill(prompt).stats for prompt in (SHORT, LONG)]
            assert {(each.policy, each.peak_arena_bytes, each.lanes) for each in found} == {
                ("on-demand", 10 * RECORD, 2)
            }
        with Session(package, arena_bytes=4 * RECORD) as session:
            found = [session.prefill(prompt).stats for prompt in (SHORT, LONG)]
            assert [each.policy for each in found] == ["post-routing", "pre-routing"]
            assert {each.peak_arena_bytes for each in found} == {4 * RECORD}


def test_a_resident_device_in_a_smaller_arena_is_paged(packed: PackageFactory, tmp_path: Path) -> None:
    choice = configuration(0, 1, EXPERTS * LAYERS - 1, "resident")
    with open_package(configured(packed(), tmp_path, [choice])) as package:
        with Session(package, arena_bytes=4 * RECORD) as session:
            assert session.prefill(LONG).stats.policy == "pre-routing"
        with Session(package) as session:
            assert session.prefill(LONG).stats.policy == "resident"


def test_another_device_is_chosen_by_its_name(packed: PackageFactory, tmp_path: Path) -> None:
    with open_package(configured(packed(), tmp_path, PAGED)) as package:
        [generic] = package.manifest.device_configurations
        with Session(package, device="generic") as session:
            assert session.prefill(LONG).stats.peak_arena_bytes == generic.arena_bytes
        with Session(package, device="phone") as session:
            assert session.prefill(LONG).stats.peak_arena_bytes == 10 * RECORD
        with pytest.raises(LinkError, match="no device configuration for 'watch'") as caught:
            Session(package, device="watch")
    assert caught.value.hint == "the package has 'phone', 'generic'"
