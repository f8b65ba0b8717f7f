from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from estream_loader import open_package
from estream_packer.build import build
from estream_packer.recipe import BuildOptions
from estream_runtime import Session
from estream_runtime.observing import open_observed
from estream_spec.errors import LinkError
from estream_spec.graph_interface import layer_classes, role_shape
from estream_spec.model import ModelDescription
from estream_spec.weights import Floats
from fixtures.families import FAMILIES, prompt, write_checkpoint
from fixtures.packed import PackageFactory

NEARLY = BuildOptions(experts="w8", dense="w8", activations="f32")


def widths(model: ModelDescription) -> dict[tuple[int | None, str], int]:
    """Rows of every matrix of a model, by layer and name."""
    found: dict[tuple[int | None, str], int] = {}
    for layer in range(len(model.layers)):
        for role, shape_class in layer_classes(model, layer).items():
            found |= {(layer, each.name): each.rows for each in role_shape(role, model, shape_class).matrices}
    return found | {(None, each.name): each.rows for each in role_shape("head", model, 0).matrices}


@pytest.mark.parametrize("family", [name for name in FAMILIES if "-" not in name or name.endswith("-latent")])
def test_every_matrix_of_every_family_is_observed(family: str, tmp_path: Path) -> None:
    found: dict[tuple[int | None, str], int] = {}
    experts = set[tuple[int | None, int]]()

    def observe(layer: int | None, expert: int | None, rows: Mapping[str, Floats]) -> None:
        found.update({(layer, matrix): each.shape[1] for matrix, each in rows.items()})
        assert (expert is not None) == ("gate" in rows)
        if expert is not None:
            experts.add((layer, expert))

    build(write_checkpoint(tmp_path / "checkpoint", family), tmp_path / "a.emoe", NEARLY)
    routed = set[tuple[int | None, int]]()
    with open_package(tmp_path / "a.emoe") as package, open_observed(package, observe) as session:
        tokens = prompt(family, 64)
        logits = session.forward(
            tokens, lambda layer, ids, _: routed.update((layer, each) for each in ids.ravel().tolist())
        )
        assert found == widths(package.manifest.model)
        assert experts == routed
        with Session(package, "portable") as plain:
            np.testing.assert_allclose(logits, plain.forward(tokens), rtol=1e-3, atol=1e-3)


def test_quantised_activations_are_not_observed(packed: PackageFactory) -> None:
    with open_package(packed()) as package, pytest.raises(LinkError, match="only f32 ones can be observed"):
        open_observed(package, lambda *_: None)
