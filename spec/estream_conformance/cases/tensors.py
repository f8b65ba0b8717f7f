"""Layouts that are not those of section 7: tensors and matrices in other places, of other shapes, too many, too few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from estream_conformance.builder import Draft, Sealed, Values
from estream_conformance.case import accepted, refused
from estream_conformance.cases.graphs import with_kinds
from estream_conformance.cases.layouts import EMBEDDING, EXPERT, FINAL, LAYER, filled, packed, with_layout
from estream_conformance.changes import refuse
from estream_conformance.packages import draft, smallest, smallest_model
from estream_spec.constants import SectionType


def wide() -> Draft:
    """A package whose dimensions all differ, so that none can stand for another."""
    model = {**smallest_model(), "hidden": 3, "vocabulary": 5}
    model["attentions"][0].update(heads=2, head_dim=4)
    model["expert_blocks"][0].update(experts=2, intermediate=7)
    return draft(model)


def quantised() -> Draft:
    """The same with quantised matrices of every kind."""
    encodings = {"embedding": "w8", **dict.fromkeys(("q", "k", "v"), "w8"), **dict.fromkeys(("gate", "up"), "w4g32")}
    model = wide().model()
    return with_kinds(draft(model, {**encodings, "down": "w4g64"}), "expert", [("int8", "f32")])


@accepted()
def all_dimensions_apart() -> Sealed:
    """No two dimensions of the model are the same."""
    return wide().seal()


@accepted(base="all_dimensions_apart")
def all_dimensions_apart_quantised() -> Sealed:
    """No two dimensions of the model are the same, and matrices are quantised in every way."""
    return quantised().seal()


def _wrong(
    name: str, about: str, index: int, change: Callable[[Values], Any], make: Callable[[], Draft] = wide
) -> None:
    bases = {wide: "all_dimensions_apart", quantised: "all_dimensions_apart_quantised", smallest: "smallest"}
    refuse("EMOE-LAY-005", name, about, lambda: with_layout(index, change, make), base=bases[make])


def _tensor(number: int, **changes: Any) -> Callable[[Values], Any]:
    def change(layout: Values) -> None:
        layout["tensors"][number].update(changes)

    return change


def _repacked(number: int, **changes: Any) -> Callable[[Values], Any]:
    def change(layout: Values) -> None:
        layout["tensors"][number].update(changes)
        packed(layout)

    return change


def _matrix(number: int, **changes: Any) -> Callable[[Values], Any]:
    return lambda layout: layout["matrices"][number].update(changes)


# Offsets


def _moved(by: int) -> Callable[[Values], Any]:
    def change(layout: Values) -> None:
        for tensor in layout["tensors"]:
            tensor["offset"] += by

    return change


def _offsets_exchanged(layout: Values) -> None:
    first, second = layout["tensors"][:2]
    first["offset"], second["offset"] = second["offset"], first["offset"]


_wrong("tensor_128_bytes_late", "The last tensor begins 128 bytes late.", EXPERT, _tensor(2, offset=384), smallest)
_wrong("tensor_64_bytes_early", "A tensor begins 64 bytes early.", EXPERT, _tensor(1, offset=64), smallest)
_wrong("tensor_4_bytes_behind_the_one_before", "A tensor is not aligned.", EXPERT, _tensor(1, offset=4), smallest)
_wrong("tensor_a_byte_late", "A tensor begins a byte late.", EXPERT, _tensor(1, offset=129), smallest)
_wrong("tensor_over_the_one_before", "Two tensors have the same offset.", EXPERT, _tensor(1, offset=0), smallest)
_wrong("tensor_in_another_s_place", "The last tensor lies over the first.", EXPERT, _tensor(2, offset=0), smallest)
_wrong("first_tensor_at_128", "All tensors begin 128 bytes late.", EXPERT, _moved(128), smallest)
_wrong("tensors_in_each_other_s_place", "Two tensors have exchanged offsets.", EXPERT, _offsets_exchanged)

# Order and number


def _tensors(change: Callable[[list[Values]], list[Values]]) -> Callable[[Values], Any]:
    def changed(layout: Values) -> None:
        layout["tensors"] = [dict(each) for each in change(layout["tensors"])]
        packed(layout)

    return changed


def _matrices(change: Callable[[list[Values]], list[Values]]) -> Callable[[Values], Any]:
    return lambda layout: layout.update(matrices=[dict(each) for each in change(layout["matrices"])])


def _both(change: Callable[[list[Values]], list[Values]]) -> Callable[[Values], Any]:
    def changed(layout: Values) -> None:
        _tensors(change)(layout)
        _matrices(change)(layout)

    return changed


def _swapped(values: list[Values]) -> list[Values]:
    return [values[1], values[0], *values[2:]]


BIAS = {"name": "bias", "dtype": "f32", "shape": [3], "offset": 0}
EXTRA = {"name": "extra", "encoding": "f32", "rows": 1, "columns": 1}
_wrong("matrices_listed_in_another_order", "`matrices` has up before gate.", EXPERT, _matrices(_swapped))
_wrong("tensors_in_another_order", "`tensors` has up before gate, and they lie so.", EXPERT, _tensors(_swapped))
_wrong("gate_and_up_exchanged", "Up comes before gate, in both lists.", EXPERT, _both(_swapped))
_wrong("norms_exchanged", "`expert_norm` comes before `attention_norm`.", LAYER, _tensors(_swapped))
_wrong("vectors_behind_matrices", "`final_norm` comes behind the head.", FINAL, _tensors(_swapped))
_wrong("tensor_missing", "The last tensor is missing.", EXPERT, _tensors(lambda each: each[:-1]))
_wrong("matrix_missing", "The last matrix is missing in both lists.", EXPERT, _both(lambda each: each[:-1]))
_wrong("matrix_not_listed", "The last matrix is not listed.", EXPERT, _matrices(lambda each: each[:-1]))
_wrong("vector_missing", "`attention_norm` is missing.", LAYER, _tensors(lambda each: each[1:]))
_wrong("tensor_more", "There is a tensor more.", EXPERT, _tensors(lambda each: [*each, BIAS]))
_wrong("tensor_twice", "The first tensor comes twice.", EXPERT, _tensors(lambda each: [each[0], *each]))
_wrong("tensors_of_the_greatest_number", "There are 64 tensors.", EXPERT, _tensors(lambda each: each + [BIAS] * 61))
_wrong("matrix_more", "There is a matrix more, without tensors.", EXPERT, _matrices(lambda each: [*each, EXTRA]))
_wrong(
    "matrix_listed_twice_alike", "The first matrix is listed twice.", EXPERT, _matrices(lambda each: [each[0], *each])
)
_wrong("matrices_of_the_greatest_number", "There are 64 matrices.", EXPERT, _matrices(lambda each: each + [EXTRA] * 61))
_wrong("no_matrices_listed", "No matrix is listed, as if there were only vectors.", EXPERT, _matrices(lambda _: []))
_wrong(
    "norms_of_heads_that_the_model_has_not",
    "The layer has `q_norm` and `k_norm`, and the model no `qk_norm`.",
    LAYER,
    _tensors(
        lambda each: [
            *each[:2],
            {**BIAS, "name": "q_norm", "shape": [8]},
            {**BIAS, "name": "k_norm", "shape": [4]},
            *each[2:],
        ]
    ),
)


@refused("EMOE-LAY-005")
def norms_of_heads_missing() -> Sealed:
    """The model has `qk_norm`, and the layer no `q_norm` and `k_norm`."""
    made = wide()
    made.model()["attentions"][0]["qk_norm"] = "full"
    return made.seal()


@refused("EMOE-LAY-005")
def head_stored_though_tied() -> Sealed:
    """The head is tied, and stored all the same."""
    made = wide()
    made.model()["tied_head"] = True
    return made.seal()


@refused("EMOE-LAY-005")
def head_not_stored_though_not_tied() -> Sealed:
    """The head is not tied, and not stored."""
    made = draft({**wide().model(), "tied_head": True})
    del made.model()["tied_head"]
    return made.seal()


# Names, types and shapes

_wrong("tensor_of_another_name", "A tensor is called `w1` instead of `gate`.", EXPERT, _tensor(0, name="w1"))
_wrong("tensor_name_in_capitals", "A tensor is called `Gate`.", EXPERT, _tensor(0, name="Gate"))
_wrong("matrix_of_another_name", "A matrix is called `w1` instead of `gate`.", EXPERT, _matrix(0, name="w1"))
_wrong("vector_of_another_name", "A vector is called `norm`.", FINAL, _tensor(0, name="norm"))
_wrong("f32_stored_as_i8", "A matrix of f32 is stored as i8.", EXPERT, _repacked(0, dtype="i8"))
_wrong("vector_stored_as_u8", "A vector is stored as u8.", FINAL, _repacked(0, dtype="u8"))
_wrong("tensor_transposed", "A tensor's shape has rows and columns exchanged.", EXPERT, _tensor(0, shape=[7, 3]))
_wrong("tensor_flat", "A matrix's tensor has one dimension.", EXPERT, _tensor(0, shape=[21]))
_wrong("vector_of_two_dimensions", "A vector's tensor has two dimensions.", FINAL, _tensor(0, shape=[1, 3]))
_wrong("tensor_a_column_wider", "A tensor has a column too many.", EXPERT, _repacked(0, shape=[3, 8]))
_wrong("tensor_a_row_longer", "A tensor has a row too many.", EXPERT, _repacked(0, shape=[4, 7]))
_wrong(
    "embedding_a_row_shorter", "The embedding has a row less than the vocabulary.", EMBEDDING, _tensor(0, shape=[4, 3])
)
_wrong("matrix_a_row_longer", "A matrix is listed with a row too many.", EXPERT, _matrix(0, rows=4))
_wrong("matrix_a_column_wider", "A matrix is listed with a column too many.", EXPERT, _matrix(0, columns=8))
_wrong(
    "matrix_transposed", "A matrix is listed with rows and columns exchanged.", EXPERT, _matrix(0, rows=7, columns=3)
)
_wrong(
    "scale_of_embedding_by_column",
    "The embedding has a scale for each column.",
    EMBEDDING,
    _tensor(1, shape=[3]),
    quantised,
)


def _quantised(name: str, about: str, change: Callable[[Values], Any]) -> None:
    _wrong(name, about, EXPERT, change, quantised)


_quantised("nibbles_signed", "Nibbles are i8.", _tensor(0, dtype="i8"))
_quantised("nibbles_of_rows_not_padded", "Nibbles have half the rows, not padded.", _repacked(0, shape=[2, 7]))
_quantised("nibbles_a_byte_each", "Nibbles have a row for each row.", _repacked(0, shape=[32, 7]))
_quantised("multipliers_unsigned", "Multipliers are u8.", _tensor(1, dtype="u8"))
_quantised("multipliers_of_each_row", "Multipliers have a row for each row.", _repacked(1, shape=[3, 7]))
_quantised("scale_by_row", "The scale has a number for each row.", _repacked(2, shape=[3]))
_quantised("scale_of_two_dimensions", "The scale has two dimensions.", _tensor(2, shape=[1, 7]))
_quantised("scale_of_another_name", "The scale is called `gate.scales`.", _tensor(2, name="gate.scales"))
_quantised("w4g32_listed_as_w4g64", "A matrix of w4g32 is listed as w4g64.", _matrix(0, encoding="w4g64"))
_quantised("w4g32_listed_as_w8", "A matrix of w4g32 is listed as w8.", _matrix(0, encoding="w8"))
_quantised(
    "scale_before_its_values",
    "A matrix's scale comes before its nibbles.",
    _tensors(lambda each: [each[2], *each[:2], *each[3:]]),
)


@refused("EMOE-LAY-005")
def router_of_w8() -> Sealed:
    """The router is quantised, and its layout is right for that."""
    return draft(wide().model(), {"router": "w8"}).seal()


# Layouts of other records


@refused("EMOE-LAY-005")
def layouts_of_embedding_and_final_block_exchanged() -> Sealed:
    """The first dense record has the layout of the last one, and the last one that of the first."""
    made = smallest()
    ranges = made.tables[SectionType.DENSE]
    ranges[0].layout, ranges[2].layout = FINAL, EMBEDDING
    return filled(made).seal()


@refused("EMOE-LAY-005")
def layouts_of_layer_and_expert_exchanged() -> Sealed:
    """The experts have the layout of the layer, and the layer that of the experts."""
    made = smallest()
    made.tables[SectionType.DENSE][1].layout, made.tables[SectionType.EXPERTS][0].layout = EXPERT, LAYER
    return filled(made).seal()


def _two_widths() -> Draft:
    model = smallest_model()
    model["expert_blocks"].append({**model["expert_blocks"][0], "intermediate": 2})
    model["layers"].append({"attention": 0, "experts": 1})
    return draft(model)


@accepted()
def two_widths_of_experts() -> Sealed:
    """The experts of two layers are not as wide."""
    return _two_widths().seal()


@refused("EMOE-LAY-005", base="two_widths_of_experts")
def layouts_of_two_layers_experts_exchanged() -> Sealed:
    """The experts of each of two layers have the layout of the other's."""
    made = _two_widths()
    first, second = made.tables[SectionType.EXPERTS]
    first.layout, second.layout = second.layout, first.layout
    return filled(made).seal()
