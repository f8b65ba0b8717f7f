"""Device configurations added where a package is used."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from cli.conftest import Built, Pack
from estream_loader import open_package
from estream_packer.planning import package_workload
from estream_packer.schedules import programs_for
from estream_spec.constants import SectionType
from estream_spec.decode_planner import cache_bytes
from estream_spec.manifest import DeviceConfiguration
from estream_spec.messagepack import encode
from estream_spec.planner import available_arena
from estream_spec.profiles import shipped_profile
from estream_spec.schedule import Phase
from fixtures.packages import Draft, Section

SIZES = ("--arena", "1M", "--group-size", "2", "--prefetch-depth", "1")
TABLET = "arena 1,048,576 bytes, group size 2, prefetch depth 1, 2 lanes, pre-routing"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "model.emoe"
    path.write_bytes(Draft().seal())
    return path


def configurations(path: Path) -> list[tuple[str, int, int, int]]:
    with open_package(path) as package:
        return [
            (each.name, each.arena_bytes, each.group_size, each.prefetch_depth)
            for each in package.device_configurations
        ]


def with_local(*ids: int) -> bytes:
    """A package with local configurations of these ids, which are also their names."""
    draft = Draft()
    for number in ids:
        choice = DeviceConfiguration(name=str(number), arena_bytes=1 << 20, group_size=1, prefetch_depth=0)
        draft.sections.append(Section(SectionType.DEVICE_CONFIGURATION, encode(choice), id=number))
    return draft.seal()


def test_what_is_added_is_the_default(package: Path, pack: Pack) -> None:
    [generic] = configurations(package)
    with open_package(package) as opened:
        identity = opened.file_id, opened.manifest.content_id
    status, out, err = pack("configure", package, "--name", "phone", *SIZES)
    assert (status, err) == (0, "")
    assert out == f"added 'phone', the default now: {TABLET}\n"
    assert configurations(package) == [("phone", 1 << 20, 2, 1), generic]
    assert pack("configure", package, "--name", "tablet", *SIZES)[0] == 0
    assert [each[0] for each in configurations(package)] == ["tablet", "phone", "generic"]
    status, out, _ = pack("configure", package, "--name", "phone", "--arena", "64K", *SIZES[2:])
    assert status == 0
    assert out == f"replaced 'phone', the default now: {TABLET.replace('1,048,576', '65,536')}\n"
    assert configurations(package) == [("phone", 1 << 16, 2, 1), ("tablet", 1 << 20, 2, 1), generic]
    with open_package(package) as opened:
        assert (opened.file_id, opened.manifest.content_id) == identity
    assert pack("validate", package)[0] == 0
    assert pack("verify", package)[0] == 0


def test_nothing_is_written_where_nothing_changes(package: Path, pack: Pack) -> None:
    for name in ("phone", "tablet"):
        pack("configure", package, "--name", name, *SIZES)
    before = package.read_bytes()
    status, out, err = pack("configure", package, "--name", "tablet", *SIZES)
    assert (status, err) == (0, "")
    assert out.startswith("nothing to change for 'tablet', the default now: arena 1,048,576 bytes")
    assert package.read_bytes() == before
    assert pack("configure", package, "--name", "phone", *SIZES)[1].startswith("replaced 'phone'")  # the default again
    assert [each[0] for each in configurations(package)] == ["phone", "tablet", "generic"]


def test_it_is_shown(package: Path, pack: Pack) -> None:
    pack("configure", package, "--name", "phone\x1b", *SIZES)
    found = json.loads(pack("inspect", package, "--json")[1])
    assert [each["name"] for each in found["local_device_configurations"]] == ["phone\x1b"]
    assert [each["name"] for each in found["device_configurations"]] == ["generic"]
    assert sum(found["summary"]["space"].values()) == package.stat().st_size
    assert found["summary"]["space"]["device configurations"] > 0
    out = pack("inspect", package)[1]
    assert "local device  prompt  arena bytes  group  depth  lanes  policy" in out
    assert "phone\\x1b" in out
    assert "device configuration 0" in out


def test_it_is_removed_again(package: Path, pack: Pack) -> None:
    before = configurations(package)
    for name in ("phone", "tablet"):
        pack("configure", package, "--name", name, *SIZES)
    status, out, err = pack("configure", package, "--name", "phone", "--remove")
    assert (status, out, err) == (0, f"removed 'phone', the default now is 'tablet': {TABLET}\n", "")
    assert [each[0] for each in configurations(package)] == ["tablet", "generic"]
    edited = package.read_bytes()
    status, _, err = pack("configure", package, "--name", "phone", "--remove")
    assert status == 1
    assert "no local device configuration 'phone'" in err
    assert "hint: there are 'tablet'" in err
    assert package.read_bytes() == edited
    out = pack("configure", package, "--name", "tablet", "--remove")[1]
    assert out.startswith("removed 'tablet', the default now is 'generic': arena ")
    assert configurations(package) == before
    status, _, err = pack("configure", package, "--name", "generic", "--remove")
    assert status == 1
    assert "device configuration 'generic' belongs to the package and cannot be removed" in err
    assert "hint: none was ever added" in err


def test_banks_that_do_not_fit(package: Path, pack: Pack) -> None:
    before = package.read_bytes()
    status, out, err = pack("configure", package, "--name", "phone", "--arena", "16383", *SIZES[2:])
    assert (status, out) == (1, "")
    assert "arena of 16383 bytes, its banks take 16384" in err
    assert "[EMOE-CFG-001]" in err
    assert "hint: give --arena at least 16384, or fewer or smaller groups" in err
    assert package.read_bytes() == before
    assert pack("configure", package, "--name", "phone", "--arena", "16K", *SIZES[2:])[0] == 0


def test_no_group_is_larger_than_a_layer(package: Path, pack: Pack) -> None:
    with open_package(package) as opened:
        most = max(opened.expert_shape.counts)
    sizes = ("--arena", "1M", "--group-size", "4096", "--prefetch-depth", "1")
    status, _, err = pack("configure", package, "--name", "phone", *sizes)
    assert status == 0
    assert err == f"notice: no layer has more than {most} experts, which is the group size and not 4096\n"
    assert configurations(package)[0] == ("phone", 1 << 20, most, 1)


@pytest.mark.parametrize("name", ["", "x" * 129, "\udcff"])
def test_names_that_the_format_has_no_room_for(package: Path, name: str, pack: Pack) -> None:
    before = package.read_bytes()
    status, out, err = pack("configure", package, "--name", name, *SIZES)
    assert (status, out) == (1, "")
    assert "name" in err
    assert package.read_bytes() == before


def test_no_more_than_the_format_allows(package: Path, pack: Pack) -> None:
    package.write_bytes(with_local(*range(64)))
    assert pack("configure", package, "--name", "9", *SIZES)[0] == 0
    assert configurations(package)[0] == ("9", 1 << 20, 2, 1)
    before = package.read_bytes()
    status, _, err = pack("configure", package, "--name", "phone", *SIZES)
    assert status == 1
    assert "package has 64 other local device configurations, 1 would be added: the limit is 64" in err
    assert "hint: remove one first, with --remove" in err
    assert package.read_bytes() == before


def test_a_name_that_has_several_configurations_is_listed_once(package: Path, pack: Pack) -> None:
    draft = Draft()
    for number in (1, 2):
        choice = DeviceConfiguration(
            name="phone", arena_bytes=1 << 20, group_size=1, prefetch_depth=0, prompt_tokens=number
        )
        draft.sections.append(Section(SectionType.DEVICE_CONFIGURATION, encode(choice), id=number))
    package.write_bytes(draft.seal())
    assert pack("configure", package, "--name", "tablet", "--remove").err.endswith("hint: there are 'phone'\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arena", "1M"], "missing: --name, --group-size, --prefetch-depth"),
        (["--name", "phone", *SIZES[:4]], "missing: --prefetch-depth"),
        (["--profile", "nvme", "--memory", "1G", "--arena", "1M"], "--arena does not go with --profile"),
        (["--profile", "nvme"], "--profile needs --memory"),
        (["--memory", "1G"], "--memory needs --profile"),
        ([], "--name, --arena, --group-size and --prefetch-depth are needed, or --profile and --memory, or --remove"),
    ],
)
def test_what_is_wrong_with_options_is_told(package: Path, arguments: list[str], message: str, pack: Pack) -> None:
    assert f"error: {message}\n" in pack("configure", package, *arguments).err


def test_the_highest_id_can_only_be_replaced(package: Path, pack: Pack) -> None:
    highest = (1 << 32) - 1
    package.write_bytes(with_local(3, highest))
    status, _, err = pack("configure", package, "--name", "phone", *SIZES)
    assert status == 1
    assert "last local device configuration has id 4294967295, 1 would be added: the last id is 4294967295" in err
    assert pack("configure", package, "--name", str(highest), *SIZES)[0] == 0
    assert [each[0] for each in configurations(package)] == [str(highest), "3", "generic"]
    assert pack("configure", package, "--name", "phone", *SIZES)[0] == 0
    assert configurations(package)[0][0] == "phone"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--name", "phone"],
        ["--name", "phone", *SIZES[:4]],
        ["--name", "phone", "--remove", *SIZES],
        ["--name", "phone", "--remove", "--prefetch-depth", "0"],
        ["--name", "phone", "--remove", "--lanes", "2"],
        ["--name", "phone", "--remove", "--profile", "nvme"],
        ["--remove"],
        ["--profile", "nvme"],
        ["--profile", "nvme", "--prompt", "8"],
        ["--profile", "nvme", "--memory", "1G", "--arena", "1M"],
        ["--profile", "nvme", "--memory", "1G", "--policy", "on-demand"],
        ["--profile", "nvme", "--memory", "1G", "--prompt", "8,"],
        ["--name", "phone", *SIZES, "--memory", "1G"],
        ["--name", "phone", *SIZES, "--prompt", "8"],
        ["--name", "phone", *SIZES, "--lanes", "65"],
        ["--name", "phone", *SIZES, "--policy", "eager"],
        ["--name", "phone", *SIZES[:2], "--group-size", "0", "--prefetch-depth", "1"],
        ["--name", "phone", "--arena", "64Q", *SIZES[2:]],
        list(SIZES),
    ],
)
def test_usage(package: Path, arguments: list[str], pack: Pack) -> None:
    before = package.read_bytes()
    status, out, err = pack("configure", package, *arguments)
    assert (status, out) == (2, "")
    assert "estream-pack configure --help" in err
    assert package.read_bytes() == before


def test_faults_are_refused(package: Path, tmp_path: Path, pack: Pack) -> None:
    draft = Draft()
    draft.sections.append(Section(SectionType.DEVICE_CONFIGURATION, b"\xc1"))
    package.write_bytes(draft.seal())
    before = package.read_bytes()
    assert pack("configure", package, "--name", "phone", *SIZES)[0] == 1
    assert package.read_bytes() == before
    status, _, err = pack("configure", tmp_path / "absent", "--name", "phone", *SIZES)
    assert status == 1
    assert "file cannot be opened: no such file or directory" in err


def schedules(path: Path) -> list[tuple[int, int, int, int]]:
    """Section id and sizes of each program that prefills."""
    with open_package(path) as package:
        return [
            (entry.id, each.arena_bytes, each.group_size, each.prefetch_depth)
            for entry, each in package.schedules.items()
            if each.phase == Phase.PREFILL
        ]


def decoding(path: Path) -> list[tuple[int, int, int]]:
    """Section id, arena and banks of each program that decodes."""
    with open_package(path) as package:
        return [
            (entry.id, each.arena_bytes, each.bank_count)
            for entry, each in package.schedules.items()
            if each.phase == Phase.DECODE
        ]


def test_a_program_comes_with_the_configuration_and_goes_with_it(package: Path, pack: Pack) -> None:
    assert pack("configure", package, "--name", "phone", *SIZES)[0] == 0
    assert pack("configure", package, "--name", "tablet", "--arena", "64K", *SIZES[2:])[0] == 0
    both = [(0, 1 << 20, 2, 1), (2, 1 << 16, 2, 1)], [(1, 1 << 20, 6), (3, 1 << 16, 6)]
    assert (schedules(package), decoding(package)) == both
    pack("configure", package, "--name", "other", *SIZES)
    assert (schedules(package), decoding(package)) == both
    pack("configure", package, "--name", "phone", "--remove")
    assert (schedules(package), decoding(package)) == both
    pack("configure", package, "--name", "other", "--arena", "2M", *SIZES[2:])
    assert sorted(schedules(package)) == [(0, 2 << 20, 2, 1), (2, 1 << 16, 2, 1)]
    assert sorted(decoding(package)) == [(1, 2 << 20, 6), (3, 1 << 16, 6)]
    pack("configure", package, "--name", "other", "--remove")
    pack("configure", package, "--name", "tablet", "--remove")
    assert (schedules(package), decoding(package)) == ([], [])
    assert pack("validate", package)[1] == "valid structure; weights are not read\n"


def test_a_program_of_a_configuration_in_the_manifest_stays(built: Built, tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "built.emoe"
    path.write_bytes(built().read_bytes())
    with open_package(path) as package:
        [generic] = package.device_configurations
    sizes = "--arena", generic.arena_bytes, "--group-size", generic.group_size
    pack("configure", path, "--name", "same", *sizes, "--prefetch-depth", generic.prefetch_depth)
    assert len(schedules(path)) == len(decoding(path)) == 1
    pack("configure", path, "--name", "same", "--remove")
    assert len(schedules(path)) == len(decoding(path)) == 1


def test_configurations_of_one_arena_share_a_program_to_decode(package: Path, pack: Pack) -> None:
    pack("configure", package, "--name", "phone", *SIZES)
    pack("configure", package, "--name", "tablet", *SIZES[:2], "--group-size", "1", "--prefetch-depth", "0")
    assert sorted(schedules(package)) == [(0, 1 << 20, 2, 1), (2, 1 << 20, 1, 0)]
    listed = json.loads(pack("inspect", package, "--json")[1])["schedules"]
    assert [each["configurations"] for each in listed if each["phase"] == "decode"] == [["tablet", "phone"]]
    pack("configure", package, "--name", "phone", *SIZES[:2], "--group-size", "3", "--prefetch-depth", "0")
    assert decoding(package) == [(1, 1 << 20, 6)]
    pack("configure", package, "--name", "phone", "--remove")
    assert decoding(package) == [(1, 1 << 20, 6)]


def test_an_arena_too_small_for_a_token_has_no_program_to_decode(package: Path, pack: Pack) -> None:
    sizes = "--arena", "4K", "--group-size", "1", "--prefetch-depth", "0"
    pack("configure", package, "--name", "phone", *sizes)
    assert (len(schedules(package)), decoding(package)) == (1, [])


def test_no_more_programs_than_the_format_allows(package: Path, pack: Pack) -> None:
    draft = Draft()
    with open_package(draft.seal()) as opened:
        data = programs_for(opened.expert_shape, opened.device_configurations[0], predicts=False)[0].encode()
    draft.sections += [Section(SectionType.SCHEDULE, data, id=number) for number in range(384)]
    package.write_bytes(draft.seal())
    before = package.read_bytes()
    status, _, err = pack("configure", package, "--name", "phone", *SIZES)
    assert status == 1
    assert "package has 384 schedules, the limit is 384" in err
    assert package.read_bytes() == before


def test_lanes_and_policy(package: Path, pack: Pack) -> None:
    reading = "--lanes", "3", "--policy", "post-routing"
    out = pack("configure", package, "--name", "phone", *SIZES, *reading)[1]
    assert out == "added 'phone', the default now: " + TABLET.replace("2 lanes, pre-", "3 lanes, post-") + "\n"
    listed = json.loads(pack("inspect", package, "--json")[1])
    [phone], [generic] = listed["local_device_configurations"], listed["device_configurations"]
    assert (phone["lanes"], phone["policy"], phone["prompt_tokens"]) == (3, "post-routing", 0)
    assert (generic["lanes"], generic["policy"], generic["prompt_tokens"]) == (2, "pre-routing", 0)
    prefill, decode = listed["schedules"]
    assert (prefill["phase"], prefill["policy"], prefill["configurations"]) == ("prefill", "post-routing", ["phone"])
    assert (decode["phase"], decode["policy"], decode["configurations"]) == ("decode", "post-routing", ["phone"])
    pack("configure", package, "--name", "phone", *SIZES)
    listed = json.loads(pack("inspect", package, "--json")[1])
    assert {each["phase"]: each["policy"] for each in listed["schedules"]} == {
        "prefill": "pre-routing",
        "decode": "post-routing",
    }


def test_a_resident_configuration_has_a_program_to_load(package: Path, pack: Pack) -> None:
    """Two layers of three experts are two groups."""
    sizes = "--arena", "24K", "--group-size", "3"
    status, _, err = pack(
        "configure", package, "--name", "phone", *sizes, "--prefetch-depth", "0", "--policy", "resident"
    )
    assert status == 1
    assert "1 banks cannot keep 2 groups resident" in err
    assert (
        pack("configure", package, "--name", "phone", *sizes, "--prefetch-depth", "1", "--policy", "resident")[0] == 0
    )
    listed = json.loads(pack("inspect", package, "--json")[1])
    assert [(each["phase"], each["policy"]) for each in listed["schedules"]] == [
        ("load", "resident"),
        ("prefill", "resident"),
        ("decode", "post-routing"),
    ]
    assert pack("validate", package)[0] == 0
    pack("configure", package, "--name", "phone", "--remove")
    assert schedules(package) == []


def memory_for(path: Path, arena_bytes: int, tokens: int, profile: str) -> int:
    """What the planner must be given so that an arena of this size fits beside a prompt."""
    with open_package(path) as package:
        return arena_bytes - available_arena(package_workload(package), shipped_profile(profile), 0, tokens)


@pytest.fixture
def sample(tmp_path: Path, built: Built) -> Path:
    path = tmp_path / "sample.emoe"
    shutil.copy(built(), path)
    return path


def test_what_the_planner_chooses_is_written(sample: Path, pack: Pack) -> None:
    with open_package(sample) as opened:
        identity, record = opened.file_id, max(opened.expert_shape.record_lengths)
    memory = memory_for(sample, 9 * record, 256, "nvme")
    planned = "--profile", "nvme", "--memory", str(memory), "--prompt", "256,1,16"
    status, out, err = pack("configure", sample, *planned)
    assert status == 0
    assert err.startswith("notice: estimated figures of nvme: ")
    assert out.splitlines()[0].split()[:4] == ["prompt", "policy", "arena", "group"]
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["256", "1", "16"]
    heading, *written = out[out.index("added") :].splitlines()
    assert heading == "added 'nvme', the default now:"
    with open_package(sample, integrity="full") as opened:
        choices = opened.device()
        assert opened.file_id == identity
        shown = [
            f"arena {each.arena_bytes:,} bytes, group size {each.group_size}, prefetch depth {each.prefetch_depth}, "
            f"{each.lanes} lanes, {each.policy}"
            for each in choices
        ]
        assert [line.partition(": ")[2] for line in written] == shown
        assert 1 < len(choices) <= 3
        assert choices[-1].prompt_tokens == 256
        assert written[-1].startswith("  prompts up to 256, and longer ones: ")
        assert max(each.arena_bytes for each in choices) <= 9 * record
        for choice in choices:
            assert opened.program(choice, Phase.PREFILL) is not None
        for one, other in pairwise(choices):
            assert one.prompt_tokens < other.prompt_tokens
            assert replace(one, prompt_tokens=other.prompt_tokens) != other
    assert pack("verify", sample)[0] == 0
    before = sample.read_bytes()
    assert "\nnothing to change for 'nvme', the default now:\n" in pack("configure", sample, *planned)[1]
    assert sample.read_bytes() == before
    assert "\nadded 'mine', the default now:\n" in pack("configure", sample, *planned, "--name", "mine")[1]
    assert [each.name for each in all_of(sample)] == ["mine"] * len(choices) + ["nvme"] * len(choices) + ["generic"]
    pack("configure", sample, "--name", "mine", "--remove")
    assert [each.name for each in all_of(sample)] == ["nvme"] * len(choices) + ["generic"]
    out = pack("configure", sample, "--name", "nvme", "--remove")[1]
    assert out.startswith("removed 'nvme', the default now is 'generic': arena ")
    assert len(schedules(sample)) == 1


def test_single_tokens_get_all_memory_that_the_longest_prompt_leaves(sample: Path, pack: Pack) -> None:
    with open_package(sample) as opened:
        record = max(opened.expert_shape.record_lengths)
        kept = cache_bytes(opened.manifest.model, 16)
    memory = memory_for(sample, 9 * record + kept, 16, "nvme")
    planned = "--profile", "nvme", "--memory", str(memory), "--prompt", "1,8,16"
    status, out, _ = pack("configure", sample, *planned)
    assert status == 0
    first, *others = all_of(sample)[:-1]
    assert (first.prompt_tokens, first.group_size, first.policy) == (1, 1, "post-routing")
    assert first.arena_bytes == (first.prefetch_depth + 1) * record
    assert first.arena_bytes == max(9 * record, *(other.arena_bytes for other in others))
    assert all(other.prompt_tokens > 1 for other in others)
    assert f"\n  single tokens: arena {first.arena_bytes:,} bytes, group size 1, " in out
    assert pack("verify", sample)[0] == 0


def all_of(path: Path) -> tuple[DeviceConfiguration, ...]:
    with open_package(path) as package:
        return package.device_configurations


def test_lengths_that_are_run_alike_have_one_configuration(sample: Path, pack: Pack) -> None:
    """With memory for everything, all experts stay, and there is nothing to choose."""
    out = pack("configure", sample, "--profile", "ufs-4.0", "--memory", "1G", "--prompt", "16,256,64")[1]
    [choice] = all_of(sample)[:-1]
    assert (choice.name, choice.policy, choice.prompt_tokens) == ("ufs-4.0", "resident", 256)
    assert out.splitlines()[-1].startswith("  prompts up to 256, and longer ones: arena ")
    with open_package(sample) as package:
        assert package.program(choice, Phase.LOAD) is not None


@pytest.mark.parametrize(
    ("context", "lengths"),
    [(48, ["48"]), (64, ["64"]), (100, ["64", "100"]), (2048, ["64", "512", "2,048"]), (9999, ["64", "512", "4,096"])],
)
def test_lengths_go_up_to_the_context_unless_some_are_given(
    context: int, lengths: list[str], package: Path, pack: Pack
) -> None:
    draft = Draft()
    draft.change_model(context_length=context)
    package.write_bytes(draft.seal())
    status, out, _ = pack("configure", package, "--profile", "ufs-4.0", "--memory", "1G")
    assert status == 0
    assert [line.split()[0] for line in out[: out.index("\n\n")].splitlines()[1:]] == lengths


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "1M"], "1.0 MiB of memory for a prompt of 512 tokens, expected at least "),
        (["--memory", "1G", "--prompt", "8,9999"], "a prompt of 9999 tokens, expected at most the model's "),
        (
            ["--memory", "1G", "--profile", "toaster"],
            "profile cannot be read: file cannot be opened: no such file or directory",
        ),
    ],
)
def test_what_cannot_be_planned_changes_nothing(sample: Path, arguments: list[str], message: str, pack: Pack) -> None:
    before = sample.read_bytes()
    status, out, err = pack("configure", sample, "--profile", "ufs-4.0", *arguments)
    assert (status, out) == (1, "")
    assert err.count("error: ") == 1
    assert f"estream-pack: error: {message}" in err
    assert sample.read_bytes() == before
