"""Graphs compiled for accelerators: what the manifest says of them, and their sections. FORMAT.md section 10.3."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from estream_conformance.builder import Draft, Sealed, Section, Values, edit
from estream_conformance.case import accepted, refused
from estream_conformance.changes import Path, accept, put, refuse, spelled, with_binary, with_pairs, with_value
from estream_conformance.kinds import with_convolution, with_shared_block
from estream_conformance.messagepack import Pairs
from estream_conformance.packages import binary, full, smallest
from estream_conformance.roles import ROLES
from estream_spec import limits
from estream_spec.constants import SectionType

MATRICES: Final = {"qkv": 3, "attend": 0, "convolve": 3, "out": 1, "expert": 3, "dense": 3, "head": 1}
"""How many matrices the graphs of each role take."""
CLASSES: Final = {"qkv": 2, "attend": 2, "convolve": 0, "out": 3, "expert": 2, "dense": 0, "head": 1}
"""How many shape classes each role has in the full package."""
PACKAGES: Final = {"convolve": with_convolution, "dense": with_shared_block}
"""For roles that the smallest package lacks one that has them."""
GRAPH: Final[Path] = ("binaries", 0, "graphs", 0)
SDK: Final[Path] = ("binaries", 0, "sdk")


def with_binaries(*binaries: Values, made: Draft | None = None) -> Draft:
    """A package with other binaries, each with its own section."""
    made = smallest() if made is None else made
    put(made.manifest, ("binaries",), list(binaries))
    made.sections = [each for each in made.sections if each.type != SectionType.BINARY]
    for each in binaries:
        made.sections.insert(-1, Section(SectionType.BINARY, b"binary %d" % each["section"], id=each["section"]))
    return made


def graph_of(role: str, name: str = "g", **changes: Any) -> Values:
    """A graph of a role, right for shape class 0."""
    pairs = {"name": name, "role": role, "shape_class": 0, "tokens": 1, "keys": int(role == "attend")}
    pairs |= {"encodings": ["f32"] * MATRICES[role], **changes}
    return {key: value for key, value in pairs.items() if value or key == "shape_class"}


def with_graphs(*graphs: Values, made: Draft | None = None) -> Sealed:
    """A package with a binary of these graphs."""
    return with_binaries(binary(0, graphs=list(graphs)), made=made).seal()


def _graphs(*graphs: Values) -> Callable[[], Sealed]:
    make = PACKAGES.get(graphs[0]["role"], smallest)
    return lambda: with_graphs(*graphs, made=make())


def _with_full(*graphs: Values) -> Callable[[], Sealed]:
    return lambda: with_graphs(*graphs, made=full())


# Sections


@refused("EMOE-BIN-001", base="one_binary")
def binary_section_that_no_binary_names() -> Sealed:
    """There is a `BINARY` section more than binaries."""
    made = with_binary()
    made.sections.insert(-1, Section(SectionType.BINARY, b"binary", id=1))
    return made.seal()


@refused("EMOE-BIN-001")
def binary_section_without_binaries() -> Sealed:
    """There is a `BINARY` section, and the manifest has no binaries."""
    made = smallest()
    made.sections.append(Section(SectionType.BINARY, b"binary"))
    return made.seal()


@refused("EMOE-BIN-001", base="one_binary")
def binary_without_its_section() -> Sealed:
    """A binary names a section that there is not."""
    made = with_binary()
    made.sections.remove(made.section(SectionType.BINARY))
    return made.seal()


@refused("EMOE-BIN-001", base="one_binary")
def binary_of_another_section_id() -> Sealed:
    """A binary names section 2^32 - 1, and its own is named by none."""
    made = with_binary()
    made.manifest["binaries"][0]["section"] = 0xFFFFFFFF
    return made.seal()


@refused("EMOE-BIN-001", base="binaries_of_three_chips")
def two_binaries_of_one_section() -> Sealed:
    """Two binaries name one section, and there is none but those named."""
    made = with_binaries(binary(0), binary(1, soc_model=69))
    made.sections.remove(made.section(SectionType.BINARY, 1))
    made.manifest["binaries"][1]["section"] = 0
    return made.seal()


@refused("EMOE-BIN-001", base="one_binary")
def binary_of_a_section_of_another_type() -> Sealed:
    """A binary names a section whose id a graph has, and no binary."""
    made = with_binary()
    made.sections.remove(made.section(SectionType.BINARY))
    made.manifest["binaries"][0]["section"] = made.manifest["graphs"][2]["section"]
    return made.seal()


@accepted()
def binaries_of_three_chips() -> Sealed:
    """There are binaries for three chips, in another order than their sections."""
    third = binary(0xFFFFFFFF, soc_model=0xFFFFFFFF, architecture=65535)
    return with_binaries(binary(7, soc_model=69, architecture=79), binary(0), third).seal()


@accepted()
def binaries_of_the_greatest_number() -> Sealed:
    """There are 64 binaries, all of one architecture."""
    return with_binaries(*(binary(number, soc_model=number + 1) for number in range(limits.MAX_BINARIES))).seal()


@accepted(base="one_binary")
def binary_of_any_bytes() -> Sealed:
    """A binary is one zero; the format does not look into it."""
    made = with_binary()
    made.section(SectionType.BINARY).data = b"\0"
    return made.seal()


@accepted(base="one_binary")
def binary_before_all_sections() -> Sealed:
    """The binary is the first section."""
    made = with_binary()
    made.sections.insert(0, made.sections.pop(-2))
    return made.seal()


@accepted()
def binary_added_by_an_edit() -> Sealed:
    """A binary was added in place: the manifest was written anew, the old one's extent is free."""
    before, after = smallest().seal(), with_binary().seal()
    add = [
        Section(each["type"], each["content"])
        for each in after.entries
        if each["type"] in (SectionType.BINARY, SectionType.MANIFEST)
    ]
    edited = edit(before, add, [(SectionType.MANIFEST, 0)])
    return Sealed(edited.data, edited.superblock, edited.entries, after.draft, edited.records)


# Chips


@refused("EMOE-BIN-002", base="binaries_of_three_chips")
def two_binaries_of_one_chip() -> Sealed:
    """Two binaries are for one chip, made by two builds of the SDK."""
    return with_binaries(binary(0), binary(1, sdk="2.52")).seal()


@refused("EMOE-BIN-002", base="binaries_of_three_chips")
def first_and_third_binary_of_one_chip() -> Sealed:
    """The first and the third binary are for one chip."""
    return with_binaries(binary(0), binary(1, soc_model=69), binary(2)).seal()


@accepted(base="one_binary")
def binaries_of_one_chip_and_two_architectures() -> Sealed:
    """Two binaries agree in the chip's number and not in the architecture."""
    return with_binaries(binary(0), binary(1, architecture=79)).seal()


# Graphs

for _role in ROLES:
    accept(
        f"binary_graph_of_role_{_role}",
        f"A binary has a graph of role `{_role}`.",
        _graphs(graph_of(_role)),
        base="one_binary",
    )
    refuse(
        "EMOE-BIN-003",
        f"binary_graph_of_role_{_role}_behind_the_last_class",
        f"A binary's graph of role `{_role}` serves the shape class behind the last.",
        _graphs(graph_of(_role, shape_class=1)),
        base=f"binary_graph_of_role_{_role}",
    )
    refuse(
        "EMOE-BIN-003",
        f"binary_graph_of_role_{_role}_behind_the_last_class_of_several",
        f"A binary's graph of role `{_role}` serves the shape class behind the last of several.",
        _with_full(graph_of(_role, shape_class=CLASSES[_role])),
        base="binary_graphs_of_all_classes",
    )
    for _count in {MATRICES[_role] + 1, MATRICES[_role] - 1, 0} - {MATRICES[_role], -1}:
        refuse(
            "EMOE-BIN-003",
            f"binary_graph_of_role_{_role}_with_{_count}_encodings",
            f"A binary's graph of role `{_role}` has {_count} encodings.",
            _graphs(graph_of(_role, encodings=["f32"] * _count)),
            base=f"binary_graph_of_role_{_role}",
        )
    _keys = 0 if _role == "attend" else 1
    refuse(
        "EMOE-BIN-003",
        f"binary_graph_of_role_{_role}_with_{_keys}_keys",
        f"A binary's graph of role `{_role}` takes {_keys} keys.",
        _graphs(graph_of(_role, keys=_keys)),
        base=f"binary_graph_of_role_{_role}",
    )
refuse(
    "EMOE-BIN-003",
    "binary_graph_of_class_1023",
    "A binary's graph serves shape class 1023.",
    _graphs(graph_of("out", shape_class=1023)),
    base="binary_graph_of_role_out",
)


@accepted(base="full")
def binary_graphs_of_all_classes() -> Sealed:
    """A binary has a graph for every role and shape class of a model that has several."""
    graphs = [
        graph_of(role, f"{role}{number}", shape_class=number) for role in ROLES for number in range(CLASSES[role])
    ]
    return with_graphs(*graphs, made=full())


ALIKE: Final[dict[str, tuple[str, Values]]] = {
    "tokens": ("expert", {"tokens": 2}),
    "keys": ("attend", {"keys": 2}),
    "encodings": ("expert", {"encodings": ["f32", "f32", "w8"]}),
    "order_of_encodings": ("expert", {"encodings": ["w8", "f32", "f32"]}),
}
"""What graphs may differ in and be two: the role, and what the second has."""
for _what, (_role, _changes) in ALIKE.items():
    _first = {"encodings": ["f32", "f32", "w8"]} if _what == "order_of_encodings" else {}
    accept(
        f"binary_graphs_that_differ_in_{_what}",
        f"Two graphs of a binary differ in {_what.replace('_', ' ')} alone, and in their names.",
        _graphs(graph_of(_role, "a", **_first), graph_of(_role, "b", **_changes)),
        base="one_binary",
    )


@accepted(base="full")
def binary_graphs_that_differ_in_shape_class() -> Sealed:
    """Two graphs of a binary differ in their shape class alone, and in their names."""
    return with_graphs(graph_of("expert", "a"), graph_of("expert", "b", shape_class=1), made=full())


@accepted(base="binaries_of_three_chips")
def binaries_with_equal_graphs() -> Sealed:
    """Two binaries have the same graphs, of the same names."""
    graphs = [graph_of("expert", "a"), graph_of("head", "b")]
    return with_binaries(binary(0, graphs=graphs), binary(1, soc_model=69, graphs=graphs)).seal()


@refused("EMOE-BIN-004", base="binary_graph_of_role_expert")
def binary_graph_twice_by_two_names() -> Sealed:
    """Two graphs of a binary agree in everything but their names."""
    return with_graphs(graph_of("expert", "a"), graph_of("expert", "b"))


@refused("EMOE-BIN-004", base="binary_graph_of_role_expert")
def binary_graph_twice() -> Sealed:
    """A graph of a binary comes twice, with its name: that they are alike is judged first."""
    return with_graphs(graph_of("expert"), graph_of("expert"))


@refused("EMOE-BIN-004", base="binary_graphs_that_differ_in_keys")
def third_binary_graph_like_the_first() -> Sealed:
    """The third graph of a binary is like the first."""
    return with_graphs(graph_of("attend", "a"), graph_of("attend", "b", keys=2), graph_of("attend", "c"))


@refused("EMOE-BIN-005", base="binary_graphs_that_differ_in_tokens")
def binary_graphs_of_one_name() -> Sealed:
    """Two graphs of a binary have one name."""
    return with_graphs(graph_of("expert"), graph_of("expert", tokens=2))


@refused("EMOE-BIN-005", base="one_binary")
def binary_graphs_of_two_roles_and_one_name() -> Sealed:
    """Graphs of two roles have one name."""
    return with_graphs(graph_of("expert"), graph_of("out"), graph_of("head", "h"))


@accepted(base="one_binary")
def binary_graph_names_equal_but_for_case() -> Sealed:
    """Two graphs of a binary have names that differ in case alone, which is two."""
    return with_graphs(graph_of("expert"), graph_of("out", "G"))


@accepted(base="one_binary")
def binary_graph_at_its_limits() -> Sealed:
    """A graph of a binary has the greatest numbers and the longest name that there are."""
    greatest = {"tokens": limits.MAX_DIMENSION, "keys": limits.MAX_DIMENSION}
    return with_graphs(graph_of("attend", "g" * limits.MAX_NAME, **greatest))


@accepted(base="one_binary", committed=False)
def binary_graphs_of_the_greatest_number() -> Sealed:
    """A binary has 1024 graphs, for as many tiles."""
    return with_graphs(
        *(graph_of("head", f"g{number}", tokens=number) for number in range(1, limits.MAX_BINARY_GRAPHS + 1))
    )


@accepted(base="one_binary")
def binary_graph_of_encodings_that_no_layer_has() -> Sealed:
    """A graph of a binary is for 4-bit experts, of which the model has none: it is of no use, and legal."""
    return with_graphs(graph_of("expert", encodings=["w4g32", "w4g64", "w8"]))


# Order


@refused("EMOE-GRA-004", base="one_binary")
def graph_section_before_binary_section() -> Sealed:
    """A `GRAPH` section and a `BINARY` section are named by none: graphs are judged first."""
    made = with_binary()
    made.sections.insert(-1, Section(SectionType.BINARY, b"binary", id=1))
    made.sections.insert(-1, Section(SectionType.GRAPH, b"graph", id=5))
    return made.seal()


@refused("EMOE-BIN-001", base="one_binary")
def binary_section_before_chips() -> Sealed:
    """Two binaries are for one chip, and a third section is named by none: sections are judged first."""
    made = with_binaries(binary(0), binary(1))
    made.sections.insert(-1, Section(SectionType.BINARY, b"binary", id=2))
    return made.seal()


@refused("EMOE-BIN-003", base="binaries_of_three_chips")
def binary_graph_before_the_next_chip() -> Sealed:
    """The first binary has a graph of no shape class, the second is for the same chip: they are judged one by one."""
    return with_binaries(binary(0, graphs=[graph_of("out", shape_class=1)]), binary(1)).seal()


@refused("EMOE-BIN-002", base="binaries_of_three_chips")
def chip_before_the_graphs_of_its_binary() -> Sealed:
    """The second binary is for the chip of the first, and has a graph of no shape class: the chip is judged first."""
    return with_binaries(binary(0), binary(1, graphs=[graph_of("out", shape_class=1)])).seal()


@refused("EMOE-BIN-005", base="one_binary")
def binary_graph_name_before_the_next_graph() -> Sealed:
    """The second graph has the name of the first, the third no shape class: graphs are judged one by one."""
    return with_graphs(graph_of("expert"), graph_of("out"), graph_of("head", "h", shape_class=1))


@refused("EMOE-BIN-003", base="one_binary")
def binary_graph_of_no_class_twice() -> Sealed:
    """A graph of no shape class comes twice: it is judged before it comes again."""
    return with_graphs(*[graph_of("out", shape_class=1)] * 2)


@refused("EMOE-BIN-005", base="one_binary")
def binary_before_layouts() -> Sealed:
    """Two graphs of a binary have one name, and a payload has a wrong length: binaries are judged first."""
    made = with_binaries(binary(0, graphs=[graph_of("expert"), graph_of("out")]))
    made.manifest["layouts"][0]["payload_length"] += 1
    return made.seal()


@refused("EMOE-BIN-001")
def binary_section_before_its_digest() -> Sealed:
    """A `BINARY` section is named by none and has another digest: the manifest is judged first."""
    made = smallest()
    made.sections.append(Section(SectionType.BINARY, b"binary", changes={"sha256": bytes(32)}))
    return made.seal()


# Values


def _with_value(path: Path, value: Any) -> Sealed:
    return with_value(path, value, with_binary())


def _spelled(path: Path, value: Any) -> Sealed:
    return spelled(path, value, with_binary())


for _name, _value in {
    "of_one_number": "2",
    "of_zero": "0",
    "of_eight_numbers": "1.2.3.4.5.6.7.8",
    "with_leading_zeros": "02.051",
    "of_18_digits": "9" * 18,
    "of_128_characters": ".".join(["1" * 18] * 6 + ["1" * 14]),
}.items():
    accept(
        f"sdk_{_name}",
        f"The build of a binary's SDK is `{_value}`.",
        partial(_with_value, SDK, _value),
        base="one_binary",
    )
for _name, _value in {
    "of_nine_numbers": "1.2.3.4.5.6.7.8.9",
    "of_19_digits": "9" * 19,
    "of_19_digits_behind_a_dot": "2." + "0" * 19,
    "with_a_dot_first": ".2",
    "with_a_dot_last": "2.51.",
    "with_two_dots": "2..51",
    "with_a_letter": "v2.51",
    "with_a_letter_last": "2.51b",
    "with_a_sign": "+2",
    "with_a_space": "2.51 ",
    "with_a_line_feed": "2.51\n",
    "with_a_nul": "2.51\0",
    "with_an_underscore": "2_51",
    "of_another_script": "\u0662.\u0665\u0661",
    "of_a_fullwidth_digit": "\uff12",
}.items():
    refuse(
        "EMOE-MAN-002",
        f"sdk_{_name}",
        f"The build of a binary's SDK is {_value!a}.",
        partial(_spelled, SDK, _value),
        base="one_binary",
    )
DEFAULTS: Final[list[tuple[Path, Any]]] = [
    (("binaries", 0, "options"), ""),
    ((*GRAPH, "keys"), 0),
    ((*GRAPH, "encodings"), []),
]
for _path, _default in DEFAULTS:
    refuse(
        "EMOE-MAN-003",
        f"{_path[-1]}_at_its_default",
        f"The key `{_path[-1]}` is there though it has its default value.",
        partial(_spelled, _path, _default),
        base="one_binary",
    )
ENCODINGS: Final[dict[str, Any]] = {"nil": None, "an_integer": 0, "of_no_known_value": "f16", "empty": ""}
for _name, _encoding in ENCODINGS.items():
    refuse(
        "EMOE-MAN-002",
        f"encoding_of_a_binary_graph_{_name}",
        f"An encoding of a binary's graph is {_name.replace('_', ' ')}.",
        partial(_spelled, (*GRAPH, "encodings"), [_encoding]),
        base="one_binary",
    )


@refused("EMOE-MAN-003", base="one_binary")
def binaries_behind_extensions() -> Sealed:
    """The key `binaries` stands behind `extensions`, though its table has it before them."""
    made = with_binary()
    put(made.manifest, ("extensions",), {"a": b""})
    return with_pairs((), lambda pairs: Pairs([*pairs[:-2], pairs[-1], pairs[-2]]), made)
