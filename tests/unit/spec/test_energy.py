"""Energy, from figures that are easy to multiply."""

from __future__ import annotations

import msgspec
import pytest

from estream_spec.energy import (
    Work,
    energy_spent,
    prompt_energy,
    prompt_products,
    prompt_work,
    token_products,
    uses_floats,
)
from estream_spec.planner import Prediction, configure
from estream_spec.profile import DeviceProfile, Energy, EnergyFigures, Power
from estream_spec.profiles import shipped_profile
from estream_spec.shapes import DEEPSEEK_V2_LITE, LFM2_8B_A1B, OLMOE_1B_7B
from fixtures.estream import device, workload

GIB = 1 << 30


def figures(
    read: float = 0, memory: float = 0, integer: float = 0, floating: float = 0, idle: float = 0
) -> EnergyFigures:
    def energy(value: float) -> Energy:
        return Energy(value=value, basis="estimated", source="a test")

    return EnergyFigures(
        read_byte=energy(read),
        memory_byte=energy(memory),
        integer_product=energy(integer),
        float_product=energy(floating),
        idle=Power(value=idle, basis="estimated", source="a test"),
    )


def with_energy(energy: EnergyFigures) -> DeviceProfile:
    return msgspec.structs.replace(device(), energy=energy)


def choice(memory_bytes: int = 2 * GIB, tokens: int = 512) -> Prediction:
    return configure(workload("olmoe-1b-7b"), device(), memory_bytes, tokens).choice


def test_parts_add_up() -> None:
    work = Work(read_bytes=1e9, memory_bytes=2e9, products=3e9, idle_s=4.0)
    spent = energy_spent(work, figures(400, 60, 0.5, 2.0, 0.25), floats=False)
    assert (spent.read_j, spent.memory_j) == pytest.approx((0.4, 0.12))
    assert (spent.compute_j, spent.idle_j) == pytest.approx((0.0015, 1.0))
    assert spent.total_j == pytest.approx(1.5215)
    assert spent.delay_product(2.0) == pytest.approx(3.043)
    assert energy_spent(work, figures(integer=9.0, floating=2.0), floats=True).total_j == pytest.approx(0.006)


def test_accelerators_multiply_f16_and_processors_8_bits() -> None:
    assert uses_floats(shipped_profile("snapdragon-8-elite"))
    assert not uses_floats(shipped_profile("ufs-4.0"))


def test_products_are_those_of_active_weights() -> None:
    """1.3 billion weights are active in OLMoE-1B-7B, the embedding among them, which no token multiplies."""
    active = 1.28e9 - 50304 * 2048
    assert token_products(OLMOE_1B_7B, 0) == pytest.approx(active, rel=0.01)
    pairs = 16 * 16 * 256
    assert token_products(OLMOE_1B_7B, 100) - token_products(OLMOE_1B_7B, 0) == 100 * pairs
    head = 2048 * 50304
    expected = 512 * (token_products(OLMOE_1B_7B, 0) - head) + head + 512**2 / 2 * pairs
    assert prompt_products(OLMOE_1B_7B, 512) == pytest.approx(expected)


@pytest.mark.parametrize("model", [DEEPSEEK_V2_LITE, LFM2_8B_A1B])
def test_dense_layers_and_convolutions_are_counted(model: object) -> None:
    assert isinstance(model, type(OLMOE_1B_7B))
    assert token_products(model, 1000) > token_products(model, 0) > 1e9


def test_prompt_reads_writes_and_computes() -> None:
    plan = choice()
    work = prompt_work(workload("olmoe-1b-7b"), plan, 512)
    assert work.read_bytes == plan.bytes_read > 3e9
    assert work.memory_bytes == 2 * plan.bytes_read
    assert work.products == prompt_products(OLMOE_1B_7B, 512)
    assert work.idle_s == pytest.approx(plan.bubble * plan.time_s)


def test_resident_experts_are_read_from_memory_alone() -> None:
    plan = choice(16 * GIB)
    assert plan.mode == "resident"
    work = prompt_work(workload("olmoe-1b-7b"), plan, 512)
    assert (work.read_bytes, work.idle_s) == (0, 0)
    assert work.memory_bytes == workload("olmoe-1b-7b").expert_bytes


def test_energy_is_told_where_the_profile_has_figures() -> None:
    plan = choice()
    assert prompt_energy(workload("olmoe-1b-7b"), device(), plan, 512) is None
    spent = prompt_energy(workload("olmoe-1b-7b"), with_energy(figures(read=1000)), plan, 512)
    assert spent is not None
    assert spent.total_j == spent.read_j == pytest.approx(plan.bytes_read * 1e-9)
