from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from estream_packer import cli as packer
from estream_packer.build import build
from estream_packer.recipe import read_recipe
from estream_packer.sample import sample_files
from estream_runtime import cli as runtime

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it shows works on the sample model and prints English."""
    monkeypatch.chdir(tmp_path)
    build(Path(str(sample_files())), tmp_path / "sample.emoe")
    [example] = blocks("python")
    exec(compile(example, "README.md", "exec"), {})
    assert re.search(r"[a-z]{2,} [a-z]{2,} ", capsys.readouterr().out)


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
