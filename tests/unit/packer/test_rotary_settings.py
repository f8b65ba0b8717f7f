"""Rotary settings: found wherever they stand, and frequencies as transformers computes them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from estream_packer.families import common
from estream_packer.families.config import Config
from estream_packer.families.rotary import RotarySettings
from estream_spec.errors import PackError
from estream_spec.model import Rotary

REFERENCE: Final[list[tuple[dict[str, Any], float, list[float]]]] = [
    (
        {
            "head_dim": 32,
            "max_position_embeddings": 163840,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
            },
        },
        1.0,
        [
            1.0,
            0.562341332,
            0.316227764,
            0.177827939,
            0.100000001,
            0.0562341288,
            0.0272181761,
            0.0128290169,
            0.00582142826,
            0.00249036867,
            0.000959977158,
            0.000292145909,
            2.49999994e-05,
            1.40585325e-05,
            7.90569447e-06,
            4.44569832e-06,
        ],
    ),
    (
        {
            "head_dim": 32,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_theta": 150000.0,
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        1.3465735902799727,
        [
            1.0,
            0.47478205,
            0.225418001,
            0.107024424,
            0.0508132726,
            0.0193349998,
            0.00679495931,
            0.00209379266,
            0.000456483918,
            3.83088118e-05,
            1.8188337e-05,
            8.63549576e-06,
            4.09997847e-06,
            1.94659629e-06,
            9.24208962e-07,
            4.38797855e-07,
        ],
    ),
    (
        {
            "head_dim": 16,
            "max_position_embeddings": 163840,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "original_max_position_embeddings": 4096,
            },
        },
        1.1557219901962608,
        [1.0, 0.316227764, 0.100000001, 0.0239147246, 0.00512499968, 0.000849862176, 2.49999994e-05, 7.90569447e-06],
    ),
    (
        {
            "head_dim": 16,
            "max_position_embeddings": 512,
            "rope_theta": 1000000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4,
                "original_max_position_embeddings": 128,
                "attention_factor": 1.5,
            },
        },
        1.5,
        [
            1.0,
            0.111142464,
            0.00790569466,
            0.00140585331,
            0.000250000012,
            4.44569851e-05,
            7.90569356e-06,
            1.40585337e-06,
        ],
    ),
    (
        {
            "head_dim": 32,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        1.0,
        [
            1.0,
            0.440366626,
            0.193922758,
            0.0853971019,
            0.0376060307,
            0.0165604409,
            0.00729266508,
            0.00321144611,
            0.000524846022,
            7.78465546e-05,
            3.42810235e-05,
            1.50962178e-05,
            6.64786967e-06,
            2.92749974e-06,
            1.28917316e-06,
            5.6770881e-07,
        ],
    ),
    (
        {
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.5},
        },
        1.0,
        [
            0.400000006,
            0.1264911,
            0.0399999991,
            0.0126491114,
            0.00399999972,
            0.00126491114,
            0.000400000019,
            0.000126491112,
        ],
    ),
    (
        {
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 256,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                "long_factor": [2, 3, 4, 5, 6, 7, 8, 9],
            },
        },
        1.118033988749895,
        [1.0, 0.287479758, 0.0833333358, 0.0243252143, 0.00714285718, 0.00210818532, 0.000624999986, 0.000186016332],
    ),
]
"""Configurations, and the attention factor and frequencies that transformers 5.24 makes of them."""
YARN: Final[dict[str, Any]] = REFERENCE[0][0]
KINDS: Final = ("default", "linear", "llama3", "yarn", "longrope")
WRONG: Final[tuple[object, ...]] = (None, "text", 0, -1, 2**40, 1.5, True, [], {}, [None], 10**400)


def settings(
    config: dict[str, object],
    theta: float = 10000.0,
    kinds: tuple[str, ...] = KINDS,
    default: dict[str, object] | None = None,
) -> RotarySettings:
    return RotarySettings(Config(config), theta=theta, kinds=kinds, default=default)


def scaled(**keys: object) -> dict[str, object]:
    """A YaRN configuration with some settings changed; None stands for one that is not set."""
    return YARN | {"rope_scaling": YARN["rope_scaling"] | keys}


@pytest.mark.parametrize(("config", "scale", "frequencies"), REFERENCE)
def test_frequencies_are_those_of_transformers(config: dict[str, Any], scale: float, frequencies: list[float]) -> None:
    rotary = settings(config).rotary(config["head_dim"])
    assert rotary.scale == pytest.approx(scale, rel=1e-12)
    ours, theirs = (np.array(values, np.float32).view(np.int32) for values in (rotary.frequencies, frequencies))
    assert np.abs(ours - theirs).max() <= 1  # in the last place: an f32 power differs between libraries
    assert rotary.frequencies == tuple(float(np.float32(value)) for value in rotary.frequencies)


def test_plain_rotation_says_its_base_alone() -> None:
    assert settings({"rope_theta": 5e5}).rotary(8) == Rotary(theta=5e5)
    assert settings({}, theta=1e6).rotary(8, width=4) == Rotary(theta=1e6, width=4)
    assert settings({}).original_context is None


def test_a_part_of_a_head_is_rotated_with_frequencies_of_its_own_width() -> None:
    rotary = settings(YARN).rotary(96, width=32)
    assert rotary.width == 32
    assert rotary.frequencies == settings(YARN).rotary(32).frequencies


def test_deepseek_scales_scores_too() -> None:
    assert settings(YARN).score_multiplier == pytest.approx((0.1 * 0.707 * np.log(40) + 1) ** 2)
    assert settings(scaled(mscale_all_dim=0)).score_multiplier == 1.0
    assert settings({}).score_multiplier == 1.0


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 10000, "rope_parameters": {**YARN["rope_scaling"], "rope_type": "yarn"}},
        {"rope_parameters": {**YARN["rope_scaling"], "rope_theta": 10000.0}, "rope_scaling": YARN["rope_scaling"]},
        {"rope_scaling": {**YARN["rope_scaling"], "beta_fast": None, "beta_slow": None, "truncate": True}},
        {"rope_scaling": {**YARN["rope_scaling"], "factor": None}},
        {"original_max_position_embeddings": 4096, "rope_scaling": {**YARN["rope_scaling"], "factor": 40.0}},
    ],
)
def test_spellings_of_the_same_rotation(config: dict[str, Any]) -> None:
    common_keys = {"max_position_embeddings": 163840}
    assert settings(common_keys | config).rotary(32) == settings(YARN).rotary(32)


def test_a_family_may_have_settings_where_the_configuration_has_none() -> None:
    assert settings({}, default=YARN["rope_scaling"] | {"rope_theta": 7.0}).theta == 7.0
    assert settings({"rope_parameters": {"rope_theta": 8.0}}, default=YARN["rope_scaling"]).kind == "default"


def test_longrope_keeps_to_the_original_context() -> None:
    config, _, short = REFERENCE[-1]
    found = settings(config)
    assert (found.kind, found.original_context) == ("longrope", 256)
    config = config | {"rope_scaling": config["rope_scaling"] | {"type": "su", "short_mscale": 1.25, "long_mscale": 2}}
    assert settings(config).rotary(16).scale == 1.25
    assert settings(config).rotary(16).frequencies == pytest.approx(short)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "type is 'dynamic', expected 'default' or 'linear'"),
        ({"rope_scaling": {"type": ["yarn"]}}, "type is ['yarn']"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "type is 'yarn', expected 'linear' as elsewhere"),
        ({"rope_scaling": {"type": "linear"}}, "factor is absent"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}}, "beta_fast is 3, expected it not to be"),
        (
            {
                "rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
                "max_position_embeddings": 9,
            },
            "high_freq_factor is 4, expected more than low_freq_factor 4",
        ),
        (scaled(factor="40"), "factor is '40'"),
        (scaled(truncate=1), "truncate is 1, expected true or false"),
        (scaled(original_max_position_embeddings=0), "original_max_position_embeddings is 0"),
        (scaled() | {"rope_parameters": {"factor": 4}}, "factor is 40, expected 4 as elsewhere"),
        (scaled() | {"rope_theta": 1}, "rope_theta is 1, expected a number above 1 for yarn"),
        (scaled(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
        (scaled(factor=1e30, beta_fast=None) | {"rope_theta": 1e30}, "factor is 1e+30"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3}, "max_position_embeddings": 9},
            "short_factor is [1.0, 1.0, 1.0], expected a list of 8 numbers",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7 + [0]}, "max_position_embeddings": 9},
            "short_factor is 0",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(config: dict[str, object], message: str) -> None:
    with pytest.raises(PackError) as caught:
        settings(config).rotary(16)
    assert message in caught.value.message
    assert "config.json" in str(caught.value)


def test_every_setting_in_every_wrong_form_is_refused_by_name_or_makes_frequencies() -> None:
    for config, _, _ in REFERENCE:
        for key in config.get("rope_scaling", ()):
            for value in WRONG:
                told = None
                try:
                    rotary = settings(config | {"rope_scaling": config["rope_scaling"] | {key: value}}).rotary(16)
                    assert all(0 < frequency < np.inf for frequency in rotary.frequencies)
                except PackError as error:
                    told = str(error)
                assert told is None or "config.json" in told


def test_kinds_a_family_does_not_have_are_refused() -> None:
    with pytest.raises(PackError, match="type is 'yarn', expected 'default'"):
        settings(YARN, kinds=("default",))


def test_experts_are_counted_under_any_name() -> None:
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        assert common.expert_count(Config({name: 6}), 2) == 6
    with pytest.raises(PackError, match="n_routed_experts is 7, expected 6"):
        common.expert_count(Config({"num_local_experts": 6, "n_routed_experts": 7}), 2)
    with pytest.raises(PackError, match="num_experts is absent"):
        common.expert_count(Config({}), 2)


def test_heads_may_be_wider_than_the_residual_stream() -> None:
    keys: dict[str, object] = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}

    def heads(**changes: object) -> common.Heads:
        changed = Config(keys | changes)
        return common.heads(changed, common.rotary(changed, 1e4))

    rotary = Rotary(theta=1e4)
    assert heads(head_dim=32) == {"heads": 4, "key_value_heads": 2, "head_dim": 32, "rotary": rotary}
    assert heads() == {"heads": 4, "key_value_heads": 2, "head_dim": 16, "rotary": rotary}
    for wrong in (0, 3, -2, 2**40, "32", 1.0):
        with pytest.raises(PackError, match="head_dim is"):
            heads(head_dim=wrong)
