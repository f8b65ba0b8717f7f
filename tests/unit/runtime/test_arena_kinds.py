"""Sessions whose arena an NPU could share: the same results, and every byte given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from estream_loader import open_package, rpcmem
from estream_loader.memory import ARENA_KINDS
from estream_runtime import Session
from estream_runtime.backends import GRAPH_BACKENDS
from estream_runtime.weights import DenseWeights
from estream_spec.errors import IntegrityError, LinkError
from fixtures.cdsprpc import Account, StandIn
from fixtures.olmoe import EXPERTS, LAYERS, token_ids
from fixtures.packed import PackageFactory

PROMPT = token_ids("arena kinds", 33)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A stand-in that is found as the system's library is; all that it gave has come back when the test is over."""
    stand_in = StandIn(tmp_path)
    monkeypatch.setattr(rpcmem, "LIBRARY", str(stand_in.path))
    yield stand_in
    gc.collect()
    account = stand_in.account
    assert (account.frees, account.bad_frees) == (account.allocations, 0)


@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_results_do_not_depend_on_the_kind_of_memory(backend: str, packed: PackageFactory, library: StandIn) -> None:
    found = {}
    with open_package(packed()) as package:
        for kind in ARENA_KINDS:
            with Session(package, backend, arena_kind=kind, group_size=3, prefetch_depth=1, threads=1) as session:
                logits, prefill = session.forward(PROMPT), session.prefill(PROMPT)
                found[kind] = logits, prefill.logits, list(session.generate(PROMPT, 3))
                assert (prefill.stats.arena_kind, prefill.stats.backend) == (kind, backend)
                assert library.account.frees == 0
    for one, other in zip(*found.values(), strict=True):
        assert np.array_equal(one, other)
    assert library.account == Account(inits=1, allocations=1, allocations2=0, frees=1, bad_frees=0)


def test_ordinary_memory_is_taken_unless_another_kind_is_asked_for(packed: PackageFactory, library: StandIn) -> None:
    with open_package(packed()) as package:
        with Session(package, threads=1) as session:
            assert session.prefill(PROMPT).stats.arena_kind == "ordinary"
        with pytest.raises(LinkError, match="unknown arena kind 'shared', expected one of: ordinary, rpcmem"):
            Session(package, arena_kind="shared")  # type: ignore[arg-type]
    assert library.account.allocations == 0


def test_session_that_fails_to_open_gives_its_arena_back(
    packed: PackageFactory, library: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise LinkError("weights that do not fit")

    monkeypatch.setattr(DenseWeights, "__init__", fails)
    with open_package(packed()) as package, pytest.raises(LinkError, match="weights that do not fit") as caught:
        Session(package, arena_kind="rpcmem", threads=1)
    assert caught.value.__traceback__ is not None  # and what it refers to is still there
    assert library.account == Account(inits=1, allocations=1, allocations2=0, frees=1, bad_frees=0)


def test_session_whose_run_failed_gives_its_arena_back(packed: PackageFactory, library: StandIn) -> None:
    data = bytearray(packed().read_bytes())
    with open_package(bytes(data)) as package:
        for expert in range(EXPERTS):
            data[package.experts.place(LAYERS - 1, expert).offset] ^= 1
    with open_package(bytes(data)) as package:
        with Session(package, arena_kind="rpcmem", threads=1) as session, pytest.raises(IntegrityError):
            session.forward(PROMPT)
        gc.collect()
        assert library.account.frees == 1


def test_what_a_caller_keeps_of_an_arena_outlives_the_session(packed: PackageFactory, library: StandIn) -> None:
    with open_package(packed()) as package:
        with Session(package, arena_kind="rpcmem", threads=1) as session:
            session.forward(PROMPT)
            bank = session.interpreter.pager.arena.banks[0]
            held = bytes(bank.memory)
        assert library.account.frees == 0
        assert any(held)
        assert bytes(bank.memory) == held  # would end the process, had the memory gone
        del bank
        gc.collect()
        assert library.account.frees == 1
