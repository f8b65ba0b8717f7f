"""Unquantised packages compute what Hugging Face transformers does: the same experts, weights, logits and tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from estream_loader import open_package
from estream_runtime import Session
from estream_runtime.backends import GRAPH_BACKENDS
from fixtures.olmoe import CONTEXT_LENGTH, EXPERTS, HEADS, IDLE_EXPERTS, SINGLE_EXPERTS, VARIANTS, VariantName
from fixtures.packed import UNQUANTISED, PackageFactory
from fixtures.reference import GREEDY_PROMPT, GREEDY_TOKENS, PROMPT_LENGTHS, ReferenceLoader

Routes = list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]


def forward(session: Session, token_ids: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float32], Routes]:
    """Logits, and by layer the chosen experts and their weights."""
    routes: Routes = []

    def note(layer: int, expert_ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
        assert layer == len(routes)
        routes.append((expert_ids, weights))

    return session.forward(token_ids, note), routes


@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_prompt_routes_and_predicts_alike(
    variant: VariantName, backend: str, packed: PackageFactory, reference: ReferenceLoader
) -> None:
    vectors = reference(variant)
    with open_package(packed(variant, UNQUANTISED)) as package, Session(package, backend) as session:
        for length in PROMPT_LENGTHS:
            prompt = vectors.prompts[length]
            logits, routes = forward(session, prompt.tokens)
            for layer, (expert_ids, weights) in enumerate(routes):
                assert np.array_equal(expert_ids, prompt.experts[layer]), (length, layer)
                assert np.abs(weights - prompt.weights[layer]).max() < 1e-5, (length, layer)
            assert np.abs(logits[prompt.positions] - prompt.logits).max() < 1e-3, length
            assert np.abs(session.prefill(prompt.tokens).logits - prompt.logits[-1]).max() < 1e-3, length


@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_the_same(
    variant: VariantName, backend: str, packed: PackageFactory, reference: ReferenceLoader
) -> None:
    vectors = reference(variant)
    with open_package(packed(variant, UNQUANTISED)) as package, Session(package, backend) as session:
        found = list(session.generate(vectors.prompts[GREEDY_PROMPT].tokens, GREEDY_TOKENS))
    assert found == vectors.greedy.tolist()


def test_the_description_says_what_the_checkpoint_does(packed: PackageFactory) -> None:
    """What parity rests on: each variant really is what its name says."""
    models = {}
    for variant in VARIANTS:
        with open_package(packed(variant, UNQUANTISED)) as package:
            models[variant] = package.manifest.model
    assert {model.context_length for model in models.values()} == {CONTEXT_LENGTH}
    assert models["grouped"].attentions[0].key_value_heads == 2
    assert models["base"].attentions[0].key_value_heads == HEADS
    assert models["clipped"].attentions[0].clip_qkv == 0.75
    assert models["tied"].tied_head
    assert models["renormalised"].expert_blocks[0].router.family == "softmax-topk-renormalise"
    assert models["single"].expert_blocks[0].router.top_k == 1


def test_experts_nobody_chose_are_not_read_once_that_is_known(
    packed: PackageFactory, reference: ReferenceLoader
) -> None:
    prompt = reference("idle").prompts[300]
    with (
        open_package(packed("idle", UNQUANTISED)) as package,
        Session(package, arena_bytes=1 << 30, group_size=EXPERTS) as session,
    ):
        _, routes = forward(session, prompt.tokens)
        record_length = package.experts.table.ranges[0].record_length
        chosen = [set(expert_ids.ravel().tolist()) for expert_ids, _ in routes]
        stats = session.prefill(prompt.tokens).stats
    assert all(experts.isdisjoint(IDLE_EXPERTS) for experts in chosen)
    # All that was wanted came with the first pass, and stays.
    assert stats.bytes_read == 0
    chosen[-1] = set(routes[-1][0][-1].tolist())  # the last layer serves the last token alone
    wanted = sum(map(len, chosen)) * record_length
    with open_package(packed("idle", UNQUANTISED)) as package:
        with Session(package, policy="post-routing") as session:
            assert session.prefill(prompt.tokens).stats.bytes_read == wanted
        with Session(package) as session:  # what is on its way to the arena when a layer is routed comes whole
            stats = session.prefill(prompt.tokens).stats
            assert wanted <= stats.bytes_read <= len(chosen) * EXPERTS * record_length


def test_one_expert_may_take_every_token(packed: PackageFactory, reference: ReferenceLoader) -> None:
    with (
        open_package(packed("single", UNQUANTISED)) as package,
        Session(package, policy="post-routing") as session,
    ):
        _, routes = forward(session, reference("single").prompts[300].tokens)
        assert [np.unique(expert_ids).tolist() for expert_ids, _ in routes] == [[expert] for expert in SINGLE_EXPERTS]
        assert session.prefill(reference("single").prompts[300].tokens).stats.reads <= 2
