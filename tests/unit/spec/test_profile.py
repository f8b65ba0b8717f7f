"""Device profiles: what they say of rates and times, and that a wrong one is refused."""

import msgspec
import pytest

from estream_spec.errors import MalformedError
from estream_spec.profile import (
    Curve,
    DeviceProfile,
    Duration,
    ReadRate,
    ShareCurve,
    decode_profile,
    encode_profile,
)
from estream_spec.profiles import shipped_profile, shipped_profiles
from fixtures.estream import device

PROFILES = shipped_profiles()


def with_rates(*rates: ReadRate) -> DeviceProfile:
    return msgspec.structs.replace(device(), read_rates=rates)


def rate(lanes: int, at: tuple[float, ...], values: tuple[float, ...]) -> ReadRate:
    return ReadRate(lanes=lanes, at=at, values=values, basis="measured", source="a test")


def test_all_profiles_that_should_be_there_are() -> None:
    assert PROFILES == (
        "nvme",
        "snapdragon-8-elite",
        "snapdragon-8-elite-gen-5",
        "snapdragon-8-gen-3",
        "ufs-3.1",
        "ufs-4.0",
        "ufs-4.1",
    )


@pytest.mark.parametrize("name", PROFILES)
def test_shipped_profile_has_its_name_and_survives_encoding(name: str) -> None:
    profile = shipped_profile(name)
    assert profile.name == name
    assert decode_profile(encode_profile(profile), name) == profile
    assert (profile.npu is not None) == name.startswith("snapdragon")


@pytest.mark.parametrize("name", PROFILES)
def test_only_figures_with_a_named_device_or_document_are_called_measured_or_published(name: str) -> None:
    text = shipped_profile(name)
    assert text.energy is not None
    energies = [getattr(text.energy, field) for field in text.energy.__struct_fields__]
    figures = [*text.read_rates, text.read_start_s, text.head_weight_s, text.layer_flops, *energies]
    for figure in figures:
        assert figure.basis == "estimated" or any(
            each in figure.source for each in ("OnePlus", "moe-fit", "llama.cpp", "EStream")
        )


def test_newer_devices_are_faster() -> None:
    times = [
        shipped_profile(f"snapdragon-8-{name}").experts.expert_s(1 << 20, 1024, 64)
        for name in ("gen-3", "elite", "elite-gen-5")
    ]
    assert times == sorted(times, reverse=True)


def test_curve_goes_straight_over_the_logarithm_and_is_flat_outside() -> None:
    curve = Curve(at=(1, 4, 16), values=(10, 20, 40), basis="measured", source="a test")
    assert [curve(at) for at in (0.5, 1, 2, 4, 8, 16, 100)] == pytest.approx([10, 10, 15, 20, 30, 40, 40])


def test_read_is_split_over_lanes_as_the_reader_does() -> None:
    mebibyte = 1 << 20
    profile = with_rates(rate(1, (mebibyte,), (1e9,)), rate(4, (mebibyte / 4, mebibyte, 4 * mebibyte), (1e9, 2e9, 3e9)))
    assert profile.rate(16 * mebibyte, 4) == pytest.approx(3e9)
    assert profile.rate(2 * mebibyte, 4) == pytest.approx(2.5e9)
    assert profile.rate(mebibyte // 4, 4) == pytest.approx(1e9)
    assert profile.read_s(4 * mebibyte, 4) == pytest.approx(150e-6 + 4 * mebibyte / 2.5e9)
    assert profile.read_s(0, 4) == 0
    assert profile.best_rate(4) == 3e9


def test_expert_takes_whole_tiles_and_a_fixed_time() -> None:
    experts = device(flops=1e12).experts
    weights = 10**6
    fixed = weights * 0.09e-9
    assert experts.expert_s(weights, 1024, 1) == pytest.approx(fixed + 2 * weights * 32 / 1e12)
    assert experts.expert_s(weights, 1024, 32.000001) == experts.expert_s(weights, 1024, 1)
    assert experts.expert_s(weights, 1024, 33) == pytest.approx(fixed + 2 * weights * 64 / 1e12)


def test_expert_with_few_tokens_may_be_computed_at_a_lower_rate() -> None:
    share = ShareCurve(at=(8, 64), values=(0.25, 1), basis="measured", source="a test")
    experts = msgspec.structs.replace(device(flops=1e12).experts, flops_share=share)
    fixed = 10**6 * 0.09e-9
    assert experts.expert_s(10**6, 1024, 64) == pytest.approx(fixed + 2e6 * 64 / 1e12)
    assert experts.expert_s(10**6, 1024, 8) == pytest.approx(fixed + 2e6 * 32 / 0.25e12)
    assert experts.expert_s(10**6, 1024, 0) == pytest.approx(fixed)


def test_more_lanes_than_any_reader_has_are_refused() -> None:
    text = encode_profile(with_rates(rate(64, (1 << 20,), (1e9,))))
    assert decode_profile(text, "here.json").read_rates[0].lanes == 64
    with pytest.raises(MalformedError, match=r"`int` <= 64 - at `\$.read_rates\[0\].lanes`"):
        decode_profile(text.replace(b'"lanes": 64', b'"lanes": 65'), "here.json")


def test_toll_of_reading_is_by_byte_and_nothing_where_the_profile_has_none() -> None:
    assert device().read_toll(1 << 20, 2) == 0
    toll = Duration(value=0.5e-9, basis="measured", source="a test")
    profile = msgspec.structs.replace(device(), read_toll_s=toll)
    assert profile.read_toll(1 << 20, 2) * profile.read_s(1 << 20, 2) == pytest.approx(0.5e-9 * (1 << 20))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b'"about"', b'"abuot"', "unknown field `abuot`"),
        (b'"name": "fit"', b'"name": "Fit it"', "matching regex"),
        (b'"basis": "estimated"', b'"basis": "guessed"', "invalid enum value 'guessed'"),
        (b'"value": 0.00015', b'"value": -1', ">= 0"),
        (b'"value": 0.00015', b'"value": 1e308', r"<= 604800.0 - at `\$.read_start_s.value`"),
        (b'"value": 32', b'"value": 1' + 400 * b"0", r"at `\$.experts.row_tile.value`"),
        (b"3500000000.0", b"5e-324", r">= 1.0 - at `\$.read_rates\[0\].values\[0\]`"),
        (b"6600000000000.0", b"1e-200", r">= 1.0 - at `\$.experts.flops.values\[0\]`"),
        (b'"name": "fit"', b'"name": "fit\\n"', "matching regex"),
        (b'"source": "fit"', b'"source": ""', "length >= 1"),
        (b'"values": [', b'"values": [ 1.0, ', "points and 2 values, expected as many"),
        (b'"lanes": 2', b'"lanes": 0', ">= 1"),
        (b"{", b"{{", "not a device profile: JSON is malformed"),
        (b'"about": ', b'"about": ' + 10000 * b"[", "not a device profile: "),
        (b"fit", b"\xff", "not a device profile"),
    ],
)
def test_wrong_profile_is_refused(before: bytes, after: bytes, message: str) -> None:
    data = encode_profile(device())
    assert before in data
    with pytest.raises(MalformedError, match=message) as caught:
        decode_profile(data.replace(before, after, 1), "phone.json")
    assert caught.value.path == "phone.json"


def test_endless_profile_is_refused() -> None:
    with pytest.raises(MalformedError, match="profile has more than 1 MiB"):
        decode_profile(b" " * ((1 << 20) + 1), "phone.json")


def test_points_and_lanes_must_increase() -> None:
    with pytest.raises(ValueError, match="points do not increase"):
        rate(1, (2, 2), (1, 1))
    with pytest.raises(ValueError, match=r"lanes, expected each once, increasing"):
        with_rates(rate(2, (1,), (1,)), rate(1, (1,), (1,))).__post_init__()
