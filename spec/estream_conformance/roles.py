"""What the graphs of each role take: vectors and matrices, by name and shape. FORMAT.md section 10.1."""

from __future__ import annotations

from typing import Final

from estream_conformance.builder import Values

ROLES: Final = ("qkv", "attend", "convolve", "out", "expert", "dense", "head")
Shapes = dict[str, tuple[int, int]]
"""Rows and columns of matrices, by name."""
Lengths = dict[str, int]
"""Lengths of vectors, by name."""


def out_classes(model: Values) -> list[Values]:
    """The layers that stand for the shape classes of role `out`: the first of each."""
    firsts: dict[tuple[int | None, ...], Values] = {}
    for layer in model["layers"]:
        firsts.setdefault(_out_key(layer), layer)
    return list(firsts.values())


def _out_key(layer: Values) -> tuple[int | None, ...]:
    return layer.get("attention"), layer.get("convolution"), layer.get("experts")


def class_counts(model: Values) -> dict[str, int]:
    """How many shape classes each role has."""
    attentions = len(model["attentions"])
    return {
        "qkv": attentions,
        "attend": attentions,
        "convolve": len(model.get("convolutions", [])),
        "out": len(out_classes(model)),
        "expert": len(model["expert_blocks"]),
        "dense": len(model.get("dense_blocks", [])),
        "head": 1,
    }


def layer_roles(model: Values, number: int) -> dict[str, int]:
    """The shape class of each role that serves a layer, experts and head aside."""
    layer = model["layers"][number]
    classes = {
        "qkv": layer.get("attention"),
        "attend": layer.get("attention"),
        "convolve": layer.get("convolution"),
        "out": [_out_key(each) for each in out_classes(model)].index(_out_key(layer)),
        "dense": layer.get("dense"),
    }
    return {role: shape_class for role, shape_class in classes.items() if shape_class is not None}


def matrices_of(role: str, model: Values, shape_class: int) -> Shapes:
    """The matrices of a role's shape class, in order."""
    hidden = model["hidden"]
    match role:
        case "qkv":
            return _projections(model["attentions"][shape_class], hidden)
        case "convolve":
            return dict.fromkeys(("entry", "entry_gate", "exit_gate"), (hidden, hidden))
        case "out":
            attention = out_classes(model)[shape_class].get("attention")
            described = None if attention is None else model["attentions"][attention]
            return {"o": (hidden if described is None else described["heads"] * value_width(described), hidden)}
        case "expert":
            return _feed_forward("", hidden, model["expert_blocks"][shape_class]["intermediate"])
        case "dense":
            return _feed_forward("dense_", hidden, model["dense_blocks"][shape_class]["intermediate"])
        case "head":
            return {"head": (hidden, model["vocabulary"])}
    return {}


def vectors_of(role: str, model: Values, shape_class: int) -> Lengths:
    """The vectors of a role's shape class, in order."""
    matrices = matrices_of(role, model, shape_class)
    hidden = model["hidden"]
    match role:
        case "qkv":
            attention = model["attentions"][shape_class]
            return _norm(model, "attention_norm") | _head_norms(attention) | _biases(attention.get("bias"), matrices)
        case "attend":
            attention = model["attentions"][shape_class]
            return {"sinks": attention["heads"]} if attention.get("sinks") else {}
        case "convolve":
            return _norm(model, "attention_norm")
        case "out":
            return _norm(model, "expert_norm") | _out_biases(model, out_classes(model)[shape_class])
        case "expert":
            return _biases(model["expert_blocks"][shape_class].get("bias"), matrices)
        case "dense":
            return {"share": hidden} if model["dense_blocks"][shape_class].get("share") else {}
    return _norm(model, "final_norm") | _biases(model.get("head_bias"), matrices)


def value_width(attention: Values) -> int:
    """Width of a head of values."""
    return int(attention.get("value_dim") or attention["head_dim"])


def _projections(attention: Values, hidden: int) -> Shapes:
    heads, shared, width = attention["heads"], attention["key_value_heads"], attention["head_dim"]
    values = value_width(attention)
    if (latent := attention.get("latent")) is None:
        return {"q": (hidden, heads * width), "k": (hidden, shared * width), "v": (hidden, shared * values)}
    rank, rotated, narrow = latent["rank"], attention["rotary"].get("width") or width, latent.get("query_rank")
    queries = {"q": (hidden, heads * width)}
    if narrow is not None:
        queries = {"query_latent": (hidden, narrow), "q": (narrow, heads * width)}
    return {
        **queries,
        "latent": (hidden, rank),
        "k_rotated": (hidden, rotated),
        "k": (rank, heads * (width - rotated)),
        "v": (rank, heads * values),
    }


def _head_norms(attention: Values) -> Lengths:
    width = attention["head_dim"]
    if (latent := attention.get("latent")) is not None:
        names = {"query_latent_norm": "query_rank", "latent_norm": "rank"}
        return {name: int(latent[key]) for name, key in names.items() if key in latent}
    match attention.get("qk_norm"):
        case "full":
            return {"q_norm": attention["heads"] * width, "k_norm": attention["key_value_heads"] * width}
        case "head":
            return {"q_norm": width, "k_norm": width}
    return {}


def _out_biases(model: Values, layer: Values) -> Lengths:
    biases: Lengths = {}
    if (experts := layer.get("experts")) is not None:
        block = model["expert_blocks"][experts]
        biases |= {"router.bias": block["experts"]} if block["router"].get("bias") else {}
    if (attention := layer.get("attention")) is not None:
        biases |= {"o.bias": model["hidden"]} if model["attentions"][attention].get("out_bias") else {}
    return biases


def _norm(model: Values, name: str) -> Lengths:
    names = [name] if model.get("norm", "rms") == "rms" else [name, f"{name}.bias"]
    hidden: int = model["hidden"]
    return dict.fromkeys(names, hidden)


def _biases(there: object, matrices: Shapes) -> Lengths:
    return {f"{name}.bias": columns for name, (_, columns) in matrices.items()} if there else {}


def _feed_forward(prefix: str, hidden: int, inner: int) -> Shapes:
    return {f"{prefix}gate": (hidden, inner), f"{prefix}up": (hidden, inner), f"{prefix}down": (inner, hidden)}
