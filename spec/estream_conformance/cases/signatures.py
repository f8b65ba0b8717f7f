"""Signatures and what a caller asks of them: FORMAT.md section 9.5, rules SIG."""

from __future__ import annotations

from functools import partial

from estream_conformance.builder import Section, Values, pack
from estream_conformance.case import Made, accepted, refused
from estream_conformance.changes import accept, refuse
from estream_conformance.frames import raw
from estream_conformance.packages import full, smallest
from estream_conformance.signing import SIGNATURE, asking, public_key, sign, with_signatures
from estream_spec.constants import SIGNATURE_MAGIC, SectionType

FILE_ID = smallest().seal().file_id
"""Of the package that nearly all of these begin with."""
LAST = 2**64 - 1


def signed_by(*signatures: Values | bytes, keys: tuple[int, ...] = (), counter: int | None = None) -> Made:
    """The smallest package with signatures for its last sections, and a policy."""
    told = tuple(each for each in signatures if not isinstance(each, bytes))
    known = tuple(each for each in told if each["algorithm"] == 1)
    return asking(with_signatures(smallest(), *signatures), *keys, counter=counter, signatures=known)


def beside(
    detached: Values | bytes, *signatures: Values | bytes, keys: tuple[int, ...] = (1,), counter: int | None = None
) -> Made:
    """The same with a detached signature."""
    told = tuple(each for each in signatures if not isinstance(each, bytes))
    sealed = with_signatures(smallest(), *signatures)
    return asking(sealed, *keys, counter=counter, detached=detached, signatures=told)


# What is enough.
@accepted()
def signed_and_no_policy() -> Made:
    """The package is signed, and nobody asks."""
    return signed_by(sign(1, FILE_ID, 7))


@accepted("signature", base="signed_and_no_policy")
def signed_by_the_required_key() -> Made:
    """The key that is asked for has signed."""
    return signed_by(sign(1, FILE_ID), keys=(1,))


@accepted("signature", base="signed_and_no_policy")
def signed_by_both_required_keys() -> Made:
    """Both keys that are asked for have signed."""
    return signed_by(sign(1, FILE_ID), sign(2, FILE_ID, 3), keys=(1, 2))


@accepted("signature", base="signed_and_no_policy")
def signed_by_both_required_keys_in_another_order() -> Made:
    """Both keys that are asked for have signed, the second one first."""
    return signed_by(sign(2, FILE_ID), sign(1, FILE_ID, 3), keys=(1, 2))


@accepted("signature", base="signed_and_no_policy")
def signed_by_one_more_than_required() -> Made:
    """Of two keys that have signed, one is asked for."""
    return signed_by(sign(2, FILE_ID), sign(1, FILE_ID), keys=(1,))


@accepted("signature", base="signed_and_no_policy")
def required_key_asked_for_twice() -> Made:
    """One key is asked for twice and has signed once."""
    return signed_by(sign(1, FILE_ID), keys=(1, 1))


@accepted("signature", base="signed_and_no_policy")
def signed_in_16_sections() -> Made:
    """The package has as many signatures as it may, and the last one is asked for."""
    return signed_by(*(sign(number, FILE_ID) for number in range(1, 17)), keys=(16,))


@accepted("signature")
def signed_beside_the_package() -> Made:
    """The package has no signature; the detached one is by the key that is asked for."""
    return beside(sign(1, FILE_ID, 2))


@accepted("signature", base="signed_and_no_policy")
def signed_inside_and_beside_the_package() -> Made:
    """One of the keys that are asked for has signed inside of the package, the other one beside it."""
    return beside(sign(2, FILE_ID), sign(1, FILE_ID), keys=(1, 2))


@accepted("signature", "zstd", base="signed_and_no_policy")
def compressed_signature() -> Made:
    """The signature's section is compressed."""
    values = sign(1, FILE_ID)
    draft = smallest()
    data = pack(SIGNATURE, values)
    draft.sections.append(Section(SectionType.SIGNATURE, data, stored=raw(data)))
    return asking(draft.seal(), 1, signatures=(values,))


@accepted("signature", base="signed_and_no_policy")
def signature_section_before_all_others() -> Made:
    """The signature is the first section, and its id is the highest there is."""
    draft = smallest()
    section = Section(SectionType.SIGNATURE, bytes(120), id=2**32 - 1)
    draft.sections.insert(0, section)
    values = sign(1, draft.seal().file_id)
    section.data = pack(SIGNATURE, values)
    return asking(draft.seal(), 1, signatures=(values,))


@accepted("signature", base="full")
def signed_package_with_everything() -> Made:
    """A package with everything is signed by the key that is asked for."""
    values = sign(1, full().seal().file_id, 5)
    return asking(with_signatures(full(), values), 1, counter=5, signatures=(values,))


# Who has signed, and what.
@refused("EMOE-SIG-002", "signature")
def required_signature_and_none() -> Made:
    """A key is asked for, and the package has no signature."""
    return signed_by(keys=(1,))


@refused("EMOE-SIG-002", "signature", base="signed_by_the_required_key")
def signed_by_another_key() -> Made:
    """Another key than the one that is asked for has signed."""
    return signed_by(sign(2, FILE_ID), keys=(1,))


@refused("EMOE-SIG-002", "signature", base="signed_by_both_required_keys")
def signed_by_the_first_of_two_required_keys() -> Made:
    """Two keys are asked for, and the second one has not signed."""
    return signed_by(sign(1, FILE_ID), keys=(1, 2))


@refused("EMOE-SIG-002", "signature", base="signed_by_both_required_keys")
def signed_by_the_second_of_two_required_keys() -> Made:
    """Two keys are asked for, and the first one has not signed."""
    return signed_by(sign(2, FILE_ID), keys=(1, 2))


@refused("EMOE-SIG-002", "signature", base="signed_by_both_required_keys")
def signed_by_one_required_key_twice() -> Made:
    """Two keys are asked for; there are two signatures, both by the first one."""
    return signed_by(sign(1, FILE_ID), sign(1, FILE_ID, 1), keys=(1, 2))


@refused("EMOE-SIG-002", "signature", base="signed_by_the_required_key")
def signature_names_another_key() -> Made:
    """The key that is asked for has signed, but the signature names another one."""
    return signed_by({**sign(1, FILE_ID), "public_key": public_key(2)}, keys=(1,))


@refused("EMOE-SIG-002", "signature", base="signed_by_the_required_key")
def signature_by_another_key_names_the_required_one() -> Made:
    """Another key has signed, but the signature names the one that is asked for."""
    return signed_by({**sign(2, FILE_ID), "public_key": public_key(1)}, keys=(1,))


for _name, _about, _covered in (
    ("over_zeros", "zeros", bytes(32)),
    ("over_another_package", "the `file_id` of another package", full().seal().file_id),
    ("over_content_id", "the package's `content_id`", smallest().content_id()),
    ("over_the_end_of_file_id", "only 31 bytes of `file_id`", FILE_ID[:31]),
    ("over_file_id_backwards", "the bytes of `file_id` the other way round", FILE_ID[::-1]),
):
    refuse(
        "EMOE-SIG-002",
        f"signature_{_name}",
        f"The key that is asked for has signed {_about}.",
        partial(lambda covered: signed_by(sign(1, covered), keys=(1,)), _covered),
        "signature",
        base="signed_by_the_required_key",
    )


@refused("EMOE-SIG-002", "signature", base="signed_beside_the_package")
def detached_signature_of_another_package() -> Made:
    """The detached signature is by the key that is asked for, but of another package."""
    return beside(sign(1, full().seal().file_id))


@refused("EMOE-SIG-002", "signature", base="signed_beside_the_package")
def detached_signature_by_another_key() -> Made:
    """The detached signature is by another key than the one that is asked for."""
    return beside(sign(2, FILE_ID))


@refused("EMOE-SIG-002", "signature", base="signed_by_the_required_key")
def signature_section_dropped() -> Made:
    """The signature was dropped and its extent is no longer in use; its bytes are still there."""
    draft = smallest()
    draft.sections.append(Section(SectionType.FREE, pack(SIGNATURE, sign(1, FILE_ID))))
    return asking(draft.seal(), 1)


@refused("EMOE-SIG-002", "signature", base="signed_by_the_required_key")
def signature_in_a_section_of_unknown_type() -> Made:
    """The signature stands in a section that is not of type `SIGNATURE`."""
    draft = smallest()
    draft.sections.append(Section(99, pack(SIGNATURE, sign(1, FILE_ID)), changes={"flags": 6}))
    return asking(draft.seal(), 1)


# Security counters.
for _name, _own, _asked in (
    ("0_and_0", 0, 0),
    ("5_and_5", 5, 5),
    ("6_and_5", 6, 5),
    ("2_to_32_and_1", 2**32, 1),
    ("2_to_63_and_2_to_63_less_1", 2**63, 2**63 - 1),
    ("highest_and_highest", LAST, LAST),
):
    accept(
        f"counter_{_name}",
        f"The signature's security counter is {_own}, at least {_asked} is asked for.",
        partial(lambda own, asked: signed_by(sign(1, FILE_ID, own), keys=(1,), counter=asked), _own, _asked),
        "signature",
        base="signed_and_no_policy",
    )
for _name, _own, _asked in (
    ("0_and_1", 0, 1),
    ("4_and_5", 4, 5),
    ("1_and_2_to_32", 1, 2**32),
    ("2_to_63_less_1_and_2_to_63", 2**63 - 1, 2**63),
    ("0_and_highest", 0, LAST),
    ("1_less_than_highest", LAST - 1, LAST),
):
    refuse(
        "EMOE-SIG-003",
        f"counter_{_name}",
        f"The signature's security counter is {_own}, at least {_asked} is asked for.",
        partial(lambda own, asked: signed_by(sign(1, FILE_ID, own), keys=(1,), counter=asked), _own, _asked),
        "signature",
        base="counter_5_and_5",
    )


@accepted("signature", base="signed_and_no_policy")
def better_counter_last() -> Made:
    """The key has signed twice, and the security counter of the second signature is high enough."""
    return signed_by(sign(1, FILE_ID, 1), sign(1, FILE_ID, 5), keys=(1,), counter=5)


@accepted("signature", base="signed_and_no_policy")
def better_counter_first() -> Made:
    """The key has signed twice, and the security counter of the first signature is high enough."""
    return signed_by(sign(1, FILE_ID, 5), sign(1, FILE_ID, 1), keys=(1,), counter=5)


@accepted("signature", base="signed_and_no_policy")
def better_counter_beside_the_package() -> Made:
    """The key has signed twice, and the security counter of the detached signature is high enough."""
    return beside(sign(1, FILE_ID, 5), sign(1, FILE_ID, 1), counter=5)


@accepted("signature", base="signed_and_no_policy")
def broken_signature_beside_a_good_one() -> Made:
    """The key has signed twice; one signature, with a higher security counter, is broken, the other one good enough."""
    broken = {**sign(1, FILE_ID, 1), "security_counter": 9}
    return signed_by(broken, sign(1, FILE_ID, 5), keys=(1,), counter=5)


@refused("EMOE-SIG-003", "signature", base="broken_signature_beside_a_good_one")
def counter_of_broken_signature_high_enough() -> Made:
    """The key has signed twice; the only signature whose security counter is high enough is broken."""
    broken = {**sign(1, FILE_ID, 1), "security_counter": 9}
    return signed_by(broken, sign(1, FILE_ID, 5), keys=(1,), counter=6)


@refused("EMOE-SIG-002", "signature", base="counter_5_and_5")
def counter_raised_after_signing() -> Made:
    """The security counter was raised after signing to what is asked for."""
    return signed_by({**sign(1, FILE_ID, 4), "security_counter": 5}, keys=(1,), counter=5)


@refused("EMOE-SIG-003", "signature", base="signed_by_both_required_keys")
def counter_of_second_key_too_low() -> Made:
    """Two keys are asked for and have signed, the second one with too low a security counter."""
    return signed_by(sign(1, FILE_ID, 9), sign(2, FILE_ID, 4), keys=(1, 2), counter=5)


@refused("EMOE-SIG-003", "signature", base="signed_by_both_required_keys")
def counter_of_first_key_too_low() -> Made:
    """Two keys are asked for and have signed, the first one with too low a security counter."""
    return signed_by(sign(1, FILE_ID, 4), sign(2, FILE_ID, 9), keys=(1, 2), counter=5)


@refused("EMOE-SIG-003", "signature", base="signed_by_both_required_keys")
def counter_of_first_key_before_second_signature() -> Made:
    """The first key's security counter is too low, and the second key has not signed: keys are judged one by one."""
    return signed_by(sign(1, FILE_ID, 4), keys=(1, 2), counter=5)


@refused("EMOE-SIG-002", "signature", base="signed_by_both_required_keys")
def first_signature_before_counter_of_second_key() -> Made:
    """The first key has not signed, and the second key's security counter is too low: keys are judged one by one."""
    return signed_by(sign(2, FILE_ID, 4), keys=(1, 2), counter=5)


@refused("EMOE-SIG-003", "signature", base="signed_by_the_required_key")
def counter_of_another_key_high_enough() -> Made:
    """The key that is asked for has signed with too low a security counter, another one with a higher one."""
    return signed_by(sign(1, FILE_ID, 4), sign(2, FILE_ID, 9), keys=(1,), counter=5)


# The bytes of a signature.
WHOLE = pack(SIGNATURE, sign(1, FILE_ID))
MALFORMED = {
    "cut_to_119_bytes": (WHOLE[:-1], "A signature of algorithm 1 has 119 bytes."),
    "of_121_bytes": (WHOLE + b"\0", "A signature of algorithm 1 has a byte more than 120."),
    "twice_in_one_section": (WHOLE * 2, "Two signatures stand in one section."),
    "cut_to_1_byte": (WHOLE[:1], "Only the first byte of a signature is there."),
    "cut_to_15_bytes": (WHOLE[:15], "Of a signature's first 16 bytes one is missing."),
    "cut_to_16_bytes": (WHOLE[:16], "A signature of algorithm 1 ends behind its first 16 bytes."),
    "of_unknown_algorithm_cut_to_15_bytes": (
        SIGNATURE_MAGIC + b"\2\0\0\0\0\0\0",
        "Of the first 16 bytes of a signature of unknown algorithm one is missing.",
    ),
    "with_another_magic": (b"e" + WHOLE[1:], "The first byte of a signature is another."),
    "with_another_last_byte_of_magic": (WHOLE[:7] + b"\1" + WHOLE[8:], "The last byte of a signature's magic is 1."),
    "with_magic_of_a_directory": (b"EMOEDIR\0" + WHOLE[8:], "A signature has the magic of a directory."),
    "with_reserved_byte_12_set": (WHOLE[:12] + b"\1" + WHOLE[13:], "A reserved byte of a signature is 1."),
    "with_reserved_byte_15_set": (WHOLE[:15] + b"\x80" + WHOLE[16:], "A reserved byte of a signature is 128."),
    "of_unknown_algorithm_with_another_magic": (
        b"e" + SIGNATURE_MAGIC[1:] + b"\2".ljust(112, b"\0"),
        "A signature of unknown algorithm has another magic.",
    ),
    "of_unknown_algorithm_with_reserved_byte_set": (
        SIGNATURE_MAGIC + b"\2\0\0\0\0\1\0\0".ljust(112, b"\0"),
        "A reserved byte of a signature of unknown algorithm is 1.",
    ),
    "of_zeros": (bytes(120), "A signature is zeros."),
}
"""Bytes that are no signature."""
for _name, (_data, _about) in MALFORMED.items():
    refuse(
        "EMOE-SIG-001",
        f"signature_{_name}",
        f"{_about} Nobody asks for one.",
        partial(lambda data: signed_by(data), _data),
        base="signed_and_no_policy",
    )
    refuse(
        "EMOE-SIG-001",
        f"detached_signature_{_name}",
        f"{_about} It is detached, and the key that is asked for has signed inside of the package.",
        partial(lambda data: beside(data, sign(1, FILE_ID)), _data),
        "signature",
        base="signed_inside_and_beside_the_package",
    )


@refused("EMOE-SIG-001", "signature", base="signed_by_the_required_key")
def malformed_signature_behind_the_required_one() -> Made:
    """The key that is asked for has signed, and the signature behind it is cut short."""
    return signed_by(sign(1, FILE_ID), WHOLE[:-1], keys=(1,))


for _algorithm in (0, 2, 257, 65537, 2**31, 2**32 - 1):
    for _length in (16, 17, 120, 5000) if _algorithm == 2 else (120,):
        _name = f"signature_of_algorithm_{_algorithm}_in_{_length}_bytes"
        _data = (SIGNATURE_MAGIC + _algorithm.to_bytes(4, "little") + bytes(4)).ljust(_length, b"\xff")
        accept(
            _name,
            f"A signature of algorithm {_algorithm}, which is not known, has {_length} bytes and proves nothing.",
            partial(lambda data: signed_by(data), _data),
        )
        accept(
            f"{_name}_beside_a_good_one",
            f"Before the signature that is asked for stands one of algorithm {_algorithm}, which is not known.",
            partial(lambda data: signed_by(data, sign(1, FILE_ID), keys=(1,)), _data),
            "signature",
            base=_name,
        )


@refused("EMOE-SIG-002", "signature", base="signature_of_algorithm_2_in_120_bytes")
def signed_by_an_unknown_algorithm_only() -> Made:
    """The only signature by the key that is asked for is of an unknown algorithm; all else in it is right."""
    return signed_by(sign(1, FILE_ID, algorithm=2), keys=(1,))


@refused("EMOE-SIG-002", "signature", base="signature_of_algorithm_2_in_120_bytes")
def algorithm_changed_after_signing() -> Made:
    """A signature was made for algorithm 2, and its algorithm set to 1."""
    return signed_by({**sign(1, FILE_ID, algorithm=2), "algorithm": 1}, keys=(1,))


@accepted("signature", base="signed_and_no_policy")
def detached_signature_of_unknown_algorithm() -> Made:
    """The key that is asked for has signed inside of the package; the detached signature is of an unknown algorithm."""
    return beside(SIGNATURE_MAGIC + b"\2".ljust(8, b"\0"), sign(1, FILE_ID))


@accepted(base="signed_and_no_policy")
def broken_signature_and_no_policy() -> Made:
    """The signature does not verify, and nobody asks."""
    return signed_by({**sign(1, FILE_ID), "signature": bytes(64)})


@accepted(base="signed_and_no_policy")
def signature_of_no_point_and_no_policy() -> Made:
    """The signature's key is no point of the curve, and nobody asks."""
    return signed_by({**sign(1, FILE_ID), "public_key": b"\2".ljust(32, b"\0")})
