"""Signatures: what a caller may ask of them, and that nothing else than a genuine one over this package will do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from estream_loader import SignaturePolicy, open_package
from estream_spec.constants import SIGNATURE_MAGIC, SectionFlag, SectionType
from estream_spec.errors import EmoeError, IntegrityError, LinkError, MalformedError, TrustError
from estream_spec.records import Signature
from fixtures.packages import Draft, Section, with_superblock
from fixtures.sources import CountingSource

MAKER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
VENDOR = Ed25519PrivateKey.from_private_bytes(bytes(32))


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


PACKAGE = Draft().seal()
FILE_ID = open_package(PACKAGE).file_id
DIRECTORY = PACKAGE.rindex(b"EMOEDIR\0")
"""Where the directory is, and in its place the first section that is added."""
POLICY = SignaturePolicy(keys=(public(MAKER),))


def signature(key: Ed25519PrivateKey = MAKER, *, counter: int = 0, over: bytes = FILE_ID) -> bytes:
    unsigned = Signature(SIGNATURE_MAGIC, 1, counter, public(key), bytes(64))
    return replace(unsigned, signature=key.sign(unsigned.message(over))).encode()


def signature_of_nothing() -> bytes:
    return Signature(SIGNATURE_MAGIC, 1, 0, bytes(32), bytes(64)).encode()


def signed(*signatures: bytes) -> bytes:
    draft = Draft()
    draft.sections += [Section(SectionType.SIGNATURE, each, id=number) for number, each in enumerate(signatures)]
    return draft.seal()


def refused(data: bytes, policy: SignaturePolicy, rule: str = "EMOE-SIG-002") -> EmoeError:
    with pytest.raises(TrustError) as caught:
        open_package(data, policy=policy)
    error = caught.value
    assert (error.rule, error.path, error.offset) == (rule, "signatures", data.rindex(b"EMOEDIR\0"))
    return error


class TestPolicy:
    def test_no_key(self) -> None:
        with pytest.raises(LinkError, match="signature policy without a key"):
            SignaturePolicy(keys=())

    @pytest.mark.parametrize("length", [0, 31, 33, 64])
    def test_key_of_another_length(self, length: int) -> None:
        with pytest.raises(LinkError, match=f"public key of {length} bytes, expected 32"):
            SignaturePolicy(keys=(public(MAKER), bytes(length)))

    @pytest.mark.parametrize(
        ("values", "message", "hint"),
        [
            (
                {"keys": public(MAKER)},
                "keys of a signature policy are of type bytes, expected a tuple",
                "read_public_key",
            ),
            ({"keys": [public(MAKER)]}, "are of type list, expected a tuple", "read_public_key"),
            ({"keys": (public(MAKER).hex(),)}, "hold a value of type str, expected bytes", "read_public_key"),
            ({"keys": (MAKER.public_key(),)}, "of type Ed25519PublicKey, expected bytes", "read_public_key"),
            ({"detached": signature_of_nothing()}, "detached of a signature policy are of type bytes", "of its file"),
            ({"detached": ("model.sig",)}, "hold a value of type str, expected bytes", "of its file"),
            (
                {"minimum_counter": -1},
                "minimum counter -1, expected an integer from 0 to 18446744073709551615",
                "oldest",
            ),
            ({"minimum_counter": 2**64}, "minimum counter 18446744073709551616, expected", "oldest"),
            ({"minimum_counter": "3"}, "minimum counter '3', expected an integer", "oldest"),
        ],
    )
    def test_values_that_are_none(self, values: dict[str, Any], message: str, hint: str) -> None:
        with pytest.raises(LinkError) as caught:
            SignaturePolicy(**{"keys": (public(MAKER),), **values})
        assert message in caught.value.message
        assert hint in (caught.value.hint or "")

    def test_without_the_library_that_verifies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is told when the policy is made, and nobody else needs the library."""
        for name in [name for name in sys.modules if name.startswith("cryptography")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "cryptography", None)
        with pytest.raises(LinkError, match="signatures need the library cryptography") as caught:
            SignaturePolicy(keys=(bytes(32),))
        assert caught.value.hint == "install it: pip install cryptography"
        open_package(signed(b"no signature")).close()

    def test_without_a_policy_no_signature_is_looked_at(self) -> None:
        source = CountingSource(signed(b"no signature"))
        with open_package(source) as package:
            assert len(source.reads) == 4
            with pytest.raises(MalformedError):
                package.signatures()


class TestMessage:
    def test_what_is_signed(self) -> None:
        given = Signature(SIGNATURE_MAGIC, 1, 2**64 - 2, bytes(32), bytes(64))
        message = b"EMOE signature\0" + bytes.fromhex("01000000 00000000 feffffffffffffff") + FILE_ID
        assert given.message(FILE_ID) == message
        assert len(message) == 63

    def test_how_a_signature_stands(self) -> None:
        data = signature(counter=5)
        assert data[:24] == b"EMOESIG\0" + bytes.fromhex("01000000 00000000 0500000000000000")
        assert data[24:56] == public(MAKER)
        assert len(data) == 120


class TestAccepted:
    @pytest.mark.parametrize("integrity", ["open", "paged", "full"])
    def test_signed(self, integrity: Any) -> None:
        with open_package(signed(signature()), integrity=integrity, policy=POLICY) as package:
            (found,) = package.signatures()
            assert found.public_key == public(MAKER)
            assert package.manifest.name == "tiny"

    def test_records_are_proven_unless_the_caller_says_otherwise(self) -> None:
        """A record changed together with its checksum: only its digest, which is signed, tells."""
        draft = Draft()
        draft.sections.append(Section(SectionType.SIGNATURE, signature()))
        data = bytearray(draft.seal())
        with open_package(bytes(data)) as package:
            place = package.experts.place(0)
        forge(data, place.offset)
        with open_package(bytes(data)) as package:
            assert package.integrity == "paged"
        with pytest.raises(IntegrityError, match=r"record has digest .* \[EMOE-REC-002\]"):
            open_package(bytes(data), policy=POLICY)
        with open_package(bytes(data), integrity="paged", policy=POLICY) as package:
            package.read_record(place, memoryview(bytearray(place.length)))

    def test_compressed_signature(self) -> None:
        draft = Draft()
        draft.sections.append(Section(SectionType.SIGNATURE, signature()))
        draft.sections[-1].compress()
        open_package(draft.seal(), policy=POLICY).close()

    def test_every_key_has_signed(self) -> None:
        policy = SignaturePolicy(keys=(public(MAKER), public(VENDOR)))
        open_package(signed(signature(VENDOR), signature(MAKER)), policy=policy).close()

    def test_detached(self) -> None:
        policy = replace(POLICY, detached=(signature(VENDOR), signature()))
        open_package(signed(), policy=policy).close()

    def test_some_inside_and_some_detached(self) -> None:
        policy = SignaturePolicy(keys=(public(MAKER), public(VENDOR)), detached=(signature(VENDOR),))
        open_package(signed(signature()), policy=policy).close()

    def test_signatures_of_others_and_of_other_packages_do_no_harm(self) -> None:
        others = signature(VENDOR), signature(over=bytes(32)), of_algorithm(7)
        open_package(signed(*others, signature()), policy=POLICY).close()

    @pytest.mark.parametrize("counter", [3, 4, 2**64 - 1])
    def test_counter_at_or_above_the_minimum(self, counter: int) -> None:
        open_package(signed(signature(counter=counter)), policy=replace(POLICY, minimum_counter=3)).close()

    @pytest.mark.parametrize("counters", [(2, 3), (3, 2)])
    def test_the_better_of_two_signatures_counts(self, counters: tuple[int, int]) -> None:
        data = signed(*(signature(counter=each) for each in counters))
        open_package(data, policy=replace(POLICY, minimum_counter=3)).close()


def forge(data: bytearray, offset: int) -> None:
    """Change five bytes so that every CRC-32C over them stays: add its polynomial, which divides itself."""
    polynomial = 0x1_05EC76F1  # 33 bits, the highest power first in the order in which bytes are taken
    for at, byte in enumerate(polynomial.to_bytes(5, "little"), offset):
        data[at] ^= byte


def of_algorithm(number: int) -> bytes:
    return SIGNATURE_MAGIC + number.to_bytes(4, "little") + bytes(4) + b"anything"


def flips() -> dict[str, bytes]:
    """A genuine signature with a bit flipped in each field that is signed or signs."""
    data = signature(counter=5)
    fields = {
        "counter": 16,
        "counter's top": 23,
        "key": 24,
        "key's end": 55,
        "R": 56,
        "R's end": 87,
        "S": 88,
        "S's": 119,
    }
    return {name: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for name, at in fields.items()}


FLIPS = flips()


class TestRefused:
    def test_not_signed(self) -> None:
        error = refused(signed(), POLICY)
        assert public(MAKER).hex() in error.message
        assert FILE_ID.hex() in error.message
        assert "0 of 0 signatures name the key" in error.message

    def test_signed_by_another_key(self) -> None:
        assert "0 of 1 signatures name the key" in refused(signed(signature(VENDOR)), POLICY).message

    def test_signature_of_another_package(self) -> None:
        assert "1 of 1 signatures name the key" in refused(signed(signature(over=bytes(32))), POLICY).message

    def test_another_keys_signature_under_this_keys_name(self) -> None:
        forged = bytearray(signature(VENDOR))
        forged[24:56] = public(MAKER)
        refused(signed(bytes(forged)), POLICY)

    @pytest.mark.parametrize("data", FLIPS.values(), ids=FLIPS)
    def test_flipped_bit(self, data: bytes) -> None:
        refused(signed(data), POLICY)

    def test_another_scalar_that_the_equation_would_take(self) -> None:
        data = bytearray(signature())
        scalar = int.from_bytes(data[88:], "little") + 2**252 + 27742317777372353535851937790883648493
        data[88:] = scalar.to_bytes(32, "little")
        refused(signed(bytes(data)), POLICY)

    def test_key_that_is_no_point_of_the_curve(self) -> None:
        key = (2).to_bytes(32, "little")
        data = Signature(SIGNATURE_MAGIC, 1, 0, key, bytes(64)).encode()
        refused(signed(data), SignaturePolicy(keys=(key,)))

    def test_one_of_two_keys(self) -> None:
        policy = SignaturePolicy(keys=(public(MAKER), public(VENDOR)))
        assert public(VENDOR).hex() in refused(signed(signature()), policy).message
        assert public(MAKER).hex() in refused(signed(signature(VENDOR)), policy).message

    def test_detached_signature_of_another_package(self) -> None:
        refused(signed(), replace(POLICY, detached=(signature(over=bytes(32)),)))

    def test_unknown_algorithm_proves_nothing(self) -> None:
        refused(signed(of_algorithm(0)), POLICY)
        as_another = bytearray(signature())
        as_another[8] = 2
        refused(signed(bytes(as_another)), replace(POLICY, detached=(of_algorithm(2**32 - 1),)))

    @pytest.mark.parametrize("counters", [(2,), (0, 2)])
    def test_counter_below_the_minimum(self, counters: tuple[int, ...]) -> None:
        data = signed(*(signature(counter=each) for each in counters))
        error = refused(data, replace(POLICY, minimum_counter=3), "EMOE-SIG-003")
        assert error.message == f"security counter 2 of key {POLICY.keys[0].hex()}, expected at least 3"
        assert error.hint is not None

    def test_every_key_must_reach_the_minimum(self) -> None:
        policy = SignaturePolicy(keys=(public(MAKER), public(VENDOR)), minimum_counter=3)
        refused(signed(signature(counter=9), signature(VENDOR, counter=2)), policy, "EMOE-SIG-003")

    def test_nothing_but_the_directory_is_read_before(self) -> None:
        source = CountingSource(signed())
        with pytest.raises(TrustError):
            open_package(source, policy=POLICY)
        assert len(source.reads) == 3
        assert source.closed == 1


BAD: dict[str, bytes] = {
    "empty header": b"\0",
    "short header": signature()[:15],
    "cut": signature()[:-1],
    "longer": signature() + b"\0",
    "magic": b"EMOESIX\0" + signature()[8:],
    "reserved": signature()[:12] + b"\1" + signature()[13:],
    "reserved, of an unknown algorithm": of_algorithm(7)[:15] + b"\1",
    "magic, of an unknown algorithm": b"X" + of_algorithm(7)[1:],
}


class TestMalformed:
    """Refused where signatures are looked at, whoever else has signed: under a policy, and by `full`."""

    @pytest.mark.parametrize("data", BAD.values(), ids=BAD)
    def test_inside(self, data: bytes) -> None:
        package = signed(signature(), data)
        for arguments in ({"policy": POLICY}, {"integrity": "full"}):
            with pytest.raises(MalformedError) as caught:
                open_package(package, **arguments)
            error = caught.value
            assert (error.rule, error.path) == ("EMOE-SIG-001", "signature section 1")
            assert error.offset == DIRECTORY + 128  # behind the first signature

    @pytest.mark.parametrize("data", BAD.values(), ids=BAD)
    def test_detached(self, data: bytes) -> None:
        with pytest.raises(MalformedError) as caught:
            open_package(signed(signature()), policy=replace(POLICY, detached=(data,)))
        error = caught.value
        assert (error.rule, error.path, error.offset) == ("EMOE-SIG-001", "detached signature 0", None)

    def test_damaged(self) -> None:
        data = bytearray(signed(signature()))
        data[data.index(SIGNATURE_MAGIC) + 30] ^= 1
        with pytest.raises(IntegrityError, match=r"signature section 0\) \[EMOE-SEC-018\]"):
            open_package(bytes(data), policy=POLICY)


Change = Callable[[Draft], Any]
CHANGES: dict[str, Change] = {
    "manifest": lambda draft: draft.change_manifest(name="other"),
    "tokenizer": lambda draft: setattr(draft.section(SectionType.TOKENIZER), "data", b"{}"),
    "graph": lambda draft: setattr(draft.section(SectionType.GRAPH, 2), "data", b"other"),
    "weights": lambda draft: draft.change_record(SectionType.EXPERTS, 3, lambda record: record.__setitem__(0, 0)),
    "unknown section": lambda draft: draft.sections.append(Section(99, b"x")),
    "section dropped": lambda draft: draft.sections.remove(draft.section(SectionType.TOKENIZER)),
    "order": lambda draft: draft.sections.reverse(),
}


class TestFileId:
    def test_preimage(self) -> None:
        """Written out from the text of the format."""
        with open_package(signed(signature())) as package:
            entries = {(each.type, each.id): each.encode() for each in package.container.entries if each.type != 14}
            stored = b"".join(data for _, data in sorted(entries.items()))
            head = bytes([0, 0, 12, 0]) + bytes(8)
            assert package.file_id == sha256(b"EMOE file_id\0" + head + stored).digest()

    def test_unsigned_sections_may_be_added(self) -> None:
        draft = Draft()
        draft.sections += [
            Section(SectionType.SIGNATURE, signature()),
            Section(SectionType.SIGNATURE, signature(VENDOR), id=9),
            Section(SectionType.DEVICE_CONFIGURATION, b"whatever"),
            Section(SectionType.FREE, b"whatever"),
            Section(99, b"whatever", flags=SectionFlag.UNSIGNED),
        ]
        with open_package(draft.seal(), integrity="paged", policy=POLICY) as package:
            assert package.file_id == FILE_ID

    @pytest.mark.parametrize("changes", [{"generation": 9}, {"generation": 9, "optional_features": 1}])
    def test_what_any_reader_may_pass_over_is_outside(self, changes: dict[str, int]) -> None:
        data = signed(signature())
        open_package(with_superblock(data, 0, **changes), policy=POLICY).close()

    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_whatever_else_is_changed(self, change: Change) -> None:
        draft = Draft()
        draft.sections.append(Section(SectionType.SIGNATURE, signature()))
        change(draft)
        assert "1 of 1 signatures name the key" in refused(draft.seal(), POLICY).message
