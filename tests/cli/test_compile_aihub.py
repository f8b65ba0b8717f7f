"""Graphs compiled in AI Hub: the client as it is, and a server in place of the service that has the local compiler."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cli.conftest import Pack
from estream_loader import open_package
from estream_loader.progress import Quiet
from estream_packer.htp import tiles
from estream_packer.htp.local import LocalCompiler
from estream_packer.htp.proof import Proof
from estream_runtime.vendor_sdk import installed_sdk
from estream_spec.chips import Chip
from estream_spec.errors import PackError
from fixtures.aihub_stand_in import TOKEN, Binary, StandIn
from fixtures.made import GRAPH
from fixtures.npu import FEWEST, compiled_for, small_tiles
from fixtures.packages import Draft


def link(graphs: Sequence[tuple[str, bytes]], chip: Chip) -> Binary:
    """What the compiler on this machine makes of the tiles."""
    tiles = {tile.onnx: tile for tile in small_tiles()}
    made = LocalCompiler().compile([tiles[model] for _, model in graphs], chip, Quiet())
    return Binary(made.data, [graph.name for graph in made.graphs])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    for role, tokens in FEWEST.items():
        monkeypatch.setitem(tiles.TOKENS, role, tokens)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    configuration = tmp_path / "client.ini"
    monkeypatch.setenv("QAIHUB_CLIENT_INI", str(configuration))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with StandIn(link).serving() as stand_in:
        told = f"api_token = {TOKEN}\napi_url = {stand_in.url}\nweb_url = {stand_in.url}\nverbose = True\n"
        configuration.write_text(f"[api]\n{told}")
        yield stand_in


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "model.emoe"
    path.write_bytes(Draft().seal())
    return path


def test_compiled_in_the_cloud_and_proven_here(hub: StandIn, package: Path, pack: Pack) -> None:
    """A link job fails first: the package stays as it is, and the next run takes up what is compiled."""
    before = package.read_bytes()
    hub.failures["estream-sm8650"] = "graphs do not fit"
    status, out, err = pack("compile", package, "--target", "htp:sm8650", "--compiler", "aihub")
    assert (status, out) == (1, "")
    first, hint = err.splitlines()
    assert first == "estream-pack: error: AI Hub failed to link: graphs do not fit"
    assert hint == f"estream-pack: hint: see {hub.url}/jobs/j5/"
    assert package.read_bytes() == before
    notes = package.with_name("model.emoe.aihub")
    assert (notes / "aihub.json").is_file()

    hub.failures.clear()
    hub.submitted.clear()
    status, out, err = pack("compile", package, "--target", "htp:sm8650", "--compiler", "aihub")
    assert (status, err) == (0, "")
    assert hub.submitted == ["estream-sm8650"]
    assert out.startswith("compiled for Snapdragon 8 Gen 3 (sm8650, Hexagon v75): 5 graphs, ")
    assert "\n  qai-hub " in out
    assert f", SDK {installed_sdk()}; in the simulator off by at most " in out
    assert not notes.exists()
    with open_package(package) as opened:
        [binary] = opened.manifest.binaries
        assert bytes(opened.binary(binary)) == compiled_for("sm8650").data
        assert binary.compiler.startswith("qai-hub ")


def test_what_the_proof_refuses_is_not_taken_up_again(
    hub: StandIn, package: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or every run would be given the same binary."""
    before = package.read_bytes()
    hub.link = lambda graphs, chip: Binary(
        b"v2.51.0.260929181845\0" + b"".join(name.encode() + b"\0" for name, _ in graphs), [name for name, _ in graphs]
    )

    def off(*_: object) -> None:
        raise PackError("output 'y' is off", path="graph expert_0 for sm8650")

    monkeypatch.setattr("estream_packer.htp.targets.prove_binary", off)
    status, out, err = pack("compile", package, "--target", "htp:sm8650", "--compiler", "aihub")
    assert (status, out) == (1, "")
    assert err == "estream-pack: error: output 'y' is off (at graph expert_0 for sm8650)\n"
    assert package.read_bytes() == before
    assert [each.name for each in package.parent.iterdir() if each.name.startswith("model")] == ["model.emoe"]


def test_what_cannot_be_proven_here_is_taken_up_where_it_can(
    hub: StandIn, package: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service's SDK may be newer than the one here: nothing is compiled twice for that."""
    hub.link = lambda graphs, chip: Binary(
        b"v3.0.0.270929181845\0" + b"".join(name.encode() + b"\0" for name, _ in graphs), [name for name, _ in graphs]
    )
    before = package.read_bytes()
    status, out, err = pack("compile", package, "--target", "htp:sm8650", "--compiler", "aihub")
    assert (status, out) == (1, "")
    assert "was made by SDK 3.0.0.270929181845, which is newer than the one here" in err
    assert package.read_bytes() == before
    hub.submitted.clear()
    monkeypatch.setattr("estream_packer.htp.targets.prove_binary", lambda *_: [Proof(GRAPH, "attended", 1e-3)])
    assert pack("compile", package, "--target", "htp:sm8650", "--compiler", "aihub").code == 0
    assert hub.submitted == []
    assert not package.with_name("model.emoe.aihub").exists()
