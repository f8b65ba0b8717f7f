"""Which graphs a package has, and what they are for. FORMAT.md section 10.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from estream_conformance.builder import Draft, Sealed, Section, Values
from estream_conformance.case import accepted, refused
from estream_conformance.changes import accept, refuse
from estream_conformance.kinds import convolution, shared_block
from estream_conformance.packages import draft, full, smallest, smallest_model
from estream_conformance.roles import ROLES, class_counts
from estream_spec.constants import SectionType
from estream_spec.limits import MAX_GRAPHS

MATRICES: Final = {
    "qkv": ("q", "k", "v"),
    "convolve": ("entry", "entry_gate", "exit_gate"),
    "out": ("o",),
    "expert": ("gate", "up", "down"),
    "dense": ("dense_gate", "dense_up", "dense_down"),
    "head": ("head",),
}
"""Matrices that the graphs of each role take."""
BASES: Final[dict[str, tuple[Callable[[], Values], str]]] = {
    "convolve": (convolution, "layer_with_a_convolution"),
    "dense": (shared_block, "layer_with_experts_and_a_dense_block"),
}
"""A model that has a role, and the name of its case, for roles that the smallest one lacks."""
F32: Final = ("f32", "f32")
PLAIN: Final = ("int8", "f32")
SIGNED: Final = ("int8", "dynamic-int8")
UNSIGNED: Final = ("uint8", "dynamic-int8")
Kinds = list[tuple[str, str]]


def with_graphs(made: Draft, graphs: list[Values]) -> Draft:
    """The draft with other graphs, each in a section of its own."""
    made.manifest["graphs"] = [{**each, "section": number} for number, each in enumerate(graphs)]
    kept = [each for each in made.sections if each.type != SectionType.GRAPH]
    own = [Section(SectionType.GRAPH, b"graph %d" % number, id=number) for number in range(len(graphs))]
    made.sections = [*kept[:-1], *own, kept[-1]]
    return made


def with_kinds(made: Draft, role: str, kinds: Kinds) -> Draft:
    """The draft with other graphs of one role, for shape class 0."""
    graphs: list[Values] = []
    for each in made.manifest["graphs"]:
        if each["role"] != role:
            graphs.append(each)
        elif not any(one["role"] == role for one in graphs):
            graphs += [{**each, "weights": weights, "activations": activations} for weights, activations in kinds]
    return with_graphs(made, graphs)


def _base_of(role: str) -> tuple[Callable[[], Values], str]:
    return BASES.get(role, (smallest_model, "smallest"))


def quantised(role: str, encoding: str = "w8", activations: str = "f32") -> Draft:
    """The smallest package that has a role, with its matrices quantised, and the graphs for it."""
    made = draft(_base_of(role)[0](), dict.fromkeys(MATRICES[role], encoding))
    return with_kinds(made, role, [PLAIN] if activations == "f32" else [SIGNED, UNSIGNED])


def _quantised(role: str, encoding: str, activations: str) -> Callable[[], Sealed]:
    return lambda: quantised(role, encoding, activations).seal()


def _kinds(role: str, encoded: str, kinds: Kinds) -> Callable[[], Sealed]:
    def build() -> Sealed:
        plain = draft(_base_of(role)[0]())
        return with_kinds(plain if encoded == "f32" else quantised(role, encoded), role, kinds).seal()

    return build


for _role in MATRICES:
    for _encoding, _activations in (("w8", "f32"), ("w4g32", "dynamic-int8")):
        _name = f"{_role}_of_{_encoding}_with_{_activations.replace('-', '_')}_graphs"
        _about = f"Only the matrices of `{_role}` are {_encoding}."
        accept(_name, _about, _quantised(_role, _encoding, _activations), base=_base_of(_role)[1])

WRONG_SETS: Final[list[tuple[str, str, Kinds]]] = [
    ("signed_alone", "only the signed one of two graphs", [SIGNED]),
    ("unsigned_alone", "only the unsigned one of two graphs", [UNSIGNED]),
    ("all_of_int8", "graphs of two sets", [PLAIN, SIGNED, UNSIGNED]),
    ("both_of_f32", "a graph for f32 and one for int8", [F32, PLAIN]),
    ("f32_dynamic", "a graph of f32 weights with int8 activations", [("f32", "dynamic-int8")]),
    ("unsigned_plain", "a graph of unsigned weights with f32 activations", [("uint8", "f32")]),
    ("missing", "no graph", []),
]
for _role in MATRICES:
    for _suffix, _about, _list in WRONG_SETS:
        _encoding = "f32" if _suffix in ("both_of_f32", "f32_dynamic") else "w8"
        refuse(
            "EMOE-GRA-003",
            f"{_role}_graphs_{_suffix}",
            f"Role `{_role}` has {_about}.",
            _kinds(_role, _encoding, _list),
            base=_base_of(_role)[1],
        )
for _suffix, _about, _list in (
    ("missing", "no graph", []),
    ("plain", "a graph for int8", [PLAIN]),
    ("dynamic", "the two graphs for int8", [SIGNED, UNSIGNED]),
    ("both", "a graph for int8 beside the right one", [F32, PLAIN]),
):
    refuse("EMOE-GRA-003", f"attend_graphs_{_suffix}", f"Role `attend` has {_about}.", _kinds("attend", "f32", _list))


@refused("EMOE-GRA-003", base="full")
def shape_class_of_attention_without_graphs() -> Sealed:
    """The second attention has no graphs of role `qkv`, the first one has."""
    made = full()
    graphs = [each for each in made.manifest["graphs"] if (each["role"], each["shape_class"]) != ("qkv", 1)]
    return with_graphs(made, graphs).seal()


@refused("EMOE-GRA-003", base="full")
def pair_of_shape_classes_without_graphs() -> Sealed:
    """The pair of attention and experts that only the last layer has is without a graph."""
    made = full()
    graphs = [each for each in made.manifest["graphs"] if (each["role"], each["shape_class"]) != ("out", 2)]
    return with_graphs(made, graphs).seal()


# Shape classes

FULL_CLASSES: Final = {"qkv": 2, "attend": 2, "convolve": 0, "out": 3, "expert": 2, "dense": 0, "head": 1}
"""How many the full package has for each role."""


def _classed(make: Callable[[], Draft], role: str, shape_class: int) -> Callable[[], Sealed]:
    """One more graph of a role, for another shape class."""

    def build() -> Sealed:
        made = make()
        own = {**made.manifest["graphs"][-1], "role": role, "shape_class": shape_class}
        own |= {"weights": "f32", "activations": "f32"}
        return with_graphs(made, [*made.manifest["graphs"], own]).seal()

    return build


for _role in ROLES:
    _about = f"A graph of role `{_role}` serves the shape class behind the last."
    _count = class_counts(smallest_model())[_role]
    refuse("EMOE-GRA-001", f"{_role}_graph_of_class_{_count}", _about, _classed(smallest, _role, _count))
    _about = f"A graph of role `{_role}` serves the shape class behind the last of several."
    _count = FULL_CLASSES[_role]
    refuse("EMOE-GRA-001", f"{_role}_graph_behind_the_last", _about, _classed(full, _role, _count), base="full")
refuse("EMOE-GRA-001", "graph_of_class_1023", "A graph serves shape class 1023.", _classed(smallest, "out", 1023))


@refused("EMOE-GRA-002")
def graph_twice() -> Sealed:
    """Two graphs agree in everything but their sections."""
    made = smallest()
    return with_graphs(made, [*made.manifest["graphs"], made.manifest["graphs"][2]]).seal()


@refused("EMOE-GRA-002")
def graph_twice_of_one_section() -> Sealed:
    """A graph stands in the manifest twice, with the same section."""
    made = smallest()
    made.manifest["graphs"].append(made.manifest["graphs"][2])
    return made.seal()


@refused("EMOE-GRA-002")
def graph_twice_before_one_of_no_class() -> Sealed:
    """A graph comes twice and a later one serves no shape class: they are judged one by one."""
    made = smallest()
    graphs = made.manifest["graphs"]
    return with_graphs(made, [graphs[0], *graphs, {**graphs[1], "shape_class": 1}]).seal()


@refused("EMOE-GRA-001")
def graph_of_no_class_before_one_twice() -> Sealed:
    """A graph serves no shape class and a later one comes twice: they are judged one by one."""
    made = smallest()
    graphs = made.manifest["graphs"]
    return with_graphs(made, [{**graphs[1], "shape_class": 1}, *graphs, graphs[0]]).seal()


@refused("EMOE-GRA-001")
def graph_of_no_class_twice() -> Sealed:
    """A graph serves no shape class, and comes twice."""
    made = smallest()
    graphs = [*made.manifest["graphs"], {**made.manifest["graphs"][0], "shape_class": 1}]
    return with_graphs(made, [*graphs, graphs[-1]]).seal()


# Sections


@accepted(base="full")
def graphs_in_another_order() -> Sealed:
    """Graphs stand in another order than their sections and roles."""
    made = full()
    made.manifest["graphs"].reverse()
    return made.seal()


@accepted(committed=False)
def graphs_of_the_greatest_number() -> Sealed:
    """There are 1024 graphs: for 22 attentions, 21 expert blocks and 457 of their pairs, all but one role quantised."""
    model = smallest_model()
    model["attentions"], model["expert_blocks"] = model["attentions"] * 22, model["expert_blocks"] * 21
    pairs = [(first, second) for first in range(22) for second in range(21)]
    model["layers"] = [{"attention": first, "experts": second} for first, second in pairs[:457]]
    encodings = {name: "w8" for names in MATRICES.values() for name in names}
    made = draft(model, encodings, activations="dynamic-int8")
    assert len(made.manifest["graphs"]) == MAX_GRAPHS
    return made.seal()


@refused("EMOE-GRA-004")
def graph_section_that_no_graph_names() -> Sealed:
    """There is a `GRAPH` section more than graphs."""
    made = smallest()
    made.sections.insert(-1, Section(SectionType.GRAPH, b"graph", id=5))
    return made.seal()


@refused("EMOE-GRA-004")
def graph_without_its_section() -> Sealed:
    """A graph names a section that there is not."""
    made = smallest()
    made.sections.remove(made.section(SectionType.GRAPH, 4))
    return made.seal()


@refused("EMOE-GRA-004")
def graph_of_another_section_id() -> Sealed:
    """A graph names section 2^32 - 1, and its own is named by none."""
    made = smallest()
    made.manifest["graphs"][4]["section"] = 0xFFFFFFFF
    return made.seal()


@refused("EMOE-GRA-004")
def two_graphs_of_one_section() -> Sealed:
    """Two graphs name one section, and there is none but those named."""
    made = smallest()
    made.sections.remove(made.section(SectionType.GRAPH, 4))
    made.manifest["graphs"][4]["section"] = 3
    return made.seal()


@refused("EMOE-GRA-004")
def no_graph_sections() -> Sealed:
    """Every graph names a section, and none is there."""
    made = smallest()
    made.sections = [each for each in made.sections if each.type != SectionType.GRAPH]
    return made.seal()


@refused("EMOE-GRA-003")
def graph_missing_and_its_section_left() -> Sealed:
    """A role has no graph, and a section is named by none: what the graphs are is judged before where they are."""
    made = smallest()
    made.manifest["graphs"].pop()
    return made.seal()


# Encodings


def _encoded(name: str, about: str, encodings: dict[str, str], role: str, kinds: Kinds) -> None:
    model, base = _base_of(role)

    def build() -> Sealed:
        return with_kinds(draft(model(), encodings), role, kinds).seal()

    refuse("EMOE-GRA-005", name, about, build, base=base)


for _role, _names in MATRICES.items():
    _all = dict.fromkeys(_names, "w8")
    _encoded(
        f"{_role}_quantised_with_a_graph_of_f32",
        f"The matrices of `{_role}` are w8, its graph is for f32.",
        _all,
        _role,
        [F32],
    )
    _encoded(
        f"{_role}_of_f32_with_a_graph_of_int8",
        f"The matrices of `{_role}` are f32, its graph is for int8.",
        {},
        _role,
        [PLAIN],
    )
    _encoded(
        f"{_role}_of_f32_with_dynamic_graphs",
        f"The matrices of `{_role}` are f32, its graphs for int8.",
        {},
        _role,
        [SIGNED, UNSIGNED],
    )
    for _one in _names if len(_names) > 1 else ():
        _about = f"Of the matrices of `{_role}` only `{_one}` is w8, its graph is for int8."
        _encoded(f"{_one}_alone_quantised_with_a_graph_of_int8", _about, {_one: "w8"}, _role, [PLAIN])
        _about = f"Of the matrices of `{_role}` only `{_one}` is w8, its graph is for f32."
        _encoded(f"{_one}_alone_quantised_with_a_graph_of_f32", _about, {_one: "w8"}, _role, [F32])
        _rest = {each: "w8" for each in _names if each != _one}
        _about = f"Of the matrices of `{_role}` only `{_one}` is f32, its graph is for int8."
        _encoded(f"{_one}_alone_of_f32_with_a_graph_of_int8", _about, _rest, _role, [PLAIN])


@accepted()
def expert_of_three_encodings() -> Sealed:
    """The three matrices of an expert are quantised in three ways, which one graph serves."""
    encodings = {"gate": "w8", "up": "w4g32", "down": "w4g64"}
    return with_kinds(draft(smallest_model(), encodings), "expert", [PLAIN]).seal()


def _tied(embedding: str, kinds: Kinds) -> Callable[[], Sealed]:
    def build() -> Sealed:
        made = draft({**smallest_model(), "tied_head": True}, {"embedding": embedding})
        return with_kinds(made, "head", kinds).seal()

    return build


accept("tied_head_of_f32", "The head is the embedding, of f32.", _tied("f32", [F32]))
accept("tied_head_of_w8", "The head is the embedding, of w8.", _tied("w8", [PLAIN]))
accept("tied_head_of_w8_with_dynamic_graphs", "The head is the embedding, of w8.", _tied("w8", [SIGNED, UNSIGNED]))
refuse("EMOE-GRA-005", "tied_head_of_w8_with_a_graph_of_f32", "The head is the embedding of w8.", _tied("w8", [F32]))
refuse("EMOE-GRA-005", "tied_head_of_f32_with_a_graph_of_int8", "The head is the f32 embedding.", _tied("f32", [PLAIN]))


@accepted()
def head_of_f32_beside_an_embedding_of_w8() -> Sealed:
    """The embedding is w8 and the head, not tied, f32: each goes by its own."""
    return draft(smallest_model(), {"embedding": "w8"}).seal()


def _layered(second: dict[str, str], first: dict[str, str]) -> Draft:
    """A package of two layers of one shape class, with encodings of their own."""
    model = {**smallest_model(), "layers": smallest_model()["layers"] * 2}
    made, other = draft(model, first), draft(model, second)
    for records, ranges in made.tables.items():
        at = 2 if records == SectionType.DENSE else 1
        own = other.tables[records][at]
        layout = other.manifest["layouts"][own.layout]
        if layout not in made.manifest["layouts"]:
            made.manifest["layouts"].append(layout)
        own.layout = made.manifest["layouts"].index(layout)
        ranges[at] = own
    longest = max(4096, *(each["payload_length"] for each in made.manifest["layouts"]))
    made.manifest["device_configurations"][0]["arena_bytes"] = -(-longest // 4096) * 4096
    return made


@accepted()
def layers_of_two_quantisations() -> Sealed:
    """Two layers of one shape class are quantised in two ways, which the same graphs serve."""
    names = ("q", "k", "v", "o", "gate", "up", "down")
    made = _layered(dict.fromkeys(names, "w4g32"), dict.fromkeys(names, "w8"))
    return made.seal()


@refused("EMOE-GRA-005", base="layers_of_two_quantisations")
def second_layer_of_f32_beside_one_of_w8() -> Sealed:
    """The first layer's output matrix is w8 and the second one's f32, though one graph serves both."""
    return _layered({}, {"o": "w8"}).seal()


@refused("EMOE-GRA-005", base="layers_of_two_quantisations")
def second_layer_of_w8_beside_one_of_f32() -> Sealed:
    """The first layer's queries are f32 and the second one's w8, though one graph serves both."""
    return _layered(dict.fromkeys(MATRICES["qkv"], "w8"), {}).seal()


@refused("EMOE-GRA-005", base="layers_of_two_quantisations")
def experts_of_the_second_layer_of_f32() -> Sealed:
    """The first layer's experts are w8 and the second one's f32, though one graph serves both."""
    return _layered({}, dict.fromkeys(MATRICES["expert"], "w8")).seal()


@accepted(base="full")
def shape_classes_of_two_sets() -> Sealed:
    """One attention's graphs are for int8 and the other one's, quantised as well, are dynamic."""
    made = full()
    graphs = [each for each in made.manifest["graphs"] if (each["role"], each["shape_class"]) != ("qkv", 1)]
    own = {"section": 0, "target": "portable", "role": "qkv", "shape_class": 1}
    return with_graphs(made, [*graphs, {**own, "weights": "int8", "activations": "f32"}]).seal()


def _relisted(change: Callable[[list[Values]], list[Values]], encodings: dict[str, str]) -> Sealed:
    """The smallest package with another list of matrices for its dense layer."""
    made = draft(smallest_model(), encodings)
    layout = made.manifest["layouts"][made.tables[SectionType.DENSE][1].layout]
    layout["matrices"] = change(layout["matrices"])
    return made.seal()


@refused("EMOE-GRA-005")
def quantised_matrices_not_listed() -> Sealed:
    """The layer's matrices are w8 but not listed, so taken to be f32, and the graph is for int8."""
    return _relisted(lambda _: [], dict.fromkeys(MATRICES["qkv"], "w8"))


@refused("EMOE-LAY-005")
def matrices_of_f32_not_listed() -> Sealed:
    """The layer's matrices are f32, as taken to be when not listed, and the graph is for f32; the list is wrong."""
    return _relisted(lambda _: [], {})


@refused("EMOE-LAY-005")
def matrix_listed_twice_rightly_at_last() -> Sealed:
    """The output matrix is listed as w8 and again as the f32 that it is: the later one counts, the list is wrong."""
    return _relisted(lambda listed: [{**listed[-1], "encoding": "w8"}, *listed], {})


@refused("EMOE-GRA-005")
def matrix_listed_twice_wrongly_at_last() -> Sealed:
    """The output matrix is listed as the f32 that it is and again as w8: the later one counts, the graph is for f32."""
    return _relisted(lambda listed: [*listed, {**listed[-1], "encoding": "w8"}], {})


@refused("EMOE-GRA-005")
def layer_of_wrong_encoding_and_wrong_name() -> Sealed:
    """A tensor has a wrong name and a matrix is w8 where the graph is for f32: the encoding is judged first."""
    made = with_kinds(draft(smallest_model(), {"o": "w8"}), "out", [F32])
    made.manifest["layouts"][made.tables[SectionType.DENSE][1].layout]["tensors"][0]["name"] = "norm"
    return made.seal()


@refused("EMOE-GRA-005", base="layers_of_two_quantisations")
def experts_of_int8_with_the_layout_of_the_layer() -> Sealed:
    """The second layer's experts have the layout of a dense layer, without `gate`, so f32; their graph is for int8."""
    model = {**smallest_model(), "layers": smallest_model()["layers"] * 2}
    made = draft(model, dict.fromkeys(MATRICES["expert"], "w8"))
    dense, experts = made.tables[SectionType.DENSE][1], made.tables[SectionType.EXPERTS][1]
    experts.layout, experts.payloads = dense.layout, dense.payloads
    return made.seal()
