"""The prefetch router: predicts a layer's experts from what enters its attention block. FORMAT.md section 6.12.

A layer has a linear map to expert scores, trained on what the model's own router chose, and a confidence model that
says how many experts beyond `top_k` are worth fetching: annex A.7. What is predicted decides when records are read,
never a result. The section's bytes are those of the file that `estream-pack train-prefetch` writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, Final, Protocol

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from estream_spec import limits
from estream_spec.constants import PREFETCH_CONTEXT, PREFETCH_MAGIC
from estream_spec.manifest import Digest, Name, Provenance, Source
from estream_spec.messagepack import decode_canonical, encode
from estream_spec.model import Described, ModelDescription
from estream_spec.rulebook import refusal, require

Share = Annotated[float, Meta(ge=0, le=1)]

ROUTER_TENSORS: Final = ("expert_norm", "expert_norm.bias", "router", "router.bias", "selection_bias")
"""What decides a layer's experts, by the names in its record, in the order in which it is digested."""
BEYOND: Final = 8
"""Probabilities beyond the first `top_k` that the confidence model sees by rank."""
_HINT: Final = "train it anew for this model, with 'estream-pack train-prefetch'"


class PrefetchLayer(Described, frozen=True, kw_only=True):
    """What predicts the experts of one layer. All numbers are little-endian and finite, E being its experts.

    Attributes:
        layer: a layer with experts.
        router: digest of the router that it was trained for, see `router_digest`.
        weights: f16 `[hidden, E]`, from the normalised row to scores.
        bias: f32 `[E]`, added to scores.
        confidence: f32 `[feature_count]`, what each feature counts in the confidence model.
        thresholds: f32 `[E - top_k + 1]`, non-decreasing: for d = 0 and so on, where it is as likely as not that the
            first `top_k + d` predicted experts cover all that are needed.
        needed: f32 `[E]` from 0 to 1: how often the expert predicted at each rank was routed to.
        target: how sure the confidence model must be, above 0 and up to 1.
    """

    layer: Annotated[int, Meta(ge=0, lt=limits.MAX_LAYERS)]
    router: Digest
    weights: bytes
    bias: bytes
    confidence: bytes
    thresholds: bytes
    needed: bytes
    target: Annotated[float, Meta(gt=0, le=1)]


class PrefetchRouter(Described, frozen=True, kw_only=True):
    """The content of a `PREFETCH_ROUTER` section behind its magic.

    Attributes:
        model: digest of the model it was trained for, see `model_digest`.
        layers: one for each layer that has experts, ascending.
        writer: name and version of the program that trained it.
        tokens: of text it was trained on.
        sources: the files it was trained on.
        overlap: share of needed experts that it predicted on text it had not seen, at the layers' targets.
        extra: predicted experts beyond `top_k` on the same text, mean over tokens and layers.
    """

    model: Digest
    layers: Annotated[tuple[PrefetchLayer, ...], Meta(min_length=1, max_length=limits.MAX_LAYERS)]
    writer: Name
    tokens: Annotated[int, Meta(ge=0, lt=1 << 48)]
    sources: Annotated[tuple[Source, ...], Meta(max_length=limits.MAX_SOURCES)]
    overlap: Share
    extra: Annotated[float, Meta(ge=0, le=limits.MAX_EXPERTS)]


class Bound(Protocol):
    """What a prefetch router is bound to, such as a manifest."""

    @property
    def model(self) -> ModelDescription:
        """What the model computes."""

    @property
    def provenance(self) -> Provenance:
        """Where its weights came from."""


_decoder = msgspec.msgpack.Decoder(PrefetchRouter)


def encode_prefetch_router(router: PrefetchRouter) -> bytes:
    """The bytes of the section, and of the file."""
    return PREFETCH_MAGIC + encode(router)


def decode_prefetch_router(data: bytes, path: str) -> PrefetchRouter:
    """Parse a prefetch router and prove that its bytes are the canonical ones.

    Args:
        data: the bytes of the section or the file.
        path: what messages call it.

    Raises:
        MalformedError: wrong magic, or not MessagePack behind it.
        InvalidError: another structure, a value outside its range, or not canonical.
    """
    found = data[: len(PREFETCH_MAGIC)]
    message = f"not a prefetch router: it starts with {found!r}, expected {PREFETCH_MAGIC!r}"
    require(found == PREFETCH_MAGIC, "EMOE-PRE-001", message, path)
    return decode_canonical(_decoder, data[len(PREFETCH_MAGIC) :], path)


def check_prefetch_router(router: PrefetchRouter, bound: Bound, path: str) -> None:
    """Judge a prefetch router against a model, but for the routers it was trained for: see `check_router`.

    Args:
        router: the prefetch router.
        bound: the model's manifest, or what is known of it yet.
        path: what messages call it.

    Raises:
        IntegrityError: it was trained for another model.
        InvalidError: not the layers with experts, an array of another length, a number that is not finite, thresholds
            that fall, or a share outside 0 to 1.
    """
    if router.model != (expected := model_digest(bound)):
        message = f"prefetch router is for another model: digest {router.model.hex()}, this one has {expected.hex()}"
        raise refusal("EMOE-PRE-002", message, path=path, hint=_HINT)
    model = bound.model
    named = tuple(each.layer for each in router.layers)
    message = f"prefetch router has layers {_listed(named)}, those with experts are {_listed(model.expert_layers)}"
    require(named == model.expert_layers, "EMOE-PRE-003", message, f"{path}.layers")
    for index, layer in enumerate(router.layers):
        _check_layer(layer, model, f"{path}.layers[{index}]")


def check_router(layer: PrefetchLayer, tensors: Mapping[str, NDArray[Any]], path: str) -> None:
    """Prove that a layer of a prefetch router was trained for the layer's router.

    Args:
        layer: of the prefetch router.
        tensors: the tensors of the layer's dense record by name, see `router_digest`.
        path: what messages call the prefetch router.

    Raises:
        IntegrityError: it was trained for another router.
    """
    if layer.router != (found := router_digest(tensors)):
        message = f"prefetch router is for another router of layer {layer.layer}: digest {layer.router.hex()}"
        raise refusal("EMOE-PRE-008", f"{message}, this one has {found.hex()}", path=path, hint=_HINT)


def model_digest(bound: Bound) -> bytes:
    """Digest of what a prefetch router is bound to: the model description, and the tensors of the checkpoint.

    Spec: FORMAT.md section 6.12.
    """
    tensors = next((each.sha256 for each in bound.provenance.sources if each.name == "tensors"), bytes(32))
    return sha256(PREFETCH_CONTEXT + sha256(encode(bound.model)).digest() + tensors).digest()


def router_digest(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """Digest of what decides a layer's experts.

    Args:
        tensors: the layer's f32 tensors by the names in its record; only `ROUTER_TENSORS` count.

    Spec: FORMAT.md section 6.13.
    """
    digest = sha256()
    for name in ROUTER_TENSORS:
        if name in tensors:
            digest.update(np.ascontiguousarray(tensors[name], dtype="<f4").data)
    return digest.digest()


def feature_count(experts: int, top_k: int) -> int:
    """Features that the confidence model of a layer sees."""
    return min(experts, top_k + BEYOND) + 2 * experts


def arrays_of(layer: PrefetchLayer) -> dict[str, NDArray[Any]]:
    """The arrays of a layer, flat and as they are stored."""
    return {
        "weights": np.frombuffer(layer.weights, "<f2"),
        **{name: np.frombuffer(getattr(layer, name), "<f4") for name in ("bias", "confidence", "thresholds", "needed")},
    }


def _check_layer(layer: PrefetchLayer, model: ModelDescription, path: str) -> None:
    block = model.expert_block(layer.layer)
    for name, expected in _lengths(model.hidden, block.experts, block.router.top_k).items():
        found = len(getattr(layer, name))
        message = f"{name} of {found} bytes, expected {expected}"
        require(found == expected, "EMOE-PRE-004", message, f"{path}.{name}")
    arrays = arrays_of(layer)
    for name, values in arrays.items():
        _refuse_odd(values, np.isfinite(values), "EMOE-PRE-005", f"{path}.{name}", "finite numbers")
    thresholds, needed = arrays["thresholds"], arrays["needed"]
    falls = np.flatnonzero(thresholds[1:] < thresholds[:-1])
    if falls.size:
        before, after = thresholds[falls[0]], thresholds[falls[0] + 1]
        message = f"thresholds fall from {before} to {after}, expected none below the one before"
        raise refusal("EMOE-PRE-006", message, path=f"{path}.thresholds")
    _refuse_odd(needed, (needed >= 0) & (needed <= 1), "EMOE-PRE-007", f"{path}.needed", "numbers from 0 to 1")


def _refuse_odd(values: NDArray[Any], legal: NDArray[np.bool_], rule: str, path: str, expected: str) -> None:
    """Refuse an array by its first number that is not legal."""
    odd = values[~legal]
    if odd.size:
        raise refusal(rule, f"{path.rpartition('.')[2]} has {odd[0]}, expected {expected}", path=path)


def _listed(layers: Sequence[int]) -> str:
    """Layers in words, only the first ones of many."""
    return ", ".join(map(str, layers[:8])) + (f", ... ({len(layers)})" if len(layers) > 8 else "")


def _lengths(hidden: int, experts: int, top_k: int) -> dict[str, int]:
    """Bytes of each array of a layer."""
    return {
        "weights": 2 * hidden * experts,
        "bias": 4 * experts,
        "confidence": 4 * feature_count(experts, top_k),
        "thresholds": 4 * (experts - top_k + 1),
        "needed": 4 * experts,
    }
