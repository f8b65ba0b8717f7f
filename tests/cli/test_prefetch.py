"""Prefetch routers on the command line: packed, shown, compared, signed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import Built, Pack
from estream_loader import open_package
from estream_spec.prefetch_router import encode_prefetch_router
from fixtures.olmoe import CheckpointFactory
from fixtures.pages import Page
from fixtures.prefetching import prefetch_router_for


@pytest.fixture
def file(built: Built, tmp_path: Path) -> Path:
    path = tmp_path / "router.prefetch"
    with open_package(built()) as package:
        path.write_bytes(encode_prefetch_router(prefetch_router_for(package)))
    return path


@pytest.fixture
def package(olmoe_checkpoint: CheckpointFactory, file: Path, tmp_path: Path, pack: Pack) -> Path:
    output = tmp_path / "model.emoe"
    assert pack("build", olmoe_checkpoint("base"), "-o", output, "--prefetch", file).code == 0
    return output


def test_a_recipe_and_the_flag_pack_the_same(
    olmoe_checkpoint: CheckpointFactory, package: Path, file: Path, tmp_path: Path, pack: Pack
) -> None:
    (tmp_path / "checkpoint").symlink_to(olmoe_checkpoint("base"))
    recipe, output = tmp_path / "recipe.toml", tmp_path / "again.emoe"
    recipe.write_text(f'[source]\ncheckpoint = "checkpoint"\n[package]\nprefetch = "{file.name}"\n')
    assert pack("build", recipe, "-o", output).code == 0
    assert output.read_bytes() == package.read_bytes()
    status, _, err = pack("build", recipe, "-o", output, "--prefetch", file)
    assert status == 2
    assert "--prefetch cannot be given with a recipe" in err


def test_one_for_another_checkpoint(
    olmoe_checkpoint: CheckpointFactory, file: Path, tmp_path: Path, pack: Pack
) -> None:
    output = tmp_path / "clipped.emoe"
    status, out, err = pack("build", olmoe_checkpoint("clipped"), "-o", output, "--prefetch", file)
    assert (status, out) == (1, "")
    assert err.startswith("estream-pack: error: prefetch router is for another model: digest ")
    assert "hint: train it anew for this model, with 'estream-pack train-prefetch'" in err
    assert not output.exists()


def test_it_is_shown(package: Path, file: Path, tmp_path: Path, pack: Pack) -> None:
    found = json.loads(pack("inspect", package, "--json").out)
    assert found["prefetch_router"] == {
        "layers": 2,
        "tokens": 1000,
        "overlap": 0.5,
        "extra": 1.5,
        "writer": "tests",
        "sources": [],
        "length": file.stat().st_size,
    }
    assert found["summary"]["space"]["prefetch router"] == file.stat().st_size
    assert "prefetch router" in [each["name"] for each in found["extents"]]
    lines = pack("inspect", package).out.splitlines()
    [row] = [line.split() for line in lines if line.strip().startswith("by tests")]
    assert row == ["by", "tests", "2", "1,000", "50.00%", "1.50", f"{file.stat().st_size:,}"]
    page = tmp_path / "page.html"
    assert pack("inspect", package, "--html", page).code == 0
    assert "Prefetch router" in Page(page.read_text("utf-8")).text()


def test_a_package_without_one_shows_none(built: Built, pack: Pack) -> None:
    assert json.loads(pack("inspect", built(), "--json").out)["prefetch_router"] is None
    assert "prefetch router" not in pack("inspect", built()).out


def test_packages_with_and_without_one_have_the_same_content(
    olmoe_checkpoint: CheckpointFactory, package: Path, file: Path, tmp_path: Path, pack: Pack
) -> None:
    without, other = tmp_path / "without.emoe", tmp_path / "other.emoe"
    assert pack("build", olmoe_checkpoint("base"), "-o", without).code == 0
    lines = pack("diff", without, package).out.splitlines()
    assert lines[0] == "same content"
    assert "  prefetch router: only in the second" in lines
    with open_package(without) as opened:
        file.write_bytes(encode_prefetch_router(prefetch_router_for(opened, seed=1)))
    assert pack("build", olmoe_checkpoint("base"), "-o", other, "--prefetch", file).code == 0
    lines = pack("diff", package, other).out.splitlines()
    assert lines[0] == "same content"
    assert "  prefetch router: differs" in lines


def test_a_signature_covers_it(package: Path, tmp_path: Path, pack: Pack) -> None:
    key = tmp_path / "vendor"
    assert pack("keygen", "-o", key).code == 0
    assert pack("sign", package, "--key", key).code == 0
    assert pack("verify", package, "--key", f"{key}.pub").code == 0
    with open_package(package) as opened:
        assert opened.prefetch_router is not None
