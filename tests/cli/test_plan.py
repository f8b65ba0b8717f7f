"""Plans on the command line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from cli.conftest import Built, Pack
from estream_spec.profile import Count, encode_profile
from fixtures.estream import device

PHONE = ("--profile", "snapdragon-8-elite-gen-5")


def test_plan_of_a_shape_shows_a_row_for_each_prompt_and_the_frontier(pack: Pack) -> None:
    status, out, err = pack("plan", "olmoe-1b-7b", "--profile", "ufs-4.1", "--memory", "1G", "--prompt", "1,512")
    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert " ".join(rows[0]) == "prompt policy arena group depth lanes time bubble I/O floor"
    assert rows[1][:2] == ["1", "post-routing"]
    assert rows[2][:2] == ["512", "pre-routing"]
    assert "arena against time, a prompt of 512" in out
    assert sum(row[-1:] == ["chosen"] for row in rows) == 2
    assert "above the cap" in out
    assert err.startswith("notice: estimated figures of ufs-4.1: reading, computing of ")


def test_json_has_choice_and_frontier(pack: Pack) -> None:
    status, out, _ = pack("plan", "mixtral-8x7b", "--profile", "nvme", "--memory", "3G", "--json")
    found = json.loads(out)
    [plan] = found["plans"]
    choice = plan["choice"]
    assert status == 0
    assert (found["model"], found["profile"], plan["tokens"]) == ("mixtral-8x7b", "nvme", 512)
    assert choice["time_s"] * (1 + 1e-9) >= max(choice["io_floor_s"], choice["compute_floor_s"])
    assert choice["arena_bytes"] <= plan["arena_cap"]
    arenas = [each["arena_bytes"] for each in plan["frontier"]]
    assert arenas == sorted(arenas)


def test_package_that_fits_stays_resident(built: Built, pack: Pack) -> None:
    status, out, _ = pack("plan", built(), "--profile", "ufs-4.0", "--memory", "1G", "--prompt", "16")
    assert status == 0
    assert out.splitlines()[1].split()[:2] == ["16", "resident"]
    [chosen] = [line for line in out.splitlines() if line.endswith(" chosen")]
    assert chosen.startswith("resident ")
    assert "\nchosen: the smallest arena within 2 % of the best time, but a model that fits " in out
    assert out.splitlines()[-1].startswith("all experts are read once, before any prompt, in ")


def test_decoding_is_planned_beside_the_prompt(pack: Pack) -> None:
    status, out, _ = pack("plan", "olmoe-1b-7b", "--profile", "ufs-4.1", "--memory", "1G", "--prompt", "64")
    assert status == 0
    table = out[out.index("decoding after a prompt of 64") :].splitlines()
    assert table[1].split() == ["prefetch", "hits", "read", "time", "tokens/s", "energy", "energy", "x", "time"]
    assert [line.split()[0] for line in table[2:5]] == ["none", "exact", "oracle"]
    assert re.search(r"^a prompt of 64 takes [\d.]+ J; times its time, [\d.]+ J s$", out, re.MULTILINE)
    assert re.search(r"wants all memory that is left: an arena of [\d.]+ MiB, \d+ experts$", out, re.MULTILINE)
    assert "\nprefetching pays here: attention of a layer hides 0.7 reads of an expert\n" in out
    assert re.search(
        r"^prefetching saves \d.\d% of a token, and without a wrong guess saves \d.\d%$", out, re.MULTILINE
    )
    assert "\nexact: figures of the prefetch router are those published, until one is trained\n" in out
    assert (
        "\nprefetching does not pay here: attention of a layer hides "
        in pack("plan", "olmoe-1b-7b", *PHONE, "--memory", "1G", "--prompt", "64")[1]
    )
    out = pack("plan", "olmoe-1b-7b", "--profile", "ufs-4.1", "--memory", "64G")[1]
    assert "\nprefetching does not pay here: all experts are in the arena\n" in out
    assert "prefetching saves" not in out
    flash = ("plan", "olmoe-1b-7b", "--profile", "ufs-4.1", "--prompt", "64", "--memory")
    [least] = re.findall(r"expected at least (\d+) MiB", pack(*flash, "64M")[2])
    out = pack(*flash, f"{int(least) + 100}M")[1]
    assert "\nprefetching does not pay here: the arena has no room for it\n" in out
    [least] = re.findall(r"expected at least (\d+) MiB", pack("plan", "mixtral-8x7b", *PHONE, "--memory", "64M")[2])
    status, out, _ = pack("plan", "mixtral-8x7b", *PHONE, "--memory", f"{least}M")
    assert status == 0
    assert "decoding after a prompt of 512: no room for the experts of a token; more memory lets them stay\n" in out


def test_energy_is_not_told_where_the_profile_has_no_figures(tmp_path: Path, pack: Pack) -> None:
    profile = tmp_path / "silent.json"
    profile.write_bytes(encode_profile(device()))
    status, out, _ = pack("plan", "olmoe-1b-7b", "--profile", profile, "--memory", "1G")
    assert status == 0
    assert " takes " not in out
    [row] = [line for line in out.splitlines() if line.startswith("oracle ")]
    assert "J" not in row
    found = json.loads(pack("plan", "olmoe-1b-7b", "--profile", profile, "--memory", "1G", "--json")[1])
    assert found["energies"] == [None]
    assert [way["energy"] for way in found["decoding"][0]["ways"]] == [None] * 3


def test_device_with_less_memory_than_asked_for_is_told(tmp_path: Path, pack: Pack) -> None:
    profile = tmp_path / "small.json"
    memory = Count(value=1 << 30, basis="measured", source="a test")
    profile.write_bytes(encode_profile(msgspec.structs.replace(device(), memory_bytes=memory)))
    status, out, err = pack("plan", "olmoe-1b-7b", "--profile", profile, "--memory", "4G", "--json")
    assert status == 0
    assert "notice: fit has 1.00 GiB of memory, which counts and not --memory\n" in err
    assert (json.loads(out)["asked_bytes"], json.loads(out)["memory_bytes"]) == (4 << 30, 1 << 30)
    assert "which counts" not in pack("plan", "olmoe-1b-7b", "--profile", profile, "--memory", "1G")[2]


def test_picture_is_written(tmp_path: Path, pack: Pack) -> None:
    picture = tmp_path / "frontier.svg"
    status, out, _ = pack("plan", "olmoe-1b-7b", *PHONE, "--memory", "1G", "--svg", picture)
    assert status == 0
    assert out.splitlines()[-1] == f"wrote {picture}"
    assert picture.read_text().startswith("<svg ")


@pytest.mark.parametrize("prompts", ["", "0", "64,", "64,x", "-1", "²", "99999999", "1" * 5000])
def test_wrong_prompt_lengths_are_a_usage_error(prompts: str, pack: Pack) -> None:
    status, _, err = pack("plan", "olmoe-1b-7b", *PHONE, "--memory", "1G", f"--prompt={prompts}")
    assert status == 2
    assert "is not a list of numbers of tokens such as 64,512" in err


@pytest.mark.parametrize("prompts", [",".join(map(str, range(1, 66))), "1," * 5000 + "1"])
def test_more_prompt_lengths_than_a_package_has_room_for_are_a_usage_error(prompts: str, pack: Pack) -> None:
    status, _, err = pack("plan", "olmoe-1b-7b", *PHONE, "--memory", "1G", f"--prompt={prompts}")
    assert status == 2
    assert "more than 64 lengths" in err


def test_pipe_is_no_profile_and_not_waited_for(tmp_path: Path, pack: Pack) -> None:
    os.mkfifo(tmp_path / "pipe")
    status, _, err = pack("plan", "olmoe-1b-7b", "--profile", tmp_path / "pipe", "--memory", "1G")
    assert status == 1
    assert "error: profile cannot be read: not a regular file" in err


def test_too_little_memory_is_refused_with_what_is_needed(tmp_path: Path, pack: Pack) -> None:
    picture = tmp_path / "frontier.svg"
    status, out, err = pack("plan", "olmoe-1b-7b", *PHONE, "--memory", "64M", "--svg", picture)
    assert (status, out) == (1, "")
    assert "error: 64.0 MiB of memory for a prompt of 512 tokens, expected at least " in err
    assert "hint: the program 192.0 MiB, weights other than experts " in err
    assert not picture.exists()
    [least] = re.findall(r"expected at least (\d+) MiB", err)
    for memory, enough in ((int(least), True), (int(least) - 1, False)):
        status = pack("plan", "olmoe-1b-7b", *PHONE, "--memory", f"{memory}M")[0]
        assert status == (0 if enough else 1)


def test_unknown_names_are_refused_with_the_known_ones(pack: Pack) -> None:
    status, _, err = pack("plan", "gpt", *PHONE, "--memory", "1G")
    assert status == 1
    assert "hint: shapes are olmoe-1b-7b, " in err
    status, _, err = pack("plan", "olmoe-1b-7b", "--profile", "toaster", "--memory", "1G")
    assert status == 1
    assert "error: profile cannot be read: file cannot be opened: no such file or directory (at toaster)" in err
