"""`estream-run`, as a user sees it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cli.conftest import Run
from estream_loader import open_package, rpcmem
from estream_loader.console import size
from estream_packer.configuring import configure_changes
from estream_packer.editing import edit_package
from estream_packer.signing import sign
from estream_runtime import Session, backends
from estream_runtime.backends import GRAPH_BACKENDS
from estream_runtime.native import library
from estream_spec.manifest import DeviceConfiguration
from fixtures.cdsprpc import StandIn
from fixtures.olmoe import EXPERTS, LAYERS
from fixtures.packed import UNQUANTISED, PackageFactory

PROMPT = "in the beginning"


def command_line(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-c", "from estream_runtime.cli import main; main()", *map(str, arguments)]


def test_generate_shows_the_text_and_what_it_cost(run: Run, packed: PackageFactory) -> None:
    with open_package(packed()) as package, Session(package, arena_bytes=3 << 14) as session:
        ids = list(session.generate(package.tokenizer.encode(PROMPT).ids, 20))
        text = package.tokenizer.decode(ids)
    found = run("generate", packed(), "--prompt", PROMPT, "--max-new-tokens", "20", "--arena", "48K")
    assert (found.code, found.out) == (0, f"{text}\n")
    first, second, third = found.err.splitlines()
    assert first.startswith(f"{len(PROMPT) - 3} tokens in, 20 out; first token after ")
    assert first.endswith(" tokens/s")
    assert re.match(rf"{backends.default_backend()}( \(\w+\))?, arena 49,152 bytes, ", second)
    assert "% of the package's" in second
    assert "of experts read in" in second
    assert re.fullmatch(
        r"decoding: \d+% of experts there from earlier tokens, [\d,]+ bytes and \d\.\d stalls a token; "
        r"reading ahead off: the package has no prefetch router",
        third,
    )


def test_one_token_is_not_decoded(run: Run, packed: PackageFactory) -> None:
    found = run("generate", packed(), "--prompt", PROMPT, "--max-new-tokens", "1")
    assert "decoding" not in found.err


def test_late_experts_may_be_replaced(run: Run, packed: PackageFactory) -> None:
    options = ["--prompt", PROMPT, "--max-new-tokens", "12", "--arena", "96K"]
    found = run("generate", packed(), *options, "--mode", "stall-free", "--substitute-share", "1")
    assert found.code == 0
    assert re.search(
        r"; reading ahead off: the package .* router; \d+ experts replaced, which had \d+\.\d% of the weights\n$",
        found.err,
    )
    stats = json.loads(run("generate", packed(), *options, "--mode", "stall-free", "--json").out)["stats"]
    assert {"hits", "bytes_read", "stalls", "substituted", "lost_share"} <= {*stats["decoding"]}
    assert json.loads(run("generate", packed(), *options, "--json").out)["stats"]["decoding"]["substituted"] == 0
    exact = run("generate", packed(), *options, "--substitute-share", "1")
    assert (exact.code, exact.out) == (2, "")
    assert "--substitute-share needs --mode stall-free" in exact.err
    refused = run("generate", packed("single"), *options, "--mode", "stall-free")
    assert (refused.code, refused.out) == (1, "")
    assert "loses too much in a model that routes to 1 expert" in refused.err


def test_generate_as_json(run: Run, packed: PackageFactory) -> None:
    path = packed()
    plain = run("generate", path, "--prompt", PROMPT, "--max-new-tokens", "9")
    found = run("generate", path, "--prompt", PROMPT, "--max-new-tokens", "9", "--json")
    assert (found.code, found.err) == (0, "")
    result = json.loads(found.out)
    assert plain.out == result["text"] + "\n"
    assert len(result["token_ids"]) == result["stats"]["new_tokens"] == 9
    assert result["stats"]["package_bytes"] == path.stat().st_size
    assert result["stats"]["peak_arena_bytes"] < path.stat().st_size


@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
@pytest.mark.parametrize("integrity", ["open", "paged", "full"])
def test_text_is_the_same_everywhere(backend: str, integrity: str, run: Run, packed: PackageFactory) -> None:
    options = ["--prompt", PROMPT, "--max-new-tokens", "6", "--temperature", "0.9", "--top-p", "0.8", "--seed", "5"]
    path = packed("base", UNQUANTISED)
    expected = run("generate", path, *options)
    found = run("generate", path, *options, "--backend", backend, "--integrity", integrity, "--threads", "1")
    assert (found.code, found.out) == (0, expected.out)


def test_without_a_compiled_kernel_other_means_compute_and_that_is_told(
    run: Run, packed: PackageFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ["--prompt", PROMPT, "--max-new-tokens", "6"]
    expected = run("generate", packed(), *options, "--backend", "portable")
    assert "notice" not in expected.err
    monkeypatch.setattr(library, "HERE", tmp_path)
    for module in (library, backends):
        monkeypatch.setattr(module, "paths_here", tuple)
    found = run("generate", packed(), *options)
    assert (found.code, found.out) == (0, expected.out)
    notice, _, cost, _ = found.err.splitlines()
    assert notice.startswith("notice: the native kernel was not compiled when estream-pack was installed, so ONNX")
    assert cost.startswith("portable, arena ")
    stats = json.loads(run("generate", packed(), *options, "--json").out)["stats"]
    assert (stats["backend"], f"notice: {stats['notice']}") == ("portable", notice)
    refused = run("generate", packed(), *options, "--backend", "native")
    assert (refused.code, refused.out) == (1, "")
    assert "the native kernel was not compiled" in refused.err
    assert "C compiler" in refused.err


def test_backend_that_was_asked_for_is_named_without_a_notice(run: Run, packed: PackageFactory) -> None:
    for backend in ("portable", "reference"):
        found = run("generate", packed(), "--prompt", PROMPT, "--max-new-tokens", "2", "--backend", backend, "--json")
        stats = json.loads(found.out)["stats"]
        assert (stats["backend"], stats["notice"], stats["arena_kind"]) == (backend, None, "ordinary")


def test_arena_may_be_shared_with_an_npu(run: Run, packed: PackageFactory, tmp_path: Path) -> None:
    StandIn(tmp_path)
    options = ["--prompt", PROMPT, "--max-new-tokens", "3", "--arena", "48K"]
    line = command_line("generate", packed(), *options, "--arena-kind", "rpcmem")
    found = subprocess.run(line, env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, run("generate", packed(), *options).out)
    assert ", arena 49,152 bytes of rpcmem, " in found.stderr


def test_arena_cannot_be_shared_without_the_library_for_it(
    run: Run, packed: PackageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpcmem, "LIBRARY", "libcdsprpc-absent.so")
    found = run("generate", packed(), "--prompt", PROMPT, "--arena-kind", "rpcmem")
    assert (found.code, found.out) == (1, "")
    error, hint = found.err.splitlines()
    assert error.startswith("estream-run: error: no memory to share with an NPU: libcdsprpc-absent.so: cannot open")
    assert "ask for the arena kind 'ordinary'" in hint
    assert run("generate", packed(), "--prompt", PROMPT, "--arena-kind", "shared").code == 2


def test_when_and_how_experts_are_read_changes_no_text(run: Run, packed: PackageFactory) -> None:
    options = ["--prompt", PROMPT, "--max-new-tokens", "5", "--json"]
    expected = json.loads(run("generate", packed(), *options).out)
    assert (expected["stats"]["policy"], expected["stats"]["lanes"]) == ("pre-routing", 2)
    found = json.loads(run("generate", packed(), *options, "--policy", "on-demand", "--lanes", "5").out)
    assert found["text"] == expected["text"]
    assert (found["stats"]["policy"], found["stats"]["lanes"]) == ("on-demand", 5)
    assert found["stats"]["reading_mode"]
    assert run("generate", packed(), *options, "--policy", "resident").code == 2
    assert run("score", packed(), *options[:2], "--choice", "a", "--lanes", "0").code == 2


def test_a_device_is_chosen_by_its_name(run: Run, packed: PackageFactory, tmp_path: Path) -> None:
    path = tmp_path / "configured.emoe"
    shutil.copy(packed(), path)
    choices = [
        DeviceConfiguration(name="phone", arena_bytes=1 << 20, group_size=1, prefetch_depth=4, lanes=3, **changes)
        for changes in ({"policy": "on-demand", "prompt_tokens": 8}, {"policy": "post-routing"})
    ]
    edit_package(path, lambda package: configure_changes(package, choices))
    options = ["--prompt", PROMPT, "--max-new-tokens", "5", "--json"]
    expected = json.loads(run("generate", packed(), *options).out)
    for device, policy, lanes in ((), "post-routing", 3), (("--device", "generic"), "pre-routing", 2):
        found = json.loads(run("generate", path, *options, *device).out)
        assert found["text"] == expected["text"]
        assert found["stats"]["prompt_tokens"] > 8
        assert (found["stats"]["policy"], found["stats"]["lanes"]) == (policy, lanes)
    found = run("score", path, "--prompt", PROMPT, "--choice", "a", "--device", "watch")
    assert (found.code, found.out) == (1, "")
    assert "estream-run: error: no device configuration for 'watch'" in found.err
    assert "hint: the package has 'phone', 'generic'" in found.err


def test_an_end_token_is_not_shown(run: Run, packed: PackageFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    def end_at_once(*_: object) -> int:
        return 0

    monkeypatch.setattr("estream_runtime.sampling.Sampler.choose", end_at_once)
    found = run("generate", packed(), "--prompt", PROMPT)
    assert (found.code, found.out) == (0, "\n")
    assert " 1 out;" in found.err


def test_score_marks_the_likeliest_choice(run: Run, packed: PackageFactory) -> None:
    choices = [" the end", " of", "zzzz"]
    with open_package(packed()) as package, Session(package) as session:
        encode = package.tokenizer.encode
        scores = session.score(encode(PROMPT).ids, [encode(choice).ids for choice in choices])
    options = [part for choice in choices for part in ("--choice", choice)]
    found = run("score", packed(), "--prompt", PROMPT, *options)
    assert found.code == 0
    lines = [
        f"{'*' if score == max(scores) else ' '} {score:10.4f}  {choice}\n"
        for choice, score in zip(choices, scores, strict=True)
    ]
    assert found.out == "".join(lines)
    result = json.loads(run("score", packed(), "--prompt", PROMPT, *options, "--json").out)
    assert result["best"] == scores.index(max(scores))
    assert [each["text"] for each in result["choices"]] == choices
    assert [each["log_likelihood"] for each in result["choices"]] == pytest.approx(scores)


def test_score_of_a_text_that_begins_with_a_part_of_a_character(
    run: Run, packed: PackageFactory, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("漢", encoding="utf-8")
    result = json.loads(run("score", packed(), "--text", text, "--json").out)
    assert (result["tokens"], result["bytes"]) == (2, 3)


def test_score_of_a_text(run: Run, packed: PackageFactory, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("in the beginning was 漢字", encoding="utf-8")
    result = json.loads(run("score", packed(), "--text", text, "--json").out)
    # The first token, one byte here, is not predicted.
    assert result["bytes"] == len(text.read_bytes()) - 1
    bits = result["bits_per_byte"] * result["bytes"]
    assert 2 ** (bits / result["tokens"]) == pytest.approx(result["perplexity"])
    found = run("score", packed(), "--text", text)
    assert found.code == 0
    assert found.out.splitlines() == [
        f"perplexity     {result['perplexity']:.4f} over {result['tokens']} tokens",
        f"bits per byte  {result['bits_per_byte']:.4f} over {result['bytes']} bytes",
    ]
    narrow = json.loads(run("score", packed(), "--text", text, "--window", "2", "--json").out)
    assert narrow["tokens"] == result["tokens"]
    assert narrow["perplexity"] != pytest.approx(result["perplexity"], rel=1e-3)


@pytest.mark.parametrize(
    ("verb", "message", "hint"),
    [
        (["generate", "FILE", "--prompt", ""], "prompt has no tokens", None),
        (["generate", "FILE", "--prompt", "a" * 513], "prompt has 513 tokens, the context holds 512", "give fewer"),
        (["generate", "FILE", "--prompt", "a\udcff"], "text is not valid UTF-8", None),
        (["generate", "FILE", "--prompt", "a", "--arena", "16383"], "holds no expert record", "is 16384 bytes"),
        (
            ["generate", "nowhere.emoe", "--prompt", "a"],
            "file cannot be opened: no such file or directory (at nowhere.emoe)",
            None,
        ),
        (["score", "FILE", "--prompt", "a", "--choice", ""], "choice 0 has no tokens", None),
        (["score", "FILE", "--text", "nowhere.txt"], "no such file or directory (at nowhere.txt)", None),
    ],
)
def test_what_cannot_be_run_is_refused(
    verb: list[str], message: str, hint: str | None, run: Run, packed: PackageFactory
) -> None:
    found = run(*[str(packed()) if part == "FILE" else part for part in verb])
    lines = found.err.splitlines()
    assert (found.code, found.out) == (1, "")
    assert lines[0].startswith("estream-run: error: ")
    assert message in lines[0]
    assert len(lines) == (1 if hint is None else 2)
    if hint is not None:
        assert lines[1].startswith("estream-run: hint: ")
        assert hint in lines[1]


@pytest.mark.parametrize(
    "verb",
    [
        ["generate", "FILE"],
        ["generate", "FILE", "--prompt", "a", "--arena", "8X"],
        ["generate", "FILE", "--prompt", "a", "--backend", "gpu"],
        ["generate", "FILE", "--prompt", "a", "--threads", "0"],
        ["generate", "FILE", "--prompt", "a", "--max-new-tokens", "-1"],
        ["generate", "--prompt", "a"],
        ["generate", "FILE", "--prompt", "a", "--minimum-counter", "1"],
        ["generate", "FILE", "--prompt", "a", "--signature", "FILE"],
        ["score", "FILE"],
        ["score", "FILE", "--prompt", "a"],
        ["score", "FILE", "--choice", "a"],
        ["score", "FILE", "--prompt", "a", "--choice", "b", "--text", "c"],
        ["sing", "FILE"],
    ],
)
def test_wrong_usage_is_told_from_refusal(verb: list[str], run: Run, packed: PackageFactory) -> None:
    found = run(*[str(packed()) if part == "FILE" else part for part in verb])
    error, hint = found.err.splitlines()
    assert (found.code, found.out) == (2, "")
    assert error.startswith("estream-run: error: ")
    assert hint.startswith("estream-run: hint: see 'estream-run")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--temperature", "-1", "-1.0 is not in the range x>=0"),
        ("--temperature", "nan", "'nan' is not a finite number"),
        ("--temperature", "inf", "'inf' is not a finite number"),
        ("--top-p", "0", "0.0 is not in the range 0<x<=1"),
        ("--top-p", "1.1", "1.1 is not in the range 0<x<=1"),
        ("--top-p", "nan", "'nan' is not a finite number"),
        ("--seed", "-1", "-1 is not in the range x>=0"),
        (
            "--arena",
            "8iB",
            "'8iB' is not a size, expected bytes, or a number with K, M or G (or KiB, MiB, GiB), such as",
        ),
        (
            "--arena",
            "999999999999999G",
            "'999999999999999G' is more than the largest package has, 17592186044416 bytes",
        ),
    ],
)
def test_a_value_out_of_range_is_wrong_usage(
    option: str, value: str, message: str, run: Run, packed: PackageFactory
) -> None:
    found = run("generate", packed(), "--prompt", "a", option, value)
    assert (found.code, found.out) == (2, "")
    assert f"Invalid value for '{option}': {message}" in found.err


def test_damage_is_refused(run: Run, packed: PackageFactory, tmp_path: Path) -> None:
    data = bytearray(packed().read_bytes())
    with open_package(bytes(data)) as package:
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                data[package.experts.place(layer, expert).offset] ^= 1
    damaged = tmp_path / "damaged.emoe"
    damaged.write_bytes(data)
    found = run("generate", damaged, "--prompt", "a")
    assert (found.code, found.out) == (1, "")
    assert found.err.startswith("estream-run: error: record has checksum ")
    assert found.err.splitlines()[0].endswith(" [EMOE-REC-001]")
    text = tmp_path / "latin.txt"
    text.write_bytes("naïve".encode("latin-1"))
    found = run("score", packed(), "--text", text)
    assert (found.code, found.err) == (1, f"estream-run: error: text is not UTF-8 (at offset 0x2, {text})\n")


VERBS = (["generate", "--prompt", "a", "--max-new-tokens", "2"], ["score", "--prompt", "a", "--choice", "b"])


@pytest.mark.parametrize("verb", VERBS, ids=[verb[0] for verb in VERBS])
def test_a_signature_can_be_required(verb: list[str], run: Run, packed: PackageFactory, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    required = ["--key", key.public_key().public_bytes_raw().hex()]
    with open_package(packed()) as package:
        data, signature = bytearray(packed().read_bytes()), sign(package.file_id, key, 3)
        last = package.experts.place(LAYERS - 1, EXPERTS - 1)
    path, beside = tmp_path / "a.emoe", tmp_path / "a.sig"
    path.write_bytes(data)
    beside.write_bytes(signature.encode())
    found = run(verb[0], path, *verb[1:], *required)
    assert (found.code, found.out) == (1, "")
    assert "no signature by key" in found.err
    accepted = run(verb[0], path, *verb[1:], *required, "--signature", beside, "--minimum-counter", "3")
    assert (accepted.code, accepted.out) == (0, run(verb[0], path, *verb[1:]).out)
    found = run(verb[0], path, *verb[1:], *required, "--signature", beside, "--minimum-counter", "4")
    assert (found.code, found.out) == (1, "")
    assert "expected at least 4" in found.err
    data[last.offset + last.length - 1] ^= 1
    path.write_bytes(data)
    found = run(verb[0], path, *verb[1:], *required, "--signature", beside)
    assert (found.code, found.out) == (1, "")  # whether or not this run would have read that expert
    assert "[EMOE-REC-001]" in found.err


def test_help_and_version(run: Run) -> None:
    for arguments in (["--help"], ["generate", "-h"], ["score", "--help"]):
        found = run(*arguments)
        assert (found.code, found.err) == (0, "")
        assert found.out.startswith("Usage: estream-run ")
    assert run("--version").out.startswith("estream-run, version ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("777", 777), ("512K", 512 << 10), ("8M", 8 << 20), ("8MiB", 8 << 20), ("1G", 1 << 30)],
)
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected


def test_a_closed_pipe_ends_quietly(packed: PackageFactory) -> None:
    line = command_line("generate", packed(), "--prompt", PROMPT, "--max-new-tokens", "400")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_an_interrupt_ends_with_130(packed: PackageFactory) -> None:
    line = command_line("generate", packed(), "--prompt", PROMPT, "--max-new-tokens", "450")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b"\nestream-run: error: interrupted\n"
    assert process.returncode == 130
