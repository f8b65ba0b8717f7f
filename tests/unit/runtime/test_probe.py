"""Measuring a device: what becomes a profile, and what is refused. No figure is held to a number."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from estream_loader import direct, open_package
from estream_loader.progress import Quiet
from estream_loader.reading import Reader
from estream_packer.planning import package_workload, plan_prompts
from estream_runtime import probe_computing, probe_reading
from estream_runtime.probe import Probe, probe
from estream_runtime.probe_computing import Held, LayerClock, LayerTime, PagedTime, group_seam_s
from estream_runtime.recorder import Timed
from estream_spec.errors import LinkError
from estream_spec.profile import Described, decode_profile, encode_profile
from estream_spec.routing_load import even_shares, expected_load
from estream_spec.schedule import OPERANDS, ExpertShape, Opcode
from estream_spec.trace import Activity
from estream_spec.workload import grouped_work
from fixtures.olmoe import EXPERTS, LAYERS
from fixtures.packed import UNQUANTISED, PackageFactory

TMPFS = 0x01021994


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measure as little as can be; whatever a test does, its threads end with it."""
    monkeypatch.setattr(probe_reading, "ROUNDS", 1)
    monkeypatch.setattr(probe_reading, "CELL_S", 0.0)
    monkeypatch.setattr(probe_computing, "BUDGET_S", 0.0)
    monkeypatch.setattr(probe_computing, "LONGEST", 64)
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.fixture
def direct_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads are believed to bypass the page cache, whatever file system the tests are on."""
    monkeypatch.setattr(Reader, "mode", "direct")


class Counting(Quiet):
    """Progress that counts."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.done = 0

    def begin(self, stage: str, total: int) -> None:
        self.stages.append((stage, total))

    def advance(self, amount: int) -> None:
        self.done += amount


def probed(packed: PackageFactory, progress: Quiet | None = None) -> Probe:
    with open_package(packed()) as package:
        return probe(package, "here", 1, progress or Quiet())


def figures(value: object) -> Iterator[Described]:
    """Every figure of a profile."""
    if isinstance(value, Described):
        yield value
    elif isinstance(value, msgspec.Struct):
        for each in msgspec.structs.asdict(value).values():
            yield from figures(each)
    elif isinstance(value, tuple):
        for each in value:
            yield from figures(each)


@pytest.mark.usefixtures("direct_reads")
class TestProfile:
    def test_every_figure_is_measured_and_says_how(self, packed: PackageFactory) -> None:
        profile = probed(packed).profile
        found = list(figures(profile))
        assert len(found) == 4 + 4 + 7
        assert {each.basis for each in found} == {"measured"}
        assert all(each.source for each in found)
        assert profile.name == "here"
        assert profile.npu is None
        assert decode_profile(encode_profile(profile), "here.json") == profile

    def test_rates_are_by_lanes_and_requests_that_the_package_has_bytes_for(self, packed: PackageFactory) -> None:
        profile = probed(packed).profile
        assert [rate.lanes for rate in profile.read_rates] == [1, 2, 4, 8]
        with open_package(packed()) as package:
            experts = sum(place.length for place in package.experts.places())
        assert any(size > experts for size in probe_reading.REQUESTS)
        for rate in profile.read_rates:
            assert rate.at == tuple(size for size in probe_reading.REQUESTS if size <= experts)

    def test_prompts_are_powers_of_two(self, packed: PackageFactory) -> None:
        found = probed(packed)
        assert [layer.tokens for layer in found.layers] == [1, 2, 4, 8, 16, 32, 64]
        assert list(found.profile.layer_flops.at) == [1, 2, 4, 8, 16, 32, 64]
        assert found.layers[-1].active == EXPERTS
        assert "backend native (" in found.computing
        assert found.computing in found.profile.about

    def test_how_far_measurements_are_apart(self, packed: PackageFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        rounds = 9.0, 3.0, 2.0  # the first is left out
        seconds = itertools.chain([1.0], itertools.cycle(rounds))  # after one to warm up

        def timed(clock: LayerClock, tokens: int) -> LayerTime:
            took = next(seconds) / 2
            return LayerTime(tokens=tokens, other_s=took, experts_s=took, head_s=1.0, active=1, groups=1, rows=1)

        monkeypatch.setattr(LayerClock, "run", timed)
        monkeypatch.setattr(probe_computing, "toll", lambda *_: (0.0, 0.0))
        monkeypatch.setattr(probe_computing, "prompt_lengths", lambda model: [1])
        assert probed(packed).spread == pytest.approx(0.5 / 2.5)

    def test_planner_takes_it_and_has_no_figure_to_doubt(self, packed: PackageFactory) -> None:
        planned = plan_prompts(str(packed()), probed(packed).profile, 1 << 30, [1, 16])
        assert planned.estimated == ()
        assert [plan.tokens for plan in planned.plans] == [1, 16]

    def test_what_a_group_takes_beside_its_experts_is_measured_and_counts(self, packed: PackageFactory) -> None:
        profile = probed(packed).profile
        call_s = profile.experts.group_call_s.value
        assert 0 < call_s < 0.05
        free = msgspec.structs.replace(profile.experts.group_call_s, value=0.0)
        without = msgspec.structs.replace(profile, experts=msgspec.structs.replace(profile.experts, group_call_s=free))
        with open_package(packed()) as package:
            workload = package_workload(package)
        loads = [expected_load(even_shares(workload.model.expert_block(layer)), 256) for layer in range(LAYERS)]
        for group_size in (1, EXPERTS):
            one, other = (grouped_work(workload, each, 256, loads, group_size, 1) for each in (profile, without))
            more = sum(sum(layer.compute_s) for layer in one.layers) - sum(
                sum(layer.compute_s) for layer in other.layers
            )
            assert more == pytest.approx(call_s * LAYERS * EXPERTS / group_size)

    def test_progress_is_told_of_each_measurement(self, packed: PackageFactory) -> None:
        progress = Counting()
        probed(packed, progress)
        assert [stage for stage, _ in progress.stages] == ["reading", "computing"]
        assert 0 < progress.done <= sum(total for _, total in progress.stages)

    def test_unquantised_experts_are_measured_too(self, packed: PackageFactory) -> None:
        with open_package(packed("base", UNQUANTISED)) as package:
            assert "experts stored as f32, f32 activations" in probe(package, "here", 1, Quiet()).computing


def test_only_some_experts_are_held_where_there_is_little_memory(
    packed: PackageFactory, monkeypatch: pytest.MonkeyPatch, direct_reads: None
) -> None:
    monkeypatch.setattr(probe_computing, "BANK_BYTES", 1)
    monkeypatch.setattr(probe_computing, "HELD_BYTES", 1)
    found = probed(packed)
    assert {layer.active for layer in found.layers} == {0, 1}
    tokens = [layer.rows for layer in found.layers if layer.active]
    assert sorted(set(tokens)) != [1 << shift for shift in range(7)]
    assert 0 < found.profile.experts.group_call_s.value < 0.05
    assert found.profile.read_group_toll_s is not None
    assert found.profile.read_toll_s is not None
    assert (found.profile.read_group_toll_s.value, found.profile.read_toll_s.value) == (0, 0)


def test_nothing_is_made_up_where_no_token_came_to_the_experts_that_are_held(
    packed: PackageFactory, monkeypatch: pytest.MonkeyPatch, direct_reads: None
) -> None:
    monkeypatch.setattr(probe_computing, "_typical", lambda runs: replace(runs[0], active=0, rows=0))
    with pytest.raises(LinkError, match="no prompt had a token for the experts in the arena"):
        probed(packed)


@pytest.mark.parametrize(
    ("memory_bytes", "group_size", "banks"),
    [(4, 1, 1), (11, 1, 2), (16, 2, 2), (31, 2, 3), (64, 4, 3), (1 << 40, 4, 3)],
)
def test_experts_that_are_held_take_a_quarter_of_the_memory_at_most(
    memory_bytes: int, group_size: int, banks: int
) -> None:
    """In records of 1 MiB, of which a layer has 12."""
    shape = ExpertShape(counts=(12,), record_lengths=(1 << 20,), top_k=(2,))
    held = Held.of(shape, memory_bytes << 20, 0)
    assert (held.group_size, held.banks) == (group_size, banks)
    with pytest.raises(LinkError, match="one expert takes 1048576 bytes, expected at most 1048575, a quarter"):
        Held.of(shape, (4 << 20) - 1, 0)


def test_large_expert_is_measured_where_there_is_memory() -> None:
    held = Held.of(ExpertShape(counts=(8,), record_lengths=(1 << 30,), top_k=(2,)), 1 << 34, 0)
    assert (held.group_size, held.banks) == (1, 1)


def test_no_more_experts_are_held_than_there_is_memory_for_beside_all_else() -> None:
    shape = ExpertShape(counts=(12,), record_lengths=(1 << 20,), top_k=(2,))
    held = Held.of(shape, 64 << 20, 61 << 20)
    assert held.arena_bytes <= 3 << 20
    with pytest.raises(LinkError, match="67108864 bytes of memory, expected at least 68157440"):
        Held.of(shape, 64 << 20, 64 << 20)


@pytest.mark.usefixtures("direct_reads")
def test_requests_whose_buffers_take_more_than_a_quarter_of_the_memory_are_left_out(packed: PackageFactory) -> None:
    size = probe_reading.REQUESTS[0]
    with open_package(packed()) as package:
        rates = probe_reading.read_rates(package, 4 * 2 * 2 * size, Quiet())
    assert {lanes: list(found)[:1] for lanes, found in rates.items()} == {1: [size], 2: [size], 4: [], 8: []}


@pytest.mark.usefixtures("direct_reads")
def test_model_that_does_not_fit_the_memory_is_refused_before_anything_is_read(
    packed: PackageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("estream_runtime.probe.usable_memory", lambda: (1 << 20, "a test"))
    progress = Counting()
    with pytest.raises(LinkError, match="1048576 bytes of memory, expected at least "):
        probed(packed, progress)
    assert progress.stages == []


def test_package_in_memory_is_refused(packed: PackageFactory) -> None:
    with (
        open_package(packed().read_bytes()) as package,
        pytest.raises(
            LinkError, match="the storage cannot be measured, reads are buffered: the package is not read"
        ) as caught,
    ):
        probe(package, "here", 1, Quiet())
    assert caught.value.hint is not None
    assert "on the storage it will be read from" in caught.value.hint


def test_package_on_a_file_system_in_memory_is_refused(packed: PackageFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_file_system", lambda descriptor: TMPFS)
    with (
        open_package(packed()) as package,
        pytest.raises(LinkError, match="reads are buffered: tmpfs keeps files in memory"),
    ):
        probe(package, "here", 1, Quiet())


def test_reads_that_are_not_proven_are_refused(packed: PackageFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "mode", "direct, unproven: the system does not tell")
    with open_package(packed()) as package, pytest.raises(LinkError, match="reads are direct, unproven"):
        probe(package, "here", 1, Quiet())


def test_programs_are_of_layers_that_have_experts() -> None:
    """The dense block of the first is timed with all else of the layer, and not beside reading."""
    lengths = tuple(4096 if count else 0 for count in (0, 8, 0, 8, 8))
    counts, top_k = (0, 8, 0, 8, 8), (0, 2, 0, 2, 2)
    shape = ExpertShape(counts=counts, record_lengths=lengths, top_k=top_k, dense_layers=frozenset({0, 1, 3}))
    held = Held.of(shape, 4 << 20, 0)
    once = [Opcode.ATTEND, Opcode.ROUTE, Opcode.DENSE]
    assert [each.opcode for each in held.prefill().instructions if each.opcode in once] == [*once, *once[:2]]
    for program in (held.load(), held.prefill(), held.calls()):
        assert {each.layer for each in program.instructions if OPERANDS[each.opcode]} == {1}
    paged = held.paged(shape, 2)
    assert {each.layer for each in paged.instructions if OPERANDS[each.opcode]} == {1, 3}
    assert [each.layer for each in paged.instructions if each.opcode == Opcode.DENSE] == [3]
    fills = [(each.layer, each.group) for each in paged.instructions if each.opcode == Opcode.FILL]
    assert fills == [(layer, group) for layer in (1, 3) for group in range(4)]


def timed(begun: float, ended: float, group: int, expert: int, activity: Activity = "products") -> Timed:
    return Timed(activity, begun, ended, 0, group, expert, 1)


def test_group_takes_what_lies_between_two_of_them_beyond_what_lies_between_two_experts() -> None:
    run = [
        timed(0.0, 1.0, 0, 3, "expand"),
        timed(1.5, 2.0, 0, 3),
        timed(2.25, 3.0, 0, 5, "expand"),
        timed(3.5, 4.0, 0, 5),
        timed(6.25, 7.0, 0, 3, "expand"),  # the group again
        timed(7.0, 8.0, 0, 3),
        timed(10.25, 11.0, 1, 8, "expand"),
        timed(11.0, 12.0, 1, 8),
    ]
    assert group_seam_s([run, run]) == 2.25 - 0.25
    assert group_seam_s([run[4:]]) == 2.25
    assert group_seam_s([run[:4]]) == group_seam_s([]) == 0


def test_what_groups_take_is_neither_put_down_to_experts_nor_to_reading() -> None:
    layer = LayerTime(tokens=32, other_s=1.0, experts_s=5.0, head_s=0.0, active=8, groups=2, rows=64)
    assert layer.alone_s(0.0) == 5.0
    assert layer.alone_s(0.5) == 4.0
    assert 0 < layer.alone_s(9.0) < 0.1
    paged = PagedTime(layers=2, computing_s=30.0, reads=16, bytes_read=100)
    loss = paged.loss(layer, 128, 0.5)
    assert loss.seconds == 30.0 - (2 * 4.0 * 2 + 16 * 0.5 + 1.0)
    assert (loss.groups, loss.bytes_read) == (16, 100)
