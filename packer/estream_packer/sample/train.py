"""Train the sample model: a small OLMoE on English novels in the public domain.

Run with the `train` extra installed::

    python -m estream_packer.sample.train --corpus FOLDER --out FOLDER --minutes 80

The corpus is a folder of plain-text books, one paragraph a line. Two pieces never enter training, neither the
tokenizer's nor the model's: `the-war-of-the-worlds.txt` and the last tenth of `middlemarch.txt`. They are the held-out
text on which bits per byte are reported. The beginning of the first is written beside the model as `held-out.txt`, and
pieces of all that was trained on as `calibration.txt`.

The learning rate follows the clock and not the step count, so that a slow or busy machine still ends with a model
whose rate has decayed to nothing. Two runs therefore differ in the last digits; what a run prints at its end belongs on
the model card.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import OlmoeConfig, OlmoeForCausalLM

HELD_OUT_BOOK = "the-war-of-the-worlds.txt"
FIRST_WORDS = "No one would have believed"
"""Where the held-out book begins, behind its title page."""
EXCERPT_CHARACTERS = 100_000
"""Most of the held-out book that `held-out.txt` holds."""
CALIBRATION_CHARACTERS = 8_000
"""Most of each book trained on that `calibration.txt` holds."""
END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 512
"""Tokens in one training window, and the longest prompt the model has seen."""
BATCH = 4
"""Windows in one optimiser step. Small, because time is the limit: many steps beat few exact ones."""
PEAK_LEARNING_RATE = 3e-3
WARM_UP_STEPS = 150
DECAY_SHARE = 0.45
"""Share of the time, at its end, in which the learning rate falls linearly to zero."""


def split_corpus(folder: Path) -> tuple[list[str], list[str]]:
    """Read the books and separate the held-out text; returns (training texts, held-out texts)."""
    training, held_out = [], []
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        if path.name == HELD_OUT_BOOK:
            held_out.append(text)
        elif path.name == "middlemarch.txt":
            cut = text.rindex("\n\n", 0, len(text) * 9 // 10)
            training.append(text[:cut])
            held_out.append(text[cut + 2 :])
        else:
            training.append(text)
    if len(held_out) != 2:
        raise SystemExit(f"{folder} lacks the two held-out books")
    return training, held_out


def excerpt(book: str) -> str:
    """The beginning of the held-out book, as many whole paragraphs as fit, closed by a line feed."""
    begin = book.index(FIRST_WORDS)
    return book[begin : book.rindex("\n\n", begin, begin + EXCERPT_CHARACTERS)] + "\n"


def calibration(texts: list[str]) -> str:
    """A piece from the middle of each text, as many whole paragraphs as fit, closed by a line feed."""
    pieces = []
    for text in texts:
        begin = text.index("\n\n", len(text) // 2) + 2
        pieces.append(text[begin : text.rindex("\n\n", begin, begin + CALIBRATION_CHARACTERS)])
    return "\n\n".join(pieces) + "\n"


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: every byte string has an encoding, and decoding gives it back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((paragraph for text in texts for paragraph in text.splitlines(True)), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one stream of token ids, each text closed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return np.concatenate([np.array([*tokenizer.encode(text).ids, end], np.int64) for text in texts])


def model_config() -> OlmoeConfig:
    """The architecture: 6.1 M parameters, of which each token uses 2.6 M."""
    return OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=False,
        router_aux_loss_coef=0.01,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )


def held_out_loss(model: OlmoeForCausalLM, stream: np.ndarray) -> float:
    """Mean loss in nats a token over consecutive windows of the stream."""
    total = count = 0.0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(stream) - 1, CONTEXT):
            window = torch.from_numpy(stream[start : start + CONTEXT + 1])[None]
            logits = model(window[:, :-1]).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
            count += window.shape[1] - 1
    model.train()
    return total / count


def learning_rate(step: int, spent: float) -> float:
    """Warm up by steps, hold, then fall to zero over the last `DECAY_SHARE` of the time; `spent` runs from 0 to 1."""
    return PEAK_LEARNING_RATE * min((step + 1) / WARM_UP_STEPS, 1.0, max((1.0 - spent) / DECAY_SHARE, 0.0))


def main() -> None:
    """Train, write the checkpoint in the Hugging Face layout, and print the figures for its card."""
    parser = argparse.ArgumentParser(description="Train the sample model.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=80.0)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    shuffle = np.random.default_rng(0)

    training_texts, held_out_texts = split_corpus(arguments.corpus)
    tokenizer = train_tokenizer(training_texts)
    training, held_out = encode(tokenizer, training_texts), encode(tokenizer, held_out_texts)
    held_out_bytes = sum(len(text.encode()) for text in held_out_texts)
    print(f"{len(training)} training tokens, {len(held_out)} held-out tokens", flush=True)

    model = OlmoeForCausalLM(model_config())
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )

    started, step, windows = time.monotonic(), 0, np.empty(0, np.int64)
    while (spent := (time.monotonic() - started) / 60 / arguments.minutes) < 1.0:
        if len(windows) < BATCH:  # a new pass: cut the stream at another phase, in another order
            windows = shuffle.permutation(np.arange(shuffle.integers(CONTEXT), len(training) - CONTEXT, CONTEXT))
        starts, windows = windows[:BATCH], windows[BATCH:]
        batch = torch.from_numpy(np.stack([training[s : s + CONTEXT] for s in starts]))
        rate = learning_rate(step, spent)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model(batch, labels=batch, output_router_logits=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0:
            minute = spent * arguments.minutes
            print(f"step {step} minute {minute:.1f} loss {float(loss):.3f} rate {rate:.1e}", flush=True)
    minutes, tokens = (time.monotonic() - started) / 60, step * BATCH * CONTEXT

    model.to(torch.bfloat16).save_pretrained(arguments.out)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    book = (arguments.corpus / HELD_OUT_BOOK).read_text(encoding="utf-8")
    (arguments.out / "held-out.txt").write_text(excerpt(book), encoding="utf-8")
    (arguments.out / "calibration.txt").write_text(calibration(training_texts), encoding="utf-8")

    loss_value = held_out_loss(model.to(torch.float32), held_out)  # of the weights as they are stored
    bits_per_byte = loss_value * len(held_out) / math.log(2) / held_out_bytes
    print(f"{minutes:.0f} minutes, {step:,} steps, {tokens:,} tokens, {tokens / len(training):.1f} passes")
    print(f"held out: {loss_value:.3f} nats a token, {bits_per_byte:.3f} bits per byte")


if __name__ == "__main__":
    main()
