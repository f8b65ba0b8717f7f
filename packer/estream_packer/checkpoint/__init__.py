"""Reading checkpoints: safetensors files and the folder around them. Nothing here knows a model family."""

from estream_packer.checkpoint.folder import TENSORS, TOKENIZER, TOKENIZER_MODEL, Checkpoint, open_checkpoint
from estream_packer.checkpoint.header import TensorInfo

__all__ = ["TENSORS", "TOKENIZER", "TOKENIZER_MODEL", "Checkpoint", "TensorInfo", "open_checkpoint"]
