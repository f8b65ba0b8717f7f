"""Models whose layers differ: each layer finds the graphs of its own shape classes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from estream_loader import open_package
from estream_packer.graphs import build_graph
from estream_runtime import Session
from estream_spec.constants import SectionType
from estream_spec.graph_interface import ROLES, class_count
from estream_spec.manifest import Graph
from estream_spec.model import Attention, ExpertBlock, Layer, ModelDescription, Rotary, Router
from fixtures.packages import Draft, Section

MODEL = ModelDescription(
    family="mixed",
    hidden=32,
    vocabulary=16,
    context_length=64,
    norm_epsilon=1e-5,
    layers=(
        Layer(attention=0, experts=0),
        Layer(attention=1, experts=0),
        Layer(attention=0, experts=1),
        Layer(attention=1, experts=1),
    ),
    attentions=(
        Attention(heads=2, key_value_heads=1, head_dim=16, rotary=Rotary(theta=10000.0)),
        Attention(heads=4, key_value_heads=4, head_dim=8, rotary=Rotary(theta=500.0), qk_norm="full", clip_qkv=2.0),
    ),
    expert_blocks=(
        ExpertBlock(experts=3, intermediate=32, router=Router(family="softmax-topk", top_k=2)),
        ExpertBlock(experts=5, intermediate=128, router=Router(family="softmax-topk-renormalise", top_k=1)),
    ),
)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def mixed() -> bytes:
    """A package with random weights and real graphs."""
    draft = Draft(model=MODEL)
    draft.sections = [section for section in draft.sections if section.type != SectionType.GRAPH]
    wanted = [(role, shape_class) for role in ROLES for shape_class in range(class_count(role, MODEL))]
    graphs = []
    for number, (role, shape_class) in enumerate(wanted):
        weights = "f32" if role == "attend" else "int8"
        data = build_graph(role, MODEL, shape_class, weights, "f32")  # type: ignore[arg-type]
        draft.sections.append(Section(SectionType.GRAPH, data, id=number))
        graphs.append(
            Graph(
                section=number,
                target="portable",
                role=role,
                shape_class=shape_class,
                weights=weights,  # type: ignore[arg-type]
                activations="f32",
            )
        )
    draft.change_manifest(graphs=tuple(graphs))
    return draft.seal()


def test_layers_of_several_classes_run_alike_on_both_backends(mixed: bytes) -> None:
    found = []
    shapes: list[tuple[int, ...]] = []

    def note(layer: int, expert_ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
        shapes.append(expert_ids.shape)
        assert expert_ids.max() < MODEL.expert_block(layer).experts

    for backend in ("portable", "reference"):
        with open_package(mixed) as package, Session(package, backend) as session:
            found.append(session.forward(PROMPT, note))
    assert shapes == [(len(PROMPT), 2)] * 2 + [(len(PROMPT), 1)] * 2 + shapes[:4]
    assert np.abs(found[0] - found[1]).max() < 1e-3 * np.abs(found[1]).max()


def test_records_of_different_lengths_share_an_arena(mixed: bytes) -> None:
    found = []
    with open_package(mixed) as package:
        lengths = [each.record_length for each in package.experts.table.ranges]
        assert len(set(lengths)) == 2
        for slots, group_size in ((1, 1), (2, 2), (3, 1), (16, 5)):
            with Session(package, arena_bytes=slots * max(lengths), group_size=group_size) as session:
                found.append(session.forward(PROMPT))
    for each in found[1:]:
        assert np.array_equal(each, found[0])
