"""What is known of a device: how fast it reads, how fast it computes, how much memory it has, and who says so.

A profile is a JSON file. Every figure carries its source and whether it was measured (on the device named there),
published (by who made it, or by a paper) or estimated (inferred from other figures). `estream_spec.profiles` has some.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from estream_spec import limits
from estream_spec.errors import MalformedError
from estream_spec.json_text import decode_json
from estream_spec.pieces import piece_count

Basis = Literal["measured", "published", "estimated"]
Rate = Annotated[float, Meta(ge=1, le=1e18)]
"""A second, of bytes or operations. The bounds of all figures keep what is reckoned with them finite."""
Seconds = Annotated[float, Meta(ge=0, le=7 * 24 * 3600)]
Share = Annotated[float, Meta(ge=1e-6, le=2)]
Picojoules = Annotated[float, Meta(ge=0, le=1e9)]
Watts = Annotated[float, Meta(ge=0, le=1e5)]
Point = Annotated[float, Meta(ge=1e-3, le=1 << 44)]
"""Where a curve is known: bytes, rows or tokens."""
Text = Annotated[str, Meta(min_length=1, max_length=limits.MAX_TEXT)]

NAME_PATTERN: Final = r"^[a-z0-9]+([.-][a-z0-9]+)*\Z"
"""What a profile's name looks like."""
MAX_PROFILE_LENGTH: Final = 1 << 20
"""1 MiB; a profile has a few thousand bytes."""
_ROUNDING: Final = 1e-6
"""Share of a tile by which a computed number of tokens may exceed whole tiles."""


class Described(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every struct of a profile: immutable, unknown keys refused.

    Attributes:
        basis: how the figure is known.
        source: where it is from, and what was done to it.
    """

    basis: Basis
    source: Text


class Duration(Described, frozen=True, kw_only=True):
    """A time in seconds, which may be nothing."""

    value: Seconds


class Count(Described, frozen=True, kw_only=True):
    """A number of bytes or rows."""

    value: Annotated[int, Meta(ge=1, le=1 << 44)]


class Energy(Described, frozen=True, kw_only=True):
    """An energy in picojoules."""

    value: Picojoules


class Power(Described, frozen=True, kw_only=True):
    """A power in watts."""

    value: Watts


class Curve(Described, frozen=True, kw_only=True):
    """A rate that depends on a number.

    Attributes:
        at: where it is known, increasing.
        values: what it is there; between two points it goes straight over the logarithm of `at`, outside it is flat.
    """

    at: Annotated[tuple[Point, ...], Meta(min_length=1)]
    values: Annotated[tuple[Rate, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        if len(self.at) != len(self.values):
            raise ValueError(f"{len(self.at)} points and {len(self.values)} values, expected as many")
        if any(later <= earlier for earlier, later in zip(self.at, self.at[1:], strict=False)):
            raise ValueError("points do not increase")

    def __call__(self, at: float) -> float:
        """The number at a point above 0."""
        return float(np.interp(np.log(at), np.log(self.at), self.values))


class ShareCurve(Curve, frozen=True, kw_only=True):
    """A share that depends on a number."""

    values: Annotated[tuple[Share, ...], Meta(min_length=1)]


class ReadRate(Curve, frozen=True, kw_only=True):
    """Bytes per second, by the bytes of one request, with `lanes` requests under way and no cache in between."""

    lanes: Annotated[int, Meta(ge=1, le=limits.MAX_LANES)]


class ExpertTimes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long experts take.

    Attributes:
        group_call_s: for a group with tokens, whatever else is in it: to await, use and release it, and to call the
            graph where that takes all its experts.
        weight_s: for each weight of an expert that has tokens, however many: to move and expand it.
        flops: multiplications and additions per second, by the rows of gate and up.
        row_tile: tokens are computed in tiles of so many rows.
        flops_share: share of `flops` that is reached, by tokens of the expert; None where all numbers of them reach it.
    """

    group_call_s: Duration
    weight_s: Duration
    flops: Curve
    row_tile: Count
    flops_share: ShareCurve | None = None

    def expert_s(self, weights: int, intermediate: int, tokens: float) -> float:
        """Seconds for one expert.

        Args:
            weights: weights of the expert.
            intermediate: rows of gate and up.
            tokens: tokens routed to it, an expected number.
        """
        tile = self.row_tile.value
        rows = tile * ceil(tokens / tile - _ROUNDING)
        share = 1.0 if self.flops_share is None else self.flops_share(max(tokens, 1.0))
        return weights * self.weight_s.value + 2 * weights * rows / (share * self.flops(intermediate))


class EnergyFigures(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What running takes from the battery.

    Attributes:
        read_byte: for each byte read from storage.
        memory_byte: for each byte written to memory, and again for each byte that computing reads from there.
        integer_product: for each multiplication of 8-bit numbers, with its addition.
        float_product: for each multiplication of f16, with its addition.
        idle: drawn while computing waits.
    """

    read_byte: Energy
    memory_byte: Energy
    integer_product: Energy
    float_product: Energy
    idle: Power


class NpuLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the accelerator can address. Both are bounds: what is mapped stays below them.

    Attributes:
        buffer_bytes: of one buffer, which the arena is.
        session_bytes: of all that one session maps: arena, dense weights, keys, values and activations.
    """

    buffer_bytes: Count
    session_bytes: Count


class DeviceProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A device.

    Attributes:
        name: lower case, with hyphens.
        about: one sentence for people.
        read_rates: one curve for each number of lanes, increasing.
        read_start_s: from asking for a group to its first byte, and to say that it is there.
        experts: how long experts take.
        layer_flops: operations per second of all else in a layer, by tokens, counted as `workload.layer_operations`.
        head_weight_s: seconds for each weight of the head, which one token passes.
        read_toll_s: seconds that computing loses to each byte read beside it: reading takes time of processors, too.
            None where others read than compute.
        read_group_toll_s: seconds that it loses to each group, likewise.
        memory_bytes: memory of the device; None where the profile is of storage alone.
        npu: limits of its accelerator; None where it has none.
        energy: what running takes; None where that is not known.
    """

    name: Annotated[str, Meta(pattern=NAME_PATTERN, max_length=limits.MAX_NAME)]
    about: Text
    read_rates: Annotated[tuple[ReadRate, ...], Meta(min_length=1)]
    read_start_s: Duration
    experts: ExpertTimes
    layer_flops: Curve
    head_weight_s: Duration
    read_toll_s: Duration | None = None
    read_group_toll_s: Duration | None = None
    memory_bytes: Count | None = None
    npu: NpuLimits | None = None
    energy: EnergyFigures | None = None

    def __post_init__(self) -> None:
        lanes = [rate.lanes for rate in self.read_rates]
        if sorted(set(lanes)) != lanes:
            raise ValueError(f"read rates for {lanes} lanes, expected each once, increasing")

    def rate(self, length: int, lanes: int) -> float:
        """Bytes per second at which `length` bytes are read, cut into pieces as `estream_spec.pieces` says.

        Args:
            length: bytes, above 0.
            lanes: one of those that `read_rates` has.
        """
        return self._read_rate(lanes)(length / piece_count(length, lanes))

    def best_rate(self, lanes: int) -> float:
        """Bytes per second at the best request size. Arguments as for `rate`."""
        return max(self._read_rate(lanes).values)

    def read_s(self, length: int, lanes: int) -> float:
        """Seconds from asking for `length` bytes to having them; nothing takes no time."""
        return self.read_start_s.value + length / self.rate(length, lanes) if length else 0.0

    def read_toll(self, length: int, lanes: int) -> float:
        """Seconds that computing loses to each second in which reads of `length` bytes, above 0, are under way."""
        toll = 0.0 if self.read_toll_s is None else self.read_toll_s.value
        return toll * length / self.read_s(length, lanes)

    @property
    def group_toll_s(self) -> float:
        """Seconds that computing loses to each group read beside it."""
        return 0.0 if self.read_group_toll_s is None else self.read_group_toll_s.value

    def _read_rate(self, lanes: int) -> ReadRate:
        [curve] = [each for each in self.read_rates if each.lanes == lanes]
        return curve


_decoder: Final = msgspec.json.Decoder(DeviceProfile)


def decode_profile(data: bytes | bytearray, path: str) -> DeviceProfile:
    """Parse a profile.

    Args:
        data: JSON text.
        path: what messages call it.

    Raises:
        MalformedError: not JSON, an unknown key, a value missing or out of range.
    """
    if len(data) > MAX_PROFILE_LENGTH:
        raise MalformedError("profile has more than 1 MiB", path=path)
    return decode_json(_decoder, data, "a device profile", path)


def encode_profile(profile: DeviceProfile) -> bytes:
    """A profile as text, one figure a line or so."""
    return msgspec.json.format(msgspec.json.encode(profile)) + b"\n"
