"""Keys, signatures, and what they cover. Proves EMOE-RDR-013 and EMOE-RDR-014."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from cli.conftest import Pack
from estream_loader import SignaturePolicy, open_package, read_public_key
from estream_packer.keys import read_private_key
from estream_packer.signing import sign
from estream_spec.constants import SIGNATURE_MAGIC, SectionType
from estream_spec.errors import EmoeError, TrustError
from estream_spec.records import Signature, decode_signature
from fixtures.packages import Draft, Section
from fixtures.sources import CountingSource

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
CONFIGURE = ("--name", "phone", "--arena", "1M", "--group-size", "1", "--prefetch-depth", "1")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "model.emoe"
    path.write_bytes(Draft().seal())
    return path


@pytest.fixture
def key(tmp_path: Path, pack: Pack) -> Path:
    path = tmp_path / "vendor"
    assert pack("keygen", "-o", path)[0] == 0
    return path


def public(key: Path) -> str:
    return f"{key}.pub"


def digits(key: Path) -> str:
    return read_public_key(public(key)).hex()


def file_id(path: Path) -> str:
    with open_package(path) as package:
        return package.file_id.hex()


def signatures(path: Path) -> list[Signature]:
    with open_package(path) as package:
        return package.signatures()


def test_a_key_is_made(tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "vendor"
    status, out, err = pack("keygen", "-o", path)
    assert (status, err) == (0, "")
    assert out == f"public key {digits(path)}\nwrote {path} and {path}.pub\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----\n")
    assert Path(public(path)).read_bytes().startswith(b"-----BEGIN PUBLIC KEY-----\n")
    assert read_private_key(path).public_key().public_bytes_raw().hex() == digits(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["vendor", "vendor.pub"]


@pytest.mark.parametrize("there", ["vendor", "vendor.pub"])
def test_a_key_never_replaces_a_file(tmp_path: Path, there: str, pack: Pack) -> None:
    (tmp_path / there).write_text("precious")
    status, out, err = pack("keygen", "-o", tmp_path / "vendor")
    assert (status, out) == (1, "")
    assert f"there is a file of that name, which is never replaced (at {tmp_path / there})" in err
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [(there, "precious")]


def test_no_key_is_left_when_it_cannot_be_written(tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = pack("keygen", "-o", tmp_path / "absent" / "vendor")
    assert status == 1
    assert "file cannot be written: no such file or directory" in err
    assert "hint: make the folder first" in err
    calls = iter([None, OSError(28, "No space left on device")])

    def fsync(descriptor: int) -> None:
        if (error := next(calls)) is not None:
            raise error

    monkeypatch.setattr(os, "fsync", fsync)
    status, out, err = pack("keygen", "-o", tmp_path / "vendor")
    assert (status, out) == (1, "")
    assert f"file cannot be written: no space left on device (at {tmp_path / 'vendor.pub'})" in err
    assert list(tmp_path.iterdir()) == []


def test_a_signed_package_verifies(package: Path, key: Path, pack: Pack) -> None:
    identity = file_id(package)
    status, out, err = pack("sign", package, "--key", key, "--counter", "7")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        f"file id {identity}",
        f"key {digits(key)}",
        "security counter 7",
        f"signed {package}",
    ]
    for name in (public(key), digits(key), digits(key).upper()):
        status, out, err = pack("verify", package, "--key", name, "--minimum-counter", "7")
        assert (status, err) == (0, "")
        assert out.splitlines()[1:] == [f"file id {identity}", f"signed by {digits(key)}, security counter 7"]
    found = json.loads(pack("verify", package, "--key", public(key), "--json")[1])
    assert found["signed_by"] == [{"key": digits(key), "security_counter": 7}]
    assert found["notices"] == []
    assert pack("validate", package)[0] == 0


def test_an_older_release_is_refused(package: Path, key: Path, pack: Pack) -> None:
    assert pack("sign", package, "--key", key, "--counter", "7")[0] == 0
    status, out, err = pack("verify", package, "--key", public(key), "--minimum-counter", "8")
    assert (status, out) == (1, "refused: untrusted\n")
    assert f"security counter 7 of key {digits(key)}, expected at least 8" in err
    assert "[EMOE-SIG-003]" in err


def test_a_missing_signature_is_refused(package: Path, key: Path, tmp_path: Path, pack: Pack) -> None:
    status, out, err = pack("verify", package, "--key", public(key))
    assert (status, out) == (1, "refused: untrusted\n")
    assert f"no signature by key {digits(key)}" in err
    assert "[EMOE-SIG-002]" in err
    assert pack("sign", package, "--key", key)[0] == 0
    assert pack("keygen", "-o", tmp_path / "other")[0] == 0
    other = tmp_path / "other.pub"
    status, _, err = pack("verify", package, "--key", public(key), "--key", other)
    assert status == 1
    assert f"no signature by key {digits(tmp_path / 'other')}" in err


def test_without_a_key_nothing_is_trusted(package: Path, key: Path, tmp_path: Path, pack: Pack) -> None:
    """EMOE-RDR-014: signatures are told, whether they verify or not, and decide nothing."""
    assert pack("sign", package, "--key", key, "--counter", "2")[0] == 0
    draft = Draft()
    forged = Signature(SIGNATURE_MAGIC, 1, 9, PUBLIC, bytes(64)).encode()
    draft.sections += [
        Section(SectionType.SIGNATURE, signatures(package)[0].encode()),
        Section(SectionType.SIGNATURE, forged, id=5),
    ]
    package.write_bytes(draft.seal())
    beside = tmp_path / "beside.sig"
    beside.write_bytes(sign(bytes.fromhex(file_id(package)), KEY, 3).encode())
    expected = [
        f"signature by {digits(key)}, counter 2: verifies, but you have named no key to trust",
        f"signature by {PUBLIC.hex()}, counter 9: does not verify",
        f"signature by {PUBLIC.hex()}, counter 3: verifies, but you have named no key to trust",
    ]
    status, out, _ = pack("verify", package, "--signature", beside)
    assert (status, out.splitlines()[2:]) == (0, [f"notice: {each}" for each in expected])
    found = json.loads(pack("verify", package, "--signature", beside, "--json")[1])
    assert (found["notices"], found["signed_by"]) == (expected, [])
    found = json.loads(pack("inspect", package, "--json")[1])
    assert found["signatures"] == [
        {"section": 0, "key": digits(key), "security_counter": 2, "verifies": True},
        {"section": 5, "key": PUBLIC.hex(), "security_counter": 9, "verifies": False},
    ]
    out = pack("inspect", package)[1]
    assert f"by {digits(key)}, counter 2: verifies, which is no reason to trust it\n" in out
    assert f"by {PUBLIC.hex()}, counter 9: does not verify\n" in out
    for number in (0, 5):  # once with its key, once with its bytes
        assert len(re.findall(rf"^ signature {number} ", out, re.MULTILINE)) == 2
    assert not re.search(r"^ signature 1 ", out, re.MULTILINE)


def test_a_signature_beside_the_package(package: Path, key: Path, tmp_path: Path, pack: Pack) -> None:
    before, beside = package.read_bytes(), tmp_path / "model.sig"
    beside.write_bytes(sign(bytes(32), KEY, 9).encode())  # of another package
    status, out, err = pack("sign", package, "--key", key, "--counter", "4", "-o", beside)
    assert (status, err) == (0, "")
    assert out.splitlines()[-2:] == ["security counter 4", f"wrote {beside}"]
    assert package.read_bytes() == before
    found = decode_signature(beside.read_bytes(), path="signature")
    assert found is not None
    assert (len(beside.read_bytes()), found.public_key.hex()) == (120, digits(key))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.emoe", "model.sig", "vendor", "vendor.pub"]
    assert pack("verify", package, "--key", public(key))[0] == 1
    status, out, _ = pack("verify", package, "--key", public(key), "--signature", beside)
    assert (status, out.splitlines()[-1]) == (0, f"signed by {digits(key)}, security counter 4")


def test_a_signature_replaces_nothing_but_a_signature(package: Path, key: Path, tmp_path: Path, pack: Pack) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")
    (tmp_path / "empty").touch()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for output in before:
        status, out, err = pack("sign", package, "--key", key, "-o", output)
        assert (status, out) == (1, "")
        assert f"there is a file of that name, no signature, which is never replaced (at {output})" in err
        assert "hint: give another name" in err
    os.mkfifo(tmp_path / "pipe")
    for output, what in ((tmp_path, "a folder"), (tmp_path / "pipe", "no plain file")):
        status, _, err = pack("sign", package, "--key", key, "-o", output)
        assert status == 1
        assert f"output is {what}" in err
        assert "hint: give the name of the signature file" in err
    status, _, err = pack("sign", package, "--key", key, "-o", tmp_path / "absent" / "model.sig")
    assert status == 1
    assert "file cannot be written: no such file or directory" in err
    assert {path: path.read_bytes() for path in before} == before
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_signature_is_replaced(package: Path, key: Path, tmp_path: Path, pack: Pack) -> None:
    beside = tmp_path / "model.sig"
    beside.write_bytes(SIGNATURE_MAGIC + b"cut")
    assert pack("sign", package, "--key", key, "-o", beside)[0] == 0
    assert pack("verify", package, "--key", public(key), "--signature", beside)[0] == 0


@pytest.mark.parametrize("inside", [True, False])
def test_a_counter_never_goes_back(inside: bool, package: Path, key: Path, tmp_path: Path, pack: Pack) -> None:
    place = package if inside else tmp_path / "model.sig"
    output = [] if inside else ["-o", place]
    assert pack("sign", package, "--key", key, "--counter", "3", *output)[0] == 0
    before = place.read_bytes()
    status, out, err = pack("sign", package, "--key", key, "--counter", "1", *output)
    assert (status, out) == (1, "")
    assert f"security counter 1, the signature there has 3, expected at least that (at {place})" in err
    assert "hint: give --counter 3 or more" in err
    status, out, err = pack("sign", package, "--key", key, "--counter", "3", *output)
    assert (status, err) == (0, "")
    assert out.endswith(f"already signed, nothing changes in {place}\n")
    assert place.read_bytes() == before
    assert pack("sign", package, "--key", key, "--counter", "4", *output)[0] == 0
    assert place.read_bytes() != before


def test_a_forged_counter_binds_nobody(package: Path, key: Path, pack: Pack) -> None:
    """Anyone can put a signature into a package that names the key and the highest counter."""
    draft = Draft()
    forged = Signature(SIGNATURE_MAGIC, 1, 2**64 - 1, bytes.fromhex(digits(key)), bytes(64)).encode()
    draft.sections.append(Section(SectionType.SIGNATURE, forged))
    package.write_bytes(draft.seal())
    assert pack("sign", package, "--key", key, "--counter", "1")[0] == 0
    assert [each.security_counter for each in signatures(package)] == [1]


def test_a_private_key_that_cannot_be_read(
    package: Path, key: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused as any other file is, whoever runs the tests."""
    opened = os.open

    def forbidden(path: Any, *arguments: Any) -> int:
        if path == key:
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", forbidden)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    status, out, err = pack("sign", package, "--key", key)
    assert (status, out) == (1, "")
    assert err == f"estream-pack: error: file cannot be opened: permission denied (at {key})\n"


def test_a_detached_signature_that_is_none(package: Path, key: Path, tmp_path: Path, pack: Pack) -> None:
    beside = tmp_path / "model.sig"
    for data, slug, words in (
        (b"no signature", "malformed", "[EMOE-SIG-001]"),
        (bytes(70000), "link", "exceeds the limit of 65536 bytes"),
        (package.read_bytes(), "link", "hint: this is no signature"),
    ):
        beside.write_bytes(data)
        status, out, err = pack("verify", package, "--key", public(key), "--signature", beside)
        assert (status, out) == (1, f"refused: {slug}\n")
        assert words in err
    status, _, err = pack("verify", package, "--key", public(key), "--signature", tmp_path / "absent")
    assert status == 1
    assert "file cannot be opened: no such file or directory" in err


def test_signatures_stay_true_through_edits(package: Path, key: Path, tmp_path: Path, pack: Pack) -> None:
    """A local configuration, a second signature and a new one by the same key leave the others as they were."""
    identity, other = file_id(package), tmp_path / "other"
    assert pack("keygen", "-o", other)[0] == 0
    assert pack("sign", package, "--key", key, "--counter", "1")[0] == 0
    assert pack("configure", package, *CONFIGURE)[0] == 0
    assert pack("sign", package, "--key", other, "--counter", "5")[0] == 0
    assert pack("sign", package, "--key", key, "--counter", "2")[0] == 0
    assert pack("configure", package, "--name", "phone", "--remove")[0] == 0
    status, out, _ = pack("verify", package, "--key", public(key), "--key", public(other))
    assert status == 0
    assert out.splitlines()[1:] == [
        f"file id {identity}",
        f"signed by {digits(key)}, security counter 2",
        f"signed by {digits(other)}, security counter 5",
    ]
    assert len(signatures(package)) == 2


def test_a_damaged_package_is_not_signed(package: Path, key: Path, tmp_path: Path, pack: Pack) -> None:
    with open_package(package) as opened:
        record, padding = opened.experts.place(0).offset + 9, 128
    for offset, rule in ((record, "EMOE-REC-001"), (padding, "EMOE-PAD-001")):
        data = bytearray(Draft().seal())
        data[offset] ^= 1
        package.write_bytes(data)
        for output in ([], ["-o", tmp_path / "model.sig"]):
            status, out, err = pack("sign", package, "--key", key, *output)
            assert (status, out) == (1, "")
            assert rule in err
        assert package.read_bytes() == data
    assert not (tmp_path / "model.sig").exists()


def test_no_more_signatures_than_the_format_allows(package: Path, key: Path, tmp_path: Path, pack: Pack) -> None:
    draft = Draft()
    identity = bytes.fromhex(file_id(package))
    for number in range(16):
        data = sign(identity, Ed25519PrivateKey.generate() if number else read_private_key(key), 0).encode()
        draft.sections.append(Section(SectionType.SIGNATURE, data, id=number * 9))
    package.write_bytes(draft.seal())
    assert pack("sign", package, "--key", key, "--counter", "3")[0] == 0  # in place of its own
    assert pack("keygen", "-o", tmp_path / "other")[0] == 0
    before = package.read_bytes()
    status, _, err = pack("sign", package, "--key", tmp_path / "other")
    assert status == 1
    assert "package has 16 signatures by other keys, the limit is 16" in err
    assert "hint: write the signature beside the package, with -o" in err
    assert package.read_bytes() == before


def pem(key: Any, password: bytes | None = None) -> bytes:
    encryption = NoEncryption() if password is None else BestAvailableEncryption(password)
    private: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    return private


def public_pem(key: Any) -> bytes:
    found: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return found


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        (pem(KEY, b"secret"), "private key is protected by a password", "decrypt it first"),
        (
            pem(ec.generate_private_key(ec.SECP256R1())),
            "private key of another type, expected Ed25519",
            "make one with",
        ),
        (public_pem(KEY), "public key, expected a private one", "give the file without .pub"),
        (
            b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
            "not a private key in PEM",
            "make one with",
        ),
        (
            b"",
            "not a private key in PEM, expected an Ed25519 private key in PEM",
            "make one with 'estream-pack keygen'",
        ),
        (
            KEY.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
            "key for SSH, expected an Ed25519 private key in PEM",
            "make one with",
        ),
        (Draft().seal(), "file is a package", "this is no key file"),
        (bytes(70000), "file length 70000 exceeds the limit of 65536 bytes", None),
        (None, "file cannot be opened: no such file or directory", None),
    ],
)
def test_keys_that_cannot_sign(
    package: Path, tmp_path: Path, data: bytes | None, message: str, hint: str | None, pack: Pack
) -> None:
    path = tmp_path / "key"
    if data is not None:
        path.write_bytes(data)
    before = package.read_bytes()
    status, out, err = pack("sign", package, "--key", path)
    assert (status, out) == (1, "")
    assert f"estream-pack: error: {message}" in err
    assert (f"estream-pack: hint: {hint}" in err) if hint else ("hint" not in err)
    assert package.read_bytes() == before


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        (pem(KEY), "private key, expected a public one", "give the public one"),
        (public_pem(ec.generate_private_key(ec.SECP256R1())), "public key of another type", "ask the package's vendor"),
        (b"ssh-ed25519 AAAA", "key for SSH", "ask the package's vendor"),
        (None, "file cannot be opened: no such file or directory", None),
    ],
)
def test_keys_that_cannot_verify(
    package: Path, tmp_path: Path, data: bytes | None, message: str, hint: str | None, pack: Pack
) -> None:
    path = tmp_path / "key"
    if data is not None:
        path.write_bytes(data)
    status, out, err = pack("verify", package, "--key", path)
    assert (status, out) == (1, "refused: link\n")
    assert f"estream-pack: error: {message}" in err
    assert (f"estream-pack: hint: {hint}" in err) if hint else ("hint" not in err)


def test_keys_of_other_tools(tmp_path: Path, package: Path, pack: Pack) -> None:
    (tmp_path / "key").write_bytes(b"a line before it\n" + pem(KEY))
    (tmp_path / "key.pub").write_bytes(public_pem(KEY).replace(b"\n", b"\r\n"))
    assert pack("sign", package, "--key", tmp_path / "key")[0] == 0
    assert pack("verify", package, "--key", tmp_path / "key.pub")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "PACKAGE", "--minimum-counter", "1"],
        ["verify", "PACKAGE", "--key", PUBLIC.hex(), "--minimum-counter", "-1"],
        ["sign", "PACKAGE"],
        ["sign", "PACKAGE", "--key", "KEY", "--counter", str(1 << 64)],
        ["keygen"],
    ],
)
def test_usage(package: Path, arguments: list[str], pack: Pack) -> None:
    status, out, err = pack(*(str(package) if each == "PACKAGE" else each for each in arguments))
    assert (status, out) == (2, "")
    assert "--help" in err


def policy(data: bytes) -> SignaturePolicy:
    """A policy that asks for a signature over a package, and brings it."""
    with open_package(data) as package:
        return SignaturePolicy((PUBLIC,), detached=(sign(package.file_id, KEY, 0).encode(),))


SIGNED = range(len(Draft().sections))


@pytest.mark.parametrize("index", SIGNED)
def test_every_signed_byte_counts(index: int) -> None:
    """Any change to a section, its digest mended, breaks the signature, and so does any to its entry."""
    required = policy(Draft().seal())
    with open_package(Draft().seal(), policy=required) as package:
        entry = package.container.entries[index]
    draft = Draft()
    section = draft.sections[index]
    for position in range(0, len(section.data), max(len(section.data) // 16, 1)):
        data = bytearray(section.data)
        data[position] ^= 0x10
        changed = Draft()
        changed.sections[index] = replace(section, data=bytes(data), sha256=None)
        with pytest.raises(TrustError):
            open_package(changed.seal(), policy=required)
    for name, value in (
        ("type", 99),
        ("id", entry.id + 1),
        ("flags", entry.flags ^ 2),
        ("codec", 1),
        ("alignment_shift", entry.alignment_shift + 1),
        ("offset", entry.offset + 64),
        ("stored_length", entry.stored_length - 1),
        ("length", entry.length - 1),
        ("sha256", bytes(32)),
    ):
        changed = Draft()
        changed.sections[index].changes[name] = value
        with pytest.raises(EmoeError):
            open_package(changed.seal(), policy=required)


def test_a_section_added_or_left_out_breaks_the_signature() -> None:
    required = policy(Draft().seal())
    fewer, more, swapped = Draft(), Draft(), Draft()
    fewer.sections.remove(fewer.section(SectionType.TOKENIZER))
    more.sections.append(Section(99, b"x"))
    first, second = (swapped.section(SectionType.GRAPH, number) for number in (0, 1))
    first.id, second.id = 1, 0
    for draft in (fewer, more, swapped):
        with pytest.raises(TrustError):
            open_package(draft.seal(), policy=required)


def test_a_policy_comes_before_the_manifest() -> None:
    """EMOE-RDR-013: what only a signature vouches for is not read before it is proven."""
    draft = Draft()
    draft.section(SectionType.MANIFEST).data += b"no manifest"
    source = CountingSource(draft.seal())
    with pytest.raises(TrustError):
        open_package(source, policy=SignaturePolicy((PUBLIC,)))
    assert max(length for _, length in source.reads) < 2000
    with open_package(Draft().seal()) as package:
        manifest = package.container.section(SectionType.MANIFEST)
    assert not any(manifest.offset <= offset < manifest.end for offset, _ in source.reads)
