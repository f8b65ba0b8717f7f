from __future__ import annotations

import errno
import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from estream_loader import Integrity, open_package
from estream_loader.arena import Bank
from estream_packer.build import build
from estream_packer.recipe import BuildOptions
from estream_runtime import Session, backends
from estream_runtime.backends import BACKENDS
from estream_runtime.backends.portable import PortableBackend
from estream_runtime.evaluation import compare
from estream_runtime.programs import POLICIES
from estream_spec.errors import EmoeError, IntegrityError, LinkError, TrapError
from fixtures.olmoe import CONTEXT_LENGTH, EXPERTS, LAYERS, VOCABULARY, VariantName, token_ids, write_checkpoint
from fixtures.packed import UNQUANTISED, FamilyFactory, PackageFactory
from fixtures.sources import FaultySource, fails_at

Ids = npt.NDArray[np.int64]
PROMPT = token_ids("session", 33)
LONG = token_ids("session long", 300)
DEFAULT = BuildOptions()


@pytest.fixture
def session(packed: PackageFactory) -> Iterator[Session]:
    """A session with the packer's and the package's defaults."""
    with open_package(packed()) as package, Session(package, threads=1) as opened:
        yield opened


def logits_of(path: Path, token_ids: Ids, integrity: Integrity = "paged", **options: Any) -> npt.NDArray[np.float32]:
    with open_package(path, integrity=integrity) as package, Session(package, threads=1, **options) as session:
        return session.forward(token_ids)


def record_length(path: Path) -> int:
    with open_package(path) as package:
        return package.experts.table.ranges[0].record_length


@pytest.mark.parametrize("options", [DEFAULT, UNQUANTISED, BuildOptions(experts="w8")], ids=["w4", "f32", "w8"])
def test_results_do_not_depend_on_arena_or_groups_or_policy(options: BuildOptions, packed: PackageFactory) -> None:
    path = packed("base", options)
    slot = record_length(path)
    expected = logits_of(path, PROMPT, arena_bytes=slot * EXPERTS * LAYERS, group_size=EXPERTS)
    ways = product(POLICIES, [1, 3], [(1, 0), (1, 4), (5, 0), (5, 1), (5, 3), (1, 23)])
    for reading, lanes, (group_size, depth) in ways:
        arena_bytes = slot * group_size * (depth + 1)
        found = logits_of(
            path,
            PROMPT,
            arena_bytes=arena_bytes,
            group_size=group_size,
            prefetch_depth=depth,
            lanes=lanes,
            policy=reading,
        )
        assert np.array_equal(found, expected), (reading, lanes, group_size, depth)
    for slots in [1, 2, 3, 5, 7, 11, EXPERTS, EXPERTS + 1, 2 * EXPERTS - 1]:
        for group_size in (1, 2, 5, EXPERTS):
            found = logits_of(path, PROMPT, arena_bytes=slot * slots, group_size=group_size)
            assert np.array_equal(found, expected), (slots, group_size)
    for policy in ("open", "full"):
        assert np.array_equal(logits_of(path, PROMPT, integrity=policy), expected)


def test_what_an_arena_held_before_never_shows(packed: PackageFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed("base", UNQUANTISED)
    expected = logits_of(path, PROMPT)
    take: Callable[[Bank, tuple[int, int]], None] = Bank.take

    def poisoned(bank: Bank, group: tuple[int, int]) -> None:
        take(bank, group)
        bank.memory[:] = b"\xff" * len(bank.memory)  # every f32 is not a number

    monkeypatch.setattr(Bank, "take", poisoned)
    for slots in (1, 2, 5, EXPERTS):
        found = logits_of(path, PROMPT, arena_bytes=record_length(path) * slots, group_size=2)
        assert np.array_equal(found, expected), slots


def test_a_session_gives_the_same_again_whatever_ran_before(session: Session) -> None:
    expected = session.forward(PROMPT)
    list(session.generate(LONG, 3))
    session.score(PROMPT, [PROMPT[:2]])
    assert np.array_equal(session.forward(PROMPT), expected)


@pytest.mark.parametrize("length", [*range(1, 13), 63, 64, 65, 127, 128, 129, 300])
def test_every_length_takes_the_same_path(length: int, packed: PackageFactory) -> None:
    """The logits of a prefix are those of the whole at its tokens: no token sees a later one, no length is special."""
    routes: list[npt.NDArray[np.int32]] = []
    with open_package(packed("base", UNQUANTISED)) as package, Session(package) as session:
        whole = session.forward(LONG)
        part = session.forward(LONG[:length], lambda layer, expert_ids, weights: routes.append(expert_ids))
        last = session.prefill(LONG[:length]).logits
    assert np.abs(part - whole[:length]).max() < 1e-4
    assert np.abs(last - whole[length - 1]).max() < 1e-4
    assert [chosen.shape for chosen in routes] == [(length, 3)] * LAYERS
    assert all(((chosen >= 0) & (chosen < EXPERTS)).all() for chosen in routes)


@pytest.mark.parametrize(
    ("variant", "options", "bound"),
    [
        ("base", DEFAULT, 0.2),
        ("base", BuildOptions(experts="w4g64"), 0.2),
        ("base", BuildOptions(experts="w8"), 0.06),
        ("base", BuildOptions(experts="w8", activations="f32"), 0.05),
        ("base", BuildOptions(experts="f32", dense="w4g32"), 0.9),
        ("tied", DEFAULT, 0.2),
        ("tied", BuildOptions(experts="w8", activations="f32"), 0.04),
        ("grouped", DEFAULT, 0.2),
    ],
)
def test_quantised_packages_predict_nearly_what_the_checkpoint_does(
    variant: VariantName, options: BuildOptions, bound: float, packed: PackageFactory
) -> None:
    with (
        open_package(packed(variant, UNQUANTISED)) as original,
        open_package(packed(variant, options)) as package,
        Session(original) as reference,
        Session(package) as portable,
        Session(package, "reference") as meaning,
    ):
        assert compare(reference, [portable], LONG, 128)[0].mean_kl < bound
        apart = np.abs(portable.forward(PROMPT) - meaning.forward(PROMPT)).max(axis=1)
    # An activation on the edge between two integers may fall either way, and changes its row and those that see it.
    assert np.median(apart) < 1e-4


def test_unsigned_weights_give_what_signed_ones_mean(packed: PackageFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PortableBackend, "_signed_is_exact", False)
    for variant, options in (("base", DEFAULT), ("tied", BuildOptions(experts="w8", dense="w4g32"))):
        path = packed(variant, options)  # type: ignore[arg-type]
        apart = np.abs(logits_of(path, PROMPT) - logits_of(path, PROMPT, backend="reference")).max(axis=1)
        assert np.median(apart) < 1e-4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "prompt has no tokens"),
        ([1, 2, VOCABULARY], rf"token id {VOCABULARY} is outside the vocabulary of {VOCABULARY} \(at prompt\[2\]\)"),
        ([-1], r"token id -1 is outside the vocabulary"),
        ([1.5], "prompt is float64 of shape"),
        ([[1], [2, 3]], "prompt is no list of token ids"),
        ([1 << 70], "prompt is object of shape"),
        (None, "prompt is object of shape"),
        ([[1, 2]], r"prompt is int64 of shape \[1, 2\], expected one list"),
        ([1] * (CONTEXT_LENGTH + 1), f"prompt has {CONTEXT_LENGTH + 1} tokens, the context holds {CONTEXT_LENGTH}"),
        ([1] * (10 * CONTEXT_LENGTH), "the context holds"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_and_the_session_goes_on(
    given: list[Any], message: str, session: Session
) -> None:
    expected = session.forward(PROMPT)
    calls: list[Callable[[list[Any]], object]] = [
        session.forward,
        session.prefill,
        session.generate,
        lambda prompt: session.score(prompt, [[1]]),
        session.log_likelihoods,
    ]
    for call in calls:
        with pytest.raises(TrapError, match=message):
            call(given)
    assert np.array_equal(session.forward(PROMPT), expected)


def test_a_prompt_may_fill_the_context(session: Session) -> None:
    full = np.resize(LONG, CONTEXT_LENGTH)
    assert session.forward(full).shape == (CONTEXT_LENGTH, VOCABULARY)


@pytest.mark.parametrize(
    ("arena_bytes", "message"), [(0, "an arena of 0 bytes"), (-1, "an arena of -1 bytes"), (16383, "of 16383 bytes")]
)
def test_an_arena_below_one_expert_is_refused_with_the_minimum(
    arena_bytes: int, message: str, packed: PackageFactory
) -> None:
    with open_package(packed()) as package, pytest.raises(LinkError, match=message) as refusal:
        Session(package, arena_bytes=arena_bytes)
    assert refusal.value.hint == "the smallest arena for this package is 16384 bytes"


def test_an_arena_need_not_be_a_whole_number_of_experts(packed: PackageFactory) -> None:
    path = packed()
    with open_package(path) as package, Session(package, arena_bytes=16384 * 3 + 777, group_size=2) as session:
        stats = session.prefill(PROMPT).stats
        assert stats.peak_arena_bytes <= 16384 * 3 + 777
        assert np.array_equal(session.forward(PROMPT), logits_of(path, PROMPT))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "gpu"}, f"unknown backend 'gpu', expected one of: {', '.join(BACKENDS)}"),
        ({"threads": 0}, "threads is 0, expected 1 to 256"),
        ({"threads": 9999}, "threads is 9999, expected 1 to 256"),
        ({"group_size": 0}, "group_size is 0, expected at least 1"),
        ({"group_size": 1.5}, "group_size is 1.5, expected at least 1"),
        ({"lanes": 0}, "lanes is 0, expected 1 to 64"),
        ({"lanes": 65}, "lanes is 65, expected 1 to 64"),
        ({"prefetch_depth": -1}, "prefetch_depth is -1, expected at least 0"),
        ({"policy": "resident"}, "unknown policy 'resident', expected one of: pre-routing, post-routing, on-demand"),
        ({"threads": "2"}, "threads is '2', expected 1 to 256"),
        ({"arena_bytes": "8M"}, "arena_bytes is '8M', expected a number of bytes"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options: dict[str, Any], message: str, packed: PackageFactory) -> None:
    with open_package(packed()) as package, pytest.raises(LinkError, match=message):
        Session(package, **options)


def test_a_closed_session_holds_no_memory(packed: PackageFactory) -> None:
    with open_package(packed()) as package:
        session = Session(package)
        arena = weakref.ref(session.interpreter.pager.arena)
        session.close()
        gc.collect()
        assert arena() is None


def test_a_closed_session_says_so(packed: PackageFactory) -> None:
    with open_package(packed()) as package:
        session = Session(package)
        tokens = session.generate(PROMPT)
        next(tokens)
        session.close()
        session.close()
        with pytest.raises(TrapError, match="the session is closed"):
            session.forward(PROMPT)
        with pytest.raises(TrapError, match="the session is closed"):
            next(tokens)


def faulty(path: Path, fault: Callable[[int, int, int], int | None]) -> FaultySource:
    return FaultySource(path.read_bytes(), fault)


def test_short_and_interrupted_reads_change_nothing(packed: PackageFactory) -> None:
    def fault(call: int, offset: int, length: int) -> int | None:
        if call % 3 == 0:
            raise InterruptedError(errno.EINTR, "interrupted")
        return max(1, length * (call % 7 + 1) // 7)

    path = packed()
    with open_package(faulty(path, fault)) as package, Session(package) as session:
        assert np.array_equal(session.forward(PROMPT), logits_of(path, PROMPT))


def ends_at(position: int) -> Callable[[int, int, int], int | None]:
    return lambda call, offset, length: max(0, position - offset) if offset + length > position >= offset else None


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (fails_at, LinkError, "reading failed: Input/output error: got 0 of"),
        (ends_at, IntegrityError, r"the package ends early: got \d+ of \d+ bytes.*\[EMOE-SUP-011\]"),
    ],
)
def test_a_device_that_fails_ends_the_call_and_not_the_session(
    make: Callable[[int], Callable[[int, int, int], int | None]],
    kind: type[EmoeError],
    message: str,
    packed: PackageFactory,
) -> None:
    path = packed()
    with open_package(path) as package:
        wanted: list[int] = []
        with Session(package) as session:
            session.forward(PROMPT, lambda layer, expert_ids, weights: wanted.append(int(expert_ids[0, 0])))
        position = package.experts.place(1, wanted[1]).offset + 100
    source = faulty(path, make(position))
    with open_package(source) as package, Session(package) as session:
        for _ in range(2):
            with pytest.raises(kind, match=message):
                session.forward(PROMPT)
        source.fault = lambda call, offset, length: None
        assert np.array_equal(session.forward(PROMPT), logits_of(path, PROMPT))


def test_a_damaged_expert_is_refused_when_it_is_read_and_by_no_one_who_does_not_need_it(
    packed: PackageFactory, tmp_path: Path
) -> None:
    data = bytearray(packed("idle").read_bytes())
    routes: list[set[int]] = []
    with open_package(bytes(data)) as package, Session(package) as session:
        session.forward(PROMPT, lambda layer, expert_ids, weights: routes.append(set(expert_ids.ravel().tolist())))
        unused = next(expert for expert in range(EXPERTS) if expert not in routes[0])
        used = min(routes[1])
        places = package.experts.place(0, unused), package.experts.place(1, used)
    expected = logits_of(packed("idle"), PROMPT)
    data[places[0].offset + 5] ^= 1
    with open_package(bytes(data)) as package, Session(package) as session:
        assert np.array_equal(session.forward(PROMPT), expected)
    data[places[1].offset + 5] ^= 1
    message = rf"record has checksum .* experts\[1\]\[{used}\]\) \[EMOE-REC-001\]"
    with (
        open_package(bytes(data)) as package,
        Session(package) as session,
        pytest.raises(IntegrityError, match=message),
    ):
        session.forward(PROMPT)
    with open_package(bytes(data), integrity="open") as package, Session(package) as session:
        assert session.forward(PROMPT).shape == expected.shape


@pytest.mark.parametrize(
    ("tensor", "place"),
    [("model.norm.weight", "head"), ("model.layers.0.mlp.experts.{}.down_proj.weight", "layer 1")],
)
def test_numbers_that_overflow_are_named_with_their_layer(tensor: str, place: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "base")
    tensors = load_file(checkpoint / "model.safetensors")
    for expert in range(EXPERTS):
        tensors[tensor.format(expert)] = np.full_like(tensors[tensor.format(expert)], 3e38)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    build(checkpoint, tmp_path / "huge.emoe", UNQUANTISED)
    with open_package(tmp_path / "huge.emoe") as package, Session(package) as session:
        for _ in range(2):
            with pytest.raises(TrapError, match=rf"is not finite \(at {place}\)"):
                session.forward(PROMPT)


def test_stats_tell_what_was_read(packed: PackageFactory) -> None:
    path = packed()
    slot = record_length(path)
    with open_package(path) as package, Session(package, arena_bytes=slot, group_size=1) as session:
        routes: list[set[int]] = []
        session.forward(PROMPT, lambda layer, expert_ids, weights: routes.append(set(expert_ids.ravel().tolist())))
        stats = session.prefill(LONG[:1]).stats
        assert stats.bytes_read == slot * stats.reads == slot * 3 * LAYERS
        assert stats.peak_arena_bytes == slot
        assert (stats.prompt_tokens, stats.new_tokens) == (1, 0)
        assert 0 < stats.bubble < 1
        assert stats.ttft_s == stats.total_s > stats.compute_busy_s > 0
        assert stats.io_busy_s > 0
        assert (stats.policy, stats.lanes, stats.reading_mode.split(",")[0]) == ("post-routing", 2, "direct")
        assert stats.decode_tokens_per_s is None
    with open_package(path) as package, Session(package, arena_bytes=1 << 30) as session:
        assert session.prefill(PROMPT).stats.bytes_read == slot * sum(map(len, routes))
        resident = session.prefill(PROMPT).stats
        assert resident.bytes_read == resident.reads == resident.io_busy_s == 0
        assert resident.peak_arena_bytes == slot * EXPERTS * LAYERS
    with open_package(path.read_bytes()) as package, Session(package, policy="on-demand", lanes=3) as session:
        stats = session.prefill(PROMPT).stats
        assert (stats.policy, stats.lanes) == ("on-demand", 3)
        assert stats.reading_mode == "buffered: the package is not read from a file"


def test_the_package_says_which_arena_it_wants(session: Session) -> None:
    configuration = session.package.manifest.device_configurations[0]
    assert session.prefill(PROMPT).stats.peak_arena_bytes == configuration.arena_bytes


def test_session_says_why_the_fast_backend_does_not_compute(
    packed: PackageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_package(packed()) as package:
        with Session(package, threads=1) as session:
            assert (session.notice, session.prefill(PROMPT).stats.notice) == (None, None)
        monkeypatch.setattr(backends, "paths_here", tuple)
        monkeypatch.setattr(backends, "why_none", lambda: "the kernel is missing")
        with Session(package, threads=1) as session:
            stats = session.prefill(PROMPT).stats
            assert session.notice == stats.notice == "the kernel is missing, so ONNX Runtime computes, which is slower"
            assert stats.backend == "portable"
        with Session(package, "portable", threads=1) as session:
            assert (session.notice, session.prefill(PROMPT).stats.backend) == (None, "portable")


def test_a_row_in_a_window_attends_to_no_more_than_that(
    packed_family: FamilyFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, run = list[int](), PortableBackend.run

    def watched(self: PortableBackend, role: Any, shape_class: int, feeds: Any) -> Any:
        if role == "attend" and feeds["queries"].shape[1] == 1:
            seen.append(feeds["keys"].shape[1])
        return run(self, role, shape_class, feeds)

    monkeypatch.setattr(PortableBackend, "run", watched)
    prompt, made = list(token_ids("window", 9)), list[int]()
    with open_package(packed_family("mixtral-windowed")) as package, Session(package, "portable") as session:
        for token in session.generate(prompt, 12):
            assert int(np.argmax(session.forward([*prompt, *made])[-1])) == token
            made.append(token)
        assert {layer.window for layer in package.manifest.model.layers} == {16}
    assert len(made) == 12
    assert seen[-1] == 16
