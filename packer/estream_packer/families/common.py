"""What the configurations of most families have in common, old and new keys alike.

`dtype` and `torch_dtype` are not looked at: every tensor says its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypedDict

from estream_packer.checkpoint.folder import GENERATION_CONFIG
from estream_packer.families.config import Config
from estream_packer.families.rotary import RotarySettings
from estream_spec import limits
from estream_spec.model import ExpertBlock, Rotary, Router

ROTARY_KINDS: Final = ("default", "linear", "llama3", "yarn")
"""Those that do not depend on the length of a prompt."""
_EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SOFT_CAPS: Final = ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap")
"""Settings of other families, without which their models would be others; no family here has them."""


class Frame(TypedDict):
    """The attributes of a model description that are found in the same way for every family."""

    family: str
    hidden: int
    vocabulary: int
    context_length: int
    norm_epsilon: float
    tied_head: bool
    end_tokens: tuple[int, ...]


class Heads(TypedDict):
    """The attributes of an attention that are found in the same way for most families."""

    heads: int
    key_value_heads: int
    head_dim: int
    rotary: Rotary


def frame(
    family: str,
    keys: Config,
    generation: Mapping[str, object] | None,
    *,
    epsilon: float,
    epsilon_key: str = "rms_norm_eps",
    tied: bool = False,
    tied_key: str = "tie_word_embeddings",
) -> Frame:
    """What every model has, and a look at what none does.

    Args:
        family: what it is called.
        keys: `config.json`.
        generation: `generation_config.json`; its end tokens win, as they do in transformers.
        epsilon: what norms add where the configuration does not say.
        epsilon_key: where it says so.
        tied: whether the head is the embedding where the configuration does not say.
        tied_key: where it says so.

    Raises:
        PackError: a key is missing, of a wrong type, out of range, or asks for something no family does.
    """
    keys.only("hidden_act", "silu")
    for key in _SOFT_CAPS:
        keys.only(key)
    vocabulary = width(keys, "vocab_size")
    # Checked only: what is put before a prompt is the tokenizer's business.
    keys.integer("bos_token_id", 0, vocabulary - 1, default=0)
    return Frame(
        family=family,
        hidden=width(keys, "hidden_size"),
        vocabulary=vocabulary,
        context_length=context_length(keys),
        norm_epsilon=keys.number(epsilon_key, 0, 1, epsilon),
        tied_head=keys.flag(tied_key, tied),
        end_tokens=_end_tokens(keys, generation, vocabulary),
    )


def width(keys: Config, key: str, default: int | None = None) -> int:
    """Rows or columns of a matrix.

    Raises:
        PackError: they are out of range, or are not set and there is no default.
    """
    return keys.integer(key, 1, limits.MAX_DIMENSION, default)


def layer_count(keys: Config) -> int:
    """How many layers there are.

    Raises:
        PackError: they are missing or out of range.
    """
    return keys.integer("num_hidden_layers", 1, limits.MAX_LAYERS)


def context_length(keys: Config) -> int:
    """Most tokens of prompt and output together.

    Raises:
        PackError: they are missing or out of range.
    """
    return width(keys, "max_position_embeddings")


def rotary(keys: Config, theta: float) -> RotarySettings:
    """The rotary settings of a family whose base is `theta` where the configuration has none.

    Raises:
        PackError: as `RotarySettings` does.
    """
    return RotarySettings(keys, theta=theta, kinds=ROTARY_KINDS)


def heads(keys: Config, settings: RotarySettings) -> Heads:
    """Heads of queries, of keys and values, and their width: `head_dim`, or what hidden width and heads give.

    Raises:
        PackError: a key is missing, out of range, or does not divide what it must.
    """
    count = keys.integer("num_attention_heads", 1, limits.MAX_DIMENSION // 2)
    head_dim = _head_dim(keys, count)
    shared = keys.integer("num_key_value_heads", 1, count, default=count)
    if count % shared:
        raise keys.refusal("num_key_value_heads", f"a divisor of num_attention_heads {count}")
    return Heads(heads=count, key_value_heads=shared, head_dim=head_dim, rotary=settings.rotary(head_dim))


def _head_dim(keys: Config, count: int) -> int:
    widest = min(limits.MAX_DIMENSION // count, 2 * limits.MAX_FREQUENCIES)
    if keys.has("head_dim"):
        found = keys.integer("head_dim", 2, widest)
        if found % 2:
            raise keys.refusal("head_dim", "an even number")
        return found
    hidden = width(keys, "hidden_size")
    if hidden % count:
        raise keys.refusal("num_attention_heads", f"a divisor of hidden_size {hidden}")
    found = hidden // count
    if found % 2 or found > widest:
        expected = f"heads of even width up to {widest}, hidden_size {hidden} gives {found}"
        raise keys.refusal("num_attention_heads", expected)
    return found


def agreed(keys: Config, *names: str) -> str:
    """Which of several names of one setting the configuration has, the first where it has none.

    Raises:
        PackError: two of them are set, to different values.
    """
    given = [name for name in names if keys.has(name)] or [names[0]]
    for name in given[1:]:
        keys.only(name, keys.values[given[0]])
    return given[0]


def expert_count(keys: Config, layers: int, name: str = _EXPERT_COUNTS[0]) -> int:
    """Routed experts of a layer, at most as many as `layers` of them may have together.

    Args:
        keys: the configuration.
        layers: how many have experts.
        name: the family's usual name for it; any other is as good.

    Raises:
        PackError: they are missing, out of range, or contradict each other.
    """
    highest = min(limits.MAX_EXPERTS, limits.MAX_RECORDS // max(layers, 1))
    return keys.integer(agreed(keys, name, *_EXPERT_COUNTS), 1, highest)


def softmax_experts(keys: Config, layers: int, width_key: str) -> ExpertBlock:
    """Experts chosen and weighed by a softmax over all of them, which `norm_topk_prob` renormalises.

    Args:
        keys: the configuration.
        layers: how many have experts.
        width_key: where it says how wide an expert is.

    Raises:
        PackError: a key is missing or out of range.
    """
    experts = expert_count(keys, layers)
    renormalise = keys.flag("norm_topk_prob", default=False)
    return ExpertBlock(
        experts=experts,
        intermediate=width(keys, width_key),
        router=Router(
            family="softmax-topk-renormalise" if renormalise else "softmax-topk",
            top_k=keys.integer("num_experts_per_tok", 1, experts),
        ),
    )


def shared_width(keys: Config, key: str, default: int, each: int, *, fewest: int = 1) -> int:
    """Rows of all shared experts together, which lie one under the other in one block; 0 where there are none.

    Args:
        keys: the configuration.
        key: where it says how many there are.
        default: as many where it does not.
        each: `moe_intermediate_size`, rows of one.
        fewest: as many as there may be.

    Raises:
        PackError: they are out of range.
    """
    count = keys.integer(key, fewest, limits.MAX_EXPERTS, default)
    if count * each > limits.MAX_DIMENSION:
        most = f"at most {limits.MAX_DIMENSION} rows in all shared experts, with moe_intermediate_size {each}"
        raise keys.refusal(key, most)
    return count * each


def window(keys: Config, context: int, default: int | None = None) -> int | None:
    """The window that `sliding_window` sets for all layers; None where it is null or as long as the context.

    Args:
        keys: the configuration.
        context: most tokens of prompt and output together.
        default: the window where the key is absent, which null is not; None for none.

    Raises:
        PackError: it is out of range.
    """
    key = "sliding_window"
    tokens = width(keys, key) if keys.has(key) else None if key in keys.values else default
    return tokens if tokens is not None and tokens < context else None


def layer_types(keys: Config, known: Sequence[str], default: Sequence[str] | None = None) -> tuple[str, ...]:
    """What `layer_types` calls each layer.

    Args:
        keys: the configuration.
        known: what it may call one.
        default: where it is not set; None where it must be.

    Raises:
        PackError: it is missing, of another length than there are layers, or has a name that is not known.
    """
    found = keys.values["layer_types"] if keys.has("layer_types") else default
    count = layer_count(keys)
    if not isinstance(found, list | tuple) or len(found) != count or not all(kind in known for kind in found):
        raise keys.refusal("layer_types", f"a list of {count}, each {' or '.join(known)}")
    return tuple(found)


def check_layers_alike(keys: Config, window: int | None) -> None:
    """Refuse `layer_types` by which some layers have a window that the others have not.

    Raises:
        PackError: it does.
    """
    kind = "full_attention" if window is None else "sliding_attention"
    layer_types(keys, (kind,), (kind,) * layer_count(keys))


def _end_tokens(keys: Config, generation: Mapping[str, object] | None, vocabulary: int) -> tuple[int, ...]:
    """The end tokens, each once. One, several or none may be given."""
    key = "eos_token_id"
    generation_keys = Config(generation or {}, GENERATION_CONFIG)
    place = generation_keys if generation_keys.has(key) else keys
    found = place.values.get(key)
    tokens = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        hint = f"set {key} in {place.place} to the tokenizer's end token, or to null"
        raise place.refusal(key, f"ids below vocab_size {vocabulary}", hint)
    if len(set(tokens)) > limits.MAX_END_TOKENS:
        raise place.refusal(key, f"at most {limits.MAX_END_TOKENS} ids")
    return tuple(dict.fromkeys(tokens))
