"""What is made of measured times: known figures come back."""

from __future__ import annotations

import pytest

from estream_spec.profile import Count, Curve, Duration, ExpertTimes, ShareCurve
from estream_spec.profile_fit import ExpertFit, Loss, fit_experts, fit_toll, monotone

WEIGHTS = 6 * 10**6
TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


def times_of(fit: ExpertFit) -> ExpertTimes:
    source = "a test"
    return ExpertTimes(
        group_call_s=Duration(value=0, basis="measured", source=source),
        weight_s=Duration(value=fit.weight_s, basis="measured", source=source),
        flops=Curve(at=(1024,), values=(fit.flops,), basis="measured", source=source),
        row_tile=Count(value=1, basis="measured", source=source),
        flops_share=ShareCurve(at=fit.at, values=fit.shares, basis="measured", source=source),
    )


def test_time_that_grows_evenly_is_told_apart() -> None:
    seconds = [WEIGHTS * 0.5e-9 + 2 * WEIGHTS * tokens / 2e11 for tokens in TOKENS]
    fit = fit_experts(TOKENS, seconds, WEIGHTS)
    assert fit.weight_s == pytest.approx(0.5e-9)
    assert fit.flops == pytest.approx(2e11)
    assert fit.at == TOKENS[2:]
    assert fit.shares == pytest.approx([1] * len(fit.at))


def test_measured_times_are_what_the_profile_then_says() -> None:
    """Where many tokens are computed at a better rate than few, as most processors do."""
    seconds = [3.6e-3, 3.8e-3, 4.1e-3, 4.9e-3, 6.0e-3, 7.9e-3, 10.6e-3, 14.8e-3, 24e-3]
    times = times_of(fit_experts(TOKENS, seconds, WEIGHTS))
    found = [times.expert_s(WEIGHTS, 1024, tokens) for tokens in TOKENS]
    assert found[2:] == pytest.approx(seconds[2:])
    assert found == pytest.approx(seconds, rel=0.05)
    assert max(times.flops_share.values if times.flops_share else ()) == 1


def test_disturbed_times_still_grow() -> None:
    seconds = [3.6e-3, 4.8e-3, 3.9e-3, 5.9e-3, 5.7e-3, 7.9e-3, 10.6e-3, 9.9e-3, 24e-3]
    times = times_of(fit_experts(TOKENS, seconds, WEIGHTS))
    found = [times.expert_s(WEIGHTS, 1024, tokens) for tokens in TOKENS]
    assert found == sorted(found)


def test_two_prompts_are_enough() -> None:
    fit = fit_experts((1.0, 2.0), (3e-3, 4e-3), 10**6)
    assert fit.weight_s == pytest.approx(2e-9)
    assert fit.flops == pytest.approx(2e9)


def test_times_come_in_any_order_and_several_of_one_number_of_tokens() -> None:
    ordered = fit_experts((1.0, 2.0, 4.0), (3e-3, 4e-3, 6e-3), 10**6)
    assert fit_experts((4.0, 1.0, 2.0, 2.0, 2.0), (6e-3, 3e-3, 4e-3, 1e-3, 9e-3), 10**6) == ordered
    assert len(fit_experts((1.0, 1.0), (3e-3, 4e-3), 10**6).at) == 1


def test_tokens_that_take_nothing_are_taken_to_need_a_hundredth() -> None:
    """Of experts so small that calling their graph is all that is seen."""
    times = times_of(fit_experts(TOKENS, [1e-3] * len(TOKENS), WEIGHTS))
    found = [times.expert_s(WEIGHTS, 1024, tokens) for tokens in TOKENS]
    assert found == pytest.approx([1e-3] * len(TOKENS), rel=0.011)


def test_monotone_leaves_what_grows_and_evens_out_what_does_not() -> None:
    assert monotone([1, 2, 2, 5]).tolist() == [1, 2, 2, 5]
    assert monotone([1, 4, 2, 5]).tolist() == [1, 3, 3, 5]


def loss(seconds: float, groups: int, bytes_read: int = 10**9) -> Loss:
    return Loss(seconds=seconds, groups=groups, bytes_read=bytes_read)


def test_loss_is_put_down_to_groups_and_bytes() -> None:
    pairs = [(loss(noise + 0.3 + 10 * 1e-3, 10), loss(noise + 0.3 + 110 * 1e-3, 110)) for noise in (0, 0.1, -0.1)]
    assert fit_toll(pairs) == pytest.approx((1e-3, 0.3e-9))


def test_loss_to_groups_of_one_size_is_put_down_to_bytes() -> None:
    assert fit_toll([(loss(0.2, 5), loss(0.3, 5))] * 3) == pytest.approx((0, 0.2e-9))


def test_loss_is_never_a_gain() -> None:
    assert fit_toll([(loss(-0.2, 5), loss(-0.3, 50))]) == (0, 0)
