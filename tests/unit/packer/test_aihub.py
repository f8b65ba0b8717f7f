"""The compiler in AI Hub: the client as it is, over loopback HTTP, and a server that stands in for the service."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from qai_hub import public_api_pb2 as pb
from requests.adapters import HTTPAdapter

from estream_loader.progress import Quiet
from estream_packer.htp.aihub import AiHubCompiler
from estream_packer.htp.compiler import Compiled, Tile
from estream_spec.binary_interface import label, tensor_name
from estream_spec.chips import Chip, chip_named
from estream_spec.errors import EmoeError, LinkError, PackError
from estream_spec.manifest import BinaryGraph
from fixtures.aihub_stand_in import TOKEN, Answer, Binary, StandIn, phone

CHIP = chip_named("sm8650")
BUILD = "2.51.0.260929181845"


def tile(tokens: int, factor: float = 2.0) -> Tile:
    """A graph small enough to be read: it takes rows and a scale, and gives the rows and their multiple."""
    name = label("head", 0, tokens, encodings=("w8",))
    rows, scale, multiple, kept = (tensor_name(name, each) for each in ("x", "head.scale", "logits", "kept"))
    graph = helper.make_graph(
        [
            helper.make_node("Constant", [], [name], value_float=factor),
            helper.make_node("Mul", [rows, name], [kept]),
            helper.make_node("Mul", [kept, scale], [multiple]),
        ],
        name,
        [helper.make_tensor_value_info(each, TensorProto.FLOAT, [tokens, 4]) for each in (rows, scale)],
        [helper.make_tensor_value_info(each, TensorProto.FLOAT, [tokens, 4]) for each in (multiple, kept)],
    )
    wanted = BinaryGraph(name=name, role="head", shape_class=0, tokens=tokens, encodings=("w8",))
    return Tile(wanted, helper.make_model(graph).SerializeToString())


TILES = [tile(tokens) for tokens in (32, 64, 128)]
LABELS = [each.label for each in TILES]


def link(graphs: Sequence[tuple[str, bytes]], chip: Chip) -> Binary:
    """Bytes that tell, as a context binary does, of the build and the graphs."""
    told = b"".join(name.encode() + b"\0" + sha256(model).digest() for name, model in graphs)
    return Binary(f"{chip.soc_model} v{BUILD}\0v{BUILD}\0".encode() + told, [name for name, _ in graphs])


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this project nor the client waits between attempts."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def configure(path: Path, url: str, token: str = TOKEN) -> None:
    path.write_text(f"[api]\napi_token = {token}\napi_url = {url}\nweb_url = {url}\nverbose = True\n")


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the client finds its configuration instead of in the home of whoever runs the tests."""
    path = tmp_path / "client.ini"
    monkeypatch.setenv("QAIHUB_CLIENT_INI", str(path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return path


@pytest.fixture
def hub(configuration: Path) -> Iterator[StandIn]:
    with StandIn(link).serving() as stand_in:
        configure(configuration, stand_in.url)
        yield stand_in


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


class Killed(BaseException):
    """The end of a process."""


@dataclass
class Watching(Quiet):
    """Notes stages, and ends the run after so many steps of one."""

    stage: str = ""
    steps: int = -1
    stages: list[tuple[str, int]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def begin(self, stage: str, total: int) -> None:
        self.stages.append((stage, total))
        if stage == self.stage and self.steps == 0:
            raise Killed

    def advance(self, amount: int) -> None:
        stage, _ = self.stages[-1]
        self.done += [stage] * amount
        if stage == self.stage and self.done.count(stage) == self.steps:
            raise Killed


def compiled(state: Path, tiles: Sequence[Tile] = TILES, chip: Chip = CHIP) -> Compiled:
    """What is made, and put where it belongs."""
    compiler = AiHubCompiler(state)
    made = compiler.compile(tiles, chip, Quiet())
    compiler.forget()
    return made


def refused(state: Path) -> EmoeError:
    """How it is refused; without a word beside."""
    with pytest.raises(EmoeError) as raised:
        compiled(state)
    return raised.value


# What it makes


def test_tiles_become_one_binary(hub: StandIn, state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    progress = Watching()
    compiler = AiHubCompiler(state)
    made = compiler.compile(TILES, CHIP, progress)
    compiler.forget()
    assert made.data == link([(each.label, each.onnx) for each in TILES], CHIP).data
    assert made.graphs == tuple(each.graph for each in TILES)
    assert made.sdk == BUILD
    assert re.fullmatch(r"qai-hub \d+\.\d+.*", made.compiler)
    assert "FLOAT16" in made.options
    assert hub.submitted == [*LABELS, "estream-sm8650"]
    assert progress.stages == [("uploading", 3), ("compiling", 3), ("linking", 1), ("downloading", 1)]
    assert progress.done == [stage for stage, total in progress.stages for _ in range(total)]
    assert not state.exists()
    assert capfd.readouterr() == ("", "")


def test_a_single_tile_is_linked_too(hub: StandIn, state: Path) -> None:
    assert compiled(state, TILES[:1]).graphs == (TILES[0].graph,)


def test_graphs_are_called_as_the_binary_calls_them(hub: StandIn, state: Path) -> None:
    """They are told by their inputs and outputs: the binary may list them in any order, by any name."""

    def renaming(graphs: Sequence[tuple[str, bytes]], chip: Chip) -> Binary:
        names = [f"Prepared_{index}" for index in range(len(graphs))]
        return Binary(link([(name, b"") for name in names], chip).data, names)

    hub.link = renaming
    assert [(each.name, each.tokens) for each in compiled(state).graphs] == [
        ("Prepared_0", 32),
        ("Prepared_1", 64),
        ("Prepared_2", 128),
    ]


def test_jobs_are_for_the_chip_and_say_what_graphs_and_outputs_are_called(hub: StandIn, state: Path) -> None:
    compiled(state)
    for job, each in zip(hub.jobs.values(), TILES, strict=False):
        assert "soc-model:57" in job.compile_job.devices.devices[0].attributes
        assert f"context_enable_graphs={each.label};" in job.compile_job.options
        outputs = ",".join(value.name for value in onnx.load_model_from_string(each.onnx).graph.output)
        assert f"--output_names {outputs} " in job.compile_job.options


def test_a_chip_known_by_its_number_alone(hub: StandIn, state: Path) -> None:
    chip = chip_named("soc60-v73")
    hub.devices.append(phone(chip))
    assert compiled(state, chip=chip).data.startswith(b"60 ")


# Taking up an interrupted run


@pytest.mark.parametrize(
    ("stage", "steps", "then"),
    [
        ("uploading", 2, [LABELS[2], "estream-sm8650"]),
        ("compiling", 0, ["estream-sm8650"]),
        ("compiling", 2, ["estream-sm8650"]),
        ("compiling", 3, ["estream-sm8650"]),
        ("linking", 0, []),
        ("downloading", 0, []),
    ],
)
def test_a_killed_run_is_taken_up(hub: StandIn, state: Path, stage: str, steps: int, then: list[str]) -> None:
    with pytest.raises(Killed):
        AiHubCompiler(state).compile(TILES, CHIP, Watching(stage, steps))
    before = list(hub.submitted)
    made = compiled(state)
    assert hub.submitted == before + then
    assert made.data == link([(each.label, each.onnx) for each in TILES], CHIP).data
    assert not state.exists()


def test_a_run_that_ends_before_the_binary_is_in_its_place_is_taken_up(hub: StandIn, state: Path) -> None:
    """Proving takes time, and may need a newer SDK: nothing is compiled twice for that."""
    AiHubCompiler(state).compile(TILES, CHIP, Quiet())
    before = list(hub.submitted)
    made = compiled(state)
    assert hub.submitted == before
    assert made.data == link([(each.label, each.onnx) for each in TILES], CHIP).data
    assert not state.exists()


def test_a_run_that_lost_the_network_is_taken_up(hub: StandIn, state: Path) -> None:
    hub.fault = lambda method, path: Answer(503) if path == "/api/v1/jobs/j1/" else None
    assert isinstance(refused(state), LinkError)
    hub.fault = lambda method, path: None
    compiled(state)
    assert sorted(hub.submitted) == sorted([*LABELS, LABELS[1], "estream-sm8650"])  # the answer of one was lost


def test_only_what_changed_is_submitted_again(hub: StandIn, state: Path) -> None:
    with pytest.raises(Killed):
        AiHubCompiler(state).compile(TILES, CHIP, Watching("linking", 0))
    hub.submitted.clear()
    compiled(state, [*TILES[:2], tile(128, factor=3.0)])
    assert hub.submitted == [LABELS[2], "estream-sm8650"]


def test_jobs_for_one_chip_are_not_taken_for_another(hub: StandIn, state: Path) -> None:
    with pytest.raises(Killed):
        AiHubCompiler(state).compile(TILES, CHIP, Watching("linking", 0))
    hub.submitted.clear()
    assert compiled(state, chip=chip_named("sm8750")).data.startswith(b"69 ")
    assert hub.submitted == [*LABELS, "estream-sm8750"]
    hub.submitted.clear()
    assert compiled(state).data.startswith(b"57 ")
    assert hub.submitted == []


def test_jobs_that_the_service_no_longer_has_are_submitted_again(hub: StandIn, state: Path) -> None:
    with pytest.raises(Killed):
        AiHubCompiler(state).compile(TILES, CHIP, Watching("compiling", 0))
    del hub.jobs["j1"]
    hub.jobs["gone"] = pb.Job()  # keeps numbers unlike
    hub.submitted.clear()
    compiled(state)
    assert hub.submitted == [LABELS[1], "estream-sm8650"]


def test_a_failed_tile_is_tried_again_alone(hub: StandIn, state: Path) -> None:
    hub.failures[LABELS[1]] = "out of\nmemory"
    error = refused(state)
    assert isinstance(error, PackError)
    assert str(error) == f"AI Hub failed to compile {LABELS[1]}: out of memory"
    assert error.hint == f"see {hub.url}/jobs/j1/"
    hub.failures.clear()
    hub.submitted.clear()
    compiled(state)
    assert hub.submitted == [LABELS[1], "estream-sm8650"]


def test_a_failed_link_is_tried_again_alone(hub: StandIn, state: Path) -> None:
    hub.failures["estream-sm8650"] = "graphs do not fit"
    error = refused(state)
    assert isinstance(error, PackError)
    assert str(error) == "AI Hub failed to link: graphs do not fit"
    hub.failures.clear()
    hub.submitted.clear()
    compiled(state)
    assert hub.submitted == ["estream-sm8650"]


def test_damaged_notes_are_refused(hub: StandIn, state: Path) -> None:
    state.mkdir()
    (state / "aihub.json").write_text('{"jobs": [')
    error = refused(state)
    assert isinstance(error, PackError)
    assert error.path == str(state / "aihub.json")
    assert hub.submitted == []


def test_notes_that_cannot_be_kept_are_said(hub: StandIn, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    error = refused(tmp_path / "file" / "state")
    assert isinstance(error, PackError)
    assert "notes of jobs in AI Hub cannot be" in error.message


# What goes wrong


def test_nothing_but_compiling_there_needs_the_client() -> None:
    script = "import sys; sys.modules['qai_hub'] = None; import estream_packer.cli, estream_packer.htp.aihub"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_without_the_client(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qai_hub", None)
    error = refused(state)
    assert isinstance(error, LinkError)
    assert error.hint == "install it with: pip install 'estream-pack[aihub]'"


@pytest.mark.parametrize("text", [None, "[api]\napi_url = http://127.0.0.1\n", "not a configuration"])
def test_without_a_token(configuration: Path, state: Path, text: str | None) -> None:
    if text is not None:
        configuration.write_text(text)
    error = refused(state)
    assert isinstance(error, LinkError)
    assert error.message == "AI Hub's client has no API token"
    assert error.hint is not None
    assert "qai-hub configure" in error.hint


def test_a_token_that_is_refused(hub: StandIn, configuration: Path, state: Path) -> None:
    configure(configuration, hub.url, "another")
    error = refused(state)
    assert isinstance(error, LinkError)
    assert error.message == "AI Hub refused the API token"
    assert not state.exists()


def test_no_such_device(hub: StandIn, state: Path) -> None:
    hub.devices = [device for device in hub.devices if "soc-model:57" not in device.attributes]
    error = refused(state)
    assert isinstance(error, LinkError)
    assert str(error) == "AI Hub has no device with Snapdragon 8 Gen 3 (sm8650, Hexagon v75)"


@pytest.mark.parametrize(
    ("method", "path", "answer", "kind", "said"),
    [
        ("GET", "/api/v1/devices/", Answer(426), LinkError, "no longer serves this version of its client"),
        ("GET", "/api/v1/devices/", Answer(200, b"<html>log in"), LinkError, "does not speak its protocol"),
        ("GET", "/api/v1/devices/", Answer(500), LinkError, "kept failing when asked for devices with"),
        ("POST", "/api/v1/models/", Answer(429, b"out of quota"), LinkError, "takes no more for now .*'out of quota'"),
        (
            "POST",
            "/api/v1/models/",
            Answer(413, b"too large"),
            PackError,
            f"to compile {LABELS[0]}, saying 'too large'",
        ),
        ("PUT", "/files/m0", Answer(403), LinkError, f"status 403 when asked to compile {LABELS[0]}"),
        ("PUT", "/files/m0", Answer(503), LinkError, f"status 503 when asked to compile {LABELS[0]}"),
        ("POST", "/api/v1/jobs/", Answer(429), LinkError, "takes no more for now"),
        ("POST", "/api/v1/jobs/", Answer(502), LinkError, f"status 502 when asked to compile {LABELS[0]}"),
        ("POST", "/api/v1/jobs/", Answer(400, b'{"detail": "odd\\noptions"}'), PackError, "saying 'odd options'"),
        ("GET", "/api/v1/jobs/j0/", Answer(503), LinkError, "kept failing when asked"),
        ("GET", "/api/v1/jobs/j0/", Answer(missing=4), LinkError, "broke off when asked"),
        ("GET", "/api/v1/jobs/j3/", Answer(403, b"not yours"), LinkError, "status 403 .* saying 'not yours'"),
        ("GET", "/api/v1/models/m6/download/", Answer(404, b"expired"), LinkError, "status 404 .* saying 'expired'"),
        ("GET", "/files/m6", Answer(missing=9), LinkError, "broke off when asked for the binary of job j3"),
        ("GET", "/files/m6", Answer(500), LinkError, "status 500 when asked for the binary of job j3"),
    ],
)
def test_answers_that_are_no_good(
    hub: StandIn,
    state: Path,
    capfd: pytest.CaptureFixture[str],
    method: str,
    path: str,
    answer: Answer,
    kind: type[EmoeError],
    said: str,
) -> None:
    hub.fault = lambda *asked: answer if asked == (method, path) else None
    error = refused(state)
    assert f"{method} {path}" in hub.requests
    assert type(error) is kind
    assert re.search(said, str(error))
    assert "\n" not in str(error)
    assert capfd.readouterr() == ("", "")
    hub.fault = lambda method, path: None
    assert compiled(state).sdk == BUILD


def test_nobody_there(configuration: Path, state: Path) -> None:
    with StandIn(link).serving() as gone:
        configure(configuration, gone.url)
    error = refused(state)
    assert isinstance(error, LinkError)
    assert error.message.startswith("AI Hub cannot be reached when asked for devices")


def test_no_answer_in_time(hub: StandIn, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    send = HTTPAdapter.send
    # The client waits for half a minute, seven times.
    monkeypatch.setattr(HTTPAdapter, "send", lambda *a, **k: send(*a, **{**k, "timeout": 0.2}))

    def silence(method: str, path: str) -> Answer | None:
        answered.wait()
        return None

    hub.fault = silence
    try:
        error = refused(state)
    finally:
        answered.set()
    assert isinstance(error, LinkError)
    assert error.message.startswith("AI Hub did not answer in time when asked for devices")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"<html>", "6 bytes that name no build of the QNN SDK, expected a context binary"),
        (link([], CHIP).data + b"v2.50.1.260101000000\0", f"several builds.*2.50.1.260101000000, {BUILD}"),
        (link([(LABELS[0], b"")], CHIP).data, f"does not name the graph '{LABELS[1]}'"),
    ],
    ids=["a page", "two builds", "a graph lost"],
)
def test_a_result_that_is_no_such_binary(hub: StandIn, state: Path, data: bytes, said: str) -> None:
    hub.link = lambda graphs, chip: Binary(data, [name for name, _ in graphs])
    error = refused(state)
    assert isinstance(error, PackError)
    assert re.search(said, str(error))
    hub.link = link
    hub.submitted.clear()
    compiled(state)
    assert hub.submitted == ["estream-sm8650"]


def test_a_result_with_other_outputs(hub: StandIn, state: Path) -> None:
    hub.other_outputs = True
    error = refused(state)
    assert isinstance(error, PackError)
    assert f"lacks a graph like {LABELS[0]}" in str(error)
    assert "output_0" in str(error)


def test_a_result_for_another_chip(hub: StandIn, state: Path) -> None:
    hub.facts = {pb.MODEL_METADATA_KEY_QNN_CONTEXT_BIN_SOC_MODEL: "43"}
    error = refused(state)
    assert isinstance(error, PackError)
    assert "QNN_CONTEXT_BIN_SOC_MODEL is '43', expected '57'" in str(error)


def test_a_result_that_says_it_is_for_the_chip(hub: StandIn, state: Path) -> None:
    hub.facts = {
        pb.MODEL_METADATA_KEY_QNN_CONTEXT_BIN_SOC_MODEL: "57",
        pb.MODEL_METADATA_KEY_QNN_CONTEXT_BIN_HEXAGON_VERSION: "v75",
    }
    assert compiled(state).sdk == BUILD
