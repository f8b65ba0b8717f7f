"""Changes to a manifest's values, with keys kept in the order of FORMAT.md sections 6 and 8."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

from estream_conformance.builder import Draft, Sealed, Section, Values
from estream_conformance.case import Build, accepted, refused
from estream_conformance.keys import KEYS
from estream_conformance.kinds import with_convolution, with_latent, with_shared_block
from estream_conformance.messagepack import Pairs, encode
from estream_conformance.packages import binary, smallest
from estream_spec.constants import SectionType

Path = tuple[str | int, ...]

PLACES: Final[dict[str, Path]] = {
    "": (),
    "layouts": ("layouts", 0),
    "matrices": ("layouts", 0, "matrices", 0),
    "tensors": ("layouts", 0, "tensors", 0),
    "graphs": ("graphs", 0),
    "device_configurations": ("device_configurations", 0),
    "provenance": ("provenance",),
    "sources": ("provenance", "sources", 0),
    "binaries": ("binaries", 0),
    "binary_graphs": ("binaries", 0, "graphs", 0),
    "model": ("model",),
    "layers": ("model", "layers", 0),
    "attentions": ("model", "attentions", 0),
    "rotary": ("model", "attentions", 0, "rotary"),
    "latent": ("model", "attentions", 0, "latent"),
    "convolutions": ("model", "convolutions", 0),
    "dense_blocks": ("model", "dense_blocks", 0),
    "expert_blocks": ("model", "expert_blocks", 0),
    "router": ("model", "expert_blocks", 0, "router"),
}
"""Where the first struct of each kind stands in the manifest."""
NAMES: Final = {
    "": "manifest",
    "layouts": "layout",
    "matrices": "matrix",
    "tensors": "tensor",
    "graphs": "graph",
    "device_configurations": "configuration",
    "sources": "source",
    "binaries": "binary",
    "binary_graphs": "binary_graph",
    "layers": "layer",
    "attentions": "attention",
    "expert_blocks": "expert_block",
    "dense_blocks": "dense_block",
    "convolutions": "convolution",
}
"""What a struct is called, where the key says it otherwise."""
SOURCE: Final[Values] = {"name": "", "length": 0, "sha256": bytes(32)}


def with_binary() -> Draft:
    """The smallest package, with a binary."""
    draft = smallest()
    put(draft.manifest, ("binaries",), [binary(0)])
    draft.sections.insert(-1, Section(SectionType.BINARY, b"binary"))
    return draft


def with_source() -> Draft:
    """The smallest package, with a source named."""
    draft = smallest()
    put(draft.manifest, ("provenance", "sources"), [dict(SOURCE)])
    return draft


BASES: Final[dict[str, tuple[Callable[[], Draft], str]]] = {
    "provenance": (with_source, "one_source"),
    "sources": (with_source, "one_source"),
    "binaries": (with_binary, "one_binary"),
    "binary_graphs": (with_binary, "one_binary"),
    "latent": (with_latent, "latent_attention"),
    "convolutions": (with_convolution, "layer_with_a_convolution"),
    "dense_blocks": (with_shared_block, "layer_with_experts_and_a_dense_block"),
}
"""The package, and the name of its case, for structs that the smallest one lacks."""


def base_of(struct: str) -> tuple[Callable[[], Draft], str]:
    """A package that has a struct, and the name of its case."""
    return BASES.get(struct, (smallest, "smallest"))


def value_at(values: Any, path: Path) -> Any:
    """What stands at a path of keys and indexes."""
    for step in path:
        values = values[step]
    return values


def put(values: Values, path: Path, value: Any) -> None:
    """Set a value; a key that is new goes where its struct's table has it, an unknown one to the end."""
    *parents, last = path
    holder: Any = value_at(values, tuple(parents))
    if not isinstance(holder, dict):
        holder[last] = value
        return
    order = _keys_at(tuple(parents))
    pairs = {**holder, last: value}
    holder.clear()
    holder.update({key: pairs[key] for key in order if key in pairs})
    holder.update(pairs)


def _keys_at(path: Path) -> tuple[str, ...]:
    """The keys of the struct at a path, whichever element of an array it is; none where a map is no struct."""
    names = _names(path)
    return next((KEYS[struct] for struct, place in PLACES.items() if _names(place) == names), ())


def _names(path: Path) -> list[str]:
    return [each for each in path if isinstance(each, str)]


def drop(values: Values, path: Path) -> None:
    """Leave a key or an element out."""
    del value_at(values, path[:-1])[path[-1]]


def with_value(path: Path, value: Any, draft: Draft | None = None) -> Sealed:
    """A package with one value of its manifest set, and `content_id` right for it."""
    draft = smallest() if draft is None else draft
    put(draft.manifest, path, value)
    return draft.seal()


def miswritten(change: Callable[[Values], Any], draft: Draft | None = None) -> Sealed:
    """A package whose manifest is encoded otherwise than it should be; `content_id` is that of the sound one.

    Args:
        change: changes the manifest's values, or returns what shall be encoded for them.
        draft: the package; the smallest where there is none.
    """
    draft = smallest() if draft is None else draft
    manifest = deepcopy({**draft.manifest, "content_id": draft.content_id()})
    changed = change(manifest)
    data = encode(manifest if changed is None else changed)
    return with_manifest(lambda _: data, draft)


def spelled(path: Path, value: Any, draft: Draft | None = None) -> Sealed:
    """The same with one value set: to another spelling of it, or to one that is not of its type or range."""
    return miswritten(lambda manifest: put(manifest, path, value), draft)


def with_pairs(path: Path, change: Callable[[Pairs], Pairs], draft: Draft | None = None) -> Sealed:
    """The same with the pairs of one map changed, which may then come in any order and number."""

    def changed(manifest: Values) -> Any:
        pairs = change(Pairs(value_at(manifest, path).items()))
        if not path:
            return pairs
        put(manifest, path, pairs)
        return None

    return miswritten(changed, draft)


def with_manifest(change: Callable[[bytes], bytes], draft: Draft | None = None) -> Sealed:
    """A package with the manifest's bytes changed."""
    draft = smallest() if draft is None else draft
    draft.section(SectionType.MANIFEST).change = change
    return draft.seal()


def refuse(
    rule: str, name: str, about: str, build: Build, *features: str, base: str = "smallest", committed: bool = True
) -> None:
    """Register a refused case of many that differ in a value only."""
    refused(rule, *features, base=base, committed=committed)(_named(name, about, build))


def accept(name: str, about: str, build: Build, *features: str, base: str = "smallest", committed: bool = True) -> None:
    """Register an accepted case of many that differ in a value only."""
    accepted(*features, base=base, committed=committed)(_named(name, about, build))


def counted(number: int, noun: str) -> str:
    """A number of things, in words."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _named(name: str, about: str, build: Build) -> Build:
    def case() -> Any:
        return build()

    case.__name__, case.__doc__ = name, about
    return case
