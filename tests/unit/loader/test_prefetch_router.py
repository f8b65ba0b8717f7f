"""The prefetch router of a package: proven when it is asked for, and under `full` against the routers themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from estream_loader import open_package
from estream_loader.verdict import judge
from estream_spec.constants import FLAGS, SectionFlag, SectionType
from estream_spec.errors import FormatError
from estream_spec.limits import MAX_PREFETCH_ROUTER_LENGTH
from estream_spec.prefetch_router import PrefetchRouter, encode_prefetch_router
from fixtures.packages import Draft, Section
from fixtures.prefetching import prefetch_router_for

with open_package(Draft().seal()) as _package:
    SOUND = prefetch_router_for(_package)
    FILE_ID, CONTENT_ID = _package.file_id, _package.manifest.content_id


def section(router: PrefetchRouter | bytes = SOUND, number: int = 0, **changes: Any) -> Section:
    data = router if isinstance(router, bytes) else encode_prefetch_router(router)
    return Section(SectionType.PREFETCH_ROUTER, data, id=number, changes=changes)


def added(*sections: Section) -> bytes:
    draft = Draft()
    draft.sections += sections
    return draft.seal()


def judged(data: bytes) -> str:
    """The rule that the loader's program refuses a package by."""
    status, text = judge(data)
    assert status == 1
    return str(json.loads(text)["rule"])


def test_it_is_there() -> None:
    with open_package(added(section()), integrity="full") as package:
        assert package.prefetch_router == SOUND
        assert package.prefetch_router is package.prefetch_router


def test_there_is_none() -> None:
    with open_package(Draft().seal()) as package:
        assert package.prefetch_router is None


def test_compressed() -> None:
    each = section()
    each.compress()
    with open_package(added(each), integrity="full") as package:
        assert package.prefetch_router == SOUND


def test_it_is_signed_and_no_part_of_the_content() -> None:
    assert FLAGS[SectionType.PREFETCH_ROUTER] == SectionFlag.SAFE_TO_COPY
    with open_package(added(section())) as package:
        assert package.file_id != FILE_ID
        assert package.manifest.content_id == CONTENT_ID


@pytest.mark.parametrize("sections", [(section(), section(number=1)), (section(number=1),)], ids=["two", "another id"])
def test_there_is_at_most_one(sections: tuple[Section, ...]) -> None:
    assert judged(added(*sections)) == "EMOE-SEC-016"


def test_it_may_be_longer_than_other_sections() -> None:
    data = added(section(b"\0" * (1 << 21), codec=1, length=MAX_PREFETCH_ROUTER_LENGTH))
    assert judged(data) == "EMOE-SEC-019"
    data = added(section(b"\0" * ((1 << 21) + 1), codec=1, length=MAX_PREFETCH_ROUTER_LENGTH + 1))
    assert judged(data) == "EMOE-SEC-011"


def test_nobody_gets_one_for_another_model() -> None:
    draft = Draft()
    draft.change_model(norm_epsilon=1e-4)
    draft.sections.append(section())
    with open_package(draft.seal()) as package, pytest.raises(FormatError, match="is for another model") as error:
        _ = package.prefetch_router
    assert error.value.rule == "EMOE-PRE-002"
    assert "at offset 0x" in str(error.value)
    assert "prefetch_router section 0" in str(error.value)


def test_one_for_other_routers_is_found_by_full() -> None:
    other = replace(SOUND, layers=(SOUND.layers[0], replace(SOUND.layers[1], router=bytes(32))))
    data = added(section(other))
    with open_package(data) as package:
        assert package.prefetch_router == other
    with pytest.raises(FormatError, match="is for another router of layer 1") as error:
        open_package(data, integrity="full")
    assert error.value.rule == "EMOE-PRE-008"
    assert judged(data) == "EMOE-PRE-008"


@pytest.mark.parametrize(
    ("router", "rule"),
    [
        (b"EMOEPRG\0", "EMOE-PRE-001"),
        (b"EMOEPRE\0\xc1", "EMOE-MAN-001"),
        (b"EMOEPRE\0\x80", "EMOE-MAN-002"),
        (replace(SOUND, model=bytes(32)), "EMOE-PRE-002"),
        (replace(SOUND, layers=SOUND.layers[1:]), "EMOE-PRE-003"),
        (replace(SOUND, layers=(SOUND.layers[0], replace(SOUND.layers[1], bias=b""))), "EMOE-PRE-004"),
    ],
    ids=["magic", "message", "keys", "model", "layers", "length"],
)
def test_what_is_at_fault_is_refused(router: PrefetchRouter | bytes, rule: str) -> None:
    data = added(section(router))
    with open_package(data) as package, pytest.raises(FormatError) as error:
        _ = package.prefetch_router
    assert error.value.rule == rule
    assert judged(data) == rule
