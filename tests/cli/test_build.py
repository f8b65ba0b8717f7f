from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from cli.conftest import Pack
from estream_loader import open_package
from estream_packer.cli import group
from fixtures.olmoe import CheckpointFactory


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_build_packs_a_checkpoint_and_says_where_the_bytes_went(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, pack: Pack
) -> None:
    output = tmp_path / "model.emoe"
    status, out, err = pack("build", olmoe_checkpoint("base"), "-o", output)
    assert (status, err) == (0, "")
    with open_package(output, integrity="full") as package:
        assert f"file id {package.file_id.hex()}" in out
    assert f"{output.stat().st_size:,}" in out
    assert f"wrote {output}" in out
    for word in ("embedding", "attention", "router", "experts", "head", "bits per weight", "record padding", "MB/s"):
        assert word in out


def test_json_is_the_whole_output_and_adds_up(tmp_path: Path, olmoe_checkpoint: CheckpointFactory, pack: Pack) -> None:
    output = tmp_path / "model.emoe"
    status, out, _ = pack(
        "build", olmoe_checkpoint("base"), "-o", output, "--json", "--experts", "w8", "--dense", "f32"
    )
    result = json.loads(out)
    assert status == 0
    assert result["output"] == str(output)
    assert sum(result["summary"]["space"].values()) == result["summary"]["file_length"] == output.stat().st_size
    assert {role["role"]: role["bits_per_weight"] for role in result["summary"]["roles"]}["head"] == 32


def test_a_recipe_and_the_same_flags_give_the_same_package(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, pack: Pack
) -> None:
    (tmp_path / "checkpoint").symlink_to(olmoe_checkpoint("base"))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[source]\ncheckpoint = "checkpoint"\n[model]\nname = "Tiny"\nlicence = "MIT"\n'
        '[weights]\nexperts = "w4g64"\ndense = "w4g32"\nactivations = "f32"\n'
    )
    assert pack("build", recipe, "-o", tmp_path / "recipe.emoe", "--jobs", "3", "--json")[0] == 0
    flags = ["--experts", "w4g64", "--dense", "w4g32", "--activations", "f32", "--name", "Tiny", "--licence", "MIT"]
    assert pack("build", tmp_path / "checkpoint", "-o", tmp_path / "flags.emoe", *flags)[0] == 0
    assert (tmp_path / "recipe.emoe").read_bytes() == (tmp_path / "flags.emoe").read_bytes()


def test_a_checkpoint_without_tokenizer_is_packed_with_a_notice(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, pack: Pack
) -> None:
    shutil.copytree(olmoe_checkpoint("base"), tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "tokenizer.json").unlink()
    recipe = tmp_path / "RECIPE.TOML"
    recipe.write_text('[source]\ncheckpoint = "checkpoint"\n')
    status, out, err = pack("build", recipe, "-o", tmp_path / "model.emoe", "--json")
    assert status == 0
    assert [f"notice: {notice}" for notice in json.loads(out)["notices"]] == err.splitlines()
    assert "neither tokenizer.json nor tokenizer.model" in err


def test_a_recipe_is_never_overruled_and_never_replaced(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, pack: Pack
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[source]\ncheckpoint = "{olmoe_checkpoint("base")}"\n')
    status, _, err = pack("build", recipe, "-o", tmp_path / "model.emoe", "--experts", "f32", "--name", "x")
    assert status == 2
    assert "error: --experts, --name cannot be given with a recipe" in err
    status, _, err = pack("build", recipe, "-o", recipe)
    assert (status, "output is the recipe" in err) == (1, True)
    assert names(tmp_path) == ["recipe.toml"]


def test_processes_and_urls_give_the_same_package(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, pack: Pack
) -> None:
    source = olmoe_checkpoint("base")
    assert pack("build", source, "-o", tmp_path / "threads.emoe").code == 0
    urls = f"file://{source}", "-o", f"file://{tmp_path}/processes.emoe"
    code, out, err = pack("build", *urls, "--executor", "processes", "--jobs", "2")
    assert (code, err) == (0, "")
    assert f"wrote {tmp_path}/processes.emoe" in out
    assert (tmp_path / "processes.emoe").read_bytes() == (tmp_path / "threads.emoe").read_bytes()


@pytest.mark.parametrize("name", ["gpu", "thread", "dask://", "dask://host", "dask://host:port", "dask://:1"])
def test_an_executor_that_cannot_be_is_a_usage_error(name: str, tmp_path: Path, pack: Pack) -> None:
    code, out, err = pack("build", tmp_path, "-o", tmp_path / "x.emoe", "--executor", name)
    assert (code, out) == (2, "")
    assert f"{name!r}, expected threads, processes or dask://HOST:PORT" in err


def test_a_chat_template_that_cannot_be_used_is_told(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, pack: Pack
) -> None:
    folder = shutil.copytree(olmoe_checkpoint("base"), tmp_path / "checkpoint")
    for text, told in (("{% for m in messages %}{{ m.content }}{% endfor %}", False), ("{% for m in", True)):
        (folder / "chat_template.jinja").write_text(text)
        code, _, err = pack("build", folder, "-o", tmp_path / "x.emoe")
        assert code == 0
        assert ("cannot use this package" in err) is told


def test_an_executor_or_a_place_that_cannot_be_had_exits_with_1(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, pack: Pack
) -> None:
    source, output = olmoe_checkpoint("base"), tmp_path / "x.emoe"
    for arguments, message in (
        ((source, "-o", output, "--executor", "dask://127.0.0.1:1"), "scheduler cannot be reached"),
        (("nosuch://model", "-o", output), "URL cannot be used: protocol not known"),
        ((source, "-o", "nosuch://x.emoe"), "URL cannot be used: protocol not known"),
    ):
        code, out, err = pack("build", *arguments)
        assert (code, out) == (1, "")
        assert err.startswith("estream-pack: error: ")
        assert message in err
        assert "Traceback" not in err
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing argument 'source'"),
        (["."], "missing option '-o'"),
        ([".", "-o", "x.emoe", "--experts", "w5"], "'w5' is not one of 'f32', 'w8', 'w4g32', 'w4g64'"),
        ([".", "-o", "x.emoe", "--dense", "w4g64"], "'w4g64' is not one of"),
        ([".", "-o", "x.emoe", "--jobs", "0"], "0 is not in the range"),
        ([".", "-o", "x.emoe", "--fast"], "no such option"),
    ],
)
def test_wrong_usage_exits_with_2(pack: Pack, arguments: list[str], message: str) -> None:
    status, out, err = pack("build", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("estream-pack: error: ")
    assert message in err.lower()
    assert "estream-pack: hint: see 'estream-pack build --help'" in err


def test_a_refusal_exits_with_1_and_says_what_to_do(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, pack: Pack
) -> None:
    source = olmoe_checkpoint("base")
    for arguments, message, hint in (
        ((tmp_path / "absent", "-o", tmp_path / "x.emoe"), "folder cannot be read", "download it first"),
        ((source, "-o", tmp_path), "output is a folder", "give the name of the .emoe file"),
        ((source, "-o", tmp_path / "absent" / "x.emoe"), "no such file or directory", "make the folder first"),
        ((source, "-o", source / "config.json"), "output is a file of the checkpoint", "give another name"),
    ):
        status, out, err = pack("build", *arguments)
        assert (status, out) == (1, "")
        error_line, hint_line = err.splitlines()
        assert error_line.startswith("estream-pack: error: ")
        assert message in error_line
        assert hint_line.startswith("estream-pack: hint: ")
        assert hint in hint_line
    assert names(tmp_path) == []


def test_a_limit_on_file_size_is_a_plain_error(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
from estream_packer.cli import main
main()
"""
    process = subprocess.run(
        [sys.executable, "-c", code, "build", str(olmoe_checkpoint("base")), "-o", str(tmp_path / "model.emoe")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert process.stderr.startswith("estream-pack: error: package cannot be written: file too large")
    assert "Traceback" not in process.stderr
    assert names(tmp_path) == []


def test_every_verb_is_a_command_that_the_help_lists(pack: Pack) -> None:
    status, out, _ = pack("--help")
    verbs = group.list_commands(click.Context(group))
    assert status == 0
    assert {"build", "sample"} <= set(verbs)
    for verb in verbs:
        assert f"  {verb} " in out
        assert pack(verb, "--help")[0] == 0


def test_an_unknown_verb_is_wrong_usage(pack: Pack) -> None:
    status, _, err = pack("bild")
    assert (status, "bild" in err, "estream-pack --help" in err) == (2, True, True)
