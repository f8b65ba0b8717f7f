"""The backend `htp` in the simulator against the reference backend."""

from __future__ import annotations

import re

import numpy as np
import pytest
from msgspec.structs import replace

from estream_loader.progress import Quiet
from estream_packer.htp.compiler import Compiled
from estream_packer.htp.local import LocalCompiler
from estream_runtime.backends.htp import HtpBackend
from estream_spec.errors import LinkError, TrapError
from estream_spec.graph_interface import ROLES, class_count, interface
from estream_spec.manifest import GraphRole
from estream_spec.weights import Encoding
from fixtures.compiled import (
    CAPACITIES,
    CHIP,
    ENCODINGS,
    MIXED,
    MODEL,
    SEVERAL_TILES,
    Array,
    Feeds,
    case,
    causal_mask,
    encoded,
    expected_of,
    graph_of,
    tile_of,
    worst_row,
)

ROWS = [1, 31, 32, 33, 65, 129, 300]
WITH_MATRICES: list[GraphRole] = [*SEVERAL_TILES]
CLOSE = 1e-2
"""What a row may be off; fp16 takes up to half of it."""


def assert_close(found: Feeds, expected: Feeds) -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == np.float32
        assert array.shape == expected[name].shape
        assert array.flags.c_contiguous
        assert worst_row(array, expected[name]) < CLOSE, name


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("role", WITH_MATRICES)
def test_any_number_of_rows(role: GraphRole, rows: int, backend: HtpBackend) -> None:
    given = case(role, 0, encoded(role, SEVERAL_TILES[role]), rows)
    assert_close(backend.run(role, 0, given.stored), expected_of(role, 0, given.plain))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("role", WITH_MATRICES)
def test_any_encoding(role: GraphRole, encoding: Encoding, backend: HtpBackend) -> None:
    given = case(role, 0, encoded(role, encoding), 7)
    assert_close(backend.run(role, 0, given.stored), expected_of(role, 0, given.plain))


def test_matrices_of_one_expert_in_different_encodings(backend: HtpBackend) -> None:
    given = case("expert", 0, MIXED, 40)
    assert_close(backend.run("expert", 0, given.stored), expected_of("expert", 0, given.plain))


@pytest.mark.parametrize("role", ["qkv", "out"])
def test_another_shape_class(role: GraphRole, backend: HtpBackend) -> None:
    """Without norms and bounds, and with a head of its own for each query head."""
    given = case(role, 1, encoded(role, "w8"), 40)
    assert_close(backend.run(role, 1, given.stored), expected_of(role, 1, given.plain))


@pytest.mark.parametrize(
    ("shape_class", "rows", "keys"),
    [
        *((0, *each) for each in [(1, 1), (1, 63), (31, 31), (32, 64), (33, 65), (65, 65), (300, 300), (300, 320)]),
        *((1, *each) for each in [(1, 9), (33, 65), (129, 319)]),
    ],
)
def test_attention(shape_class: int, rows: int, keys: int, backend: HtpBackend) -> None:
    """Below, at and above the capacities, as whole sequences and as their last rows."""
    given = case("attend", shape_class, (), rows, keys)
    assert_close(backend.run("attend", shape_class, given.stored), expected_of("attend", shape_class, given.plain))


def test_heads_of_keys_and_values_may_lie_apart(backend: HtpBackend) -> None:
    """As they do in a cache that has room for more, up to the very capacity: no key has to be filled up then."""
    for keys in (40, *CAPACITIES):
        given = case("attend", 0, (), 33, keys)
        expected = backend.run("attend", 0, given.stored)
        for name in ("keys", "values"):
            room = np.full((2, keys + 9, 8), np.nan, np.float32)
            room[:, :keys] = given.stored[name]
            given.stored[name] = room[:, :keys]
        assert np.array_equal(backend.run("attend", 0, given.stored)["attended"], expected["attended"])


def test_more_keys_than_any_graph_takes_are_refused(backend: HtpBackend) -> None:
    given = case("attend", 0, (), 2, 321)
    with pytest.raises(TrapError, match=r"321 keys are more than the binary's graphs take, which is 320") as refusal:
        backend.run("attend", 0, given.stored)
    assert refusal.value.hint == "give fewer tokens, or use another backend"


def test_room_that_no_row_sees_takes_no_capacity(backend: HtpBackend) -> None:
    """A cache grows ahead of what it holds; what is not seen may even be no number."""
    given = case("attend", 0, (), 2, 320)
    expected = backend.run("attend", 0, given.stored)
    for name in ("keys", "values"):
        given.stored[name] = np.pad(given.stored[name], ((0, 0), (0, 80), (0, 0)), constant_values=np.nan)
    given.stored["mask"] = np.pad(given.stored["mask"], ((0, 0), (0, 80)), constant_values=np.finfo(np.float32).min)
    assert np.array_equal(backend.run("attend", 0, given.stored)["attended"], expected["attended"])


@pytest.mark.parametrize(("hidden", "encoding"), [(72, "w4g32"), (40, "w4g32"), (96, "w4g64"), (72, "w8")])
def test_a_graph_computes_the_same_after_another(hidden: int, encoding: Encoding) -> None:
    """What a graph leaves in the processor's memory is nothing to the next, though a group of rows be not full."""
    attention = replace(MODEL.attentions[0], heads=hidden // 8, key_value_heads=hidden // 8, clip_qkv=None)
    model = replace(MODEL, hidden=hidden, attentions=(attention, MODEL.attentions[1]))
    graphs = [graph_of("qkv", 0, encoded("qkv", encoding), tokens) for tokens in (64, 32)]
    compiled = LocalCompiler().compile([tile_of(graph, model) for graph in graphs], CHIP, Quiet())
    backend = HtpBackend(model, compiled.data, compiled.graphs, CHIP)
    small, large = (case("qkv", 0, encoded("qkv", encoding), rows, model=model) for rows in (32, 64))
    alone = backend.run("qkv", 0, small.stored)
    assert_close(alone, expected_of("qkv", 0, small.plain, model))
    assert_close(backend.run("qkv", 0, large.stored), expected_of("qkv", 0, large.plain, model))
    for name, array in backend.run("qkv", 0, small.stored).items():
        assert np.array_equal(array, alone[name])


def test_gate_times_up_may_leave_fp16(backend: HtpBackend) -> None:
    """Inside the graph it does not: what is multiplied with the last matrix is divided first."""
    given = case("expert", 0, encoded("expert", "f32"), 4)
    for name, factor in (("gate", 3000), ("up", 3000), ("down", 1e-3)):
        given.stored[name] = given.plain[name] = given.plain[name] * np.float32(factor)
    expected = expected_of("expert", 0, given.plain)
    assert np.abs(given.plain["normed"] @ given.plain["gate"]).max() ** 2 > 65504
    assert_close(backend.run("expert", 0, given.stored), expected)


@pytest.mark.parametrize("size", [-6e4, -100, 100, 6e4])
def test_a_gate_may_be_as_large_as_fp16_lets_it(size: float, backend: HtpBackend) -> None:
    given = case("expert", 0, encoded("expert", "f32"), 4)
    normed = given.stored["normed"] = given.plain["normed"] = np.ones_like(given.plain["normed"])
    for name, value in (("gate", size), ("up", 1.0)):
        given.stored[name] = given.plain[name] = np.full_like(given.plain[name], value / normed.shape[1])
    given.stored["down"] = given.plain["down"] = given.plain["down"] / np.float32(8)
    found = backend.run("expert", 0, given.stored)
    if size < 0:  # the gate is shut
        assert np.abs(found["y"]).max() < 1e-6
    else:
        assert_close(found, expected_of("expert", 0, given.plain))


@pytest.mark.parametrize("role", ["out", "expert", "head"])
def test_results_that_fp16_does_not_have_are_refused(role: GraphRole, backend: HtpBackend) -> None:
    """Whatever the processor makes of them looks like a number."""
    given = case(role, 0, encoded(role, "f32"), 4)
    for name in {"out": ["attended", "o"], "expert": ["normed", "gate", "up", "down"], "head": ["head"]}[role]:
        given.stored[name] = np.full_like(given.plain[name], 50 if role == "out" else 10)
    if role == "head":  # rows come normed to it
        given.stored["final_norm"] = np.full_like(given.plain["final_norm"], 60000)
        given.stored["x"] = np.ones_like(given.plain["x"])
    with pytest.raises(TrapError, match=r"the largest number of fp16 is 65504"):
        backend.run(role, 0, given.stored)


@pytest.mark.parametrize("role", [role for role in ROLES if class_count(role, MODEL)])
def test_a_row_is_the_same_whatever_stands_beside_it(role: GraphRole, backend: HtpBackend) -> None:
    """To the last bit: what fills up a tile cannot matter then."""
    symbolic = interface(role, MODEL, 0, "f32")
    axes = {value.name: value.shape.index("T") for value in (*symbolic.inputs, *symbolic.outputs) if "T" in value.shape}
    given = case(role, 0, encoded(role, SEVERAL_TILES[role]) if role in SEVERAL_TILES else (), 32, keys=64)
    expected = backend.run(role, 0, given.stored)
    beside = {name: array.copy() for name, array in given.stored.items()}
    for name in axes.keys() & beside.keys():
        rest = np.moveaxis(beside[name], axes[name], 0)[5:]
        rest[:] = 0 if name == "mask" else 100 * np.random.default_rng(1).standard_normal(rest.shape)
    found = backend.run(role, 0, beside)
    alone = {name: first_rows(array, axes.get(name), 5) for name, array in given.stored.items()}
    for name, array in backend.run(role, 0, alone).items():
        assert not np.array_equal(found[name], expected[name])
        for whole in (found, expected):
            assert np.array_equal(array, first_rows(whole[name], axes[name], 5))


def first_rows(array: Array, axis: int | None, count: int) -> Array:
    """An input or output of nothing but the first rows; without rows it is what it was."""
    return array if axis is None else np.ascontiguousarray(array[(slice(None),) * axis + (slice(count),)])


def test_hidden_keys_change_no_bit(backend: HtpBackend) -> None:
    """Whatever finite numbers stand there: garbage of the cache, or the zeros that fill up to the capacity."""
    given = case("attend", 0, (), 33, 50)
    given.stored["mask"] = np.where(np.arange(50) < 40, causal_mask(33, 50), np.finfo(np.float32).min)
    expected = backend.run("attend", 0, given.stored)["attended"]
    for value in (0.0, 1e4, -1e4):
        for name in ("keys", "values"):
            given.stored[name][:, 40:] = value
        assert np.array_equal(backend.run("attend", 0, given.stored)["attended"], expected)
    shorter = given.stored | {"mask": np.ascontiguousarray(given.stored["mask"][:, :40])}
    shorter |= {name: given.stored[name][:, :40] for name in ("keys", "values")}
    assert np.array_equal(backend.run("attend", 0, shorter)["attended"], expected)


@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_and_values_beyond_fp16_are_refused_before_anything_attends_to_them(
    name: str, backend: HtpBackend
) -> None:
    given = case("qkv", 1, encoded("qkv", "w8"), 3)
    given.stored[f"{name}.scale"] *= 1e5
    message = r"'(keys|values)' has .*, the largest number of fp16 is 65504 \(at graph qkv\.1\)"
    with pytest.raises(TrapError, match=message):
        backend.run("qkv", 1, given.stored)


def test_rows_are_counted(compiled: Compiled) -> None:
    graphs = [graph for graph in compiled.graphs if graph.role == "out" and graph.shape_class == 1]
    opened = HtpBackend(MODEL, compiled.data, graphs, CHIP)
    assert (opened.tile_rows, opened.padded_rows) == (0, 0)
    opened.run("out", 1, case("out", 1, ("w8",), 33).stored)
    assert (opened.tile_rows, opened.padded_rows) == (64, 31)
    opened.run("out", 1, case("out", 1, ("w8",), 32).stored)
    assert (opened.tile_rows, opened.padded_rows) == (96, 31)


def test_results_share_no_memory_with_what_was_given(backend: HtpBackend) -> None:
    given = case("out", 0, ("w8",), 64)
    found = backend.run("out", 0, given.stored)
    before = {name: array.copy() for name, array in found.items()}
    for array in given.stored.values():
        array[:] = 1
    backend.run("out", 0, case("out", 0, ("w8",), 33).stored)
    assert all(np.array_equal(found[name], before[name]) for name in found)


def test_who_computes_is_told(backend: HtpBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (backend.name, backend.detail) == ("htp", "sm8650, simulated")
    monkeypatch.setattr("estream_runtime.backends.htp.simulated", lambda: False)
    assert backend.detail == "sm8650"


def test_weights_are_taken_as_they_are_stored(backend: HtpBackend) -> None:
    assert {backend.weights_of(role, 0) for role in WITH_MATRICES} == {"stored"}
    assert backend.weights_of("attend", 1) == "f32"


def test_what_the_binary_does_not_have_is_refused(compiled: Compiled, backend: HtpBackend) -> None:
    with pytest.raises(LinkError, match=r"no graph for role 'head', shape class 1 \(at binaries\)"):
        backend.weights_of("head", 1)
    mixed = case("expert", 0, ("w8", "w8", "w4g64"))
    with pytest.raises(LinkError, match="no graph for role 'expert', shape class 0, encodings w8, w8, w4g64"):
        backend.run("expert", 0, mixed.stored)
    [only] = [graph for graph in compiled.graphs if graph.encodings == MIXED]
    closed = HtpBackend(MODEL, compiled.data, [only], CHIP)
    closed.close()
    with pytest.raises(LinkError, match="no graph for role 'expert', shape class 0, encodings w4g32, w8, f32"):
        closed.run("expert", 0, case("expert", 0, MIXED).stored)


def test_inputs_of_different_numbers_of_rows_are_refused(backend: HtpBackend) -> None:
    given = case("out", 0, ("w8",), 33)
    short = given.stored | {"residual": given.stored["residual"][:32]}
    with pytest.raises(TrapError, match="other numbers of rows: 'attended' has 33, 'residual' has 32"):
        backend.run("out", 0, short)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("o", lambda array: array[:-1], "'o' is int8 [47, 48], expected i8 [48, 48]"),
        ("o", lambda array: array.view(np.uint8), "'o' is uint8 [48, 48], expected i8 [48, 48]"),
        ("o.scale", lambda array: array.astype(np.float64), "'o.scale' is float64 [48], expected f32 [48]"),
        ("residual", lambda array: array[:, :-1], "'residual' is float32 [32, 47], expected f32 [32, 48]"),
        ("attended", lambda array: array.astype(np.float16), "'attended' is float16 [32, 48], expected f32 [32, 48]"),
    ],
)
def test_nothing_of_another_shape_or_type_reaches_the_library(
    name: str, change: object, message: str, backend: HtpBackend
) -> None:
    assert callable(change)
    given = case("out", 0, ("w8",), 32)
    with pytest.raises(TrapError, match=re.escape(f"{message} (at graph out_0_w8_32)")):
        backend.run("out", 0, given.stored | {name: change(given.stored[name])})


def test_a_graph_that_takes_something_else_than_the_manifest_says(compiled: Compiled) -> None:
    """Names of two graphs exchanged: the one of 32 rows would be given 64, and the other way round."""
    one, other = (
        next(
            graph for graph in compiled.graphs if (graph.role, graph.encodings, graph.tokens) == ("head", ("w8",), rows)
        )
        for rows in (32, 64)
    )
    for liar in (replace(one, name=other.name), replace(other, name=one.name)):
        opened = HtpBackend(MODEL, compiled.data, [liar], CHIP)
        with pytest.raises(TrapError, match="the run failed"):
            opened.run("head", 0, case("head", 0, ("w8",), liar.tokens).stored)
