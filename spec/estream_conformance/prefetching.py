"""Prefetch routers in the making: FORMAT.md sections 6.12 and 6.13, as plain values."""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final

from estream_conformance.builder import Draft, Sealed, Section, Values
from estream_conformance.messagepack import encode
from estream_conformance.packages import bytes_of, full, smallest
from estream_spec.constants import PREFETCH_CONTEXT, PREFETCH_MAGIC, SectionType

Change = Callable[[Values], Any]
"""Changes the values of a prefetch router, or returns what shall be encoded for them."""

ONE: Final = "prefetch_router_of_one_layer"
THREE: Final = "prefetch_router_of_three_layers"
"""Names of the cases of `one_layer` and `three_layers`."""
SOURCE: Final[Values] = {"name": "tensors", "length": 1, "sha256": b"\x11" * 32}
"""What one may have been trained on."""
ROUTER_TENSORS: Final = ("expert_norm", "expert_norm.bias", "router", "router.bias", "selection_bias")


def prefetch_router(made: Draft) -> Values:
    """A prefetch router that is right for a package."""
    layers = made.model()["layers"]
    return {
        "model": model_digest(made),
        "layers": [prefetch_layer(made, number) for number, layer in enumerate(layers) if "experts" in layer],
        "writer": "w",
        "tokens": 0,
        "sources": [],
        "overlap": 0.0,
        "extra": 0.0,
    }


def prefetch_layer(made: Draft, number: int) -> Values:
    """What predicts the experts of one layer."""
    hidden, block = made.model()["hidden"], made.model()["expert_blocks"][made.model()["layers"][number]["experts"]]
    experts, top_k = block["experts"], block["router"]["top_k"]
    return {
        "layer": number,
        "router": router_digest(made, number),
        "weights": halves(*[0.5] * hidden * experts),
        "bias": floats(*[-1.5] * experts),
        "confidence": floats(*[2.0] * (min(experts, top_k + 8) + 2 * experts)),
        "thresholds": floats(*range(experts - top_k + 1)),
        "needed": floats(*[0.25] * experts),
        "target": 0.5,
    }


def floats(*numbers: float) -> bytes:
    """Numbers as f32."""
    return struct.pack(f"<{len(numbers)}f", *numbers)


def halves(*numbers: float) -> bytes:
    """Numbers as f16."""
    return struct.pack(f"<{len(numbers)}e", *numbers)


def model_digest(made: Draft) -> bytes:
    """Digest of the model description and of the tensors it came from."""
    sources = made.manifest["provenance"].get("sources", [])
    tensors = next((each["sha256"] for each in sources if each["name"] == "tensors"), bytes(32))
    return sha256(PREFETCH_CONTEXT + sha256(encode(made.model())).digest() + tensors).digest()


def router_digest(made: Draft, number: int, names: tuple[str, ...] = ROUTER_TENSORS) -> bytes:
    """Digest of what decides a layer's experts, in the order of the names."""
    one = made.tables[SectionType.DENSE][number + 1]
    tensors = {each["name"]: each for each in made.manifest["layouts"][one.layout]["tensors"]}
    digest = sha256()
    for tensor in (tensors[name] for name in names if name in tensors):
        digest.update(one.payloads[0][tensor["offset"] :][: bytes_of(tensor["dtype"], tensor["shape"])])
    return digest.digest()


def section(value: Any, number: int = 0, **changes: int | bytes) -> Section:
    """A section with a prefetch router, or with any value behind its magic."""
    return Section(SectionType.PREFETCH_ROUTER, PREFETCH_MAGIC + encode(value), id=number, changes=dict(changes))


def with_prefetch_router(made: Draft, change: Change = lambda value: None) -> Sealed:
    """A package with its prefetch router for its last section."""
    value = prefetch_router(made)
    changed = change(value)
    made.sections.append(section(value if changed is None else changed))
    return made.seal()


def one_layer(change: Change = lambda value: None) -> Sealed:
    """The smallest package with a prefetch router."""
    return with_prefetch_router(smallest(), change)


def three_layers(change: Change = lambda value: None) -> Sealed:
    """A package of three layers, of two, three and three experts, with a prefetch router."""
    return with_prefetch_router(full(), change)


def setting(key: str, value: Any) -> Change:
    """The change of one value of a prefetch router."""
    return lambda values: values.update({key: value})


def in_layer(number: int, key: str, value: Any) -> Change:
    """The change of one value of a layer."""
    return lambda values: values["layers"][number].update({key: value})


def holding(data: bytes, **changes: int | bytes) -> Sealed:
    """The smallest package with a section of any bytes."""
    made = smallest()
    made.sections.append(Section(SectionType.PREFETCH_ROUTER, data, changes=dict(changes)))
    return made.seal()
