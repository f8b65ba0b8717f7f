"""Checkpoint families: from `config.json` and tensor names to a model description and a weight map.

A family is one small module with `describe` and `weights`. A checkpoint is known by its configuration alone; code that
it brings along is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from estream_packer.families import olmoe
from estream_packer.families.config import Config
from estream_packer.families.quantisation import quantisation_of
from estream_packer.families.sources import TensorSource
from estream_packer.families.weights import WeightMap, WeightSources
from estream_spec.model import ModelDescription

__all__ = ["TensorSource", "WeightMap", "WeightSources", "family_of"]


@dataclass(frozen=True)
class Family:
    """What the packer knows of one checkpoint family.

    Attributes:
        model_type: the configuration's `model_type`.
        architecture: the one entry of its `architectures`.
        describe: the model description from `config.json` and `generation_config.json`.
        weights: the weight map of a described model.
    """

    model_type: str
    architecture: str
    describe: Callable[[Mapping[str, object], Mapping[str, object] | None], ModelDescription]
    weights: Callable[[ModelDescription], WeightMap]


FAMILIES: Final = (Family(olmoe.MODEL_TYPE, olmoe.ARCHITECTURE, olmoe.describe, olmoe.weights),)


def family_of(config: Mapping[str, object]) -> Family:
    """The family of a configuration.

    `model_type` decides, or `architectures` where there is none; where both are set they must agree.

    Raises:
        PackError: the family is not known, the checkpoint relies on code of its own, or it is quantised in a way that
            cannot be read.
    """
    keys = Config(config)
    quantisation_of(config)
    if keys.has("auto_map"):
        hint = "remove auto_map from config.json if the model computes just what its model_type says"
        raise keys.refusal("auto_map", "it not to be set: a checkpoint's own code is never run", hint)
    architecture = _architecture(keys)
    if not keys.has("model_type"):
        if architecture is None:
            raise keys.refusal("model_type", _supported())
        return _find(keys, "architectures", {family.architecture: family for family in FAMILIES}, architecture)
    family = _find(keys, "model_type", {family.model_type: family for family in FAMILIES}, config["model_type"])
    if architecture not in (None, family.architecture):
        hint = f"a model_type of {family.model_type!r} is packed as {family.architecture!r} only"
        raise keys.refusal("architectures", repr([family.architecture]), hint)
    return family


def _architecture(keys: Config) -> str | None:
    """The one architecture a configuration names, or None if it names none."""
    found = keys.values.get("architectures")
    if found is None or found == []:
        return None
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], str):
        raise keys.refusal("architectures", "a list of one name")
    return found[0]


def _find(keys: Config, key: str, known: Mapping[str, Family], found: object) -> Family:
    if isinstance(found, str) and found in known:
        return known[found]
    close = get_close_matches(str(found)[:64], known, n=1)
    raise keys.refusal(key, _supported(), f"did you mean {close[0]!r}?" if close else None)


def _supported() -> str:
    return "a supported family: " + ", ".join(f"{family.model_type} ({family.architecture})" for family in FAMILIES)
