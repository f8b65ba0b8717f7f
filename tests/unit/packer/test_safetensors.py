"""Reading safetensors files: what is refused, in which words, and how values come out as f32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from estream_packer.checkpoint.files import InputFile
from estream_packer.checkpoint.safetensors import SafetensorsFile
from estream_spec.errors import PackError


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write(path: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def refusal(path: Path) -> PackError:
    with pytest.raises(PackError) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    return caught.value


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_a_file_of_the_public_library_reads_back(path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    save_file({"a": values, "b": values[0].astype(np.float16)}, path, metadata={"format": "pt", "note": 'x "{}" \\ é'})
    file = SafetensorsFile(path)
    assert file.tensors["a"].shape == (3, 4)
    np.testing.assert_array_equal(file.read("a"), values)
    np.testing.assert_array_equal(file.read("b"), values[0])
    file.close()


def test_only_the_wanted_rows_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(40, dtype=np.float16).reshape(10, 2, 2)
    save_file({"a": values, "z": values}, path)
    file = SafetensorsFile(path)
    read: list[tuple[int, int]] = []
    whole = InputFile.read_into

    def watched(self: InputFile, target: memoryview, offset: int) -> None:
        read.append((offset, len(target)))
        whole(self, target, offset)

    monkeypatch.setattr(InputFile, "read_into", watched)
    np.testing.assert_array_equal(file.read("z", slice(3, 5)), values[3:5])
    assert read == [(file.tensors["z"].begin + 3 * 8, 16)]
    assert file.read("z", slice(10, 12)).shape == (0, 2, 2)
    file.close()


@pytest.mark.parametrize(
    ("dtype", "bits", "value"),
    [
        ("BF16", 0x4789, 70144.0),  # has no finite 16-bit image
        ("BF16", 0x8000, -0.0),
        ("BF16", 0x0001, 2.0**-133),
        ("BF16", 0x7F7F, 3.3895313892515355e38),
        ("F16", 0x7BFF, 65504.0),
        ("F16", 0x0001, 2.0**-24),
        ("F16", 0x8000, -0.0),
    ],
)
def test_sixteen_bit_values_keep_their_value(path: Path, dtype: str, bits: int, value: float) -> None:
    file = SafetensorsFile(write(path, {"a": entry(dtype, [1], [0, 2])}, bits.to_bytes(2, "little")))
    read = file.read("a")
    assert read.dtype == np.float32
    assert read.tobytes() == np.float32(value).tobytes()
    file.close()


def test_a_single_number_has_no_dimensions(path: Path) -> None:
    file = SafetensorsFile(write(path, {"a": entry(shape=[])}, np.float32(2.5).tobytes()))
    assert file.read("a").shape == ()
    assert file.read("a") == 2.5
    file.close()


@pytest.mark.parametrize(
    ("dtype", "bits", "text"),
    [
        ("F32", 0x7FC00000, "nan"),
        ("F32", 0x7F800000, "inf"),
        ("F32", 0xFF800000, "-inf"),
        ("BF16", 0x7FC0, "nan"),
        ("BF16", 0xFF80, "-inf"),
        ("F16", 0x7C00, "inf"),
        ("F16", 0x7D00, "nan"),  # a signalling one
    ],
)
def test_values_that_are_not_finite_are_refused_by_tensor_and_index(
    path: Path, dtype: str, bits: int, text: str
) -> None:
    size = 4 if dtype == "F32" else 2
    data = bytearray(12 * size)
    data[7 * size : 8 * size] = bits.to_bytes(size, "little")
    name = "model.layers.0.mlp.experts.11.up_proj.weight"
    file = SafetensorsFile(write(path, {name: entry(dtype, [4, 3], [0, len(data)])}, bytes(data)))
    for rows in (None, slice(1, 4)):
        with pytest.raises(PackError, match="finite") as caught:
            file.read(name, rows)
        assert f"tensor {name!r} has {text} at index [2, 1]" in caught.value.message
    assert not file.read(name, slice(0, 2)).any()
    file.close()


def test_an_unreadable_dtype_is_refused_when_it_is_wanted(path: Path) -> None:
    header = {"a": entry("F8_E5M2", [4], [0, 4]), "b": entry("F4", [3, 2], [4, 7])}
    file = SafetensorsFile(write(path, header, bytes(7)))
    with pytest.raises(PackError, match="'a' has dtype F8_E5M2, expected one of F32, F16, BF16, F8_E4M3"):
        file.read("a")
    file.close()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b'{"w":%s,"w":%s}' % ((json.dumps(entry()).encode(),) * 2), "'w'"),
        (b'{"w":%s,"\\u0077":%s}' % ((json.dumps(entry()).encode(),) * 2), "'w'"),
        (b'{"w":%s,"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}' % json.dumps(entry()).encode(), "'w'"),
        (b'{"__metadata__":{},"__metadata__":{"a":"b"}}', "'__metadata__'"),
        (b'{"__metadata__":{"a":"b","a":"c"}}', "'a'"),
        (b'{"w":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}', "'dtype'"),
    ],
)
def test_duplicate_keys_are_refused_by_name(path: Path, text: bytes, key: str) -> None:
    error = refusal(write(path, text, bytes(8)))
    assert "duplicate" in error.message
    assert key in error.message


@pytest.mark.parametrize("character", [rb"\u0000", rb"\ud800", rb"\udfff\ud800"])
def test_a_tensor_name_that_no_name_can_be_is_refused(path: Path, character: bytes) -> None:
    text = b'{"a%s": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'
    assert "has a NUL or a lone surrogate" in refusal(write(path, text % character, b"x")).message
    assert list(SafetensorsFile(write(path, text % rb"\ud83d\ude00", b"x")).tensors) == ["a\U0001f600"]


@pytest.mark.parametrize(
    ("length", "size", "message"),
    [
        (2**64 - 1, 1000, "exceeds the limit"),
        (2**63, 1000, "exceeds the limit"),
        (101_000_000, 1000, "exceeds the limit"),
        (5_000, 1000, "incomplete download?"),
        (0, 1000, "not a JSON object"),
        (1, 1000, "expected a name"),
    ],
)
def test_the_header_length_is_checked_before_it_is_used(path: Path, length: int, size: int, message: str) -> None:
    assert message in refusal(write(path, b"{" * size, length=length)).message


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_too_short_for_a_length_is_an_incomplete_download(path: Path, size: int) -> None:
    path.write_bytes(bytes(size))
    assert "incomplete download?" in refusal(path).message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a\xff":1}', "not UTF-8"),
        (b'{"__metadata__":{"a":"\xe9"}}', "not UTF-8"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{}x", "text after the end"),
        (b'{"a":1}', "'a' is not described"),
        (b'{"a":{"shape":[1],"data_offsets":[0,4]}}', "expected dtype, shape and data_offsets"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}}', "expected dtype, shape and data_offsets"),
        (b'{"a":{"dtype":"F32"', "'a' is not described"),
        (b'{"a":{"dtype" "F32"}}', "not JSON"),
        (b'{"a"}', "expected a name"),
        (b'{"__metadata__":[]}', "is not an object"),
        (b'{"__metadata__":{"a":1}}', "is not a text"),
        (b'{"%s":1}' % (b"n" * 600), "at most 512 bytes"),
    ],
)
def test_a_header_that_is_not_one_is_refused(path: Path, text: bytes, message: str) -> None:
    assert message in str(refusal(write(path, text)))


@pytest.mark.parametrize(
    ("tensor", "data", "message"),
    [
        (
            entry(shape=[1000, 1000]),
            4,
            "inconsistent header: tensor 'a' has 4 bytes, but shape [1000, 1000] of F32 takes",
        ),
        (entry(offsets=[4, 0]), 4, "inconsistent header: tensor 'a' begins at 4, after its end at 0"),
        (entry(offsets=[-4, 0]), 4, "expected two whole numbers"),
        (entry(offsets=[0, 2**63 + 4]), 4, "expected two whole numbers"),
        (entry(offsets=[0, 4.0]), 4, "expected two whole numbers"),
        (entry(offsets=[0]), 4, "expected two whole numbers"),
        (entry(shape=[True]), 4, "whole numbers"),
        (entry(shape=[-1]), 4, "whole numbers"),
        (entry(shape=[1] * 9), 4, "at most 8 whole numbers"),
        (entry(shape="1"), 4, "whole numbers"),
        (entry(dtype="F33"), 4, "unknown dtype 'F33'"),
        (entry(dtype="F4", shape=[3], offsets=[0, 1]), 1, "takes 1.5"),
        (entry(offsets=[4, 8]), 8, "inconsistent header: tensor 'a' leaves a hole before it"),
        (entry(), 7, "inconsistent header: 3 bytes after the last tensor"),
    ],
)
def test_a_header_that_contradicts_itself_or_the_file(
    path: Path, tensor: dict[str, Any], data: int, message: str
) -> None:
    error = refusal(write(path, {"a": tensor}, bytes(data)))
    assert message in error.message
    assert "incomplete" not in error.message


def test_tensors_must_not_overlap(path: Path) -> None:
    header = {"a": entry(), "b": entry(shape=[2], offsets=[2, 10])}
    assert "'b' overlaps the one before" in refusal(write(path, header, bytes(10))).message


@pytest.mark.parametrize("cut", [1, 4096, 8000])
def test_a_file_cut_short_is_told_apart(path: Path, cut: int) -> None:
    write(path, {"a": entry(shape=[2000], offsets=[0, 8000])}, bytes(8000))
    os.truncate(path, path.stat().st_size - cut)
    error = refusal(path)
    assert "shorter than its header declares" in error.message
    assert "incomplete download?" in error.message


def test_a_file_that_shrinks_while_it_is_read(path: Path) -> None:
    save_file({"a": np.ones((1000, 4), np.float32)}, path)
    file = SafetensorsFile(path)
    end = file.tensors["a"].begin + 100
    os.truncate(path, end)
    with pytest.raises(PackError, match="shrank") as caught:
        file.read("a")
    assert caught.value.offset == end
    assert caught.value.path == str(path)
    file.close()


def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(1000, dtype=np.float32)
    save_file({"a": values}, path)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: whole(fd, [views[0][:7]], offset))
    file = SafetensorsFile(path)
    np.testing.assert_array_equal(file.read("a"), values)
    file.close()


def test_a_failing_disk_is_told_with_file_and_offset(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": np.zeros(4, np.float32)}, path)
    file = SafetensorsFile(path)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(PackError, match="input/output error") as caught:
        file.read("a")
    assert caught.value.offset == file.tensors["a"].begin
    file.close()


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe").message
    assert "cannot be opened" in refusal(tmp_path / "absent").message


def test_a_refusal_leaves_no_descriptor_open(path: Path) -> None:
    write(path, b"[]")
    before = descriptors()
    refusal(path)
    assert descriptors() == before


_PEAK = """
import sys
from pathlib import Path
from estream_packer.checkpoint.safetensors import SafetensorsFile
from estream_spec.errors import PackError
try:
    print(len(SafetensorsFile(Path(sys.argv[1])).tensors))
except PackError as error:
    print(error.message)
print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])
"""


@pytest.mark.parametrize(
    ("start", "repeated", "message"),
    [
        (b'{"a":', b"[", "'a' is not described"),
        (b'{"a":{"dtype":"F32","shape":', b"[],", "'a' is not described"),
        (b"[", b"0,", "not a JSON object"),
        (b'{"__metadata__":{"x":"', b"x", "is not a text"),
    ],
)
def test_a_huge_hostile_header_is_refused_in_little_memory(
    path: Path, start: bytes, repeated: bytes, message: str
) -> None:
    write(path, start + repeated * ((95_000_000 - len(start)) // len(repeated)))
    ran = subprocess.run([sys.executable, "-c", _PEAK, str(path)], capture_output=True, text=True, check=True)
    path.unlink()  # test folders are kept for a while
    told, peak = ran.stdout.splitlines()
    assert message in told
    assert int(peak) * 1024 < 200e6


def test_a_header_of_95_megabytes_reads(path: Path) -> None:
    padding = b" " * 95_000_000
    file = SafetensorsFile(write(path, json.dumps({"a": entry()}).encode() + padding, bytes(4)))
    assert file.read("a") == 0
    file.close()
    path.unlink()


def test_no_file_is_mapped(path: Path) -> None:
    save_file({"a": np.zeros(1 << 18, np.float32)}, path)
    file = SafetensorsFile(path)
    file.read("a")
    assert str(path) not in Path("/proc/self/maps").read_text()
    file.close()
