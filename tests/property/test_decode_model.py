"""Laws of the recurrence of decoding, for any layers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from estream_spec.decode_model import DecodeLayer, Reading, Strategy, decode_token

ROUNDING = 1e-9
EXACT: tuple[Strategy, ...] = ("none", "fixed", "exact", "oracle")
times = st.floats(0, 10)


@st.composite
def a_layer(draw: st.DrawFn) -> DecodeLayer:
    """A layer with up to four routed experts of up to eight, and a prediction of any worth."""
    top_k = draw(st.integers(0, 4))
    chances = draw(st.lists(st.floats(0, 1), min_size=top_k, max_size=8)) if top_k else []
    scale = min(1.0, top_k / sum(chances)) if sum(chances) else 1.0
    return DecodeLayer(
        before_s=draw(times),
        beside_s=draw(times),
        top_k=top_k,
        expert_s=draw(times),
        record_bytes=draw(st.integers(1, 1000)),
        read_s=draw(times),
        hit_rate=draw(st.floats(0, 1)),
        needed=tuple(scale * each for each in sorted(chances, reverse=True)),
    )


layers = st.lists(a_layer(), min_size=1, max_size=3)
extras = st.integers(0, 6)
readings = st.builds(Reading, start_s=times, toll_s=st.floats(0, 0.01))


def time_of(given_layers: list[DecodeLayer], strategy: Strategy, extra: int, reading: Reading) -> float:
    return decode_token(given_layers, strategy, extra=extra, reading=reading).time_s


@settings(max_examples=40, deadline=None)
@given(layers, extras, readings, st.floats(0, 1))
def test_a_faster_link_and_more_hits_never_make_a_token_slower(
    each: list[DecodeLayer], extra: int, reading: Reading, share: float
) -> None:
    faster = [replace(layer, read_s=share * layer.read_s) for layer in each]
    held = [replace(layer, hit_rate=1 - share * (1 - layer.hit_rate)) for layer in each]
    for strategy in EXACT:
        slow = time_of(each, strategy, extra, reading) * (1 + ROUNDING) + ROUNDING
        assert time_of(faster, strategy, extra, reading) <= slow
        assert time_of(held, strategy, extra, reading) <= slow


@settings(max_examples=40, deadline=None)
@given(layers, extras, readings)
def test_no_exact_strategy_beats_a_faultless_prediction_and_exact_never_loses(
    each: list[DecodeLayer], extra: int, reading: Reading
) -> None:
    found = {strategy: time_of(each, strategy, extra, reading) for strategy in EXACT}
    assert found["oracle"] <= min(found.values()) * (1 + ROUNDING) + ROUNDING
    assert found["exact"] <= min(found["none"], found["fixed"]) * (1 + ROUNDING) + ROUNDING


@settings(max_examples=40, deadline=None)
@given(layers, extras, readings)
def test_reading_ahead_nothing_is_not_reading_ahead(each: list[DecodeLayer], extra: int, reading: Reading) -> None:
    blind = [replace(layer, needed=()) for layer in each]
    none = decode_token(each, "none", reading=reading)
    for strategy in ("fixed", "exact"):
        assert decode_token(blind, strategy, extra=extra, reading=reading) == none


@settings(max_examples=40, deadline=None)
@given(layers, extras, readings)
def test_bytes_and_times_add_up(each: list[DecodeLayer], extra: int, reading: Reading) -> None:
    needed = sum((1 - layer.hit_rate) * layer.top_k * layer.record_bytes for layer in each)
    for strategy in EXACT:
        token = decode_token(each, strategy, extra=extra, reading=reading)
        assert token.stall_s >= -ROUNDING
        assert token.read_bytes - token.wasted_bytes - needed <= ROUNDING * (1 + needed)
        assert token.read_bytes >= needed * (1 - ROUNDING) - ROUNDING
    free = decode_token(each, "stall-free", extra=extra, reading=reading)
    assert abs(free.stall_s) <= ROUNDING
    assert -ROUNDING <= free.replaced <= 1 + ROUNDING
