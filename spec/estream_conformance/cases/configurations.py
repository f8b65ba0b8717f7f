"""Device configurations in the manifest: room for the banks, banks for all groups of a resident one, no two alike.

FORMAT.md section 6.7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, Final

from estream_conformance.builder import Draft, Sealed, Values
from estream_conformance.case import accepted, refused
from estream_conformance.cases.schedules import two_layers
from estream_conformance.changes import accept, refuse
from estream_conformance.packages import draft, smallest, smallest_model
from estream_spec.constants import SectionType

PAGE: Final = 4096
Numbers = tuple[int, int, int]
"""`arena_bytes`, `group_size`, `prefetch_depth`."""


def _configuration(numbers: Numbers, name: str = "generic") -> Values:
    return {"name": name, **dict(zip(("arena_bytes", "group_size", "prefetch_depth"), numbers, strict=True))}


def _configured(*given: Numbers) -> Sealed:
    return _with(*(_configuration(each, f"device {number}") for number, each in enumerate(given)))


def _with(*configurations: Values) -> Sealed:
    made = smallest()
    made.manifest["device_configurations"] = list(configurations)
    return made.seal()


def _arena(numbers: Numbers) -> Callable[[], Sealed]:
    return lambda: _configured(numbers)


RIGHT: Final[list[tuple[str, str, Numbers]]] = [
    ("of_one_bank", "The arena has one bank of three experts.", (3 * PAGE, 3, 0)),
    ("of_four_banks", "The arena has four banks of two experts.", (8 * PAGE, 2, 3)),
    ("of_a_byte_more", "The arena has a byte more than its bank.", (PAGE + 1, 1, 0)),
    ("of_more_than_the_model", "The arena is larger than the package.", (1 << 30, 1, 0)),
    ("of_groups_larger_than_the_layer", "A group has more experts than a layer.", (100 * PAGE, 100, 0)),
    ("of_2_to_the_32_bytes", "The banks need exactly 2^32 bytes.", (1 << 32, 1024, 1023)),
]
WRONG: Final[list[tuple[str, str, Numbers]]] = [
    ("of_0_bytes", "The arena has no bytes.", (0, 1, 0)),
    ("of_a_byte_less", "The arena is a byte smaller than an expert.", (PAGE - 1, 1, 0)),
    ("of_a_payload", "The arena has room for the payload and not for the padding.", (260, 1, 0)),
    ("of_a_byte_less_than_a_group", "The arena is a byte smaller than a group.", (3 * PAGE - 1, 3, 0)),
    ("without_the_first_bank", "The arena has room only for the groups read ahead.", (6 * PAGE, 2, 3)),
    ("of_banks_that_wrap_to_0", "The banks need 2^32 bytes, 0 in 32 bits.", (PAGE, 1024, 1023)),
    ("of_banks_that_wrap_to_a_page", "The banks need 2^32 + 2^22 bytes.", (1 << 22, 1024, 1024)),
    ("of_the_most_banks", "The banks need more than there is.", (PAGE, 4096, 4096)),
    ("of_a_byte_less_than_2_to_the_32", "The arena is a byte too small.", ((1 << 32) - 1, 1024, 1023)),
]
for _name, _about, _numbers in RIGHT:
    accept(f"arena_{_name}", _about, _arena(_numbers))
for _name, _about, _numbers in WRONG:
    refuse("EMOE-CFG-001", f"arena_{_name}", _about, _arena(_numbers))


@refused("EMOE-CFG-001")
def second_arena_too_small() -> Sealed:
    """The second of two configurations has too small an arena."""
    return _configured((PAGE, 1, 0), (PAGE, 2, 0))


@refused("EMOE-CFG-001")
def last_of_64_arenas_too_small() -> Sealed:
    """The last of 64 configurations has too small an arena."""
    return _configured(*[(PAGE, 1, 0)] * 63, (PAGE, 1, 1))


def _uneven() -> Draft:
    model: dict[str, Any] = smallest_model()
    model["expert_blocks"].append({**model["expert_blocks"][0], "intermediate": 1024})
    model["layers"].append({"attention": 0, "experts": 1})
    made = draft(model)
    for one in made.tables[SectionType.EXPERTS]:
        one.payloads = [bytearray(len(each)) for each in one.payloads]
    return made


@accepted()
def arena_of_the_longest_expert() -> Sealed:
    """The arena has room for the longest expert, of three pages, and no more."""
    return _uneven().seal()


@refused("EMOE-CFG-001", base="arena_of_the_longest_expert")
def arena_of_the_first_layer_s_experts() -> Sealed:
    """The arena has room for the first layer's experts and not for the longer ones of the second."""
    made = _uneven()
    made.manifest["device_configurations"][0]["arena_bytes"] = PAGE
    return made.seal()


@refused("EMOE-LAY-005")
def arena_too_small_and_layout_wrong() -> Sealed:
    """The arena is too small, and a tensor has a wrong name: layouts are judged before configurations."""
    made = smallest()
    made.manifest["device_configurations"][0]["arena_bytes"] = 0
    made.manifest["layouts"][3]["tensors"][0]["name"] = "w1"
    return made.seal()


@refused("EMOE-CFG-001")
def arena_too_small_and_checksum_wrong() -> Sealed:
    """The arena is too small, and a record's checksum wrong: configurations are judged before records."""
    made = smallest()
    made.manifest["device_configurations"][0]["arena_bytes"] = 0
    made.tables[SectionType.DENSE][0].digests[0] = {"checksum": 0}
    return made.seal()


# What a configuration says besides its sizes.
for _policy in ("on-demand", "post-routing"):
    accept(
        f"configuration_{_policy.replace('-', '_')}",
        f"The policy of a configuration is `{_policy}`.",
        partial(_with, {**_configuration((PAGE, 1, 0)), "policy": _policy}),
    )
accept(
    "configuration_of_one_lane",
    "A configuration asks for one read at a time.",
    partial(_with, {**_configuration((PAGE, 1, 0)), "lanes": 1}),
)


def _of_lengths(*lengths: int, names: Sequence[str] = ("generic",)) -> Sealed:
    """Configurations for prompts of these lengths, 0 being any, by names that go round."""
    each = [_configuration((PAGE, 1, 0), name) for name, _ in zip(cycle(names), lengths, strict=False)]
    for values, length in zip(each, lengths, strict=True):
        values |= {"prompt_tokens": length} if length else {}
    return _with(*each)


accept("configuration_of_a_prompt", "A configuration is for prompts of one token.", partial(_of_lengths, 1))
accept(
    "configurations_of_one_device",
    "Three configurations of one name are for prompts of other lengths, and the last for any.",
    partial(_of_lengths, 512, 64, 4096, 0),
)
accept(
    "configurations_of_two_devices",
    "Configurations of two names are for prompts of the same lengths.",
    partial(_of_lengths, 64, 64, 512, 512, names=("a", "b")),
    base="configurations_of_one_device",
)
for _name, _about, _build in (
    ("of_any_prompt_twice", "Two configurations of one name are for any prompt.", partial(_of_lengths, 0, 0)),
    ("of_one_length_twice", "Two configurations of one name are for one length.", partial(_of_lengths, 64, 512, 64)),
    (
        "of_one_length_twice_among_others",
        "The first and the last of five configurations of two names are alike.",
        partial(_of_lengths, 64, 64, 512, 0, 64, names=("a", "b")),
    ),
):
    refuse("EMOE-CFG-003", f"configurations_{_name}", _about, _build, base="configurations_of_one_device")


def _resident(arena: int, group: int, prefetch: int) -> Sealed:
    """Layers of three experts and of two, and a configuration that keeps them."""
    made = two_layers()
    made.manifest["device_configurations"] = [{**_configuration((arena, group, prefetch)), "policy": "resident"}]
    return made.seal()


for _name, _about, _numbers in (
    ("of_single_experts", "The arena keeps five groups in five banks.", (5 * PAGE, 1, 4)),
    ("of_ragged_groups", "The arena keeps three groups of two in three banks.", (6 * PAGE, 2, 2)),
    ("of_whole_layers", "The arena keeps two layers in two banks.", (6 * PAGE, 3, 1)),
    ("with_a_bank_to_spare", "The arena has a bank more than there are groups.", (8 * PAGE, 2, 3)),
):
    accept(f"resident_{_name}", _about, partial(_resident, *_numbers), base="two_layers_without_a_program")
for _name, _about, _numbers in (
    ("of_single_experts_in_four_banks", "Five groups are to stay in four banks.", (5 * PAGE, 1, 3)),
    ("of_ragged_groups_in_two_banks", "Three groups are to stay in two banks.", (6 * PAGE, 2, 1)),
    ("of_whole_layers_in_one_bank", "Two layers are to stay in one bank.", (6 * PAGE, 3, 0)),
    ("with_room_enough", "Five groups are to stay in two banks, with room for far more.", (1 << 30, 1, 1)),
):
    refuse(
        "EMOE-CFG-002", f"resident_{_name}", _about, partial(_resident, *_numbers), base="resident_of_single_experts"
    )


@refused("EMOE-CFG-001", base="resident_of_single_experts")
def resident_without_room_for_too_few_banks() -> Sealed:
    """The arena has room for fewer banks than there are, and those are too few: room is judged first."""
    return _resident(3 * PAGE, 1, 3)


@refused("EMOE-CFG-002", base="resident_of_single_experts")
def resident_twice_in_too_few_banks() -> Sealed:
    """The second of two equal configurations has too few banks: that is judged before names and lengths."""
    made = two_layers()
    first = _configuration((4 * PAGE, 1, 3))
    made.manifest["device_configurations"] = [first, {**first, "policy": "resident"}]
    return made.seal()


@refused("EMOE-CFG-003", base="configurations_of_one_device")
def second_configuration_twice_and_third_too_small() -> Sealed:
    """The second configuration is alike the first, the third has too small an arena: they are judged one by one."""
    alike = _configuration((PAGE, 1, 0))
    return _with(alike, dict(alike), _configuration((0, 1, 0), "small"))
