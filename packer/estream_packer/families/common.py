"""What the configurations of most families have in common, old and new keys alike.

`dtype` and `torch_dtype` are not looked at: every tensor says its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from estream_packer.families.config import Config
from estream_spec import limits

_EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
GENERATION: Final = "generation_config.json"


class Sizes(NamedTuple):
    """What every model has."""

    hidden: int
    vocabulary: int
    layers: int
    context_length: int


class Heads(NamedTuple):
    """Heads of an attention, and their width."""

    heads: int
    key_value_heads: int
    head_dim: int


def sizes(keys: Config) -> Sizes:
    """Widths and counts of the whole model.

    Raises:
        PackError: one of them is missing or out of range.
    """
    found = Sizes(
        hidden=keys.integer("hidden_size", 1, limits.MAX_DIMENSION),
        vocabulary=keys.integer("vocab_size", 1, limits.MAX_DIMENSION),
        layers=keys.integer("num_hidden_layers", 1, limits.MAX_LAYERS),
        context_length=keys.integer("max_position_embeddings", 1, limits.MAX_DIMENSION),
    )
    if keys.has("bos_token_id"):  # checked only: what is put before a prompt is the tokenizer's business
        keys.integer("bos_token_id", 0, found.vocabulary - 1)
    return found


def heads(keys: Config, hidden: int) -> Heads:
    """Heads of queries, of keys and values, and their width: `head_dim`, or what hidden width and heads give.

    Raises:
        PackError: one of them is missing, out of range, or does not divide what it must.
    """
    count = keys.integer("num_attention_heads", 1, limits.MAX_DIMENSION // 2)
    width = _head_dim(keys, hidden, count)
    shared = keys.integer("num_key_value_heads", 1, count) if keys.has("num_key_value_heads") else count
    if count % shared:
        raise keys.refusal("num_key_value_heads", f"a divisor of num_attention_heads {count}")
    return Heads(count, shared, width)


def _head_dim(keys: Config, hidden: int, count: int) -> int:
    if keys.has("head_dim"):
        width = keys.integer("head_dim", 2, limits.MAX_DIMENSION // count)
        if width % 2:
            raise keys.refusal("head_dim", "an even number")
        return width
    if hidden % count:
        raise keys.refusal("num_attention_heads", f"a divisor of hidden_size {hidden}")
    width = hidden // count
    if width % 2:
        expected = f"heads of even width, hidden_size {hidden} gives {width}"
        raise keys.refusal("num_attention_heads", expected)
    return width


def agreed(keys: Config, *names: str) -> str:
    """Which of several names of one setting the configuration has, the first where it has none.

    Raises:
        PackError: two of them are set, to different values.
    """
    given = [name for name in names if keys.has(name)] or [names[0]]
    for name in given[1:]:
        keys.only(name, keys.values[given[0]])
    return given[0]


def expert_count(keys: Config, layers: int) -> int:
    """Routed experts of a layer, under any of their names, at most as many as `layers` of them may have together.

    Raises:
        PackError: they are missing, out of range, or contradict each other.
    """
    highest = min(limits.MAX_EXPERTS, limits.MAX_RECORDS // max(layers, 1))
    return keys.integer(agreed(keys, *_EXPERT_COUNTS), 1, highest)


def norm_epsilon(keys: Config, default: float, *names: str) -> float:
    """What norms add to the mean square.

    Args:
        keys: the configuration.
        default: where it is not set.
        names: other names than `rms_norm_eps`.

    Raises:
        PackError: it is out of range.
    """
    name = agreed(keys, *(names or ("rms_norm_eps",)))
    return keys.number(name, 0, 1) if keys.has(name) else default


def end_tokens(keys: Config, generation: Mapping[str, object] | None, vocabulary: int) -> tuple[int, ...]:
    """The end tokens, each once. One, several or none may be given; those of `generation_config.json` win.

    Raises:
        PackError: they are not ids of tokens, or too many.
    """
    key = "eos_token_id"
    generation_keys = Config(generation or {}, GENERATION)
    place = generation_keys if generation_keys.has(key) else keys
    found = place.values.get(key)
    tokens = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        hint = f"set {key} in {place.place} to the tokenizer's end token, or to null"
        raise place.refusal(key, f"ids below vocab_size {vocabulary}", hint)
    if len(set(tokens)) > limits.MAX_END_TOKENS:
        raise place.refusal(key, f"at most {limits.MAX_END_TOKENS} ids")
    return tuple(dict.fromkeys(tokens))
