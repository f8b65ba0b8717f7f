"""Which graphs a package needs on an accelerator."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec.structs import replace as changed

from estream_packer.htp.tiles import KEYS, TOKENS, Weights, tiles_for
from estream_spec.graph_interface import class_count
from estream_spec.layout import embedding_layout, expert_layout, final_layout, layer_layout
from estream_spec.manifest import GraphRole
from estream_spec.model import Layer, ModelDescription
from estream_spec.weights import Encoding
from fixtures.models import MIXED
from fixtures.packages import ENCODINGS, MODEL

OWN = {role: tokens for role, tokens in TOKENS.items() if class_count(role, MODEL)}
"""The tiles of the roles that the model has."""


def weights(model: ModelDescription, *others: dict[str, Encoding]) -> Weights:
    """Weights as the format lays them out; `others` are the encodings of the first layers where they are not usual."""
    layers = range(len(model.layers))
    stored = [*(ENCODINGS | each for each in others), *[ENCODINGS] * (len(layers) - len(others))]
    dense = [layer_layout(model, layer, stored[layer]) for layer in layers]
    ends = embedding_layout(model, ENCODINGS), final_layout(model, ENCODINGS)
    experts = [expert_layout(model, model.layers[layer].experts or 0, stored[layer]) for layer in layers]
    return Weights(model, [ends[0], *dense, ends[1]], experts)


def model(*, experts: int = 3, layers: int = 2, context: int = 64) -> ModelDescription:
    [block] = MODEL.expert_blocks
    described = changed(MODEL, layers=(Layer(attention=0, experts=0),) * layers, context_length=context)
    return changed(described, expert_blocks=(changed(block, experts=experts),))


def labels(stored: Weights) -> list[str]:
    return [tile.label for tile in tiles_for(stored)]


def test_neither_experts_nor_layers_add_graphs() -> None:
    small = labels(weights(model(experts=16, layers=1)))
    assert len(small) == sum(map(len, OWN.values()))
    for experts in (16, 64):
        for layers in (1, 4):
            assert labels(weights(model(experts=experts, layers=layers))) == small


def test_tiles_are_told_apart_and_named_as_they_are_labelled() -> None:
    tiles = tiles_for(weights(model()))
    assert len({tile.label for tile in tiles}) == len(tiles)
    assert all(tile.graph.name == tile.label for tile in tiles)
    by_role: dict[GraphRole, list[int]] = {}
    for tile in tiles:
        by_role.setdefault(tile.graph.role, []).append(tile.graph.tokens)
    assert {role: tuple(found) for role, found in by_role.items()} == OWN


def test_each_tile_has_twice_the_rows_of_the_one_before() -> None:
    """What covers rows with tiles counts on it."""
    for rising in TOKENS.values():
        assert all(more == 2 * fewer for fewer, more in pairwise(rising))


@pytest.mark.parametrize(
    ("context", "capacities"),
    [
        (1, [256]),
        (256, [256]),
        (257, [256, 512]),
        (2048, [256, 512, 1024, 2048]),
        (4096, list(KEYS)),
        (4097, list(KEYS)),
        (1 << 20, list(KEYS)),
    ],
)
def test_capacities_go_up_to_the_context(context: int, capacities: list[int]) -> None:
    found = Counter(tile.graph.keys for tile in tiles_for(weights(model(context=context))) if tile.graph.keys)
    assert sorted(found) == capacities
    assert set(found.values()) == {len(TOKENS["attend"])}


def test_layers_stored_in_other_ways_add_graphs_for_what_differs() -> None:
    other: dict[str, Encoding] = {"up": "w8", "q": "f32"}
    found = set(labels(weights(model(layers=3), other)))
    usual = set(labels(weights(model(layers=3))))
    assert found - usual == {
        *(f"qkv_0_f32_w8_w8_{tokens}" for tokens in TOKENS["qkv"]),
        *(f"expert_0_w4g32_w8_w4g32_{tokens}" for tokens in TOKENS["expert"]),
    }
    assert usual < found


def test_encodings_come_in_the_order_of_the_layers() -> None:
    stored = weights(model(layers=4), {"o": "f32"}, {"o": "w4g64"}, {"o": "f32"})
    assert stored.encodings("out", 0) == [("f32",), ("w4g64",), ("w8",)]
    assert stored.encodings("attend", 0) == [()]


def test_a_tied_head_is_stored_as_the_embedding() -> None:
    described = model()
    tied = changed(described, tied_head=True)
    usual = weights(described)
    plain = embedding_layout(tied, {**ENCODINGS, "embedding": "f32"})
    stored = replace(usual, model=tied, dense=[plain, *usual.dense[1:-1], final_layout(tied, ENCODINGS)])
    assert stored.encodings("head", 0) == [("f32",)]
    assert usual.encodings("head", 0) == [("w8",)]


def test_shape_classes_have_their_own_graphs() -> None:
    [attention], [block] = MODEL.attentions, MODEL.expert_blocks
    described = changed(
        MODEL,
        layers=(Layer(attention=0, experts=0), Layer(attention=1, experts=1)),
        attentions=(attention, changed(attention, heads=4)),
        expert_blocks=(block, changed(block, intermediate=64)),
    )
    found = Counter((tile.graph.role, tile.graph.shape_class) for tile in tiles_for(weights(described)))
    expected = Counter({(role, number): len(tokens) for role, tokens in OWN.items() for number in (0, 1)})
    del expected["head", 1]
    assert found == expected


def test_layers_of_all_kinds_have_their_graphs() -> None:
    """A layer without experts, whose range of records names any layout, has no say in how experts are stored."""
    usual = weights(MIXED)
    experts = [
        usual.dense[0] if layer.experts is None else layout
        for layer, layout in zip(MIXED.layers, usual.experts, strict=True)
    ]
    stored = replace(usual, experts=experts)
    found = {(tile.graph.role, tile.graph.shape_class) for tile in tiles_for(stored)}
    assert found == {(role, number) for role in TOKENS for number in range(class_count(role, MIXED))}
    assert stored.encodings("expert", 0) == [("w4g32",) * 3]
