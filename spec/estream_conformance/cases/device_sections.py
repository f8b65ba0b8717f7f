"""Device configurations added where a package is used: FORMAT.md section 6.7 and rules MAN and CFG inside of one."""

from __future__ import annotations

from functools import partial

from estream_conformance.builder import Draft, Sealed, Section, Values, edit
from estream_conformance.case import Made, accepted, refused
from estream_conformance.changes import refuse
from estream_conformance.frames import raw
from estream_conformance.messagepack import Pairs, Raw, encode
from estream_conformance.packages import full, smallest
from estream_conformance.signing import asking, sign, with_signatures
from estream_spec.constants import SectionType
from estream_spec.limits import MAX_EXPERTS, MAX_FILE_LENGTH

RECORD = 4096
"""Bytes of the longest expert record, padding included."""
BASE = "one_device_configuration"


def values(name: str = "phone", arena: int = RECORD, group: int = 1, prefetch: int = 0) -> Values:
    """A device configuration."""
    return {"name": name, "arena_bytes": arena, "group_size": group, "prefetch_depth": prefetch}


def section(value: object, number: int = 0, **changes: int | bytes) -> Section:
    """A section with a device configuration, or with another value."""
    data = value if isinstance(value, bytes) and not isinstance(value, Raw) else encode(value)
    return Section(SectionType.DEVICE_CONFIGURATION, data, id=number, changes=dict(changes))


def with_values(*each: Values, ids: tuple[int, ...] = ()) -> Made:
    """The smallest package with device configurations for its last sections, by ids that ascend unless given."""
    numbered = list(zip(ids or range(len(each)), each, strict=True))
    made = smallest()
    made.sections += [section(one, number) for number, one in numbered]
    return Made(package=made.seal(), configurations=latest_first(numbered))


def latest_first(numbered: list[tuple[int, Values]]) -> list[Values]:
    """The order in which a loader gives them."""
    return [one for _, one in sorted(numbered, key=lambda pair: pair[0], reverse=True)]


def with_value(value: object) -> Sealed:
    """The smallest package with one device configuration, which may be anything."""
    made = smallest()
    made.sections.append(section(value))
    return made.seal()


@accepted()
def one_device_configuration() -> Made:
    """A device configuration was added; it is the default from now on."""
    return with_values(values())


@accepted()
def device_configurations_in_order_of_ids() -> Made:
    """Three device configurations were added, the one with the highest id last."""
    return with_values(values("a"), values("b"), values("c"))


@accepted()
def device_configurations_in_another_order() -> Made:
    """Three device configurations were added; the one with the highest id, which is the default, stands between."""
    return with_values(values("a"), values("b"), values("c"), ids=(7, 2**32 - 1, 2**31))


@accepted()
def device_configuration_of_the_manifest_s_name() -> Made:
    """A device configuration was added that has the name of the manifest's, and is for the same prompts: any."""
    return with_values(values("generic"))


@accepted()
def device_configurations_of_one_name() -> Made:
    """Four device configurations of one name are for prompts of other lengths, the last one for any."""
    return with_values(*(values() | {"prompt_tokens": length} for length in (64, 512, 4096)), values())


@accepted()
def device_configuration_with_every_key() -> Made:
    """A device configuration was added that has no key at its default."""
    return with_values({**values(), "lanes": 3, "policy": "post-routing", "prompt_tokens": 512})


@accepted()
def device_configurations_64() -> Made:
    """As many device configurations were added as may be."""
    return with_values(*(values(f"device {number}") for number in range(64)))


@accepted()
def device_configuration_before_all_sections() -> Made:
    """The device configuration is the first section: its place says nothing."""
    made = smallest()
    made.sections.insert(0, section(values()))
    return Made(package=made.seal(), configurations=[values()])


@accepted("zstd")
def compressed_device_configuration() -> Made:
    """The device configuration is compressed."""
    made = smallest()
    added = section(values())
    added.stored = raw(encode(values()))
    made.sections.append(added)
    return Made(package=made.seal(), configurations=[values()])


@accepted(base="full")
def device_configuration_with_room_for_many_banks() -> Made:
    """The arena has exactly the room for three banks of two experts, of the longest record there is."""
    made = full()
    arena = longest(made) * 2 * 3
    made.sections.append(section(values(arena=arena, group=2, prefetch=2)))
    return Made(package=made.seal(), configurations=[values(arena=arena, group=2, prefetch=2)])


def longest(made: Draft) -> int:
    """Bytes of the longest expert record."""
    places = made.seal().records[SectionType.EXPERTS]
    return max(int(each["length"]) for one in places for each in one)


@accepted()
def device_configuration_with_all_values_highest() -> Made:
    """The arena is as large as a file may be, the group as large as a layer, and as many groups are read ahead."""
    return with_values(values("x" * 128, MAX_FILE_LENGTH, MAX_EXPERTS, MAX_EXPERTS))


@accepted("signature", base="signed_by_the_required_key")
def device_configuration_added_to_a_signed_package() -> Made:
    """A device configuration was added in place behind the signature, which still holds."""
    signature = sign(1, smallest().seal().file_id)
    sealed = edit(with_signatures(smallest(), signature), [section(values(), 9)])
    asked = asking(sealed, 1, signatures=(signature,))
    return Made(package=sealed, signatures=asked.signatures, configurations=[values()], arguments=asked.arguments)


@accepted(base=BASE)
def device_configuration_replaced_in_place() -> Made:
    """A device configuration was replaced in place by one with a higher id."""
    first = with_values(values()).package
    assert first is not None
    later = values("later", 2 * RECORD, 2)
    return Made(
        package=edit(first, [section(later, 1)], [(SectionType.DEVICE_CONFIGURATION, 0)]), configurations=[later]
    )


# Rules of the manifest's encoding.
ENCODED = encode(values())
_value: object
for _name, _about, _data in (
    ("cut_short", "the last byte is missing", ENCODED[:-1]),
    ("with_a_byte_more", "a byte follows the value", ENCODED + b"\0"),
    ("with_tag_c1", "the only tag is the one that is not defined", b"\xc1"),
    ("with_an_endless_map", "a map of 2^32 - 1 pairs has none", b"\xdf\xff\xff\xff\xff"),
    ("twice", "there are two values", ENCODED * 2),
):
    refuse(
        "EMOE-MAN-001",
        f"device_configuration_{_name}",
        f"A device configuration that was added is not one MessagePack value: {_about}.",
        partial(with_value, _data),
        base=BASE,
    )
for _name, _about, _value in (
    ("of_nil", "it is nil", None),
    ("in_an_array", "it stands in an array", [values()]),
    ("without_name", "a key is missing", {key: value for key, value in values().items() if key != "name"}),
    ("with_unknown_key", "a key is not known", {**values(), "zone": 1}),
    ("with_empty_name", "the name is empty", values("")),
    ("with_name_of_129_characters", "the name is too long", values("x" * 129)),
    ("with_group_of_0", "groups have no expert", values(group=0)),
    ("with_group_of_4097", "groups are too large", values(arena=MAX_FILE_LENGTH, group=MAX_EXPERTS + 1)),
    (
        "with_prefetch_of_4097",
        "too many groups are read ahead",
        values(arena=MAX_FILE_LENGTH, prefetch=MAX_EXPERTS + 1),
    ),
    ("with_negative_arena", "the arena is negative", values(arena=-1)),
    ("with_arena_of_2_to_44_and_1", "the arena is too large", values(arena=MAX_FILE_LENGTH + 1)),
    ("with_arena_of_2_to_64_less_1", "the arena is too large", values(arena=2**64 - 1)),
    ("with_no_lane", "no lane reads", {**values(), "lanes": 0}),
    ("with_65_lanes", "there are too many lanes", {**values(), "lanes": 65}),
    ("with_policy_of_another_spelling", "the policy has no such name", {**values(), "policy": "pre_routing"}),
    ("with_policy_of_a_number", "the policy is a number", {**values(), "policy": 3}),
    ("with_negative_prompt", "the prompt is negative", {**values(), "prompt_tokens": -1}),
    ("with_prompt_of_2_to_24_and_1", "the prompt is too long", {**values(), "prompt_tokens": 2**24 + 1}),
    ("with_name_of_no_utf_8", "the name is no UTF-8", {**values(), "name": Raw(b"\xa1\xff")}),
):
    refuse(
        "EMOE-MAN-002",
        f"device_configuration_{_name}",
        f"A device configuration that was added is not of the right structure: {_about}.",
        partial(with_value, _value),
        base=BASE,
    )
for _name, _about, _value in (
    ("with_default_lanes", "a key has its default value", {**values(), "lanes": 2}),
    ("with_default_policy", "a key has its default value", {**values(), "policy": "pre-routing"}),
    ("with_prompt_of_any", "a key has its default value", {**values(), "prompt_tokens": 0}),
    ("with_policy_before_lanes", "two keys change places", {**values(), "policy": "on-demand", "lanes": 1}),
    ("with_keys_out_of_order", "its keys stand in another order", dict(reversed(values().items()))),
    ("with_a_key_twice", "a key comes twice", Pairs([*values().items(), ("prefetch_depth", 0)])),
    ("with_a_long_integer", "an integer is longer than it must be", {**values(), "group_size": Raw(b"\xcc\x01")}),
    ("with_a_signed_integer", "an integer has a signed form", {**values(), "group_size": Raw(b"\xd0\x01")}),
    ("with_a_long_string", "a string is longer than it must be", {**values(), "name": Raw(b"\xd9\x05phone")}),
):
    refuse(
        "EMOE-MAN-003",
        f"device_configuration_{_name}",
        f"A device configuration that was added is not encoded as it must be: {_about}.",
        partial(with_value, _value),
        base=BASE,
    )

# Room for the banks.
for _name, _about, _value in (
    ("for_no_bank", "has no room", values(arena=0)),
    ("for_a_bank_less_1_byte", "is a byte short of a bank", values(arena=RECORD - 1)),
    ("for_two_banks_less_1_byte", "is a byte short of two banks", values(arena=2 * RECORD - 1, prefetch=1)),
    ("for_two_experts_less_1_byte", "is a byte short of two experts", values(arena=2 * RECORD - 1, group=2)),
    ("wrapping_32_bits", "has room only for what is left of it in 32 bits", values(group=2048, prefetch=511)),
    (
        "of_0_wrapping_32_bits",
        "has no room, and needs what is 0 in 32 bits",
        values(arena=0, group=1024, prefetch=1023),
    ),
):
    refuse(
        "EMOE-CFG-001",
        f"device_configuration_with_arena_{_name}",
        f"The arena of a device configuration that was added {_about}.",
        partial(with_value, _value),
        base=BASE,
    )


# A bank for each group where all stay, and no two alike.
refuse(
    "EMOE-CFG-002",
    "device_configuration_of_three_layers_resident_in_one_bank",
    "A device configuration was added that is to keep three layers in one bank.",
    lambda: _full_with({**values(arena=1 << 30, group=3), "policy": "resident"}),
    base="full",
)


@refused("EMOE-CFG-003", base="device_configurations_of_one_name")
def device_configurations_of_one_name_and_length() -> Sealed:
    """Two device configurations of one name are for prompts of one length."""
    return with_added(*(section({**values(), "prompt_tokens": 64}, number) for number in range(2)))


@refused("EMOE-CFG-003", base="device_configurations_of_one_name")
def device_configurations_of_one_name_and_any_length() -> Sealed:
    """Two device configurations of one name are for any prompt, in other sizes, and not side by side."""
    return with_added(section(values(), 7), section(values("b"), 0), section(values(arena=2 * RECORD), 3))


@refused("EMOE-CFG-003", base="device_configurations_of_one_name")
def device_configuration_alike_the_one_before_a_wrong_one() -> Sealed:
    """The second device configuration is alike the first, the third is no value: they are judged one by one."""
    return with_added(section(values(), 1), section(values(), 2), section(b"\xc1", 3))


def _full_with(value: Values) -> Sealed:
    made = full()
    made.sections.append(section(value))
    return made.seal()


# Order.
def with_added(*sections: Section) -> Sealed:
    """The smallest package with more sections."""
    made = smallest()
    made.sections += sections
    return made.seal()


TIGHT = values(arena=RECORD - 1)


@refused("EMOE-CFG-001", base="device_configurations_in_order_of_ids")
def first_device_configuration_before_second() -> Sealed:
    """The first device configuration has too little room, the second one is no value: they are judged one by one."""
    return with_added(section(TIGHT, 1), section(b"\xc1", 2))


@refused("EMOE-MAN-001", base="device_configurations_in_order_of_ids")
def device_configurations_in_the_order_of_the_directory() -> Sealed:
    """The first section is no value and has the higher id, the second one has too little room: ids say nothing."""
    return with_added(section(b"\xc1", 2), section(TIGHT, 1))


@refused("EMOE-SEC-018", base=BASE)
def digest_of_device_configuration() -> Sealed:
    """The digest of a device configuration's section is another, and it is no value: the digest is judged first."""
    return with_added(section(b"\xc1", sha256=bytes(32)))


@refused("EMOE-SEC-018", base="device_configurations_in_order_of_ids")
def digest_of_second_device_configuration_before_content_of_first() -> Sealed:
    """The first device configuration is no value, the second one has another digest: all digests are judged before."""
    return with_added(section(b"\xc1", 1), section(values(), 2, sha256=bytes(32)))


@refused("EMOE-SEC-019", "zstd", base="compressed_device_configuration")
def frame_of_device_configuration() -> Sealed:
    """A device configuration is said to be compressed, but is no frame."""
    added = section(values())
    added.stored = b"no frame"
    return with_added(added)


@refused("EMOE-CFG-001", base=BASE)
def configuration_of_the_manifest_before_added_one() -> Sealed:
    """The manifest's device configuration has too little room, the one that was added is no value."""
    made = smallest()
    made.manifest["device_configurations"][0]["arena_bytes"] = RECORD - 1
    made.sections.append(section(b"\xc1"))
    return made.seal()


@refused("EMOE-TAB-012", base=BASE)
def tables_before_device_configuration() -> Sealed:
    """The digest over the records' digests is another, and a device configuration is no value: tables come first."""
    made = smallest()
    made.section(SectionType.DENSE).changes["sha256"] = bytes(32)
    made.sections.append(section(b"\xc1"))
    return made.seal()


@refused("EMOE-MAN-002", "records", base=BASE)
def device_configuration_before_records() -> Sealed:
    """A device configuration lacks its keys, and a record has another checksum: configurations come first."""
    made = smallest()
    made.tables[SectionType.DENSE][0].digests[0] = {"checksum": 0}
    made.sections.append(section({}))
    return made.seal()


@refused("EMOE-SEC-017", base="device_configurations_64")
def device_configurations_65_all_right() -> Sealed:
    """One device configuration more was added than may be; each is right."""
    return with_added(*(section(values(f"device {number}"), number) for number in range(65)))
