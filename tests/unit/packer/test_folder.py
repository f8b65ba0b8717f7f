"""Opening checkpoint folders: which files count, and what is refused."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from estream_packer.checkpoint import open_checkpoint
from estream_spec.errors import PackError

SHARDS = {
    "model-00001-of-00003.safetensors": {"a": 1.0, "b": 2.0},
    "model-00002-of-00003.safetensors": {"c": 3.0},
    "model-00003-of-00003.safetensors": {"d": 4.0, "e": 5.0},
}


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def save(path: Path, tensors: dict[str, float]) -> None:
    save_file({name: np.full((2, 2), value, np.float32) for name, value in tensors.items()}, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of three shards."""
    (tmp_path / "config.json").write_text('{"model_type": "olmoe"}')
    for shard, tensors in SHARDS.items():
        save(tmp_path / shard, tensors)
    write_index(tmp_path, {name: shard for shard, tensors in SHARDS.items() for name in tensors})
    return tmp_path


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A checkpoint of one weight file."""
    (tmp_path / "config.json").write_text("{}")
    save(tmp_path / "model.safetensors", {"a": 1.0})
    return tmp_path


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def refusal(folder: Path) -> PackError:
    before = descriptors()
    with pytest.raises(PackError) as caught:
        open_checkpoint(folder)
    assert descriptors() == before
    return caught.value


def test_shards_read_as_one(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.config == {"model_type": "olmoe"}
        assert sorted(checkpoint.tensors) == ["a", "b", "c", "d", "e"]
        assert checkpoint.read("d").tolist() == [[4, 4], [4, 4]]
        assert checkpoint.read("e", slice(1, 2)).tolist() == [[5, 5]]
        with pytest.raises(PackError, match="no tensor 'f'"):
            checkpoint.read("f")


def test_closing_gives_every_descriptor_back(folder: Path) -> None:
    before = descriptors()
    with open_checkpoint(folder) as checkpoint:
        assert len(descriptors()) > len(before)
    checkpoint.close()
    assert descriptors() == before


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model-00003-of-00003.safetensors").unlink()
    error = refusal(folder)
    assert "1 missing files ('model-00003-of-00003.safetensors' with 2 tensors)" in error.message
    assert str(folder) in str(error)


def test_a_shard_of_an_unusual_name_is_read(folder: Path) -> None:
    (folder / "model-00003-of-00003.safetensors").rename(folder / "extra.safetensors")
    places = {"a": 1, "b": 1, "c": 2}
    weight_map = {name: f"model-0000{shard}-of-00003.safetensors" for name, shard in places.items()}
    write_index(folder, weight_map | {"d": "extra.safetensors", "e": "extra.safetensors"})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.read("d")[0, 0] == 4


def test_everything_index_and_shards_disagree_on_is_told_at_once(folder: Path) -> None:
    one, two, three = SHARDS
    (folder / three).unlink()
    write_index(folder, {"a": one, "c": one, "ghost": two, "d": three, "e": three})
    message = refusal(folder).message
    assert f"1 missing files ('{three}' with 2 tensors)" in message
    assert f"2 tensors not in the file the index names ('c' in '{one}', 'ghost' in '{two}')" in message
    assert f"2 tensors not where the index has them ('b' in '{one}', 'c' in '{two}')" in message


def test_long_lists_are_cut_and_counted(folder: Path) -> None:
    one = next(iter(SHARDS))
    write_index(folder, {f"t{number:03}": one for number in range(300)})
    message = refusal(folder).message
    assert "300 tensors not in the file the index names" in message
    assert "'t007' in" in message
    assert "and 292 more" in message
    assert "'t008' in" not in message


def test_weight_files_beside_the_index_are_never_opened(folder: Path) -> None:
    for name in ("consolidated.safetensors", "model.safetensors", "pytorch_model.bin"):
        (folder / name).write_bytes(b"not weights at all")
    with open_checkpoint(folder) as checkpoint:
        assert sorted(checkpoint.tensors) == ["a", "b", "c", "d", "e"]
        assert [source.name for source in checkpoint.sources()] == ["config.json", "tensors"]


@pytest.mark.parametrize("name", ["../w.safetensors", "/etc/passwd", "x/../../w", "", "a\\b", "a\0b", 3, None])
def test_a_shard_outside_the_folder_is_refused(folder: Path, name: object) -> None:
    write_index(folder, {"a": name})
    error = refusal(folder)
    assert f"tensor 'a' is in {name!r}" in error.message
    assert "weight_map" in str(error)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_weight_map_is_refused(folder: Path, weight_map: object) -> None:
    write_index(folder, weight_map)
    assert "weight_map" in str(refusal(folder))


def test_duplicate_keys_of_the_index_are_refused_by_name(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "x", "b": "x", "a": "y"}}')
    error = refusal(folder)
    assert "duplicate key 'a'" in error.message
    assert str(index) in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"hidden_size": 64, "hidden_size": 64}', "duplicate key 'hidden_size'"),
        (b'{"x": {"y": 1, "y": 2}}', "duplicate key 'y'"),
        (b"[1]", "expected an object"),
        (b"null", "expected an object"),
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_faulty_configuration_is_refused(single: Path, text: bytes, message: str) -> None:
    (single / "config.json").write_bytes(text)
    error = refusal(single)
    assert message in error.message
    assert str(single / "config.json") in str(error)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "allenai/OLMoE-1B-7B-0924").message
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file").message == "neither a checkpoint folder nor a .toml recipe"
    assert "no config.json" in refusal(tmp_path).message
    (tmp_path / "config.json").write_text("{}")
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(tmp_path).message


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    error = refusal(tmp_path)
    assert "'pytorch_model.bin' is a PyTorch pickle" in error.message
    assert error.hint is not None
    assert "save_pretrained" in error.hint


def test_shards_without_an_index_are_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    assert "3 other .safetensors files such as 'model-00001-of-00003.safetensors'" in refusal(folder).message


def test_sources_tell_length_and_digest(single: Path) -> None:
    (single / "tokenizer.json").write_bytes(b"x" * 3_000_000)
    (single / "README.md").write_text("not a source")
    with open_checkpoint(single) as checkpoint:
        sources = {source.name: source for source in checkpoint.sources()}
        assert list(sources) == ["config.json", "tokenizer.json", "tensors"]
        for name in ("config.json", "tokenizer.json"):
            data = (single / name).read_bytes()
            assert (sources[name].length, sources[name].sha256) == (len(data), sha256(data).digest())
        tensors = load_file(single / "model.safetensors")
        assert sources["tensors"].length == sum(tensor.nbytes for tensor in tensors.values())
        assert checkpoint.tokenizer == b"x" * 3_000_000


def test_documents_that_may_be_absent(single: Path) -> None:
    with open_checkpoint(single) as checkpoint:
        assert checkpoint.tokenizer is None
        assert checkpoint.chat_template is None
        assert checkpoint.generation_config == {}


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (None, None),
        ("{{ x }}", "{{ x }}"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], None),
    ],
)
def test_the_chat_template_of_the_tokenizer(single: Path, template: object, found: str | None) -> None:
    (single / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (single / "generation_config.json").write_text('{"eos_token_id": 3}')
    with open_checkpoint(single) as checkpoint:
        assert checkpoint.chat_template == found
        assert checkpoint.generation_config == {"eos_token_id": 3}


def test_a_chat_template_in_its_own_file_wins(single: Path) -> None:
    (single / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (single / "chat_template.jinja").write_text("new")
    with open_checkpoint(single) as checkpoint:
        assert checkpoint.chat_template == "new"


def test_a_chat_template_that_is_no_text_is_refused(single: Path) -> None:
    (single / "tokenizer_config.json").write_text('{"chat_template": 3}')
    assert "expected a text" in refusal(single).message


def test_a_read_only_folder_reads(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.read("c")[0, 0] == 3
    folder.chmod(0o755)


def test_links_into_a_cache_are_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    linked = tmp_path_factory.mktemp("snapshot")
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    with open_checkpoint(linked) as checkpoint:
        assert checkpoint.read("c")[0, 0] == 3
