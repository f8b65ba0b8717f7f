"""Keys of the manifest's maps: of another type, unknown, out of order, twice. FORMAT.md section 6.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from estream_conformance.builder import Sealed
from estream_conformance.case import refused
from estream_conformance.changes import NAMES, PLACES, base_of, miswritten, refuse, value_at, with_pairs
from estream_conformance.messagepack import Pairs, Raw, encode


def _register(rule: str, struct: str, suffix: str, about: str, change: Callable[[Pairs], Pairs]) -> None:
    draft, base = base_of(struct)
    own = NAMES.get(struct, struct)
    refuse(rule, f"{own}_{suffix}", about, lambda: with_pairs(PLACES[struct], change, draft()), base=base)


def _key(name: str, about: str, key: Any) -> None:
    _register("EMOE-MAN-002", "", f"key_{name}", about, lambda pairs: Pairs([*pairs, (key, None)]))


_key("nil", "A key of the manifest is nil.", None)
_key("integer", "A key of the manifest is an integer.", 0)
_key("bytes", "A key of the manifest is a byte string.", b"name")
_key("array", "A key of the manifest is an array.", [])
_key("map", "A key of the manifest is a map.", {})
_key("ext", "A key of the manifest is an ext.", Raw(b"\xd4\1n"))
_key("bad_utf_8", "A key of the manifest is not UTF-8.", Raw(b"\xa2\xc3\x28"))
_key("empty", "A key of the manifest is the empty string.", "")
_key("in_capitals", "A key of the manifest is `Name`.", "Name")
_key("with_a_nul", "A key of the manifest is `name` with a zero byte behind.", "name\0")


def _swapped(pairs: Pairs) -> Pairs:
    return Pairs([pairs[1], pairs[0], *pairs[2:]])


def _twice(pairs: Pairs) -> Pairs:
    return Pairs([pairs[0], *pairs])


def _unknown(pairs: Pairs) -> Pairs:
    return Pairs([*pairs, ("note", 0)])


for _struct in PLACES:
    _what = NAMES.get(_struct, _struct)
    _about = f"A {_what} has the key `note`, which is in no table."
    _register("EMOE-MAN-002", _struct, "with_an_unknown_key", _about, _unknown)
    _about = f"The first key of a {_what} comes twice with the same value."
    _register("EMOE-MAN-003", _struct, "with_a_key_twice", _about, _twice)
    if len(value_at(base_of(_struct)[0]().manifest, PLACES[_struct])) > 1:
        _about = f"The first two keys of a {_what} have changed places."
        _register("EMOE-MAN-003", _struct, "with_keys_swapped", _about, _swapped)


def _with_first(key: str, value: Any) -> Callable[[Pairs], Pairs]:
    return lambda pairs: Pairs([(key, value), *pairs])


def _with_last(key: str, value: Any) -> Callable[[Pairs], Pairs]:
    return lambda pairs: Pairs([*pairs, (key, value)])


@refused("EMOE-MAN-003")
def model_hidden_twice_other_one_last() -> Sealed:
    """The key `hidden` comes twice, the second time with another legal value."""
    return with_pairs(("model",), _with_last("hidden", 2))


@refused("EMOE-MAN-003")
def model_hidden_twice_other_one_first() -> Sealed:
    """The key `hidden` comes twice, the first time with another legal value."""
    return with_pairs(("model",), _with_first("hidden", 2))


@refused("EMOE-MAN-002")
def model_hidden_twice_bad_one_last() -> Sealed:
    """The key `hidden` comes twice, the second time with a value that is out of range."""
    return with_pairs(("model",), _with_last("hidden", 0))


@refused("EMOE-MAN-002")
def model_hidden_twice_bad_one_first() -> Sealed:
    """The key `hidden` comes twice, the first time with a value of another type."""
    return with_pairs(("model",), _with_first("hidden", "1"))


@refused("EMOE-MAN-002")
def model_twice_empty_one_first() -> Sealed:
    """The key `model` comes twice, the first time with a map that lacks every key."""
    return with_pairs((), _with_first("model", {}))


@refused("EMOE-MAN-003")
def manifest_keys_in_alphabetical_order() -> Sealed:
    """The keys of the manifest are sorted by their names."""
    return with_pairs((), lambda pairs: Pairs(sorted(pairs)))


@refused("EMOE-MAN-003")
def optional_key_before_required_ones() -> Sealed:
    """A key with a default stands before those without, though its table has it behind them."""
    return with_pairs(("model",), _with_first("begin_token", 0))


@refused("EMOE-MAN-001")
def unknown_key_and_a_byte_behind() -> Sealed:
    """The manifest has an unknown key, and a byte stands behind it: MessagePack is judged first."""
    return miswritten(lambda manifest: Raw(encode({**manifest, "note": 0}) + b"\0"))


@refused("EMOE-MAN-001")
def unknown_key_before_an_undefined_tag() -> Sealed:
    """The manifest begins with an unknown key, and its last byte is the undefined tag: MessagePack is judged first."""
    return miswritten(lambda manifest: Pairs([("note", 0), *manifest.items(), ("extensions", Raw(b"\xc1"))]))


@refused("EMOE-MAN-002")
def keys_swapped_and_an_unknown_one() -> Sealed:
    """The keys of the manifest are out of order, and the last is unknown: structure is judged before the encoding."""
    return with_pairs((), lambda pairs: _unknown(_swapped(pairs)))


@refused("EMOE-MAN-003")
def keys_swapped_and_heads_not_divided() -> Sealed:
    """Keys of an attention are out of order, and its heads do not divide: the encoding is judged before the model."""

    def change(manifest: dict[str, Any]) -> None:
        attention = manifest["model"]["attentions"][0]
        manifest["model"]["attentions"][0] = _swapped(Pairs({**attention, "key_value_heads": 2}.items()))

    return miswritten(change)


def _extensions(suffix: str, rule: str, about: str, pairs: list[tuple[Any, Any]]) -> None:
    refuse(rule, f"extensions_{suffix}", about, lambda: miswritten(lambda values: _with_extensions(values, pairs)))


def _with_extensions(values: dict[str, Any], pairs: list[tuple[Any, Any]]) -> None:
    values["extensions"] = Pairs(pairs)


_extensions("unsorted", "EMOE-MAN-003", "The keys of the extensions are not sorted.", [("b", b""), ("a", b"")])
_extensions("sorted_by_length", "EMOE-MAN-003", "Keys of extensions are sorted by length.", [("b", b""), ("aa", b"")])
_extensions("without_case", "EMOE-MAN-003", "Keys are sorted as if case did not matter.", [("a", b""), ("B", b"")])
_extensions(
    "in_the_order_of_utf_16",
    "EMOE-MAN-003",
    "The keys of the extensions are sorted by their UTF-16 units, in which U+10000 comes before U+FFFD.",
    [("\U00010000", b""), ("\ufffd", b"")],
)
_extensions("twice", "EMOE-MAN-003", "An extension comes twice with the same data.", [("a", b"1"), ("a", b"1")])
_extensions("twice_differing", "EMOE-MAN-003", "An extension comes twice with other data.", [("a", b"1"), ("a", b"2")])
_extensions("name_empty", "EMOE-MAN-002", "The name of an extension is empty.", [("", b"")])
_extensions("name_of_129_characters", "EMOE-MAN-002", "An extension's name has 129 characters.", [("n" * 129, b"")])
_extensions("name_of_bytes", "EMOE-MAN-002", "The name of an extension is a byte string.", [(b"a", b"")])
_extensions("name_nil", "EMOE-MAN-002", "The name of an extension is nil.", [(None, b"")])
_extensions("name_bad_utf_8", "EMOE-MAN-002", "An extension's name is not UTF-8.", [(Raw(b"\xa1\x80"), b"")])
_extensions("data_of_a_string", "EMOE-MAN-002", "The data of an extension is a string.", [("a", "")])
_extensions("data_nil", "EMOE-MAN-002", "The data of an extension is nil.", [("a", None)])
_extensions("data_ext", "EMOE-MAN-002", "The data of an extension is an ext.", [("a", Raw(b"\xd4\1n"))])
_extensions("data_bin16", "EMOE-MAN-003", "An extension's data is written as bin16.", [("a", Raw(b"\xc5\0\1n"))])
