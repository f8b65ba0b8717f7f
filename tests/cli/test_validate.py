from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import Built, Pack
from estream_loader import open_package
from estream_spec.constants import DATA_START, SectionType
from fixtures.packages import Draft, Section, with_superblock

PACKAGE = Draft().seal()
GRAPH = PACKAGE.index(b"graph of out")
MANIFEST = open_package(PACKAGE).container.section(SectionType.MANIFEST).offset


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.emoe"


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def test_a_built_package_is_valid(built: Built, pack: Pack) -> None:
    assert pack("validate", built()) == (0, "valid structure; weights are not read\n", "")


def test_json_of_a_valid_package(path: Path, pack: Pack) -> None:
    path.write_bytes(PACKAGE + b"x")
    status, out, err = pack("validate", path, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {
        "valid": True,
        "class": None,
        "rule": None,
        "message": None,
        "path": None,
        "offset": None,
        "hint": None,
        "notices": ["1 bytes follow the package's end"],
    }


def test_notices_follow_the_verdict(path: Path, pack: Pack) -> None:
    draft = Draft()
    draft.sections.append(Section(99, b"x"))
    path.write_bytes(with_superblock(draft.seal(), 0, generation=2))
    status, out, _ = pack("validate", path)
    assert status == 0
    assert out.splitlines() == [
        "valid structure; weights are not read",
        "notice: superblock[1] is of generation 1, behind 2",
        "notice: section of unknown type 99 is skipped",
    ]


def wrong_content() -> bytes:
    draft = Draft()
    draft.change_manifest(content_id=bytes(32))
    return draft.seal()


def unknown_feature() -> bytes:
    draft = Draft()
    draft.superblock = {"required_features": 4}
    return draft.seal()


def with_section(section_type: SectionType, data: bytes) -> bytes:
    """A section put in front of all others, where data begins."""
    draft = Draft()
    draft.sections.insert(0, Section(section_type, data))
    return draft.seal()


REFUSED = {
    "malformed": (b"", "malformed", "EMOE-SUP-001", 0),
    "cut": (PACKAGE[:-1], "integrity", "EMOE-SUP-011", 0),
    "graph": (flip(PACKAGE, GRAPH), "integrity", "EMOE-SEC-018", GRAPH),
    "padding": (flip(PACKAGE, 200), "invalid", "EMOE-PAD-001", 200),
    "content id": (wrong_content(), "integrity", "EMOE-IDN-001", MANIFEST),
    "template": (with_section(SectionType.CHAT_TEMPLATE, b"\xff"), "invalid", "EMOE-SEC-020", DATA_START),
    "configuration": (
        with_section(SectionType.DEVICE_CONFIGURATION, b"\xc1"),
        "malformed",
        "EMOE-MAN-001",
        DATA_START,
    ),
    "unsupported": (unknown_feature(), "unsupported", "EMOE-SUP-006", 0),
}


@pytest.mark.parametrize(("data", "slug", "rule", "offset"), REFUSED.values(), ids=REFUSED)
def test_refusals(data: bytes, slug: str, rule: str, offset: int, path: Path, pack: Pack) -> None:
    path.write_bytes(data)
    status, out, err = pack("validate", path, "--json")
    verdict = json.loads(out)
    assert (status, err) == (1, "")
    found = [verdict[key] for key in ("valid", "class", "rule", "offset")]
    assert found == [False, slug, rule, offset]
    assert verdict["message"]
    assert verdict["path"]
    status, out, err = pack("validate", path)
    assert (status, out) == (1, f"refused: {slug}\n")
    first = err.splitlines()[0]
    assert first.startswith(f"estream-pack: error: {verdict['message']} (at offset {offset:#x}, ")
    assert first.endswith(f" [{rule}]")


def test_no_such_file(path: Path, pack: Pack) -> None:
    status, out, _ = pack("validate", path, "--json")
    verdict = json.loads(out)
    assert (status, verdict["class"], verdict["rule"]) == (1, "link", None)


def test_usage(pack: Pack) -> None:
    status, out, err = pack("validate")
    assert (status, out) == (2, "")
    assert "Missing argument 'PACKAGE'" in err
