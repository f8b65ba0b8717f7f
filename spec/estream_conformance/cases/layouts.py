"""Record layouts: lengths, encodings, and that they are the ones of the model. FORMAT.md section 7."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from estream_conformance.builder import Draft, Sealed, Values, round_up
from estream_conformance.case import accepted, refused
from estream_conformance.changes import accept, counted, refuse
from estream_conformance.packages import bytes_of, draft, full, payload, smallest, smallest_model
from estream_spec import limits
from estream_spec.constants import SectionType

EMBEDDING, LAYER, FINAL, EXPERT = range(4)
"""Indexes of the smallest package's layouts."""


def filled(made: Draft) -> Draft:
    """The draft with payloads for its layouts as they are now."""
    layouts = made.manifest["layouts"]
    for ranges in made.tables.values():
        for one in ranges:
            one.payloads = [payload(layouts[one.layout], number) for number in range(len(one.payloads))]
    longest = max(layouts[one.layout]["payload_length"] for one in made.tables[SectionType.EXPERTS])
    made.manifest["device_configurations"][0]["arena_bytes"] = round_up(longest, 1 << made.page_shift)
    return made


def end_of(layout: Values) -> int:
    """What `payload_length` has to be."""
    return max(int(each["offset"]) + bytes_of(each["dtype"], each["shape"]) for each in layout["tensors"])


def packed(layout: Values) -> None:
    """Put the tensors one behind the other as they come."""
    end = 0
    for tensor in layout["tensors"]:
        tensor["offset"] = round_up(end, 128)
        end = tensor["offset"] + bytes_of(tensor["dtype"], tensor["shape"])


def with_layout(index: int, change: Callable[[Values], Any], make: Callable[[], Draft] = smallest) -> Sealed:
    """A package with one layout changed, and with payloads as long as it asks for."""
    made = make()
    layout = made.manifest["layouts"][index]
    change(layout)
    layout["payload_length"] = end_of(layout)
    return filled(made).seal()


# payload_length


def _length(name: str, about: str, index: int, change: Callable[[Values], Any]) -> None:
    def build() -> Sealed:
        made = smallest()
        change(made.manifest["layouts"][index])
        return made.seal()

    refuse("EMOE-LAY-001", name, about, build)


def _payload_length(value: int) -> Callable[[Values], Any]:
    return lambda layout: layout.update(payload_length=value)


def _last_tensor(**changes: Any) -> Callable[[Values], Any]:
    return lambda layout: layout["tensors"][-1].update(changes)


_length("payload_length_of_one_less", "`payload_length` is a byte less than the tensors.", EXPERT, _payload_length(259))
_length("payload_length_of_one_more", "`payload_length` is a byte more than the tensors.", EXPERT, _payload_length(261))
_length("payload_length_rounded_up", "`payload_length` counts the padding of 128.", EXPERT, _payload_length(384))
_length("payload_length_of_a_page", "`payload_length` counts the padding of the page.", EXPERT, _payload_length(4096))
_length("payload_length_of_1", "`payload_length` is 1.", LAYER, _payload_length(1))
_length(
    "payload_length_of_the_most",
    "`payload_length` is the most it may be.",
    FINAL,
    _payload_length(limits.MAX_RECORD_LENGTH),
)
_length("tensor_at_2_to_the_32", "A tensor's offset is 2^32, 0 in 32 bits.", EMBEDDING, _last_tensor(offset=1 << 32))
_length("tensor_at_the_limit", "A tensor's offset is 2^44.", EMBEDDING, _last_tensor(offset=1 << 44))
_length(
    "tensor_whose_bytes_wrap_to_4",
    "A tensor of f32 has 2^30 + 1 elements, whose bytes are 4 in 32 bits.",
    EMBEDDING,
    _last_tensor(shape=[3303821, 325]),
)
_length(
    "tensor_whose_end_wraps_to_4",
    "A tensor of 132 bytes begins at 2^32 - 128, so that it ends at 4 in 32 bits.",
    EMBEDDING,
    _last_tensor(shape=[33, 1], offset=(1 << 32) - 128),
)
_length(
    "tensor_of_2_to_the_50_bytes",
    "A tensor has 2^24 rows and columns.",
    EMBEDDING,
    _last_tensor(shape=[1 << 24, 1 << 24]),
)


def _first_tensor_last(layout: Values) -> None:
    layout["tensors"][0]["offset"] = 384
    layout["payload_length"] = 260


_length("payload_length_of_the_last_tensor", "The first tensor ends behind the last one.", EXPERT, _first_tensor_last)


@refused("EMOE-GRA-004")
def payload_length_and_graph_sections_wrong() -> Sealed:
    """`payload_length` is wrong and a graph's section missing: graphs are judged before layouts."""
    made = smallest()
    made.manifest["layouts"][EXPERT]["payload_length"] = 1
    made.manifest["graphs"][4]["section"] = 5
    return made.seal()


# Which layouts are used


def _indexed(name: str, about: str, index: int) -> None:
    def build() -> Sealed:
        made = smallest()
        made.tables[SectionType.EXPERTS][0].changes["layout"] = index
        return made.seal()

    refuse("EMOE-LAY-002", name, about, build)


_indexed("layout_behind_the_last", "The range of experts names layout 4 of 4.", 4)
_indexed("layout_2_to_the_31", "The range of experts names layout 2^31.", 1 << 31)
_indexed("layout_2_to_the_32_less_1", "The range of experts names layout 2^32 - 1.", (1 << 32) - 1)
_indexed("layout_that_no_range_names", "No range names layout 3; that of experts names layout 0 instead.", 0)


@refused("EMOE-LAY-002")
def layout_more_than_ranges_name() -> Sealed:
    """There is a fifth layout, the same as the fourth, that no range names."""
    made = smallest()
    made.manifest["layouts"].append(made.manifest["layouts"][EXPERT])
    return made.seal()


@accepted(base="full")
def layouts_in_another_order() -> Sealed:
    """The layouts stand the other way round; `content_id` does not depend on it."""
    made = full()
    made.manifest["layouts"].reverse()
    for ranges in made.tables.values():
        for one in ranges:
            one.layout = len(made.manifest["layouts"]) - 1 - one.layout
    return made.seal()


@accepted()
def layouts_alike() -> Sealed:
    """Two layers of one shape class have layouts of their own, which are alike."""
    made = draft({**smallest_model(), "layers": smallest_model()["layers"] * 2})
    made.manifest["layouts"].append(made.manifest["layouts"][EXPERT])
    made.tables[SectionType.EXPERTS][1].layout = 4
    return made.seal()


@accepted(committed=False)
def layouts_of_the_greatest_number() -> Sealed:
    """There are 256 layouts, one for each range of 127 layers."""
    made = draft({**smallest_model(), "layers": smallest_model()["layers"] * 127})
    layouts = made.manifest["layouts"]
    made.manifest["layouts"] = []
    for ranges in made.tables.values():
        for one in ranges:
            made.manifest["layouts"].append(layouts[one.layout])
            one.layout = len(made.manifest["layouts"]) - 1
    return made.seal()


# Encodings

QUANTISED: Final = ("q", "k", "v", "o", "head", "gate", "up", "down")


def _narrow(rows: int, encoding: str) -> Callable[[], Sealed]:
    """A package with matrices of so many rows, all in one encoding."""

    def build() -> Sealed:
        model = {**smallest_model(), "hidden": rows}
        model["expert_blocks"][0]["intermediate"] = 3
        return draft(model, dict.fromkeys(QUANTISED, encoding)).seal()

    return build


for _encoding, _group in (("w4g32", 32), ("w4g64", 64)):
    for _rows in (1, _group // 2, _group // 2 + 1, _group - 1, _group, _group + 1, 2 * _group - 1, 2 * _group):
        _about = f"Matrices of {_encoding} have {counted(_rows, 'row')}."
        accept(f"{_encoding}_of_{_rows}_rows", _about, _narrow(_rows, _encoding))
accept("w8_of_33_rows", "Matrices of w8 have 33 rows.", _narrow(33, "w8"))


@accepted()
def embedding_of_w8() -> Sealed:
    """The embedding is w8: it has a scale for each of three rows and not for each of two columns."""
    return draft({**smallest_model(), "hidden": 2, "vocabulary": 3}, {"embedding": "w8"}).seal()


def _embedded(encoding: str) -> Callable[[], Sealed]:
    return lambda: draft(smallest_model(), {"embedding": encoding}).seal()


refuse("EMOE-LAY-004", "embedding_of_w4g32", "The embedding is w4g32.", _embedded("w4g32"))
refuse("EMOE-LAY-004", "embedding_of_w4g64", "The embedding is w4g64.", _embedded("w4g64"))


@refused("EMOE-LAY-005")
def embedding_not_listed() -> Sealed:
    """The embedding is f32, as taken to be when not listed; the list is wrong."""
    return with_layout(EMBEDDING, lambda layout: layout.update(matrices=[]))


@refused("EMOE-LAY-005")
def embedding_listed_twice_rightly_at_last() -> Sealed:
    """The embedding is listed as w4g32 and again as the f32 that it is: the later one counts, the list is wrong."""
    return with_layout(EMBEDDING, lambda layout: layout["matrices"].insert(0, _listed(layout, "w4g32")))


@refused("EMOE-LAY-004")
def embedding_listed_twice_wrongly_at_last() -> Sealed:
    """The embedding is listed as the f32 that it is and again as w4g32: the later one counts."""
    return with_layout(EMBEDDING, lambda layout: layout["matrices"].append(_listed(layout, "w4g32")))


def _listed(layout: Values, encoding: str) -> Values:
    return {**layout["matrices"][0], "encoding": encoding}


def _zeroed(made: Draft) -> Sealed:
    """The package with zeros for weights."""
    layouts = made.manifest["layouts"]
    for ranges in made.tables.values():
        for one in ranges:
            one.payloads = [bytearray(layouts[one.layout]["payload_length"])] * len(one.payloads)
    return made.seal()


def _tall(encodings: dict[str, str], intermediate: int = 1, heads: int = 1, **changes: Any) -> Callable[[], Sealed]:
    def build() -> Sealed:
        model = {**smallest_model(), **changes}
        model["attentions"][0].update(heads=heads)
        model["expert_blocks"][0]["intermediate"] = intermediate
        return _zeroed(draft(model, encodings))

    return build


MOST: Final = limits.MAX_INTEGER_ROWS
EXPERTS_W8: Final = dict.fromkeys(("gate", "up", "down"), "w8")
accept("w8_of_the_most_rows", "A matrix of w8 has 131072 rows.", _tall(EXPERTS_W8, MOST))
accept("output_of_w8_of_the_most_rows", "The output matrix of w8 has 131072 rows.", _tall({"o": "w8"}, heads=MOST // 2))
accept("f32_of_more_rows", "A matrix of f32 has 131073 rows.", _tall({}, MOST + 1))
accept(
    "embedding_of_w8_of_more_rows",
    "The embedding, of w8, has 131073 rows.",
    _tall({"embedding": "w8"}, vocabulary=MOST + 1),
)
refuse("EMOE-LAY-003", "w8_of_a_row_too_many", "A matrix of w8 has 131073 rows.", _tall(EXPERTS_W8, MOST + 1))
refuse(
    "EMOE-LAY-003",
    "output_of_w8_of_rows_too_many",
    "The output matrix has 131074 rows.",
    _tall({"o": "w8"}, heads=MOST // 2 + 1),
)


def _listed_rows(encoding: str, rows: int) -> Callable[[], Sealed]:
    def build() -> Sealed:
        made = smallest()
        made.manifest["layouts"][EXPERT]["matrices"][2].update(encoding=encoding, rows=rows)
        made.manifest["layouts"][EMBEDDING]["matrices"][0]["encoding"] = "w4g32"
        return made.seal()

    return build


refuse(
    "EMOE-LAY-003",
    "rows_too_many_and_embedding_of_w4g32",
    "A matrix is listed as w4g64 of 131073 rows, and the embedding as w4g32: rows are judged first.",
    _listed_rows("w4g64", MOST + 1),
)
refuse(
    "EMOE-LAY-003",
    "rows_of_the_most_and_embedding_of_w4g32",
    "The same with 2^24 rows.",
    _listed_rows("w4g32", 1 << 24),
)
refuse(
    "EMOE-LAY-004",
    "rows_of_f32_and_embedding_of_w4g32",
    "A matrix is listed as f32 of 131073 rows, which is no matter of rows; and the embedding as w4g32.",
    _listed_rows("f32", MOST + 1),
)
refuse(
    "EMOE-LAY-004",
    "rows_at_the_limit_and_embedding_of_w4g32",
    "A matrix is listed as w8 of 131072 rows, which it does not have; and the embedding as w4g32.",
    _listed_rows("w8", MOST),
)
