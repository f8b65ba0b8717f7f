"""Which checkpoint tensor becomes which stored tensor, as data, and the check of a checkpoint against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from estream_loader.tokenizing import tokenizer_faults
from estream_packer.checkpoint import Checkpoint
from estream_packer.checkpoint.problems import Problems
from estream_packer.checkpoint.safetensors import READABLE
from estream_spec.errors import PackError
from estream_spec.model import ModelDescription


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a stored tensor comes from.

    Attributes:
        name: the tensor's name in the checkpoint.
        shape: its shape there, in elements.
        transpose: whether it is stored transposed: `[out, in]` there becomes `[in, out]`.
    """

    name: str
    shape: tuple[int, ...]
    transpose: bool = False

    def read(self, checkpoint: Checkpoint, rows: slice | None = None) -> NDArray[np.float32]:
        """The tensor as it is stored.

        Args:
            checkpoint: where to read.
            rows: which rows of the checkpoint's tensor, step 1, so columns of the result where it is transposed.

        Returns:
            A new contiguous array, f32, finite.

        Raises:
            PackError: see `Checkpoint.read`.
        """
        values = checkpoint.read(self.name, rows)
        return np.ascontiguousarray(values.T) if self.transpose else values


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """All tensors of a model by the name they are stored under.

    Attributes:
        model: the model they belong to.
        embedding: `[vocabulary, hidden]`.
        layers: per layer the tensors that are not experts', by stored name.
        expert: `gate`, `up` and `down` of one expert, given layer and expert id.
        final: what follows the last layer: `final_norm`, and `head` unless the head is tied.
        tied_head: the name under which a checkpoint may repeat the embedding as head; None where the head is not tied.
        is_ignored: tells names of tensors that carry no weights.
    """

    model: ModelDescription
    embedding: TensorSource
    layers: tuple[Mapping[str, TensorSource], ...]
    expert: Callable[[int, int], Mapping[str, TensorSource]]
    final: Mapping[str, TensorSource]
    tied_head: str | None
    is_ignored: Callable[[str], bool]

    def sources(self) -> Iterator[TensorSource]:
        """Every tensor the checkpoint must hold, in layer and expert order."""
        yield self.embedding
        for layer, tensors in enumerate(self.layers):
            yield from tensors.values()
            for expert in range(self.model.expert_counts[layer]):
                yield from self.expert(layer, expert).values()
        yield from self.final.values()

    def check(self, checkpoint: Checkpoint) -> None:
        """Compare the checkpoint's tensors with what the model needs, before any weight is read.

        Only where a tied head is repeated are values read: it must equal the embedding.

        Raises:
            PackError: tensors are missing, superfluous, of another shape or of a dtype that cannot be read, or the
                tokenizer has ids the embedding lacks; all of them in one message.
        """
        problems = Problems()
        seen: set[str] = set()
        for source in self.sources():
            seen.add(source.name)
            tensor = checkpoint.tensors.get(source.name)
            if tensor is None:
                problems.add("missing tensors", repr(source.name))
                continue
            if tensor.shape != source.shape:
                found, expected = list(tensor.shape), list(source.shape)
                problems.add("tensors of another shape", f"{source.name!r} has {found}, expected {expected}")
            if tensor.dtype not in READABLE:
                expected_dtypes = ", ".join(READABLE)
                problems.add(
                    "tensors of another dtype", f"{source.name!r} has {tensor.dtype}, expected one of {expected_dtypes}"
                )
        for name in checkpoint.tensors:
            if name not in seen and name != self.tied_head and not self.is_ignored(name):
                problems.add("superfluous tensors", repr(name))
        if checkpoint.tokenizer is not None:
            size, rows = tokenizer_size(checkpoint.tokenizer), self.model.vocabulary
            if size > rows:
                problems.add("tokenizers too large", f"ids up to {size - 1}, but the embedding has {rows} rows")
        problems.refuse(f"checkpoint does not fit its {self.model.family} config.json", str(checkpoint.folder))
        if self.tied_head is not None and self.tied_head in checkpoint.tensors:
            _check_tied(checkpoint, self.embedding.name, self.tied_head)


def tokenizer_size(data: bytes) -> int:
    """One more than the largest token id of a `tokenizer.json`; 0 if it has none.

    Raises:
        PackError: it is not a tokenizer.
    """
    with tokenizer_faults("tokenizer.json", PackError):
        ids = Tokenizer.from_buffer(data).get_vocab(with_added_tokens=True).values()
    return max(ids, default=-1) + 1


def _check_tied(checkpoint: Checkpoint, embedding: str, head: str) -> None:
    """Refuse a head that is said to be the embedding and is not. Blocks of rows keep memory flat."""
    shape = checkpoint.tensors[embedding].shape
    if checkpoint.tensors[head].shape == shape:
        blocks = checkpoint.row_blocks(embedding)
        if all(np.array_equal(checkpoint.read(embedding, rows), checkpoint.read(head, rows)) for rows in blocks):
            return
    raise PackError(
        f"tie_word_embeddings is true, but {head!r} differs from {embedding!r}",
        path=str(checkpoint.folder),
        hint="set tie_word_embeddings to false in config.json if the head is a matrix of its own",
    )
