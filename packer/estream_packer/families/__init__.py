"""Checkpoint families: from `config.json` and tensor names to a model description and a weight map.

A family is one small module that reads its configurations. A checkpoint is known by its configuration alone; code that
it brings along is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from estream_packer.families import deepseek, ernie, gpt_oss, granite, lfm2, mixtral, olmoe, qwen
from estream_packer.families.config import Config
from estream_packer.families.quantisation import quantisation_of
from estream_packer.families.sources import TensorSource
from estream_packer.families.weights import WeightMap, WeightSources

__all__ = ["TensorSource", "WeightMap", "WeightSources", "family_of"]


Configuration = Mapping[str, object]
"""A decoded `config.json` or `generation_config.json`."""


@dataclass(frozen=True)
class Family:
    """What the packer knows of one checkpoint family.

    Attributes:
        model_type: the configuration's `model_type`.
        architectures: what the one entry of its `architectures` may be; the first is the usual one.
        read: from `config.json` and `generation_config.json` to the model description and the places of its tensors.
        code: classes of code that publishers put beside the weights and that compute what transformers does itself.
    """

    model_type: str
    architectures: tuple[str, ...]
    read: Callable[[Configuration, Configuration | None], WeightMap]
    code: tuple[str, ...] = ()


FAMILIES: Final = (
    Family(olmoe.MODEL_TYPE, ("OlmoeForCausalLM",), olmoe.read),
    Family(qwen.QWEN2, ("Qwen2MoeForCausalLM",), qwen.read_qwen2),
    Family(
        deepseek.V2,
        ("DeepseekV2ForCausalLM",),
        deepseek.read_v2,
        ("modeling_deepseek.DeepseekV2ForCausalLM",),
    ),
    Family(mixtral.MIXTRAL, ("MixtralForCausalLM",), mixtral.read_mixtral),
    Family(qwen.QWEN3, ("Qwen3MoeForCausalLM",), qwen.read_qwen3),
    Family(gpt_oss.MODEL_TYPE, ("GptOssForCausalLM",), gpt_oss.read),
    Family(granite.MODEL_TYPE, ("GraniteMoeForCausalLM",), granite.read),
    Family(lfm2.MODEL_TYPE, ("Lfm2MoeForCausalLM",), lfm2.read),
    Family(
        deepseek.V3,
        ("DeepseekV3ForCausalLM",),
        deepseek.read_v3,
        ("modeling_deepseek.DeepseekV3ForCausalLM",),
    ),
    Family(
        mixtral.PHIMOE,
        ("PhiMoEForCausalLM", "PhimoeForCausalLM"),
        mixtral.read_phimoe,
        ("modeling_phimoe.PhiMoEForCausalLM",),
    ),
    Family(
        ernie.MODEL_TYPE,
        ("Ernie4_5_MoeForCausalLM",),
        ernie.read,
        ("modeling_ernie4_5_moe.Ernie4_5_MoeForCausalLM",),
    ),
)


def family_of(config: Mapping[str, object]) -> Family:
    """The family of a configuration.

    `model_type` decides, or `architectures` where there is none; where both are set they must agree.

    Raises:
        PackError: the family is not known, the checkpoint relies on code of its own, or it is quantised in a way that
            cannot be read.
    """
    keys = Config(config)
    quantisation_of(config)
    architecture = _architecture(keys)
    by_type = {family.model_type: family for family in FAMILIES}
    if keys.has("model_type"):
        family = _find(keys, "model_type", by_type, config["model_type"])
        if architecture is not None and architecture not in family.architectures:
            usual = family.architectures[0]
            hint = f"a model_type of {family.model_type!r} is packed as {usual!r} only"
            raise keys.refusal("architectures", repr([usual]), hint)
    elif architecture is not None:
        by_name = {name: family for family in FAMILIES for name in family.architectures}
        family = _find(keys, "architectures", by_name, architecture)
    else:
        raise keys.refusal("model_type", _one_of(by_type))
    _check_code(keys, family)
    return family


def _check_code(keys: Config, family: Family) -> None:
    """Refuse a checkpoint that needs code of its own; what transformers does itself by now needs none.

    Raises:
        PackError: it does.
    """
    if not keys.has("auto_map"):
        return
    code = keys.section("auto_map").values.get("AutoModelForCausalLM")
    if code not in family.code:
        hint = "remove auto_map from config.json if the model computes just what its model_type says"
        raise keys.refusal("auto_map", "it not to be set: a checkpoint's own code is never run", hint)


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
    raise keys.refusal(key, _one_of(known), f"did you mean {close[0]!r}?" if close else None)


def _one_of(names: Iterable[str]) -> str:
    return f"one of {', '.join(names)}"
