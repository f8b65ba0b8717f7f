from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from estream_loader import Package, open_package
from estream_loader.progress import Progress
from estream_loader.records import tensors
from estream_packer import assemble, executors, journal, partial, writer
from estream_packer import build as build_module
from estream_packer.build import BuildResult, build
from estream_packer.families import family_of
from estream_packer.journal import StoppedError
from estream_packer.plan import plan_package
from estream_packer.recipe import BuildOptions, DenseEncoding
from estream_packer.writer import PackedRecord
from estream_runtime import Session
from estream_spec import limits
from estream_spec.container import check_entries
from estream_spec.errors import PackError
from estream_spec.layout import matrix_tensors
from estream_spec.weights import Encoding, dequantise, dequantise_embedding
from fixtures.olmoe import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    VOCABULARY,
    CheckpointFactory,
    VariantName,
    weights,
    write_json,
)

PLAIN: Final = BuildOptions(experts="f32", dense="f32", activations="f32")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def stored_matrices(package: Package) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Every matrix and vector of a package by the name the checkpoint gives it, as f32 and as it is stored."""
    for section, expert_names in ((package.dense, False), (package.experts, True)):
        for range_index, record_range in enumerate(section.table.ranges):
            for index in range(record_range.count):
                place = section.place(range_index, index)
                buffer = memoryview(bytearray(place.length))
                package.read_record(place, buffer)
                parts = tensors(place.layout, buffer)
                prefix = f"model.layers.{range_index if expert_names else range_index - 1}."
                for matrix in place.layout.matrices:
                    mine = {part.name: parts.pop(part.name) for part in matrix_tensors(matrix)}
                    suffixed = {name.removeprefix(matrix.name).removeprefix("."): part for name, part in mine.items()}
                    if matrix.name == "embedding":
                        yield "model.embed_tokens.weight", dequantise_embedding(matrix.encoding, suffixed)
                        continue
                    value = dequantise(matrix.encoding, suffixed, matrix.rows)
                    yield checkpoint_name(matrix.name, prefix, index if expert_names else None), value.T
                for name, vector in parts.items():
                    yield checkpoint_name(name, prefix, None), vector


def checkpoint_name(name: str, prefix: str, expert: int | None) -> str:
    if expert is not None:
        return f"{prefix}mlp.experts.{expert}.{name}_proj.weight"
    return {
        "attention_norm": f"{prefix}input_layernorm.weight",
        "expert_norm": f"{prefix}post_attention_layernorm.weight",
        "q_norm": f"{prefix}self_attn.q_norm.weight",
        "k_norm": f"{prefix}self_attn.k_norm.weight",
        "router": f"{prefix}mlp.gate.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
    }.get(name, f"{prefix}self_attn.{name}_proj.weight")


@pytest.mark.parametrize("variant", get_args(VariantName))
def test_an_unquantised_package_holds_every_weight_of_the_checkpoint(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, variant: VariantName
) -> None:
    output = tmp_path / "model.emoe"
    build(olmoe_checkpoint(variant), output, PLAIN)
    with open_package(output, integrity="full") as package:
        stored = dict(stored_matrices(package))
    expected = weights(variant)
    assert stored.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(stored[name], value.astype(np.float32), err_msg=name)


@pytest.mark.parametrize("dense", get_args(DenseEncoding))
@pytest.mark.parametrize("experts", get_args(Encoding))
def test_every_pair_of_encodings_makes_a_sound_package_near_its_checkpoint(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, experts: Encoding, dense: DenseEncoding
) -> None:
    output = tmp_path / "model.emoe"
    build(olmoe_checkpoint("base"), output, BuildOptions(experts=experts, dense=dense, page_shift=12))
    largest_error = {"f32": 0.0, "w8": 0.01, "w4g32": 0.1, "w4g64": 0.11}
    expected = weights("base")
    with open_package(output, integrity="full") as package:
        check_entries(package.container.superblock, package.container.entries)
        for name, value in stored_matrices(package):
            if value.ndim == 1 or name.endswith("mlp.gate.weight"):
                encoding: Encoding = "f32"
            elif "experts" in name:
                encoding = experts
            elif "embed" in name:
                encoding = "f32" if dense == "f32" else "w8"
            else:
                encoding = dense
            original = expected[name].astype(np.float32)
            assert np.linalg.norm(value - original) <= largest_error[encoding] * np.linalg.norm(original), name


def test_each_role_is_stored_and_computed_as_it_was_asked(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    options = BuildOptions(attention="w4g32", head="f32", embedding="f32", activations="f32")
    result = build(olmoe_checkpoint("base"), tmp_path / "model.emoe", options)
    bits = {role.role: role.bits_per_weight for role in result.summary.roles}
    assert (bits["embedding"], bits["head"]) == (32, 32)
    assert bits["attention"] == 4 + 8 / 32 + 32 / HIDDEN
    build(olmoe_checkpoint("base"), tmp_path / "plain.emoe", PLAIN)
    with (
        open_package(tmp_path / "model.emoe") as package,
        open_package(tmp_path / "plain.emoe") as plain,
        Session(package, "portable") as session,
        Session(plain, "portable") as expected,
    ):
        weights_of = {graph.role: graph.weights for graph in package.manifest.graphs}
        logits, others = session.forward([1, 2, 3]), expected.forward([1, 2, 3])
    assert weights_of == {"qkv": "int8", "attend": "f32", "out": "int8", "expert": "int8", "head": "f32"}
    assert 0 < np.linalg.norm(logits - others) < 0.5 * np.linalg.norm(others)


def test_a_width_for_a_head_that_is_the_embedding_is_refused(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    with pytest.raises(PackError, match="head is to be stored as 'w4g32', but it is the embedding") as refusal:
        build(olmoe_checkpoint("tied"), tmp_path / "model.emoe", BuildOptions(head="w4g32"))
    assert refusal.value.hint is not None
    build(olmoe_checkpoint("tied"), tmp_path / "model.emoe", BuildOptions(head="f32", embedding="f32"))


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        (PLAIN, {"expert": {("f32", "f32")}, "qkv": {("f32", "f32")}, "head": {("f32", "f32")}}),
        (
            BuildOptions(experts="w8", activations="f32"),
            {"expert": {("int8", "f32")}, "out": {("int8", "f32")}, "attend": {("f32", "f32")}},
        ),
        (
            BuildOptions(dense="f32"),
            {"expert": {("int8", "dynamic-int8"), ("uint8", "dynamic-int8")}, "head": {("f32", "f32")}},
        ),
    ],
)
def test_a_package_has_the_graphs_its_encodings_ask_for(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, options: BuildOptions, kinds: dict[str, set[tuple[str, str]]]
) -> None:
    build(olmoe_checkpoint("tied"), tmp_path / "model.emoe", options)
    with open_package(tmp_path / "model.emoe") as package:
        graphs = package.manifest.graphs
        assert all(package.graph(graph) for graph in graphs)
    for role, expected in kinds.items():
        assert {(graph.weights, graph.activations) for graph in graphs if graph.role == role} == expected


def test_the_manifest_says_where_the_package_came_from_and_nothing_of_this_machine(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    source, output = tmp_path / "checkpoint", tmp_path / "model.emoe"
    shutil.copytree(olmoe_checkpoint("base", 3), source)
    write_json(source / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    build(source, output, BuildOptions(name="Tiny", licence="Apache-2.0"))
    with open_package(output) as package:
        provenance, tokenizer, template = package.manifest.provenance, package.tokenizer_json, package.chat_template
        assert package.manifest.name == "Tiny"
    assert provenance.licence == "Apache-2.0"
    documents = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert [(file.name, file.length, file.sha256) for file in provenance.sources[:-1]] == [
        (name, (source / name).stat().st_size, sha256((source / name).read_bytes()).digest()) for name in documents
    ]
    assert provenance.sources[-1].name == "tensors"
    assert (tokenizer, template) == ((source / "tokenizer.json").read_bytes(), b"{{ messages }}")
    assert str(tmp_path).encode() not in output.read_bytes()


def test_the_default_configuration_pages_even_a_small_model(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    build(olmoe_checkpoint("base"), tmp_path / "model.emoe")
    with open_package(tmp_path / "model.emoe") as package:
        [configuration] = package.manifest.device_configurations
        record_length = package.experts.table.ranges[0].record_length
    assert (configuration.name, configuration.group_size, configuration.prefetch_depth) == ("generic", EXPERTS // 4, 1)
    assert configuration.arena_bytes == 2 * configuration.group_size * record_length


def test_bits_per_weight_are_those_of_the_encoding(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    options = BuildOptions(experts="w4g64", page_shift=12)
    result = build(olmoe_checkpoint("base"), tmp_path / "model.emoe", options)
    roles = {role.role: role for role in result.summary.roles}
    assert list(roles) == ["embedding", "attention", "router", "experts", "head", "norms"]

    # A nibble for each weight, a multiplier for each 64 rows, a scale for each column; down's 32 rows fill up to 64.
    up = HIDDEN * INTERMEDIATE // 2 + HIDDEN // 64 * INTERMEDIATE + 4 * INTERMEDIATE
    down = 64 * HIDDEN // 2 + HIDDEN + 4 * HIDDEN
    assert roles["experts"].weights == LAYERS * EXPERTS * 3 * HIDDEN * INTERMEDIATE
    assert roles["experts"].stored_bytes == LAYERS * EXPERTS * (2 * up + down)
    assert roles["experts"].bits_per_weight == 8 * (2 * up + down) / (3 * HIDDEN * INTERMEDIATE)
    assert roles["embedding"].bits_per_weight == 8 + 32 / HIDDEN
    assert roles["attention"].bits_per_weight == 8 + 32 / HIDDEN
    assert roles["head"].bits_per_weight == 8 + 32 / HIDDEN
    assert roles["router"].bits_per_weight == roles["norms"].bits_per_weight == 32
    assert result.summary.weights == sum(tensor.size for tensor in weights("base").values())


@pytest.mark.parametrize(("encoding", "bits"), [("w4g64", 4 + 8 / 64), ("w4g32", 4 + 8 / 32), ("w8", 8), ("f32", 32)])
def test_bits_per_weight_of_a_model_of_true_size(
    olmoe_checkpoint: CheckpointFactory, encoding: Encoding, bits: float
) -> None:
    config = json.loads((olmoe_checkpoint("base") / "config.json").read_text())
    model = family_of(config).read(config | {"hidden_size": 2048, "intermediate_size": 1024}, None).model
    plan = plan_package(model, BuildOptions(experts=encoding))
    layout = plan.layout(plan.experts[0])
    scales = 0 if encoding == "f32" else 32 * (1024 + 1024 + 2048)
    expected = bits * 3 * 2048 * 1024 + scales
    assert 8 * sum(tensor.length for tensor in layout.tensors) == expected


@pytest.mark.parametrize("variant", ["base", "tied"])
@pytest.mark.parametrize("options", [PLAIN, BuildOptions(), BuildOptions(page_shift=12)])
def test_the_bytes_of_a_package_add_up(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, variant: VariantName, options: BuildOptions
) -> None:
    result = build(olmoe_checkpoint(variant), tmp_path / "model.emoe", options)
    length = (tmp_path / "model.emoe").stat().st_size
    assert sum(result.summary.space.values()) == result.summary.file_length == length


def test_the_bytes_do_not_depend_on_jobs_place_or_an_older_output(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, elsewhere = olmoe_checkpoint("base"), tmp_path / "else where"
    shutil.copytree(source, elsewhere)
    first = build(source, tmp_path / "first.emoe", BuildOptions(jobs=1))
    expected = (tmp_path / "first.emoe").read_bytes()
    build(elsewhere, tmp_path / "second.emoe", BuildOptions(jobs=4))
    assert (tmp_path / "second.emoe").read_bytes() == expected
    monkeypatch.chdir(elsewhere)
    second = build(Path(), tmp_path / "second.emoe", BuildOptions(jobs=2))
    assert (tmp_path / "second.emoe").read_bytes() == expected
    assert (first.file_id, first.content_id) == (second.file_id, second.content_id)


def test_a_checkpoint_in_any_number_of_shards_gives_the_same_bytes(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    for shards in (1, 3, 7):
        build(olmoe_checkpoint("base", shards), tmp_path / f"{shards}.emoe")
    assert len({(tmp_path / f"{shards}.emoe").read_bytes() for shards in (1, 3, 7)}) == 1


def test_the_content_id_stays_where_only_pages_differ(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    results = [
        build(olmoe_checkpoint("base"), tmp_path / "model.emoe", BuildOptions(page_shift=page_shift))
        for page_shift in (14, 12)
    ]
    assert len({result.content_id for result in results}) == 1
    assert len({result.file_id for result in results}) == 2
    other = build(olmoe_checkpoint("base"), tmp_path / "model.emoe", BuildOptions(experts="w8"))
    assert other.content_id != results[0].content_id


def test_blocks_do_not_show_in_the_package(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(olmoe_checkpoint("base"), tmp_path / "whole.emoe")
    # 13 rows of the checkpoint at a time, or one large record in flight at most.
    monkeypatch.setattr(assemble, "BLOCK_WEIGHTS", 13 * HIDDEN)
    monkeypatch.setattr(executors, "IN_FLIGHT_BYTES", 1)
    build(olmoe_checkpoint("base"), tmp_path / "blocks.emoe")
    assert (tmp_path / "blocks.emoe").read_bytes() == (tmp_path / "whole.emoe").read_bytes()


@pytest.mark.parametrize(("jobs", "most"), [(3, 3 + 1), (None, 1 + 1)])
def test_few_records_are_in_memory_at_a_time(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, jobs: int | None, most: int
) -> None:
    def one_processor(_: int) -> set[int]:
        return {0}

    monkeypatch.setattr(os, "sched_getaffinity", one_processor)
    watch, begun, in_flight = Watch(), count(1), []
    make = assemble.assemble

    def counted(*arguments: Any) -> PackedRecord:
        in_flight.append(next(begun) - watch.calls)
        return make(*arguments)

    monkeypatch.setattr(build_module, "assemble", counted)
    build(olmoe_checkpoint("base"), tmp_path / "model.emoe", BuildOptions(jobs=jobs), watch)
    assert len(in_flight) == LAYERS + 2 + LAYERS * EXPERTS
    assert max(in_flight) <= most


class Watch:
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.total, self.done, self.calls = 0, 0, 0

    def begin(self, stage: str, total: int) -> None:
        self.total += total

    def advance(self, amount: int) -> None:
        self.done += amount
        self.calls += 1


def test_progress_ends_at_the_bytes_of_all_weights(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    watch = Watch()
    result = build(olmoe_checkpoint("base"), tmp_path / "model.emoe", progress=watch)
    assert watch.done == watch.total == result.source_bytes == sum(each.nbytes for each in weights("base").values())


# Refusals: no output, and an older one stays as it was.


def refused(
    source: Path, output: Path, message: str, options: BuildOptions | None = None, progress: Progress | None = None
) -> PackError:
    """Build onto an older output in a folder of its own, and expect to be refused without a trace."""
    output.parent.mkdir()
    output.write_bytes(b"older")
    with pytest.raises(PackError, match=message) as refusal:
        build(source, output, options, progress)
    assert (names(output.parent), output.read_bytes()) == ([output.name], b"older")
    return refusal.value


def test_a_checkpoint_with_faults_is_refused_before_anything_is_written(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "checkpoint"
    shutil.copytree(olmoe_checkpoint("base"), source)
    held = load_file(source / "model.safetensors")
    held["model.layers.1.mlp.experts.11.down_proj.weigth"] = held.pop("model.layers.1.mlp.experts.11.down_proj.weight")
    save_file(held, source / "model.safetensors")
    monkeypatch.setattr(build_module, "PackageWriter", None)
    error = refused(source, tmp_path / "out" / "model.emoe", "does not fit")
    assert "experts.11.down_proj.weight'" in str(error)
    assert "experts.11.down_proj.weigth'" in str(error)


def test_all_weights_that_are_not_finite_are_refused_by_name_together(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "BLOCK_WEIGHTS", 100)
    source = tmp_path / "checkpoint"
    shutil.copytree(olmoe_checkpoint("base"), source)
    held = load_file(source / "model.safetensors")
    held["model.layers.1.mlp.experts.11.down_proj.weight"][63, 31] = np.nan
    held["model.norm.weight"][3] = -np.inf
    save_file(held, source / "model.safetensors")
    error = refused(source, tmp_path / "out" / "model.emoe", "2 tensors with numbers that are not finite")
    assert "experts.11.down_proj.weight' has nan at index [63, 31]" in str(error)
    assert "model.norm.weight' has -inf at index [3]" in str(error)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_checkpoint_that_changes_while_it_is_packed_is_refused(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, name: str
) -> None:
    source, output = tmp_path / "checkpoint", tmp_path / "out" / "model.emoe"
    shutil.copytree(olmoe_checkpoint("base"), source)

    class Meddler(Watch):
        def advance(self, amount: int) -> None:
            with (source / name).open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b" ")
            os.utime(source / name, ns=(0, 0))

    error = refused(source, output, "file changed while it was packed", progress=Meddler())
    assert error.path == str(source / name)


def test_a_record_above_the_limit_is_refused_with_the_way_out(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_RECORD_LENGTH", VOCABULARY * HIDDEN * 4 - 1)
    error = refused(olmoe_checkpoint("base"), tmp_path / "out" / "model.emoe", "record of embedding takes", PLAIN)
    assert error.hint == "choose an encoding with fewer bits for them"


def test_an_option_no_package_can_have_is_refused(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    refused(olmoe_checkpoint("base"), tmp_path / "out" / "model.emoe", "option name", BuildOptions(name="x" * 129))


def test_a_chat_template_that_is_no_text_is_refused(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    source = tmp_path / "checkpoint"
    shutil.copytree(olmoe_checkpoint("base"), source)
    write_json(source / "tokenizer_config.json", {"chat_template": "\ud800"})
    refused(source, tmp_path / "out" / "model.emoe", r"chat template has '\\ud800', which is no character")


@pytest.mark.parametrize("link", [None, os.link, os.symlink])
def test_an_output_that_is_a_file_of_the_checkpoint_is_refused(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, link: Callable[[Path, Path], None] | None
) -> None:
    source = tmp_path / "checkpoint"
    shutil.copytree(olmoe_checkpoint("base"), source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    output = source / "model.safetensors"
    if link is not None:
        output = tmp_path / "model.emoe"
        link(source / "model.safetensors", output)
    with pytest.raises(PackError, match="output is a file of the checkpoint"):
        build(source, output)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_an_output_that_is_a_shard_in_a_folder_below_is_refused(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    source = tmp_path / "checkpoint"
    shutil.copytree(olmoe_checkpoint("base", 2), source)
    (source / "weights").mkdir()
    index = json.loads((source / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    moved = {shard: f"weights/{number}.emoe" for number, shard in enumerate(shards)}
    for shard, name in moved.items():
        (source / shard).rename(source / name)
    index["weight_map"] = {name: moved[shard] for name, shard in index["weight_map"].items()}
    write_json(source / "model.safetensors.index.json", index)
    for output in (source / "weights" / "0.emoe", source / "model.safetensors.index.json"):
        before = output.read_bytes()
        with pytest.raises(PackError, match="output is a file of the checkpoint"):
            build(source, output)
        assert output.read_bytes() == before


def test_a_package_in_the_checkpoint_folder_may_be_replaced(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory
) -> None:
    source = tmp_path / "checkpoint"
    shutil.copytree(olmoe_checkpoint("base"), source)
    results = [build(source, source / "model.emoe") for _ in range(2)]
    assert results[0].file_id == results[1].file_id


class FullDisk:
    """A file on a disk that is full after `room` bytes."""

    def __init__(self, file: Any, room: int):
        self._file, self._room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: memoryview) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written: int = self._file.write(data)
        return written


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.9, 0.98, 1.0])
def test_a_full_disk_at_any_stage_leaves_nothing(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    length = build(olmoe_checkpoint("base"), tmp_path / "whole.emoe").summary.file_length
    create = partial.create_partial

    def create_on_full_disk(output: Path) -> tuple[Path, FullDisk]:
        path, file = create(output)
        return path, FullDisk(file, int(share * length))

    monkeypatch.setattr(writer, "create_partial", create_on_full_disk)
    error = refused(olmoe_checkpoint("base"), tmp_path / "out" / "model.emoe", "cannot be written: no space left")
    assert error.hint == "free some space there, or write to another place"


def test_a_full_disk_takes_nothing_of_what_was_made(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, output = tmp_path / "whole.emoe", tmp_path / "out" / "model.emoe"
    length = build(olmoe_checkpoint("base"), whole).summary.file_length
    output.parent.mkdir()
    monkeypatch.setattr(journal, "STEP_BYTES", 1)
    create, made = partial.create_partial, list[int]()

    def create_on_full_disk(output: Path) -> tuple[Path, FullDisk]:
        path, file = create(output)
        return path, FullDisk(file, length // 2)

    def counted(*arguments: Any) -> PackedRecord:
        made.append(1)
        return assemble.assemble(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "create_partial", create_on_full_disk)
        with pytest.raises(StoppedError, match="cannot be written: no space left") as stop:
            build(olmoe_checkpoint("base"), output)
    assert "what was made is kept in" in stop.value.__notes__[0]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(build_module, "assemble", counted)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(
            StoppedError, match=r"[\d,]+ bytes are still to be written, the disk has room for 1,000"
        ) as stop:
            build(olmoe_checkpoint("base"), output)
    assert "what was made is kept in" in stop.value.__notes__[0]
    assert made == []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=length * 3 // 4))
        build(olmoe_checkpoint("base"), output)
    records = len(checksums(output))
    assert 0 < len(made) < records
    assert output.read_bytes() == whole.read_bytes()


def checksums(package: Path) -> list[int]:
    """Checksums of all records."""
    with open_package(package) as opened:
        return [*opened.dense.table.checksums, *opened.experts.table.checksums]


def test_a_disk_with_too_little_room_is_told_before_anything_is_made(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(build_module, "assemble", None)
    output = tmp_path / "out" / "model.emoe"
    refused(olmoe_checkpoint("base"), output, r"[\d,]+ bytes are still to be written, the disk has room for 1,000")


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failure_at_the_very_end_leaves_nothing(
    tmp_path: Path, olmoe_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    refused(olmoe_checkpoint("base"), tmp_path / "out" / "model.emoe", "cannot be written: input/output error")


def test_a_package_that_cannot_take_text_is_noticed(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    source = tmp_path / "checkpoint"
    shutil.copytree(olmoe_checkpoint("base"), source)
    assert build(source, tmp_path / "model.emoe").notices == ()
    (source / "tokenizer.json").unlink()
    [notice] = build(source, tmp_path / "model.emoe").notices
    assert (
        notice
        == "the checkpoint has neither tokenizer.json nor tokenizer.model, so the package takes token ids and no text"
    )


def test_a_result_is_plain_data(tmp_path: Path, olmoe_checkpoint: CheckpointFactory) -> None:
    output = tmp_path / os.fsdecode(b"bad\xff.emoe")
    result = build(olmoe_checkpoint("base"), output)
    assert output.is_file()
    assert result.output == str(tmp_path / "bad\ufffd.emoe")
    assert msgspec.json.decode(msgspec.json.encode(result), type=BuildResult) == result
