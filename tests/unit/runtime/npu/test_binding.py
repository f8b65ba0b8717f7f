"""What is given to the vendor's library: addresses of what lies where it lay, and nothing that was freed since."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream_loader import open_package
from estream_packer.htp.compiler import Compiled
from estream_runtime import Session
from estream_runtime.backends import htp
from estream_runtime.backends.htp import HtpBackend
from estream_spec.binary_interface import interface_of, label_of, tensor_name
from estream_spec.graph_interface import role_shape
from estream_spec.manifest import BinaryGraph, GraphRole
from fixtures.compiled import CAPACITIES, CHIP, MODEL, Array, case, encoded
from fixtures.olmoe import token_ids

PROMPT = token_ids("binding", 3)
Bound = dict[str, int]


class RecordingSession:
    """A stand-in for ONNX Runtime's session, which takes notes and computes nothing.

    Attributes:
        calls: address of each input and output, by the name that the binary gives it, for each call.
        read: what stood at the addresses of the inputs when it ran.
    """

    def __init__(self) -> None:
        self.calls: list[Bound] = []
        self.read: list[dict[str, Array]] = []

    def io_binding(self) -> RecordingBinding:
        """The inputs and outputs of one call."""
        return RecordingBinding()

    def run_with_iobinding(self, binding: RecordingBinding) -> None:
        """Reads all inputs and writes zeros to all outputs."""
        self.calls.append(binding.addresses)
        self.read.append({name: array.copy() for name, array in binding.inputs.items()})
        for array in binding.outputs.values():
            array[:] = 0


class RecordingBinding:
    """A stand-in for what ONNX Runtime's session binds, which takes addresses without holding what lies there."""

    def __init__(self) -> None:
        self.addresses: Bound = {}
        self.inputs: dict[str, Array] = {}
        self.outputs: dict[str, Array] = {}

    def bind_input(self, *bound: Any) -> None:
        """Of a name, device, its number, dtype, shape and address."""
        self.inputs[bound[0]] = self._at(*bound)

    def bind_output(self, *bound: Any) -> None:
        """The same."""
        self.outputs[bound[0]] = self._at(*bound)

    def _at(
        self, name: str, device: str, number: int, dtype: np.dtype[Any], shape: tuple[int, ...], address: int
    ) -> Array:
        assert (device, number) == ("cpu", 0)
        self.addresses[name] = address
        length = int(np.prod(shape)) * dtype.itemsize
        lying = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
        return lying.view(dtype).reshape(shape)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> dict[str, RecordingSession]:
    """Stand-ins in place of the sessions of every context that is opened, by the label of the graph."""
    opened: dict[str, RecordingSession] = {}

    def open_context(data: bytes, graphs: list[BinaryGraph], *about: object) -> list[RecordingSession]:
        opened.update({label_of(graph): RecordingSession() for graph in graphs})
        return [opened[label_of(graph)] for graph in graphs]

    monkeypatch.setattr(htp, "open_context", open_context)
    return opened


def address(array: Array) -> int:
    return int(array.ctypes.data)


def test_every_input_and_output_is_bound_once_under_its_name(
    compiled: Compiled, sessions: dict[str, RecordingSession]
) -> None:
    backend = HtpBackend(MODEL, compiled.data, compiled.graphs, CHIP)
    backend.run("qkv", 0, case("qkv", 0, encoded("qkv", "w4g32"), 33).stored)
    [graph] = [each for each in compiled.graphs if label_of(each) == "qkv_0_w4g32_w4g32_w4g32_64"]
    expected = interface_of(graph, MODEL)
    label = label_of(graph)
    [bound] = sessions[label].calls
    assert list(bound) == [tensor_name(label, value.name) for value in (*expected.inputs, *expected.outputs)]
    assert not any(each.calls for name, each in sessions.items() if name != label)


def test_what_fits_is_bound_where_it_lies(compiled: Compiled, sessions: dict[str, RecordingSession]) -> None:
    """Weights always, rows where they fill tiles, results where they go together."""
    backend = HtpBackend(MODEL, compiled.data, compiled.graphs, CHIP)
    label = "expert_0_w4g32_w4g32_w4g32_64"
    given = case("expert", 0, encoded("expert", "w4g32"), 130).stored
    for array in given.values():
        array.flags.writeable = False
    found = backend.run("expert", 0, given)["y"]
    whole = sessions[label].calls
    [rest] = sessions["expert_0_w4g32_w4g32_w4g32_32"].calls
    weights = {name: array for name, array in given.items() if name != "normed"}
    assert len(whole) == 2
    for name, array in weights.items():
        part = name.replace(".", "_")
        assert {each[f"{label}_{part}"] for each in whole} == {address(array)}
        assert rest[f"expert_0_w4g32_w4g32_w4g32_32_{part}"] == address(array)
    assert [each[f"{label}_normed"] for each in whole] == [address(given["normed"][start:]) for start in (0, 64)]
    assert [each[f"{label}_y"] for each in whole] == [address(found[start:]) for start in (0, 64)]


def test_rows_are_filled_up_with_zeros_and_keys_are_hidden(
    compiled: Compiled, sessions: dict[str, RecordingSession]
) -> None:
    backend = HtpBackend(MODEL, compiled.data, compiled.graphs, CHIP)
    given = case("attend", 0, (), 40, 50).stored
    backend.run("attend", 0, given)
    [read] = sessions[f"attend_0_64_{CAPACITIES[0]}"].read
    queries, keys, values, mask = (read[f"attend_0_64_64_{name}"] for name in ("queries", "keys", "values", "mask"))
    assert np.array_equal(queries[:, :40], given["queries"])
    assert not queries[:, 40:].any()
    for name, array in (("keys", keys), ("values", values)):
        assert np.array_equal(array[:, :50], given[name])
        assert not array[:, 50:].any()
    assert (mask[:40, :50] == np.maximum(given["mask"], np.float32(-30000))).all()
    assert (mask[:40, 50:] == -30000).all()


def test_copies_are_held_until_the_call_has_run(compiled: Compiled, sessions: dict[str, RecordingSession]) -> None:
    """Heads that lie apart have to be copied, and memory that was given back belongs to whoever comes next."""
    backend = HtpBackend(MODEL, compiled.data, compiled.graphs, CHIP)
    given = case("attend", 0, (), 64 + 32, CAPACITIES[1]).stored
    apart = {name: np.repeat(given[name], 2, axis=1)[:, : CAPACITIES[1]] for name in ("keys", "values")}
    backend.run("attend", 0, given | apart)
    for rows, start in ((64, 0), (32, 64)):
        [read] = sessions[f"attend_0_{rows}_320"].read
        label = f"attend_0_{rows}_320"
        assert np.array_equal(read[f"{label}_queries"], given["queries"][:, start : start + rows])
        for name in ("keys", "values"):
            assert np.array_equal(read[f"{label}_{name}"], apart[name])


def test_weights_of_a_package_are_bound_where_they_were_read_to(
    compiled_package: Path, sessions: dict[str, RecordingSession]
) -> None:
    """Experts in the banks of the arena, all others in memory that stays the same from call to call."""

    def bound(role: GraphRole) -> set[tuple[str, int]]:
        """Names and addresses of a role's weights in all calls so far."""
        labels = [label for label in sessions if label.startswith(f"{role}_")]
        return {
            (name, place)
            for label in labels
            for call in sessions[label].calls
            for name, place in call.items()
            if name.removeprefix(f"{label}_").split("_")[0] in role_shape(role, MODEL, 0).matrix_names
        }

    with open_package(compiled_package) as package, Session(package, "htp") as session:
        session.forward(PROMPT)
        lengths = [
            (np.frombuffer(bank.memory, np.uint8).ctypes.data, len(bank.memory))
            for bank in session.interpreter.pager.arena.banks
        ]
        roles: tuple[GraphRole, ...] = ("qkv", "out", "head")
        experts, dense = bound("expert"), {role: bound(role) for role in roles}
        assert {name.rpartition("_")[2] for name, _ in experts} == {"nibbles", "multipliers", "scale"}
        for name, place in experts:
            assert any(start <= place < start + length for start, length in lengths), name
        assert all(dense.values())
        session.forward(PROMPT)
        assert {role: bound(role) for role in dense} == dense
