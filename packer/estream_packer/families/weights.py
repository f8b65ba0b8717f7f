"""Which checkpoint tensor becomes which stored tensor, as data, and the check of a checkpoint against it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Final, TypeVar

import numpy as np
from tokenizers import Tokenizer

from estream_loader.tokenizing import tokenizer_faults, tokenizer_text
from estream_packer.checkpoint import TOKENIZER, Checkpoint
from estream_packer.checkpoint.coding import Coding
from estream_packer.checkpoint.problems import Problems
from estream_packer.checkpoint.safetensors import PLAIN
from estream_packer.families.places import ExpertSpelling, Group, Place, Places, Selection
from estream_packer.families.quantisation import ACTIVATION_SUFFIXES, quantisation_of
from estream_packer.families.sources import TensorSource
from estream_spec.errors import PackError
from estream_spec.model import ModelDescription

_BODY: Final = "model."
"""What the family's names of the model's body start with; the head stands outside."""
PREFIXES: Final = (
    (_BODY, ""),
    ("", ""),
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
    ("language_model.", ""),
)
"""What a checkpoint may have before the names of its body instead of `_BODY`, and before all others."""
ROTARY_BUFFERS: Final = (".rotary_emb.inv_freq",)
"""Old checkpoints carry the rotary frequencies, which follow from the configuration."""
_Spelling = TypeVar("_Spelling", Places, ExpertSpelling)
_TIED_BLOCK: Final = 1 << 22
"""Weights compared at a time."""


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """All tensors of a model by the name they are stored under, each with every place it may come from.

    Attributes:
        model: the model they belong to.
        embedding: `[vocabulary, hidden]`.
        layers: per layer the tensors that are not experts', in groups.
        experts: the spellings of experts, one of which the whole checkpoint has.
        final: what follows the last layer: `final_norm`, and `head` unless the head is tied.
        tied_head: the name under which a checkpoint may repeat the embedding as head; None where the head is not tied.
        ignored: ends of names of tensors that carry no weights.
        skipped: starts of names of tensors that are weights and are left out on purpose, such as draft layers.
    """

    model: ModelDescription
    embedding: Place
    layers: tuple[tuple[Group, ...], ...]
    experts: tuple[ExpertSpelling, ...]
    final: Places
    tied_head: str | None = None
    ignored: tuple[str, ...] = ROTARY_BUFFERS
    skipped: tuple[str, ...] = ()

    def resolve(self, checkpoint: Checkpoint) -> WeightSources:
        """Find every tensor in a checkpoint, before any weight is read.

        Only where a tied head is repeated are values read: it must equal the embedding.

        Raises:
            PackError: the quantisation is not known; tensors are missing, superfluous, spelled in two ways, of another
                shape or of a dtype that cannot be read, or the tokenizer has ids the embedding lacks; all of them in
                one message.
        """
        return _Resolution(self, checkpoint).run()


@dataclass(frozen=True, kw_only=True)
class WeightSources:
    """All tensors of a model by the name they are stored under, as found in one checkpoint.

    Attributes:
        model: the model they belong to.
        embedding: `[vocabulary, hidden]`.
        layers: per layer the tensors that are not experts', by stored name.
        expert: the tensors of one expert, given layer and expert id.
        final: what follows the last layer: `final_norm`, and `head` unless the head is tied.
        notices: what was left out of the package, in words.
    """

    model: ModelDescription
    embedding: TensorSource
    layers: tuple[Mapping[str, TensorSource], ...]
    expert: Callable[[int, int], Mapping[str, TensorSource]]
    final: Mapping[str, TensorSource]
    notices: tuple[str, ...] = ()

    def sources(self) -> Iterator[TensorSource]:
        """Every tensor that is read, in layer and expert order."""
        yield self.embedding
        for layer, (tensors, count) in enumerate(zip(self.layers, self.model.expert_counts, strict=True)):
            yield from tensors.values()
            for expert in range(count):
                yield from self.expert(layer, expert).values()
        yield from self.final.values()


def tokenizer_size(data: bytes) -> int:
    """One more than the largest token id of a `tokenizer.json`; 0 if it has none.

    Raises:
        PackError: it is not a tokenizer.
    """
    with tokenizer_faults(TOKENIZER, PackError):
        tokenizer = Tokenizer.from_str(tokenizer_text(data, TOKENIZER, PackError))
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
    return max(ids, default=-1) + 1


class _Resolution:
    """One look at a checkpoint: finds, notes every problem, and refuses them together."""

    def __init__(self, wanted: WeightMap, checkpoint: Checkpoint):
        self._wanted, self._checkpoint, self._tensors = wanted, checkpoint, checkpoint.tensors
        self._problems, self._notices = Problems(), list[str]()
        self._quantisation = quantisation_of(checkpoint.config)
        self._prefix = self._find_prefix()
        self._codings: dict[str, Coding | None] = {}
        """Of every tensor that was looked at."""

    def run(self) -> WeightSources:
        wanted = self._wanted
        embedding = self._whole(wanted.embedding)
        layers = [self._layer(groups) for groups in wanted.layers]
        final = {name: self._whole(place) for name, place in wanted.final.items()}
        spelling = self._best(wanted.experts, self._expert_places)
        dense = (place for layer in layers for place in layer.values())
        for place in chain([embedding], dense, self._expert_places(spelling), final.values()):
            self._check(place)
        self._check_rest()
        self._check_vocabulary(embedding, final)
        subject = f"checkpoint does not fit its {wanted.model.family} config.json"
        self._problems.refuse(subject, str(self._checkpoint.folder))
        found = WeightSources(
            model=wanted.model,
            embedding=self._source(embedding),
            layers=tuple(self._sources(layer) for layer in layers),
            expert=lambda layer, expert: self._sources(self._renamed(spelling(layer, expert))),
            final=self._sources(final),
            notices=tuple(self._notices),
        )
        self._check_tied(embedding)
        return found

    def _find_prefix(self) -> tuple[str, str]:
        """The prefix under which most tensors are found; the usual one where no other has more."""
        wanted = self._wanted
        places = [wanted.embedding, *wanted.final.values()]
        places += [place for groups in wanted.layers for group in groups for place in group[0].values()]
        return max(PREFIXES, key=lambda prefix: sum(_rename(place.name, prefix) in self._tensors for place in places))

    def _renamed(self, places: Places) -> Places:
        if self._prefix == PREFIXES[0]:
            return places
        return {key: replace(place, name=_rename(place.name, self._prefix)) for key, place in places.items()}

    def _layer(self, groups: tuple[Group, ...]) -> Places:
        """Every tensor of a layer, each group in the spelling of which most is there."""
        renamed = [[self._renamed(places) for places in group] for group in groups]
        chosen = [self._best(group, lambda places: places.values()) for group in renamed]
        return {name: place for places in chosen for name, place in places.items()}

    def _expert_places(self, spelling: ExpertSpelling) -> Iterator[Place]:
        """Every place of every expert."""
        for layer, count in enumerate(self._wanted.model.expert_counts):
            for expert in range(count):
                yield from self._renamed(spelling(layer, expert)).values()

    def _best(self, spellings: Sequence[_Spelling], places: Callable[[_Spelling], Iterable[Place]]) -> _Spelling:
        """The first spelling of which everything is there, else the first of those of which the largest part is."""
        parts = []
        for spelling in spellings:
            names = {place.name for place in places(spelling)}
            parts.append(len(names & self._tensors.keys()) / max(len(names), 1))
            if parts[-1] == 1.0:
                break
        return spellings[parts.index(max(parts))]

    def _whole(self, place: Place) -> Place:
        """A tensor outside the layers, with the rows it has where it may have more than are needed."""
        place = replace(place, name=_rename(place.name, self._prefix))
        tensor = self._tensors.get(place.name)
        if not place.padded or tensor is None or tensor.shape[1:] != place.shape[1:] or tensor.shape <= place.shape:
            return place
        return replace(place, shape=tensor.shape, outputs=Selection.span(0, place.count))

    def _check(self, place: Place) -> None:
        """Compare one tensor with what is wanted, once."""
        name, problems = place.name, self._problems
        if name in self._codings:
            return
        self._codings[name] = None
        tensor = self._tensors.get(name)
        if tensor is None:
            problems.add("missing tensors", repr(name))
            return
        shape = tensor.shape
        if self._quantisation.applies(name, tensor):
            coding = self._codings[name] = self._quantisation.coding(name, self._tensors, problems)
            if coding is None:
                return
            shape = coding.shape(tensor)
        elif tensor.dtype not in PLAIN:
            found = f"{name!r} has {tensor.dtype}, expected one of {', '.join(PLAIN)}"
            problems.add("tensors of another dtype", found)
        if shape != place.shape:
            found = f"{name!r} has {list(shape)}, expected {list(place.shape)}"
            problems.add("tensors of another shape", found)

    def _check_rest(self) -> None:
        """Judge every tensor that was not asked for."""
        wanted = self._wanted
        used = self._codings.keys() | {coding.scales for coding in self._codings.values() if coding}
        if wanted.tied_head:
            used.add(_rename(wanted.tied_head, self._prefix))
        rest = [name for name in self._tensors if name not in used and not name.endswith(wanted.ignored)]
        if not rest:
            return
        others = self._other_spellings()
        skipped = {start: _rename(start, self._prefix) for start in wanted.skipped}
        left_out: dict[str, int] = {}
        for name in rest:
            start = next((start for start, here in skipped.items() if name.startswith(here)), None)
            if start is not None:
                left_out[start] = left_out.get(start, 0) + 1
            elif self._quantisation.method == "fp8" and name.endswith(ACTIVATION_SUFFIXES):
                left_out[ACTIVATION_SUFFIXES[0]] = left_out.get(ACTIVATION_SUFFIXES[0], 0) + 1
            elif name in others:
                self._problems.add("tensors that are there in two spellings", repr(name))
            else:
                self._problems.add("superfluous tensors", repr(name))
        for start, count in left_out.items():
            what = "scales of activations" if start in ACTIVATION_SUFFIXES else f"tensors of {start}*"
            self._notices.append(f"{count} {what} are left out: the package computes without them")

    def _other_spellings(self) -> set[str]:
        """Every name that some spelling has."""
        wanted = self._wanted
        names = {place.name for spelling in wanted.experts for place in self._expert_places(spelling)}
        for groups in wanted.layers:
            for places in (places for group in groups for places in group):
                names |= {place.name for place in self._renamed(places).values()}
        return names

    def _check_vocabulary(self, embedding: Place, final: Places) -> None:
        """Compare the rows of embedding and head with each other and with the tokenizer."""
        vocabulary, rows = self._wanted.model.vocabulary, embedding.shape[0]
        if "head" in final and final["head"].shape[0] != rows:
            found = f"{final['head'].name!r} has {final['head'].shape[0]} rows, {embedding.name!r} has {rows}"
            self._problems.add("vocabularies of two sizes", found)
        if rows > vocabulary:
            found = f"{rows - vocabulary} rows of {embedding.name!r} past vocab_size {vocabulary}"
            self._notices.append(f"{found} belong to no token and are left out")
        if self._checkpoint.tokenizer is not None:
            size = tokenizer_size(self._checkpoint.tokenizer)
            if size > vocabulary:
                found = f"ids up to {size - 1}, but the embedding has {vocabulary} rows"
                self._problems.add("tokenizers too large", found)

    def _source(self, place: Place) -> TensorSource:
        tensor = self._tensors[place.name]
        length = (tensor.end - tensor.begin) * place.count * place.inputs // max(prod(place.shape), 1)
        return TensorSource(place, self._codings[place.name], length)

    def _sources(self, places: Places) -> dict[str, TensorSource]:
        return {name: self._source(place) for name, place in places.items()}

    def _check_tied(self, embedding: Place) -> None:
        """Refuse a head that is said to be the embedding and is not. Blocks of rows keep memory flat."""
        if self._wanted.tied_head is None:
            return
        name = _rename(self._wanted.tied_head, self._prefix)
        tensor = self._tensors.get(name)
        if tensor is None:
            return
        raw = self._source(replace(embedding, multiplier=1.0))
        if tensor.shape == embedding.shape and tensor.dtype in PLAIN:
            blocks = raw.blocks(self._checkpoint, _TIED_BLOCK)
            if all(np.array_equal(values, self._checkpoint.read(name, rows)) for rows, values in blocks):
                return
        raise PackError(
            f"tie_word_embeddings is true, but {name!r} differs from {embedding.name!r}",
            path=str(self._checkpoint.folder),
            hint="set tie_word_embeddings to false in config.json if the head is a matrix of its own",
        )


def _rename(name: str, prefix: tuple[str, str]) -> str:
    """A name with the prefix a checkpoint has, given one with the usual one."""
    body, outside = prefix
    return body + name.removeprefix(_BODY) if name.startswith(_BODY) else outside + name
