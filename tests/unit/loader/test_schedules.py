"""Programs in a package: proven before anyone gets them, and refused when one is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from estream_loader import open_package
from estream_loader.verdict import judge
from estream_spec.constants import FLAGS, SectionFlag, SectionType
from estream_spec.errors import EmoeError, IntegrityError, InvalidError, LimitError, MalformedError
from estream_spec.limits import MAX_SCHEDULES
from estream_spec.manifest import DeviceConfiguration, PolicyName
from estream_spec.schedule import ExpertShape, Phase, Policy, Program
from estream_spec.schedule_compiler import compile_program
from fixtures.packages import PAGE_SHIFT, Draft, Section
from fixtures.sources import CountingSource

RECORD = 1 << PAGE_SHIFT
SHAPE = ExpertShape(counts=(3, 3), record_lengths=(RECORD, RECORD), top_k=(2, 2))


def compiled(policy: Policy = Policy.PRE_ROUTING, *, depth: int = 1, phase: Phase = Phase.PREFILL) -> Program:
    return compile_program(
        SHAPE, arena_bytes=6 * RECORD, group_size=1, prefetch_depth=depth, policy=policy, phase=phase
    )


def added(*sections: Section) -> bytes:
    draft = Draft()
    draft.sections += sections
    return draft.seal()


def section(data: bytes, number: int = 0) -> Section:
    return Section(SectionType.SCHEDULE, data, id=number)


def choice(depth: int, policy: PolicyName = "pre-routing") -> DeviceConfiguration:
    return DeviceConfiguration(name="any", arena_bytes=6 * RECORD, group_size=1, prefetch_depth=depth, policy=policy)


def test_programs_are_there_in_the_order_of_the_directory() -> None:
    programs = [compiled(), compiled(Policy.RESIDENT, depth=5, phase=Phase.LOAD), compiled(Policy.RESIDENT, depth=5)]
    numbers = (7, 0, 2**32 - 1)
    data = added(*(section(each.encode(), number) for each, number in zip(programs, numbers, strict=True)))
    with open_package(data, integrity="full") as package:
        assert package.expert_shape == SHAPE
        assert list(package.schedules.values()) == programs
        assert [entry.id for entry in package.schedules] == list(numbers)
        assert package.program(choice(5, "resident"), Phase.LOAD) == programs[1]
        assert package.program(choice(5, "resident"), Phase.PREFILL) == programs[2]
        assert package.program(choice(5), Phase.PREFILL) is None
        assert package.program(choice(1), Phase.PREFILL) == programs[0]
        assert package.program(choice(1), Phase.LOAD) is None
        assert package.program(choice(2), Phase.PREFILL) is None


def test_of_several_the_latest_counts() -> None:
    """The highest id is the latest, wherever its section lies."""
    slow = replace(compiled(Policy.ON_DEMAND), policy=Policy.PRE_ROUTING)  # which only informs
    data = added(section(slow.encode(), 4), section(compiled().encode(), 2))
    with open_package(data) as package:
        assert package.program(choice(1), Phase.PREFILL) == slow


def test_none() -> None:
    with open_package(Draft().seal()) as package:
        assert package.schedules == {}


def test_compressed() -> None:
    each = section(compiled().encode())
    each.compress()
    with open_package(added(each), integrity="full") as package:
        assert list(package.schedules.values()) == [compiled()]


def test_they_are_not_read_on_opening_and_no_signature_covers_them() -> None:
    assert FLAGS[SectionType.SCHEDULE] == SectionFlag.SAFE_TO_COPY | SectionFlag.UNSIGNED
    source = CountingSource(added(section(b"\0")))
    with open_package(source) as package, open_package(Draft().seal()) as plain:
        assert len(source.reads) == 4
        assert package.experts.table.ranges
        assert package.file_id == plain.file_id


GOOD = compiled()
FAULTS: dict[str, tuple[bytes, type[EmoeError], str, str]] = {
    "cut": (GOOD.encode()[:-1], MalformedError, "EMOE-SCH-003", ""),
    "another magic": (b"\0" + GOOD.encode()[1:], MalformedError, "EMOE-SCH-001", ""),
    "too many": (GOOD.encode()[:24] + b"\xff" * 4 + GOOD.encode()[28:], LimitError, "EMOE-SCH-002", ""),
    "reserved byte": (GOOD.encode()[:-1] + b"\1", MalformedError, "EMOE-SCH-004", f"[{len(GOOD.instructions) - 1}]"),
    "arena too small": (replace(GOOD, arena_bytes=RECORD).encode(), InvalidError, "EMOE-SCH-010", ".arena_bytes"),
    "no HALT": (replace(GOOD, instructions=GOOD.instructions[:-1]).encode(), InvalidError, "EMOE-SCH-033", ""),
    "a wait left out": (
        replace(GOOD, instructions=(*GOOD.instructions[:5], *GOOD.instructions[6:])).encode(),
        InvalidError,
        "EMOE-SCH-025",
        "[5]",
    ),
}


@pytest.mark.parametrize(("data", "kind", "rule", "place"), FAULTS.values(), ids=FAULTS)
def test_refused(data: bytes, kind: type[EmoeError], rule: str, place: str) -> None:
    """When programs are asked for, and under `full`; the package's own part can still be used."""
    package_bytes = added(section(GOOD.encode(), 1), section(data, 9))
    errors = []
    with open_package(package_bytes) as package:
        with pytest.raises(kind) as caught:
            assert package.program(choice(1), Phase.PREFILL)
        errors.append(caught.value)
        assert package.experts.table.ranges
        assert package.device_configurations
        offset = package.container.section(SectionType.SCHEDULE, 9).offset
    with pytest.raises(kind) as caught:
        open_package(package_bytes, integrity="full")
    errors.append(caught.value)
    for error in errors:
        assert (error.rule, error.path, error.offset) == (rule, f"schedule section 9{place}", offset)


def test_damaged() -> None:
    data = bytearray(added(section(GOOD.encode())))
    data[data.index(b"EMOEPRG\0") + 60] ^= 1
    with open_package(bytes(data)) as package, pytest.raises(IntegrityError) as caught:
        assert package.schedules
    assert (caught.value.rule, caught.value.path) == ("EMOE-SEC-018", "schedule section 0")


def test_no_more_than_the_limit() -> None:
    data = [section(GOOD.encode(), number) for number in range(MAX_SCHEDULES + 1)]
    with open_package(added(*data[:-1])) as package:
        assert len(package.schedules) == MAX_SCHEDULES
    with pytest.raises(LimitError, match=r"385 SCHEDULE sections, the limit is 384.*\[EMOE-SEC-017\]"):
        open_package(added(*data))


def test_configurations_are_judged_before_programs() -> None:
    bad = Section(SectionType.DEVICE_CONFIGURATION, b"\xc1")
    with pytest.raises(MalformedError) as caught:
        open_package(added(section(b"\0"), bad), integrity="full")
    assert caught.value.rule == "EMOE-MAN-001"


def test_the_verdict_gives_their_headers_in_the_order_of_the_directory() -> None:
    status, text = judge(added(section(compiled(Policy.ON_DEMAND).encode(), 4), section(compiled(depth=2).encode(), 1)))
    assert status == 0
    sizes = {"arena_bytes": 6 * RECORD, "group_size": 1, "phase": 2}
    assert json.loads(text)["schedules"] == [
        {**sizes, "policy": 1, "prefetch_depth": 1, "bank_count": 2, "instruction_count": 33},
        {**sizes, "policy": 3, "prefetch_depth": 2, "bank_count": 3, "instruction_count": 33},
    ]
