"""The tables of FORMAT.md say what the code does."""

import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args

import crc32c
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from estream_conformance.packages import smallest
from estream_conformance.walkthrough import annex
from estream_spec import constants, errors, graph_interface, limits, manifest, model, prefetch_router, records, weights
from estream_spec.constants import FLAGS
from estream_spec.container import AT_MOST_ONE, SINGLE
from estream_spec.errors import MalformedError
from estream_spec.graph_interface import VARIANTS
from estream_spec.manifest import content_id
from estream_spec.rulebook import RULES
from fixtures.markdown import Row, read_tables

SPEC = Path(__file__).parents[3] / "spec"
TEXT = (SPEC / "FORMAT.md").read_text(encoding="utf-8")
TABLES = read_tables(TEXT)


def plain(cell: str) -> str:
    return cell.replace("`", "")


def table(number: str, index: int = 0) -> list[Row]:
    return TABLES[number][index]


def encoder_of(kind: type[records.Structure]) -> Callable[..., bytes]:
    return lambda *values: kind(*values).encode()


RECORDS: dict[str, tuple[int, Callable[..., bytes]]] = {
    "3.1": (records.Superblock.SIZE, encoder_of(records.Superblock)),
    "4.1": (records.DIRECTORY_HEADER.size, records.DIRECTORY_HEADER.pack),
    "4.2": (records.DirectoryEntry.SIZE, encoder_of(records.DirectoryEntry)),
    "5.1": (records.TABLE_HEADER.size, records.TABLE_HEADER.pack),
    "5.2": (records.RecordRange.SIZE, encoder_of(records.RecordRange)),
    "5.3": (records.RECORD_DIGEST.size, records.RECORD_DIGEST.pack),
    "9.5": (records.Signature.SIZE, encoder_of(records.Signature)),
}
"""Size and encoder of the record that a section's table describes."""
BYTES = {"magic", "sha256", "directory_sha256", "public_key", "signature"}
"""Fields that are bytes and not numbers."""
CLASSES: dict[str, type[Any]] = {
    "3.1": records.Superblock,
    "4.2": records.DirectoryEntry,
    "5.2": records.RecordRange,
    "9.5": records.Signature,
}


def described(number: str) -> list[tuple[str, int, int]]:
    """Name, offset and size of every row of a record's table."""
    return [(row["name"], int(row["offset"]), int(row["size"])) for row in table(number)]


@pytest.mark.parametrize("number", RECORDS)
def test_record_tables_leave_no_byte_out(number: str) -> None:
    end = 0
    for _, offset, size in described(number):
        assert offset == end
        end += size
    assert end == RECORDS[number][0]


@pytest.mark.parametrize("number", RECORDS)
def test_records_put_each_field_where_the_table_says(number: str) -> None:
    computed = {"reserved"} if number != "3.1" else {"reserved", "checksum"}
    rows = [row for row in described(number) if row[0] not in computed]
    # The encoder takes bytes for some fields and numbers for the others.
    zeros: list[Any] = [bytes(size) if name in BYTES else 0 for name, _, size in rows]
    encode = RECORDS[number][1]
    body = slice(0, 124) if number == "3.1" else slice(None)
    assert not any(encode(*zeros)[body])
    for index, (name, offset, size) in enumerate(rows):
        value = b"\xff" * size if name in BYTES else (1 << 8 * size) - 1
        data = encode(*zeros[:index], value, *zeros[index + 1 :])[body]
        assert [at for at, byte in enumerate(data) if byte] == list(range(offset, offset + size)), name


@pytest.mark.parametrize("number", CLASSES)
def test_records_have_the_names_of_the_table(number: str) -> None:
    names = [name for name, _, _ in described(number) if name not in {"reserved", "checksum"}]
    assert names == [each.name for each in fields(CLASSES[number])]


@pytest.mark.parametrize("number", ["4.2", "5.2", "9.5"])
def test_reserved_bytes_are_refused(number: str) -> None:
    for name, offset, size in described(number):
        if name == "reserved":
            for at in range(offset, offset + size):
                data = bytearray(CLASSES[number].SIZE)
                data[at] = 1
                with pytest.raises(MalformedError):
                    CLASSES[number].decode(bytes(data), path="record")


def test_superblock_checksum_is_over_all_before_it() -> None:
    data = RECORDS["3.1"][1](constants.MAGIC, 0, 9, 14, 1, 2, 3, 4, 5, 6, bytes(32))
    assert described("3.1")[-1] == ("checksum", 124, 4)
    assert data[124:] == struct.pack("<I", crc32c.crc32c(data[:124]))
    assert f"`0x{crc32c.crc32c(b'123456789'):X}`" in TEXT


def test_constants_are_those_of_the_code() -> None:
    for row in table("2"):
        value = getattr(constants, plain(row["constant"]))
        text = value.hex(" ") if isinstance(value, bytes) else str(value)
        assert plain(row["value"]) == text, row


def test_section_types_are_those_of_the_code() -> None:
    rows = table("4.3")
    assert {row["name"]: int(row["id"]) for row in rows} == {each.name: each.value for each in constants.SectionType}
    for row in rows:
        section = constants.SectionType[row["name"]]
        if section not in constants.KNOWN_SECTIONS:
            assert row["flags"] == "reserved"
            continue
        flags = {flag.name.lower() for flag in FLAGS[section] if flag.name} or {"none"}
        assert set(row["flags"].split(", ")) == flags, row
        number = "one" if section in SINGLE else "at most one" if section in AT_MOST_ONE else "any"
        assert row["number"] == number, row


def test_algorithms_are_those_of_the_code() -> None:
    assert [int(row["meaning"][0]) for row in table("9.5") if row["name"] == "algorithm"] == list(constants.Algorithm)


def test_section_flags_are_those_of_the_code() -> None:
    flags = {row["name"].upper(): 1 << int(row["bit"]) for row in table("4.4")}
    assert flags == {flag.name: flag.value for flag in constants.SectionFlag}


def test_codecs_are_those_of_the_code() -> None:
    assert {row["name"]: int(row["id"]) for row in table("4.5")} == {each.name: each.value for each in constants.Codec}


def test_limits_are_those_of_the_code() -> None:
    stated = {row["limit"]: int(row["value"]) for row in table("11")}
    assert stated == {name: value for name, value in vars(limits).items() if name.isupper()}


def test_error_classes_are_those_of_the_code() -> None:
    bases = {errors.EmoeError, errors.FormatError}
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.EmoeError)]
    assert [row["slug"] for row in table("13")] == [each.slug for each in classes if each not in bases]


STRUCTS: dict[str, type[msgspec.Struct]] = {
    "6.2": manifest.Manifest,
    "6.3": manifest.RecordLayout,
    "6.4": manifest.Matrix,
    "6.5": manifest.Tensor,
    "6.6": manifest.Graph,
    "6.7": manifest.DeviceConfiguration,
    "6.8": manifest.Provenance,
    "6.9": manifest.Source,
    "6.10": manifest.Binary,
    "6.11": manifest.BinaryGraph,
    "6.12": prefetch_router.PrefetchRouter,
    "6.13": prefetch_router.PrefetchLayer,
    "8.1": model.ModelDescription,
    "8.2": model.Layer,
    "8.3": model.Attention,
    "8.4": model.Rotary,
    "8.5": model.Latent,
    "8.6": model.Convolution,
    "8.7": model.ExpertBlock,
    "8.8": model.DenseBlock,
    "8.9": model.Router,
}
DEFAULTS: dict[str, Any] = {
    "": msgspec.NODEFAULT,
    "empty": {},
    "[]": (),
    "nil": None,
    "false": False,
    **{str(value): value for value in (0, 1, 2, 0.0, 1.0)},
    '""': "",
}
"""What the default column says, for all but plain strings."""


def test_every_struct_of_the_manifest_has_a_table() -> None:
    modules = (manifest, model, prefetch_router)
    structs = [each for module in modules for each in vars(module).values() if isinstance(each, type)]
    assert set(STRUCTS.values()) == {each for each in structs if issubclass(each, model.Described)} - {model.Described}
    for number, struct_type in STRUCTS.items():
        assert f"### {number} {struct_type.__name__}\n" in TEXT


@pytest.mark.parametrize("number", STRUCTS)
def test_manifest_tables_list_keys_and_defaults_in_order(number: str) -> None:
    fields = msgspec.structs.fields(STRUCTS[number])
    assert [row["key"] for row in table(number)] == [each.encode_name for each in fields]
    for row, each in zip(table(number), fields, strict=True):
        default = each.default if each.default_factory is msgspec.NODEFAULT else each.default_factory()
        assert DEFAULTS.get(plain(row["default"]), plain(row["default"])) == default, row["key"]


@pytest.mark.parametrize("number", STRUCTS)
def test_manifest_tables_give_the_ranges(number: str) -> None:
    for row, each in zip(table(number), msgspec.structs.fields(STRUCTS[number]), strict=True):
        stated = stated_range(plain(row["type"]), plain(row["range"]))
        assert stated == coded_range(msgspec.inspect.type_info(each.type)), row["key"]


NAMED_RANGES: dict[str, Any] = {
    "name": (1, limits.MAX_NAME),
    "text": (0, limits.MAX_TEXT),
    "version": (manifest.SDK_PATTERN, limits.MAX_NAME),
    "encoding": set(get_args(weights.Encoding)),
    "digest": (32, 32),
    "dimension": (1, limits.MAX_DIMENSION),
    "token": (0, limits.MAX_DIMENSION - 1),
    "class": (0, limits.MAX_SHAPE_CLASSES - 1),
    "offset": (0, limits.MAX_FILE_LENGTH),
    "boolean": None,
    "bytes": (0, None),
}
"""Ranges of the types that section 6.1 names; what a version is, MAX_TEXT and the like are spelt out there."""


def stated_range(kind: str, cell: str) -> Any:
    """Bounds, or the set of choices, as a row gives them."""
    kind = kind.removesuffix(" or nil")
    if not cell:
        return NAMED_RANGES.get(kind)
    if kind == "string":
        return set(cell.split(", "))
    if kind == "float":
        kinds = {"at least 0": ("ge", 0), "above 0": ("gt", 0), "above 0 to 1": ("gt", 0, 1)}
        if cell not in kinds:
            low, _, high = cell.partition(" to ")
            return ("ge", number_of(low), number_of(high))
        return kinds[cell]
    low, _, high = cell.partition(" to ")
    return (number_of(low), number_of(high or low))


def number_of(text: str) -> int:
    """`4096`, `MAX_NAME`, `4 MAX_SHAPE_CLASSES`, `2^32 - 1`, `MAX_LAYERS - 1`."""
    if text.startswith("MAX") and " - " in text:
        name, _, less = text.partition(" - ")
        return int(getattr(limits, name)) - int(less)
    if "^" in text:
        power, _, less = text.partition(" - ")
        base, _, exponent = power.partition("^")
        return int(int(base) ** int(exponent)) - int(less)
    factor, _, name = text.rpartition(" ")
    value = int(name) if name.isdigit() else int(getattr(limits, name))
    return int(factor or 1) * value


def coded_range(kind: Any) -> Any:
    """The same, out of a type annotation."""
    match kind:
        case msgspec.inspect.UnionType(types=types):
            (kind,) = [each for each in types if not isinstance(each, msgspec.inspect.NoneType)]
            return coded_range(kind)
        case msgspec.inspect.LiteralType(values=values):
            return set(values) if isinstance(values[0], str) else (values[0], values[-1])
        case msgspec.inspect.IntType(ge=low, le=high, lt=above):
            return (low, high if above is None else above - 1)
        case msgspec.inspect.FloatType(ge=low, gt=below, le=high):
            bound = ("ge", low) if below is None else ("gt", below)
            return bound if high is None else (*bound, high)
        case msgspec.inspect.StrType(pattern=str(pattern), max_length=high):
            return (pattern, high)
        case (
            msgspec.inspect.StrType(min_length=low, max_length=high)
            | msgspec.inspect.BytesType(min_length=low, max_length=high)
            | msgspec.inspect.VarTupleType(min_length=low, max_length=high)
            | msgspec.inspect.DictType(min_length=low, max_length=high)
        ):
            return (low or 0, high)
        case _:
            return None


@pytest.mark.parametrize("encoding", get_args(weights.Encoding))
def test_parts_of_an_encoding_are_those_of_the_code(encoding: weights.Encoding) -> None:
    rows, columns = 130, 6
    group = weights.GROUP_SIZES.get(encoding, 1)
    padded = weights.padded_rows(rows, group)
    sizes = {"K": rows, "N": columns, "K'/2": padded // 2, "K'/G": padded // group}
    stated, current = [], ""
    for row in table("7.1"):
        current = row["encoding"].split(",")[0] or current
        if current == encoding:
            shape = tuple(sizes[each] for each in row["shape"].strip("[]").split(", "))
            stated.append(weights.Part(name=plain(row["part"]), dtype=row["dtype"], shape=shape))  # type: ignore[arg-type]
    assert tuple(stated) == weights.matrix_parts("name", encoding, rows, columns)


def test_nibble_example_is_what_the_code_makes_of_it() -> None:
    values = np.zeros((32, 1), np.int8)
    values[[0, 16], 0] = -3, 5
    packed = weights.pack_nibbles(values, 32)
    assert packed[0, 0] == 0xD5
    parts: dict[str, Any] = {
        "nibbles": packed,
        "multipliers": np.array([[-2]], np.int8),
        "scale": np.array([0.5], np.float32),
    }
    matrix = weights.dequantise("w4g32", parts, 32)
    assert (matrix[0, 0], matrix[16, 0]) == (3, -5)
    assert "`0xD5`. `W[0, n] = 0.5 (-2 · -3) = 3` and `W[16, n] = 0.5 (-2 · 5) = -5`" in " ".join(TEXT.split())


def test_preimages_have_the_stated_lengths() -> None:
    assert int(table("9.1")[0]["bytes"]) == len(constants.FILE_ID_CONTEXT)
    content = [int(row["bytes"]) for row in table("9.2")]
    assert content[0] == len(constants.CONTENT_ID_CONTEXT)
    assert f"SHA-256 of {sum(content)} bytes" in TEXT
    message = records.Signature(constants.SIGNATURE_MAGIC, 1, 2, bytes(32), bytes(64)).message(bytes(32))
    assert int(table("9.5", 1)[0]["bytes"]) == len(constants.SIGNATURE_CONTEXT)
    assert f"The message is {len(message)} bytes" in TEXT
    assert sum(int(row["bytes"]) for row in table("9.5", 1)) == len(message)
    # One digest for the model, two for each table, one for each document.
    assert content_id.__annotations__.keys() == {"model", "layouts", "dense", "experts", "documents", "return"}
    assert len(content) == 1 + 1 + 2 * 2 + 2


PLAIN = model.Attention(heads=4, key_value_heads=2, head_dim=10, rotary=model.Rotary(theta=1e4, width=6), value_dim=14)
BLOCK = model.ExpertBlock(experts=7, intermediate=16, router=model.Router(family="softmax-topk", top_k=1))
MODEL = model.ModelDescription(
    family="test",
    hidden=12,
    vocabulary=30,
    context_length=8,
    norm_epsilon=1e-5,
    layers=(model.Layer(attention=0, experts=0),),
    attentions=(PLAIN,),
    expert_blocks=(BLOCK,),
)
LETTERS: dict[str, int | str] = {
    "T": "T",
    "S": "S",
    "H": 12,
    "V": 30,
    "E": 7,
    "I": 16,
    "h": 4,
    "j": 2,
    "d": 10,
    "D": 6,
    "w": 14,
    "R": 5,
    "Q": 3,
}


def of_attention(**changes: Any) -> model.ModelDescription:
    return replace(MODEL, attentions=(replace(PLAIN, **changes),))


def of_block(**changes: Any) -> model.ModelDescription:
    return replace(MODEL, expert_blocks=(replace(BLOCK, **changes),))


def of_dense(**changes: Any) -> model.ModelDescription:
    return replace(MODEL, dense_blocks=(model.DenseBlock(intermediate=16, **changes),))


NARROW = model.Latent(rank=5, norm_epsilon=1e-6)
CONVOLUTION = replace(MODEL, layers=(model.Layer(convolution=0, experts=0),), convolutions=(model.Convolution(taps=3),))
BIASED_ROUTER = replace(BLOCK.router, bias=True)
INTERFACES: list[tuple[str, model.ModelDescription, set[str]]] = [
    ("qkv", MODEL, set()),
    ("qkv", of_attention(qk_norm="full"), {'qk_norm "full"'}),
    ("qkv", of_attention(qk_norm="head", bias=True), {'qk_norm "head"', "bias"}),
    ("qkv, latent", of_attention(latent=NARROW, key_value_heads=4), set()),
    ("qkv, latent", of_attention(latent=replace(NARROW, query_rank=3), key_value_heads=4), {"query_rank"}),
    ("attend", MODEL, set()),
    ("attend", of_attention(sinks=True), {"sinks"}),
    ("convolve", CONVOLUTION, set()),
    ("out", MODEL, {"experts"}),
    ("out", CONVOLUTION, {"experts", "convolution"}),
    ("out", replace(of_dense(), layers=(model.Layer(attention=0, dense=0),)), set()),
    (
        "out",
        replace(of_attention(out_bias=True), expert_blocks=of_block(router=BIASED_ROUTER).expert_blocks),
        {*("experts", "bias of the router", "out_bias")},
    ),
    ("expert", MODEL, set()),
    ("expert", of_block(bias=True), {"bias"}),
    ("dense", of_dense(), set()),
    ("dense", of_dense(share=True), {"share"}),
    ("head", MODEL, set()),
    ("head", replace(MODEL, head_bias=True), {"head_bias"}),
]
"""A row of the table of section 10.1, a model that it is right for, and what that has."""


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize(("name", "described", "has"), INTERFACES)
def test_graph_interfaces_are_those_of_the_code(
    name: str, described: model.ModelDescription, has: set[str], norm: Literal["rms", "layer"]
) -> None:
    (row,) = [each for each in table("10.1") if plain(each["role"]) == name]
    role = next(each for each in graph_interface.ROLES if each == name.partition(",")[0])
    found = graph_interface.role_shape(role, replace(described, norm=norm), 0)
    letters = LETTERS | {"W": 12 if "convolution" in has else 4 * 14}
    cells = {key: list(values_of(row[key], has, letters)) for key in list(row)[2:]}
    assert cells["inputs of a call"] == [(each.name, each.shape) for each in found.inputs]
    vectors = [(each, shape) for each, shape in cells["then vectors"]]
    if norm == "layer":
        norms = ("attention_norm", "expert_norm", "final_norm")
        vectors = [
            each for one in vectors for each in ([one, (f"{one[0]}.bias", one[1])] if one[0] in norms else [one])
        ]
    assert vectors == [(each.name, each.shape) for each in found.vectors]
    assert cells["then matrices"] == [(each.name, (each.rows, each.columns)) for each in found.matrices]
    assert cells["outputs"] == [(each.name, each.shape) for each in found.outputs]


def test_every_role_is_in_the_table() -> None:
    roles = [plain(row["role"]).partition(",")[0] for row in table("10.1")]
    assert list(dict.fromkeys(roles)) == list(graph_interface.ROLES)
    assert {name for name, _, _ in INTERFACES} == {plain(row["role"]) for row in table("10.1")}


def values_of(cell: str, has: set[str], letters: dict[str, int | str]) -> Iterable[tuple[str, tuple[int | str, ...]]]:
    """Names and shapes out of `x [T, H]; with a: y [T]; without: z [T]`, for a model that has some of this."""
    asked = ""
    for clause in plain(cell).split("; ") if cell else ():
        condition, _, listed = clause.rpartition(": ")
        asked = condition.removeprefix("with ") if condition.startswith("with ") else asked
        wanted = condition == "" or (asked in has) == (condition != "without")
        for each in listed.rstrip("]").split("], ") if wanted else ():
            name, _, shape = each.partition(" [")
            yield name, tuple(dimension(part, letters) for part in shape.split(", "))


def dimension(text: str, letters: dict[str, int | str]) -> int | str:
    """What `T`, `h d` or `h (d - D)` stands for."""
    if text.endswith(")"):
        factor, _, difference = text.rstrip(")").partition(" (")
        first, less = (letters[each] for each in difference.split(" - "))
        times = letters[factor]
        assert isinstance(first, int)
        assert isinstance(less, int)
        assert isinstance(times, int)
        return times * (first - less)
    product, *rest = (letters[letter] for letter in text.split())
    for each in rest:
        assert isinstance(product, int)
        assert isinstance(each, int)
        product *= each
    return product


def test_graph_kinds_are_those_of_the_code() -> None:
    stated = {(row["activations"], row["weights"]) for row in table("10.2")}
    assert stated == set(graph_interface.COMBINATIONS) == set().union(*VARIANTS)


RULE = re.compile(r"EMOE-[A-Z]{3}-\d{3}")
NORMATIVE = TEXT.partition("\n## 14. ")[0] + TEXT.partition("\n## Annex A. ")[2].partition("\n## Annex B. ")[0]
"""What binds: sections 1 to 13 and annex A."""
SCHEDULES = (SPEC / "SCHEDULE.md").read_text(encoding="utf-8").partition("\n## 7. ")[0]
"""What binds of SCHEDULE.md: sections 1 to 6."""
CITED = set(RULE.findall("\n".join(line for line in NORMATIVE.splitlines() if not line.startswith("|")) + SCHEDULES))
"""Ids in sentences, not in the table of section 9.4."""


def test_order_of_checks_is_that_of_the_code() -> None:
    assert [(row["rule"], row["class"]) for row in table("9.4")] == [(rule, kind.slug) for rule, kind in RULES.items()]


def test_every_rule_stands_in_a_sentence() -> None:
    assert set(RULES) <= CITED


def test_every_normative_paragraph_names_its_rule() -> None:
    binding_text = NORMATIVE.partition("### 1.2")[2] + "\n\n" + SCHEDULES
    paragraphs = re.split(r"\n\n|\n(?=- |\d+\. |\|)", binding_text)
    binding = [each for each in paragraphs if re.search(r"\b(MUST|SHOULD)\b", each)]
    assert len(binding) > 110
    assert [each for each in binding if not RULE.search(each)] == []


def test_the_walk_through_shows_the_smallest_package() -> None:
    assert TEXT.partition("\n## Annex B. ")[2].partition("\n\n")[2].partition("\n\n")[2] == annex()
    assert f"{len(smallest().seal().data):,} bytes" in TEXT
