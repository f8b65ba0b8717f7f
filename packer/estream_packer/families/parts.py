"""Parts of a model description out of configuration keys that most families share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from estream_packer.families import common
from estream_packer.families.config import Config
from estream_packer.families.rotary import RotarySettings
from estream_spec import limits
from estream_spec.model import Attention, ModelDescription

LARGEST: Final = 1e30
"""Of any number that something is multiplied by."""
ROTARY_KINDS: Final = ("default", "linear", "llama3", "yarn")
"""Those that do not depend on the length of a prompt."""


def model(family: str, keys: Config, generation: Mapping[str, object] | None, **parts: Any) -> ModelDescription:
    """A model description.

    Args:
        family: what it is called.
        keys: `config.json`.
        generation: `generation_config.json`.
        parts: attributes of the description besides its sizes and tokens.

    Raises:
        PackError: a key is missing or out of range.
    """
    sizes = common.sizes(keys)
    described: dict[str, Any] = {
        "family": family,
        "hidden": sizes.hidden,
        "vocabulary": sizes.vocabulary,
        "context_length": sizes.context_length,
        "end_tokens": common.end_tokens(keys, generation, sizes.vocabulary),
    }
    return ModelDescription(**(described | parts))


def only_silu(keys: Config) -> None:
    """Refuse another activation.

    Raises:
        PackError: there is one.
    """
    keys.only("hidden_act", "silu")


def layer_count(keys: Config) -> int:
    """How many layers there are."""
    return common.sizes(keys).layers


def attention(
    keys: Config, theta: float, *, kinds: tuple[str, ...] = ROTARY_KINDS, head_dim: int | None = None, **parts: Any
) -> Attention:
    """An attention shape class.

    Args:
        keys: the configuration.
        theta: the family's rotary base where the configuration has none.
        kinds: kinds of rotary scaling that the family has.
        head_dim: the family's width of a head where the configuration has none; None for what the hidden width gives.
        parts: attributes of the attention besides its heads and rotary encoding.

    Raises:
        PackError: a key is missing or out of range.
    """
    if head_dim is not None and not keys.has("head_dim"):
        keys = Config({**keys.values, "head_dim": head_dim}, keys.place)
    shape = common.heads(keys, common.sizes(keys).hidden)
    return Attention(
        heads=shape.heads,
        key_value_heads=shape.key_value_heads,
        head_dim=shape.head_dim,
        rotary=RotarySettings(keys, theta=theta, kinds=kinds).rotary(shape.head_dim),
        **parts,
    )


def integer_or(keys: Config, key: str, default: int, low: int, high: int) -> int:
    """A whole number, `default` where it is not set; that is held to the bounds too.

    Raises:
        PackError: it is out of range.
    """
    return keys.integer(key, low, high) if keys.has(key) else Config({key: default}, keys.place).integer(key, low, high)


def number_or(keys: Config, key: str, default: float, *, above: float = 0.0, high: float = LARGEST) -> float:
    """A number, `default` where it is not set.

    Raises:
        PackError: it is out of range.
    """
    return keys.number(key, above, high) if keys.has(key) else default


def window(keys: Config, context: int) -> int | None:
    """The window that `sliding_window` sets for all layers; None where it is as long as the context or not set.

    Raises:
        PackError: it is out of range.
    """
    if not keys.has("sliding_window"):
        return None
    tokens = keys.integer("sliding_window", 1, limits.MAX_DIMENSION)
    return tokens if tokens < context else None


def layer_types(keys: Config, known: Collection[str], default: Sequence[str] | None = None) -> tuple[str, ...]:
    """What `layer_types` calls each layer.

    Args:
        keys: the configuration.
        known: what it may call one.
        default: where it is not set; None where it must be.

    Raises:
        PackError: it is missing, of another length than there are layers, or has a name that is not known.
    """
    found = keys.values.get("layer_types")
    kinds = default if found is None else found
    count = layer_count(keys)
    if not isinstance(kinds, list | tuple) or len(kinds) != count or not all(kind in known for kind in kinds):
        raise keys.refusal("layer_types", f"a list of {count}, each one of {', '.join(sorted(known))}")
    return tuple(kinds)
