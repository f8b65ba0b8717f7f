from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from estream_loader.console import run_command
from estream_packer import cli as packer
from estream_packer.build import build
from estream_packer.htp import tiles
from estream_packer.recipe import read_recipe
from estream_packer.sample import sample_files
from estream_runtime import cli as runtime
from estream_spec.errors import IntegrityError

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sample model, packed, in the folder of the process, which is its user's home, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    build(Path(str(sample_files())), tmp_path / "sample.emoe")
    return tmp_path / "sample.emoe"


PROGRAMS = {"estream-pack": packer.group, "estream-run": runtime.group}


def run_example(word: str) -> None:
    """Run the example in Python that has a word which no other has."""
    [example] = [each for each in blocks("python") if word in each]
    exec(compile(example, "README.md", "exec"), {})


def run_lines(word: str, *, others: bool) -> str:
    """Run the command lines of the block that has a word which no other has, those of other programs if wanted."""
    [lines] = [each for each in blocks("console") if word in each]
    for line in lines.splitlines():
        program, *arguments = [os.path.expanduser(word) for word in shlex.split(line.removeprefix("$ "), comments=True)]  # noqa: PTH111
        if program in PROGRAMS:
            assert run_command(PROGRAMS[program], program, arguments) == 0, line
        elif others:
            subprocess.run([program, *arguments], check=True)
    return lines


def test_the_python_example_runs(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it shows works on the sample model and prints English."""
    run_example("session.score")
    assert re.search(r"[a-z]{2,} [a-z]{2,} ", capsys.readouterr().out)


def test_signing_works_as_shown(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command lines about signing all succeed, and the example in Python after them trusts what they signed."""
    shutil.copy(sample, "w8.emoe")
    assert "w8.sig" in run_lines("keygen", others=True)
    run_example("what the vendor released")
    assert "is what the vendor released" in capsys.readouterr().out
    data = bytearray(sample.read_bytes())
    data[1 << 20] ^= 1
    sample.write_bytes(data)
    with pytest.raises(IntegrityError):
        run_example("what the vendor released")


def test_decoding_works_as_shown(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sample's own prefetch router goes into a package, which then decodes in every way."""
    shutil.copytree(str(sample_files()), "checkpoint")
    run_lines("--decode", others=False)
    shown = capsys.readouterr()
    assert "reading ahead" in shown.err
    assert "oracle" in shown.out


def test_compiling_works_as_shown(
    sample: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command lines about NPUs all succeed, and the example after them trusts the binary and runs it."""
    monkeypatch.setattr(tiles, "TOKENS", dict.fromkeys(tiles.TOKENS, (32,)))
    monkeypatch.setattr(tiles, "KEYS", (256,))
    (sample.parent / "keys").mkdir()
    assert run_command(packer.group, "estream-pack", ["keygen", "-o", str(sample.parent / "keys" / "vendor")]) == 0
    shutil.copy(sample.parent / "keys" / "vendor.pub", "vendor.pub")
    assert (
        run_command(packer.group, "estream-pack", ["sign", "sample.emoe", "--key", "keys/vendor", "--counter", "3"])
        == 0
    )
    run_lines("--target", others=False)
    assert "with security counter 3 taken out, sign again with --counter 3 or more" in capsys.readouterr().err
    run_example('backend="htp"')
    assert re.search(r"[a-z]{2,}", capsys.readouterr().out)


def test_the_recipe_is_understood(tmp_path: Path) -> None:
    """The recipe shown is accepted and means what the text says."""
    (tmp_path / "olmoe.toml").write_text(blocks("toml")[0])
    checkpoint, options = read_recipe(tmp_path / "olmoe.toml")
    assert checkpoint == tmp_path / "OLMoE-1B-7B-0924"
    assert (options.experts, options.dense, options.activations, options.page_shift) == (
        "w4g32",
        "w8",
        "dynamic-int8",
        14,
    )
    assert options.targets == ("htp:sm8650",)


def test_every_verb_is_there() -> None:
    """No verb is named that the programs lack, and none is left out."""
    for name, group in (("estream-pack", packer.group), ("estream-run", runtime.group)):
        named = set(re.findall(rf"`{name} ([a-z-]+)", README))
        assert named == set(group.list_commands(None))  # type: ignore[arg-type]


def test_the_demo_is_the_one_in_the_makefile() -> None:
    """The transcript shows the command lines that `make demo` runs."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    demo = makefile.partition("\ndemo:")[2].partition("\n\n")[0]
    for line in (
        "--arena 256K --max-new-tokens 80 --temperature 0.7 --top-p 0.9 --seed 2",
        "It was a fine morning, and",
    ):
        assert line in demo
        assert line in README


def test_the_card_is_within_its_size_and_says_what_was_held_out() -> None:
    """The sample fits 13 MB and its card names licence, loss and held-out text."""
    folder = Path(str(sample_files()))
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 13_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    for fact in ("Apache-2.0", "bits per byte | 1.624", "The War of the Worlds"):
        assert fact in card
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    assert (config["num_hidden_layers"], config["num_experts"], config["num_experts_per_tok"]) == (4, 16, 4)
