"""What a prompt or a token takes from the battery, from a profile's figures per byte, product and second.

Energy has four parts: bytes read from storage; bytes written to memory and read from it; products of numbers; and the
power that is drawn while computing waits. Where it does not wait, what keeps the device awake is taken to be part of
what products cost.

Activations, and what stays in the caches of processors, are not counted: weights are nearly all that moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from estream_spec.model import ModelDescription
from estream_spec.planner import Prediction
from estream_spec.profile import DeviceProfile, EnergyFigures
from estream_spec.workload import Workload, dense_weights, expert_weights, layer_operations

PICO: Final = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What was done.

    Attributes:
        read_bytes: bytes read from storage.
        memory_bytes: bytes written to memory or read from it.
        products: multiplications, each with an addition.
        idle_s: seconds in which computing waited.
    """

    read_bytes: float
    memory_bytes: float
    products: float
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergySpent:
    """Joules of each part.

    Attributes:
        read_j: reading from storage.
        memory_j: memory.
        compute_j: computing.
        idle_j: waiting.
    """

    read_j: float
    memory_j: float
    compute_j: float
    idle_j: float

    @property
    def total_j(self) -> float:
        """Joules."""
        return self.read_j + self.memory_j + self.compute_j + self.idle_j

    def delay_product(self, time_s: float) -> float:
        """Joules times seconds: what an answer costs where both count alike."""
        return self.total_j * time_s


def energy_spent(work: Work, figures: EnergyFigures, *, floats: bool) -> EnergySpent:
    """The energy of some work.

    Args:
        work: what was done.
        figures: what each part of it takes.
        floats: whether products are those of f16 and not of 8-bit numbers.
    """
    product = figures.float_product if floats else figures.integer_product
    return EnergySpent(
        read_j=work.read_bytes * figures.read_byte.value * PICO,
        memory_j=work.memory_bytes * figures.memory_byte.value * PICO,
        compute_j=work.products * product.value * PICO,
        idle_j=work.idle_s * figures.idle.value,
    )


def uses_floats(profile: DeviceProfile) -> bool:
    """Whether the products of a device are those of f16: accelerators multiply that, processors 8-bit numbers."""
    return profile.npu is not None


def prompt_energy(workload: Workload, profile: DeviceProfile, plan: Prediction, tokens: int) -> EnergySpent | None:
    """What a prompt takes under a plan; None where the profile does not say. Arguments as for `prompt_work`."""
    if profile.energy is None:
        return None
    return energy_spent(prompt_work(workload, plan, tokens), profile.energy, floats=uses_floats(profile))


def prompt_work(workload: Workload, plan: Prediction, tokens: int) -> Work:
    """What a prompt comes to under a plan.

    Every weight of the dense matrices and every expert comes from memory once, all tokens of a prompt beside each
    other; where experts are read, they are written to memory before.

    Args:
        workload: the model as it is stored.
        plan: how the prompt is run.
        tokens: its length.
    """
    from_memory = workload.dense_bytes + (plan.bytes_read or workload.expert_bytes)
    return Work(
        read_bytes=plan.bytes_read,
        memory_bytes=plan.bytes_read + from_memory,
        products=prompt_products(workload.model, tokens),
        idle_s=plan.bubble * plan.time_s,
    )


def prompt_products(model: ModelDescription, tokens: int) -> float:
    """Multiplications of a prompt, its last token's head among them."""
    beside = sum(layer_operations(model, layer, tokens) for layer in range(len(model.layers))) / 2
    experts = sum(expert_products(model, layer, tokens) for layer in model.expert_layers)
    return beside + experts + model.hidden * model.vocabulary


def token_products(model: ModelDescription, context: int) -> float:
    """Multiplications of one token that attends to `context` tokens before it."""
    beside = sum(dense_weights(model, layer) + pairs(model, layer) * context for layer in range(len(model.layers)))
    experts = sum(expert_products(model, layer, 1) for layer in model.expert_layers)
    return beside + experts + model.hidden * model.vocabulary


def pairs(model: ModelDescription, layer: int) -> int:
    """Multiplications for each token that a token attends to; none in a layer without attention."""
    if model.layers[layer].attention is None:
        return 0
    attention = model.attention(layer)
    return attention.heads * (attention.head_dim + attention.value_width)


def expert_products(model: ModelDescription, layer: int, tokens: int) -> int:
    """Multiplications of the routed experts of so many tokens."""
    return tokens * model.expert_block(layer).router.top_k * expert_weights(model, layer)
