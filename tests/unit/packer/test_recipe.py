from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from estream_packer.recipe import BuildOptions, CalibrationTable, check_options, read_recipe
from estream_spec.errors import PackError

WHOLE = """
[source]
checkpoint = "models/olmoe"
[model]
name = "OLMoE"
licence = "Apache-2.0"
[weights]
experts = "w4g64"
dense = "f32"
activations = "f32"
[package]
page_shift = 12
"""


def write(tmp_path: Path, text: str) -> Path:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text, encoding="utf-8")
    return recipe


def test_a_recipe_says_everything_and_its_paths_are_relative_to_it(tmp_path: Path) -> None:
    checkpoint, options = read_recipe(write(tmp_path, WHOLE))
    assert checkpoint == tmp_path / "models/olmoe"
    assert options == BuildOptions(
        experts="w4g64", dense="f32", activations="f32", name="OLMoE", licence="Apache-2.0", page_shift=12
    )


def test_a_recipe_says_how_each_role_is_stored_and_what_to_calibrate_on(tmp_path: Path) -> None:
    text = (
        '[source]\ncheckpoint = "x"\n[weights]\ndense = "w4g32"\nattention = "w8"\nhead = "f32"\n'
        '[calibration]\ntext = "texts/novel.txt"\ntokens = 100\n'
    )
    _, options = read_recipe(write(tmp_path, text))
    assert options.calibration == CalibrationTable(text=str(tmp_path / "texts/novel.txt"), tokens=100)
    found = [options.encoding_of(role) for role in ("attention", "shared", "head", "embedding")]
    assert found == ["w8", "w4g32", "f32", "w8"]


def test_a_recipe_may_name_a_prefetch_router(tmp_path: Path) -> None:
    text = '[source]\ncheckpoint = "x"\n[package]\nprefetch = "routers/x.prefetch"\n'
    _, options = read_recipe(write(tmp_path, text))
    assert options == BuildOptions(prefetch=str(tmp_path / "routers/x.prefetch"))


def test_roles_that_are_not_named_are_stored_as_dense_weights_are() -> None:
    for dense, embedding in (("f32", "f32"), ("w8", "w8"), ("w4g32", "w8")):
        options = replace(BuildOptions(), dense=dense)
        found = [options.encoding_of(role) for role in ("attention", "shared", "head", "embedding")]
        assert found == [dense, dense, dense, embedding]


def test_what_a_recipe_leaves_out_has_the_default(tmp_path: Path) -> None:
    checkpoint, options = read_recipe(write(tmp_path, '[source]\ncheckpoint = "/models/olmoe"'))
    assert checkpoint == Path("/models/olmoe")
    assert options == BuildOptions()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('[source]\ncheckpoint = "x"\n[wieghts]', "unknown key 'wieghts'", "did you mean 'weights'?"),
        ('[source]\ncheckpoint = "x"\n[weights]\nexpert = "w8"', "key 'weights.expert'", "did you mean 'experts'?"),
        ('[source]\ncheckpoint = "x"\nzzz = 1', "unknown key 'source.zzz'", "known are checkpoint"),
        ('[source]\ncheckpoint = "x"\n[calibration]\ntxt = "t"', "key 'calibration.txt'", "did you mean 'text'?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_likely_one(tmp_path: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(PackError, match=message) as refusal:
        read_recipe(write(tmp_path, text))
    assert refusal.value.hint == hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing required field 'source'"),
        ("[source]", "missing required field 'checkpoint'"),
        ('[source]\ncheckpoint = ""', r"\$.source.checkpoint"),
        ('source = "x"', r"expected 'object', got 'str' - at '\$.source'"),
        (
            '[source]\ncheckpoint = "x"\n[weights]\nexperts = "w5"',
            "weights.experts is 'w5', expected one of f32, w8, w4g32, w4g64",
        ),
        (
            '[source]\ncheckpoint = "x"\n[weights]\ndense = "w4g64"',
            "weights.dense is 'w4g64', expected one of f32, w8, w4g32",
        ),
        (
            '[source]\ncheckpoint = "x"\n[weights]\nattention = "w4g64"',
            "weights.attention is 'w4g64', expected one of f32, w8, w4g32",
        ),
        (
            '[source]\ncheckpoint = "x"\n[weights]\nembedding = "w4g32"',
            "weights.embedding is 'w4g32', expected one of f32, w8",
        ),
        ('[source]\ncheckpoint = "x"\n[calibration]', "missing required field 'text'"),
        ('[source]\ncheckpoint = "x"\n[calibration]\ntext = "t"\ntokens = 1', r">= 2 - at '\$.calibration.tokens'"),
        ('[source]\ncheckpoint = "x"\n[package]\npage_shift = 11', r">= 12 - at '\$.package.page_shift'"),
        ('[source]\ncheckpoint = "x"\n[model]\nname = ""', r"\$.model.name"),
        ('[source]\ncheckpoint = "x"\n[model]\nname = 1', r"\$.model.name"),
        ("[source", r"not TOML: expected '\]'"),
        ("[a]\n[a]", "not TOML: .*line 2"),
    ],
)
def test_a_faulty_recipe_is_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PackError, match=message) as refusal:
        read_recipe(write(tmp_path, text))
    assert refusal.value.path == str(tmp_path / "recipe.toml")


def test_a_recipe_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="cannot be opened: no such file"):
        read_recipe(tmp_path / "absent.toml")
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "pipe.toml", Path("/dev/zero")):
        with pytest.raises(PackError, match="not a regular file"):
            read_recipe(path)
    with pytest.raises(PackError, match="length 1048577 exceeds the limit of 1048576 bytes"):
        read_recipe(write(tmp_path, "#" * ((1 << 20) + 1)))
    (tmp_path / "recipe.toml").write_bytes(b"\xff")
    with pytest.raises(PackError, match="not UTF-8"):
        read_recipe(tmp_path / "recipe.toml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": "w5"}, "option experts is 'w5', expected one of f32, w8, w4g32, w4g64"),
        ({"name": ""}, "option name is '': expected"),
        ({"licence": "\udc80"}, "option licence is .*surrogates not allowed"),
        ({"page_shift": 22}, "option page_shift is 22: expected 'int' <= 21"),
        ({"jobs": 0}, "option jobs is 0: expected 'int' >= 1"),
    ],
)
def test_options_no_package_can_be_made_with_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PackError, match=message):
        check_options(BuildOptions(**changes))
