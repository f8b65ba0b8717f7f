from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import Built, Pack
from fixtures.packages import Draft, Section, with_superblock

PACKAGE = Draft().seal()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.emoe"


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def test_a_built_package_is_valid(built: Built, pack: Pack) -> None:
    assert pack("validate", built()) == (0, "valid\n", "")


def test_json_of_a_valid_package(path: Path, pack: Pack) -> None:
    path.write_bytes(PACKAGE + b"x")
    status, out, err = pack("validate", path, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {
        "valid": True,
        "class": None,
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
        "valid",
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


REFUSED = {
    "malformed": (b"", "malformed", 0),
    "cut": (PACKAGE[:-1], "integrity", None),
    "graph": (flip(PACKAGE, PACKAGE.index(b"graph of out")), "integrity", PACKAGE.index(b"graph of out")),
    "padding": (flip(PACKAGE, 200), "invalid", 200),
    "content id": (wrong_content(), "integrity", None),
    "unsupported": (unknown_feature(), "unsupported", None),
}


@pytest.mark.parametrize(("data", "slug", "offset"), REFUSED.values(), ids=REFUSED)
def test_refusals(data: bytes, slug: str, offset: int | None, path: Path, pack: Pack) -> None:
    path.write_bytes(data)
    status, out, err = pack("validate", path, "--json")
    verdict = json.loads(out)
    assert (status, err) == (1, "")
    assert (verdict["valid"], verdict["class"], verdict["offset"]) == (False, slug, offset)
    assert verdict["message"]
    status, out, err = pack("validate", path)
    assert (status, out) == (1, f"refused: {slug}\n")
    assert err.startswith(f"estream-pack: error: {verdict['message']}")


def test_no_such_file(path: Path, pack: Pack) -> None:
    status, out, _ = pack("validate", path, "--json")
    assert status == 1
    assert json.loads(out)["class"] == "link"


def test_usage(pack: Pack) -> None:
    status, out, err = pack("validate")
    assert (status, out) == (2, "")
    assert "Missing argument 'PACKAGE'" in err
