"""`estream-run bench`, as a user sees it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from estream_loader import open_package
from estream_packer.build import build
from estream_packer.recipe import BuildOptions
from estream_runtime import decode_bench
from estream_runtime.decode_bench import Way
from estream_runtime.session import Session
from estream_spec.prefetch_router import encode_prefetch_router
from fixtures.olmoe import EXPERTS, LAYERS, CheckpointFactory
from fixtures.packed import PackageFactory
from fixtures.prefetching import prefetch_router_for

PROMPT = "in the beginning"
TOP_K = 3
RECORD = 1 << 14
ROOMY = f"{15 * RECORD}"
"""Room for six experts of each layer, and three to read ahead."""


@pytest.fixture(scope="module")
def predicting(
    tmp_path_factory: pytest.TempPathFactory, olmoe_checkpoint: CheckpointFactory, packed: PackageFactory
) -> Path:
    """A package with a prefetch router that predicts at random."""
    folder = tmp_path_factory.mktemp("predicting")
    with open_package(packed()) as package:
        (folder / "router").write_bytes(encode_prefetch_router(prefetch_router_for(package)))
    build(olmoe_checkpoint("base"), folder / "model.emoe", BuildOptions(prefetch=str(folder / "router")))
    return folder / "model.emoe"


def decoded(run: Run, path: Path, *options: str) -> dict[str, Any]:
    """What `--decode --json` found, ways by name."""
    found = run("bench", path, "--decode", "--rounds", "1", "--tokens", "6", "--json", *options)
    assert (found.code, found.err) == (0, "")
    result: dict[str, Any] = json.loads(found.out)
    return {**result, "ways": {way["name"]: way for way in result["ways"]}}


def test_ways_differ_in_what_they_read_and_not_in_tokens(run: Run, packed: PackageFactory) -> None:
    found = decoded(run, packed(), "--arena", ROOMY)
    assert found["same_tokens"]
    assert found["arena_bytes"] == 15 * RECORD
    assert found["reading_mode"].startswith(("direct", "buffered"))
    ways = found["ways"]
    assert [*ways] == ["no cache", "cache", "cache, previous token", "stall-free", "cache, oracle"]
    assert ways["no cache"]["bytes_per_token"] == LAYERS * TOP_K * RECORD
    assert (ways["no cache"]["hit_rate"], ways["no cache"]["stalls_per_token"]) == (0, LAYERS)
    assert 0 < ways["cache"]["bytes_per_token"] < LAYERS * TOP_K * RECORD
    assert ways["cache"]["hit_rate"] > 0
    assert all(way["tokens"] == 6 and way["tokens_per_s"] > 0 for way in ways.values())
    assert ways["cache"]["precision"] is None
    assert ways["cache, oracle"]["precision"] in (1, None)  # None where there was no time to read anything ahead
    assert all(ways[name]["agreeing"] == 7 for name in ways if name != "stall-free")


def test_reading_ahead_is_shown_where_there_is_a_prefetch_router(run: Run, predicting: Path) -> None:
    ways = decoded(run, predicting, "--arena", ROOMY)["ways"]
    assert [*ways][3:5] == ["cache, APEX", "cache, APEX, judged"]
    assert ways["cache, APEX"]["prefetching"] == "on"
    assert ways["cache, APEX, judged"]["prefetching"] == "on, not compared yet"
    assert ways["cache"]["prefetching"] == "off: not asked for"


def test_decoding_as_a_table(run: Run, predicting: Path) -> None:
    options = ["--tokens", "4", "--rounds", "1", "--arena", ROOMY, "--cold", "--prompt", PROMPT, "--prompt-tokens", "7"]
    found = run("bench", predicting, "--decode", *options)
    assert (found.code, found.err) == (0, "")
    first, _, header, *rows = found.out.splitlines()
    assert first.startswith("7 tokens of the text, then 4 tokens decoded, 1 round; arena 0.2 MiB, reads: ")
    assert header.split()[:3] == ["way", "tokens/s", "of"]
    assert [row.startswith("cache ") and "1.00x" in row for row in rows].count(True) == 1
    assert "tokens: the same by all exact ways" in rows
    assert "cache, APEX, judged: reading ahead ended on, not compared yet" in rows
    assert "tokens are those of the exact ways" in found.out


@pytest.mark.parametrize(
    ("slots", "why"), [(TOP_K, "the arena has no room for it"), (LAYERS * EXPERTS, "all experts are in the arena")]
)
def test_why_nothing_is_read_ahead_is_told(slots: int, why: str, run: Run, packed: PackageFactory) -> None:
    found = run("bench", packed(), "--decode", "--tokens", "2", "--rounds", "1", "--arena", f"{slots * RECORD}")
    assert found.code == 0
    assert f"\nnothing was read ahead: {why}\n" in found.out


def test_what_is_left_out_is_told(run: Run, packed: PackageFactory) -> None:
    options = ["--decode", "--tokens", "2", "--rounds", "1"]
    found = run("bench", packed("single"), *options)
    router, stall_free = [line for line in found.out.splitlines() if line.startswith("notice: ")]
    assert "'estream-pack train-prefetch' trains one" in router
    assert "loses too much in a model that routes to 1 expert, so that is left out" in stall_free
    assert "\nstall-free " not in found.out
    assert "\nstall-free " in run("bench", packed("single"), *options, "--substitute-share", "1").out


def test_other_tokens_are_an_error(run: Run, packed: PackageFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = decode_bench._decode

    def faulty(session: Any, way: Way, *arguments: Any) -> decode_bench.Run:
        found = decode(session, way, *arguments)
        if way.name == "cache, oracle":
            found.token_ids[2] += 1
        return found

    monkeypatch.setattr(decode_bench, "_decode", faulty)
    found = run("bench", packed(), "--decode", "--tokens", "4", "--rounds", "1", "--json")
    assert (found.code, found.err) == (1, "estream-run: error: exact ways made different tokens\n")
    result = json.loads(found.out)
    assert not result["same_tokens"]
    assert [way["agreeing"] for way in result["ways"]][-1] == 2


def test_prefill(run: Run, packed: PackageFactory) -> None:
    found = run("bench", packed(), "--rounds", "1", "--prompt-tokens", "9")
    assert (found.code, found.err) == (0, "")
    first, second = found.out.splitlines()
    assert first.startswith("9 random tokens, 1 round: first token after ")
    assert " MiB of experts read (" in second
    result = json.loads(run("bench", packed(), "--rounds", "2", "--prompt-tokens", "9", "--json").out)
    assert [each["prompt_tokens"] for each in result["runs"]] == [9, 9]
    assert result["ttft_s"] == pytest.approx(sum(each["ttft_s"] for each in result["runs"]) / 2)


def test_text_from_a_file(run: Run, packed: PackageFactory, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(PROMPT)
    found = [
        json.loads(run("bench", packed(), "--rounds", "1", "--json", *options).out)["prompt_tokens"]
        for options in (["--prompt", PROMPT], ["--prompt-file", tmp_path / "text"])
    ]
    assert found[0] == found[1] == len(PROMPT) - 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "3"], "--tokens needs --decode"),
        (["--substitute-share", "0.5"], "--substitute-share needs --decode"),
        (["--prompt", "a", "--prompt-file", "b"], "give --prompt or --prompt-file, not both"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], message: str, run: Run, packed: PackageFactory) -> None:
    found = run("bench", packed(), *options)
    assert (found.code, found.out) == (2, "")
    assert message in found.err


def test_arena_too_small_to_decode_in(run: Run, packed: PackageFactory) -> None:
    found = run("bench", packed(), "--decode", "--arena", f"{2 * RECORD}")
    assert (found.code, found.out) == (1, "")
    error, hint = found.err.splitlines()
    assert error.endswith(f"the arena of {2 * RECORD} bytes has no room for a token's experts")
    assert hint.endswith(f"the smallest arena to decode in is {TOP_K * RECORD} bytes")


def test_more_tokens_than_the_context_holds(run: Run, packed: PackageFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_package(packed()) as package:
        context = package.manifest.model.context_length
    options = ["--rounds", "1", "--prompt-tokens"]
    assert run("bench", packed(), "--decode", "--tokens", "2", *options, f"{context - 3}").code == 0
    monkeypatch.setattr(Session, "_run", None)  # nothing is computed before it is refused
    found = run("bench", packed(), "--decode", "--tokens", "3", *options, f"{context - 3}")
    assert (found.code, found.out) == (1, "")
    assert f"{context + 1} tokens: {context - 3} of the prompt, one that follows it and 3 decoded, " in found.err
    assert f"the context holds {context}\n" in found.err
    assert "hint: give a shorter prompt or fewer tokens to decode" in found.err
    plain = run("bench", packed(), *options, f"{context + 1}")
    assert (plain.code, plain.out) == (1, "")
    assert f"prompt has {context + 1} tokens, the context holds {context}\n" in plain.err
    assert "hint: give fewer tokens" in plain.err


def test_a_text_needs_a_tokenizer(run: Run, olmoe_checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    shutil.copytree(olmoe_checkpoint("base"), tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "tokenizer.json").unlink()
    path = tmp_path / "mute.emoe"
    build(tmp_path / "checkpoint", path, BuildOptions(jobs=1))
    found = run("bench", path, "--prompt", PROMPT)
    assert (found.code, found.out) == (1, "")
    assert "the package has no tokenizer" in found.err
    assert run("bench", path, "--prompt-tokens", "3", "--rounds", "1").code == 0
