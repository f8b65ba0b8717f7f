"""Sessions on backend `htp` in the simulator: what they compute, what does not change it, and what it cost."""

from __future__ import annotations

import gc
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from estream_loader import open_package, rpcmem
from estream_packer.recipe import BuildOptions, DenseEncoding
from estream_runtime import Session
from estream_runtime.batch import Batch
from estream_spec.errors import LinkError, TrapError
from fixtures.cdsprpc import StandIn
from fixtures.compiled import compile_package
from fixtures.olmoe import EXPERTS, LAYERS, VariantName, token_ids
from fixtures.packed import FamilyFactory, PackageFactory

Floats = npt.NDArray[np.float32]
PROMPT = token_ids("htp", 3)
LONG = token_ids("session", 33)
CLOSE = 2e-2
"""What logits may differ by from those of f32, as a share of the largest one."""
HIDDEN_CLOSE = 1e-2
"""What hidden states may differ by, as a share of their size."""


def logits_of(path: Path, prompt: npt.NDArray[np.int64], backend: str = "htp", **options: Any) -> Floats:
    with open_package(path) as package, Session(package, backend, threads=1, **options) as session:
        return session.forward(prompt)


@pytest.fixture(scope="module")
def expected(compiled_package: Path) -> Floats:
    """Logits of the prompt, with all experts in the arena."""
    return logits_of(compiled_package, PROMPT, arena_bytes=LAYERS * EXPERTS << 14, group_size=EXPERTS)


@pytest.mark.parametrize(
    ("policy", "lanes", "group_size", "depth"),
    [
        ("pre-routing", 1, 1, 0),
        ("pre-routing", 3, 5, 1),
        ("post-routing", 2, 1, 23),
        ("on-demand", 1, 2, 4),
    ],
)
def test_results_do_not_depend_on_arena_or_groups_or_policy(
    policy: str, lanes: int, group_size: int, depth: int, compiled_package: Path, expected: Floats
) -> None:
    sizes: dict[str, Any] = {
        "arena_bytes": group_size * (depth + 1) << 14,
        "group_size": group_size,
        "prefetch_depth": depth,
    }
    found = logits_of(compiled_package, PROMPT, **sizes, policy=policy, lanes=lanes)
    assert np.array_equal(found, expected)


def test_results_do_not_depend_on_the_kind_of_memory(
    compiled_package: Path, expected: Floats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = StandIn(tmp_path)
    monkeypatch.setattr(rpcmem, "LIBRARY", str(library.path))
    assert np.array_equal(logits_of(compiled_package, PROMPT, arena_kind="rpcmem"), expected)
    gc.collect()
    assert (library.account.allocations, library.account.frees) == (1, 1)


def test_logits_are_close_to_those_of_f32_and_experts_the_same(compiled_package: Path) -> None:
    routes: dict[str, list[npt.NDArray[np.int32]]] = {"htp": [], "portable": []}
    with open_package(compiled_package) as package:
        logits = []
        for backend, seen in routes.items():
            with Session(package, backend) as session:
                logits.append(session.forward(LONG, lambda layer, ids, weights, seen=seen: seen.append(ids)))  # type: ignore[misc]
    found, exact = logits
    assert np.abs(found - exact).max() < CLOSE * np.abs(exact).max()
    for one, other in zip(*routes.values(), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(("variant", "dense"), [("tied", "w4g32"), ("tied", "f32"), ("grouped", "f32")])
def test_other_models(variant: VariantName, dense: DenseEncoding, packed: PackageFactory, tmp_path: Path) -> None:
    """A head that is the embedding, dense weights in nibbles or f32, and key heads that query heads share."""
    path = tmp_path / "compiled.emoe"
    options = BuildOptions(activations="f32", experts="w8", dense=dense)
    shutil.copy(packed(variant, options), path)
    compile_package(path)
    found, exact = (logits_of(path, PROMPT, backend) for backend in ("htp", "portable"))
    assert np.abs(found - exact).max() < CLOSE * np.abs(exact).max()


@pytest.mark.parametrize("name", ["deepseek_v2", "gpt_oss", "lfm2_moe"])
def test_hidden_states_of_all_kinds_of_layers(name: str, packed_family: FamilyFactory, tmp_path: Path) -> None:
    """Dense blocks and latent attention; biases, sinks and windows; convolutions: rows as they enter the head."""
    path = tmp_path / "compiled.emoe"
    shutil.copy(packed_family(name, BuildOptions(activations="f32", experts="w8", dense="w8")), path)
    compile_package(path)
    found = []
    with open_package(path) as package:
        for backend in ("htp", "portable"):
            with Session(package, backend, threads=1) as session:
                found.append(session._run(Batch.of(LONG), np.copy))
    assert np.linalg.norm(found[0] - found[1]) < HIDDEN_CLOSE * np.linalg.norm(found[1])


def test_generation_is_that_of_f32(compiled_package: Path) -> None:
    with (
        open_package(compiled_package) as package,
        Session(package, "htp") as session,
        Session(package, "portable") as portable,
    ):
        assert list(session.generate(LONG, 3)) == list(portable.generate(LONG, 3))


def test_what_it_cost(compiled_package: Path) -> None:
    before = set(threading.enumerate())
    with open_package(compiled_package) as package, Session(package, "htp:sm8650") as session:
        assert session.backend.detail == "sm8650, simulated"
        stats = session.prefill(LONG).stats
        again = session.prefill(LONG[:2]).stats
    # Two layers of queries and keys and of attention; of the last layer, only the last row goes on.
    rows = 4 * len(LONG) + len(LONG) * (1 + 3) + (1 + 3) + 1
    assert (stats.backend, stats.notice, stats.arena_kind) == ("htp", None, "ordinary")
    assert stats.tile_rows - stats.padded_rows == rows
    assert stats.tile_rows % 32 == 0
    assert again.tile_rows - again.padded_rows == 2 * 4 + 2 * 4 + 4 + 1
    assert set(threading.enumerate()) == before
    with open_package(compiled_package) as package, Session(package, "portable") as session:
        stats = session.prefill(PROMPT).stats
        assert (stats.tile_rows, stats.padded_rows) == (0, 0)


def test_the_default_is_never_the_accelerator(compiled_package: Path) -> None:
    with open_package(compiled_package) as package, Session(package) as session:
        assert session.backend.name != "htp"


def test_a_package_without_binaries_does_not_open(packed: PackageFactory) -> None:
    with open_package(packed()) as package, pytest.raises(LinkError, match="has no binary for any NPU"):
        Session(package, "htp")


def test_a_prompt_is_held_to_what_the_binary_takes(compiled_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once and not in the middle of a layer; what is generated ends there as it ends with the context."""
    with open_package(compiled_package) as package, Session(package, "htp", threads=1) as session:
        assert session.backend.most_tokens == 512
        monkeypatch.setattr(session.backend, "most_tokens", 4)
        with pytest.raises(TrapError, match=r"prompt has 33 tokens, the context holds 4"):
            session.prefill(LONG)
        assert len(list(session.generate(PROMPT, max_new_tokens=9))) == 1
