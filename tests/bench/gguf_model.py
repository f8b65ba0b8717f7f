"""Write a model of random weights as GGUF, the file that llama.cpp and its forks run, all matrices in Q4_0.

Such a file is only worth measuring with if it uses all experts, as trained models do. So its nibbles run from 1 to 15:
with 0 among them, which stands for -8 and has no counterpart, the mean of every matrix is not zero, all tokens drift in
one direction and want the same few experts. And what a layer adds is small beside the embeddings, which keep tokens
apart. `routing.py` counts.

ik_llama.cpp does not know OLMoE, so a file may call the same tensors a Qwen3-MoE: its matrices have the same shapes,
and only the norms of queries and keys and the weights of the experts differ, which cost next to nothing.

    python tests/bench/gguf_model.py --label qwen3moe build/bench/olmoe-1b-7b-qwen3moe.gguf
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

sys.path.insert(0, str(Path(__file__).parents[1]))

import click
import gguf
import numpy as np
import numpy.typing as npt

from estream_spec.model import ModelDescription
from estream_spec.shapes import SHAPES

Label = Literal["olmoe", "qwen3moe"]
LABELS: Final[tuple[Label, ...]] = get_args(Label)
BLOCK: Final = 32
"""Weights of a block of Q4_0: an f16 scale, then their nibbles."""
BLOCK_BYTES: Final = 2 + BLOCK // 2
NIBBLES: Final = range(1, 16)
NIBBLE_ZERO: Final = 8
RMS_NIBBLE: Final = math.sqrt(sum((each - NIBBLE_ZERO) ** 2 for each in NIBBLES) / len(NIBBLES))
PAIRS: Final = np.array([high << 4 | low for high in NIBBLES for low in NIBBLES], np.uint8)
"""All legal bytes."""

UNIFORM: Final = ("olmoe-1b-7b", "mixtral-8x7b", "qwen3-30b-a3b")
"""Shapes whose layers are all alike and have nothing beside plain attention and experts."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to write.

    Attributes:
        name: as GGUF has it.
        shape: rows first, as numpy has it.
        deviation: of its weights; None for a norm, all ones.
        exact: whether it stays f32, as routers and norms do.
    """

    name: str
    shape: tuple[int, ...]
    deviation: float | None
    exact: bool = False

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in bytes of a tensor in Q4_0."""
        return *self.shape[:-1], self.shape[-1] // BLOCK * BLOCK_BYTES

    def make(self, generator: np.random.Generator) -> Bytes | Floats:
        """Its contents: f32 of its shape, or uint8 of its stored shape."""
        if self.deviation is None:
            return np.ones(self.shape, np.float32)
        if self.exact:
            return generator.standard_normal(self.shape, np.float32) * np.float32(self.deviation)
        blocks = np.empty((math.prod(self.shape) // BLOCK, BLOCK_BYTES), np.uint8)
        blocks[:, :2] = np.frombuffer(np.float16(self.deviation / RMS_NIBBLE).tobytes(), np.uint8)
        blocks[:, 2:] = PAIRS[generator.integers(0, len(PAIRS), (len(blocks), BLOCK // 2), np.uint8)]
        return blocks.reshape(self.stored)


def write_gguf(path: Path, model: ModelDescription, label: Label) -> None:
    """Write a model of a shape; the same tensors whatever the label, but for the norms of queries and keys.

    Args:
        path: of the file, which appears when it is whole.
        model: whose layers are all alike.
        label: what the file calls itself.
    """
    part = path.with_suffix(".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(part, label)
    _describe(writer, model)
    tensors = list(planned(model, label))
    for each in tensors:
        if each.exact:
            writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), 4 * math.prod(each.shape))
        else:
            kind = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor_info(each.name, each.stored, np.dtype(np.uint8), math.prod(each.stored), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, each in enumerate(tensors):
        writer.write_tensor_data(each.make(np.random.default_rng(number)))
    writer.close()
    part.rename(path)


def planned(model: ModelDescription, label: Label) -> Iterator[Planned]:
    """All tensors, in the order of the file."""
    attention, block = model.attentions[0], model.expert_blocks[0]
    hidden, inner = model.hidden, block.intermediate
    queries, keys = attention.heads * attention.head_dim, attention.key_value_heads * attention.head_dim
    heads = (queries, keys) if label == "olmoe" else (attention.head_dim,) * 2
    plain, added = 1 / math.sqrt(hidden), 1 / math.sqrt(2 * len(model.layers))
    yield Planned("token_embd.weight", (model.vocabulary, hidden), 1.0)
    for layer in range(len(model.layers)):
        name = f"blk.{layer}"
        yield Planned(f"{name}.attn_norm.weight", (hidden,), None, exact=True)
        yield Planned(f"{name}.attn_q.weight", (queries, hidden), plain)
        yield Planned(f"{name}.attn_k.weight", (keys, hidden), plain)
        yield Planned(f"{name}.attn_v.weight", (keys, hidden), plain)
        yield Planned(f"{name}.attn_output.weight", (hidden, queries), added / math.sqrt(queries))
        yield Planned(f"{name}.attn_q_norm.weight", heads[:1], None, exact=True)
        yield Planned(f"{name}.attn_k_norm.weight", heads[1:], None, exact=True)
        yield Planned(f"{name}.ffn_norm.weight", (hidden,), None, exact=True)
        yield Planned(f"{name}.ffn_gate_inp.weight", (block.experts, hidden), plain, exact=True)
        yield Planned(f"{name}.ffn_gate_exps.weight", (block.experts, inner, hidden), plain)
        yield Planned(f"{name}.ffn_up_exps.weight", (block.experts, inner, hidden), plain)
        yield Planned(f"{name}.ffn_down_exps.weight", (block.experts, hidden, inner), added / math.sqrt(inner))
    yield Planned("output_norm.weight", (hidden,), None, exact=True)
    yield Planned("output.weight", (model.vocabulary, hidden), plain)


def _describe(writer: gguf.GGUFWriter, model: ModelDescription) -> None:
    """The file's keys. There is no tokenizer: prompts are random token ids."""
    attention, block = model.attentions[0], model.expert_blocks[0]
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(model.context_length)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(len(model.layers))
    writer.add_feed_forward_length(block.intermediate)
    writer.add_expert_feed_forward_length(block.intermediate)
    writer.add_expert_count(block.experts)
    writer.add_expert_used_count(block.router.top_k)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.key_value_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_rope_dimension_count(attention.head_dim)
    writer.add_rope_freq_base(attention.rotary.theta)
    writer.add_layer_norm_rms_eps(model.norm_epsilon)
    writer.add_vocab_size(model.vocabulary)
    writer.add_tokenizer_model("no_vocab")


@click.command()
@click.option("--shape", type=click.Choice(UNIFORM), default="olmoe-1b-7b", show_default=True)
@click.option("--label", type=click.Choice(LABELS), default="olmoe", show_default=True)
@click.argument("path", type=click.Path(path_type=Path))
def main(shape: str, label: Label, path: Path) -> None:
    """Write a model of random weights to PATH."""
    write_gguf(path, SHAPES[shape], label)


if __name__ == "__main__":
    main()
