"""A SentencePiece model as a tokenizer of the `tokenizers` library that splits every text the same way.

What the library cannot do exactly is refused. The rest is proven on the spot: SentencePiece itself and the result must
give equal ids for the text of every piece and for characters of all Unicode categories.
"""

from __future__ import annotations

import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final

from estream_loader.tokenizing import tokenizer_faults
from estream_packer.checkpoint.sentencepiece_model import Algorithm, PieceType, SentencePieceModel, read_model
from estream_spec.errors import PackError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE, Unigram

HINT: Final = "load the tokenizer with transformers and save_pretrained it, which writes tokenizer.json"
SPACE: Final = "\u2581"
"""How pieces write a space."""
BYTES: Final = 256
_NEVER: Final = 1000.0
"""How far below all other scores those of pieces are that no text is to be split into."""
_COMMON: Final = 0x3000
"""Below it every character is part of the proof, above it every `_STEP`th."""
_STEP: Final = 23
_ALL: Final = 1 << 20
"""Spaces, more than are ever in front of a text."""
_PROVEN: Final = 1 << 17
"""Pieces whose texts are part of the proof."""
_LINE: Final = 200
"""Characters of one text of the proof."""


def convert_sentencepiece(data: bytes, path: str, *, prefix_once: bool) -> Tokenizer:
    """A tokenizer that gives the ids SentencePiece gives, without begin and end tokens.

    Control pieces and the unknown one are its special tokens: their text inside a text is taken for them, as
    transformers does.

    Args:
        data: a model file.
        path: what to call it in a message.
        prefix_once: the space that the model puts before a text is put before the first token only; otherwise also
            behind every special token.

    Raises:
        PackError: it is no model file, says something that cannot be converted exactly, or turned out not to be; or
            SentencePiece is not installed.
    """
    model = read_model(data, path)
    if reason := _not_exact(model, prefix_once=prefix_once):
        raise PackError(f"{reason}, which cannot be converted exactly", path=path, hint=HINT)
    with tokenizer_faults(path, PackError):
        tokenizer = _tokenizer(model, prefix_once=prefix_once)
        _prove(data, model, tokenizer, path)
        special = (PieceType.CONTROL, PieceType.UNKNOWN)
        tokenizer.add_special_tokens([piece.text for piece in model.pieces if piece.type in special])
    return tokenizer


def _not_exact(model: SentencePieceModel, *, prefix_once: bool) -> str | None:
    """Why a model cannot be converted; None where nothing is known that speaks against it."""
    return next(chain(_simply_not_exact(model, prefix_once=prefix_once), _pieces_not_exact(model)), None)


def _simply_not_exact(model: SentencePieceModel, *, prefix_once: bool) -> Iterator[str]:
    """Reasons that are found at once."""
    of_type = Counter(piece.type for piece in model.pieces)
    reasons = {
        f"it splits by {model.algorithm.name}": model.algorithm not in (Algorithm.BPE, Algorithm.UNIGRAM),
        f"it replaces characters by the rules {model.normalisation[:32]!r}": bool(model.character_map),
        "it changes what was decoded": model.rewrites_output,
        "its words end with their space": model.space_after,
        "its pieces write a space as it is": not model.escape,
        "none of its pieces is one that texts are split into": of_type[PieceType.NORMAL] == 0,
        f"{of_type[PieceType.UNUSED]} of its pieces are marked as unused": of_type[PieceType.UNUSED] > 0,
        f"{of_type[PieceType.UNKNOWN]} of its pieces stand for what is unknown": of_type[PieceType.UNKNOWN] != 1,
        f"{of_type[PieceType.BYTE]} of its pieces are bytes": (of_type[PieceType.BYTE] == BYTES) != model.byte_fallback,
        "two of its pieces are equal": len(model.ids) < len(model.pieces),
        "it has pieces of users, and puts a space before texts": of_type[PieceType.USER_DEFINED] > 0 and model.prefix,
        "it drops spaces, and puts one before the first token only": (
            model.single_spaces and model.prefix and prefix_once
        ),
    }
    return (reason for reason, holds in reasons.items() if holds)


def _pieces_not_exact(model: SentencePieceModel) -> Iterator[str]:
    """Reasons that take a look into every piece."""
    normal = {piece.text for piece in model.pieces if piece.type == PieceType.NORMAL}
    if alone := {each for text in normal for each in text} - normal:
        yield f"{min(alone)!r} is part of a piece and no piece itself"
    # Which of two such pieces is merged first depends on where they stand.
    if shared := [score for score, count in Counter(_merged(model).values()).items() if count > 1]:
        yield f"pieces that are merged have the same score {max(shared):g}"


def _merged(model: SentencePieceModel) -> dict[str, float]:
    """The score of each piece that is made by merging two others; of BPE only."""
    return {left + right: score for score, left, right in _merges(model)} if model.algorithm == Algorithm.BPE else {}


def _merges(model: SentencePieceModel) -> Iterator[tuple[float, str, str]]:
    """Score and halves of every two normal pieces that together are a third."""
    normal = {piece.text: piece.score for piece in model.pieces if piece.type == PieceType.NORMAL}
    for text, score in normal.items():
        for at in range(1, len(text)):
            if text[:at] in normal and text[at:] in normal:
                yield score, text[:at], text[at:]


def _tokenizer(model: SentencePieceModel, *, prefix_once: bool) -> Tokenizer:
    """The tokenizer without its special tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    tokenizer = Tokenizer(_bpe(model) if model.algorithm == Algorithm.BPE else _unigram(model))
    tidy = [
        normalizers.Replace(Regex(" {2,}"), " "),
        normalizers.Replace(Regex(r"\A | \z"), ""),
    ]
    prefix = model.prefix and not prefix_once
    tokenizer.normalizer = normalizers.Sequence(
        [
            *(tidy if model.single_spaces else []),
            *([normalizers.Prepend(SPACE)] if prefix else []),
            normalizers.Replace(" ", SPACE),
            *([normalizers.Replace(Regex(f"{SPACE}+\\z"), "")] if model.single_spaces else []),
        ]
    )
    if model.prefix and prefix_once:
        # Only this step knows where a text begins. It would put nothing before what begins with its own sign, so it
        # puts a plain space, of which there is none left, and that is replaced as the others were.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False),
                pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False),
            ]
        )
    dropped = _ALL if model.single_spaces else int(model.prefix)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", dropped, 0)] if dropped else []),
        ]
    )
    users = [piece.text for piece in model.pieces if piece.type == PieceType.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, normalized=True) for text in users])
    return tokenizer


def _bpe(model: SentencePieceModel) -> BPE:
    from tokenizers.models import BPE

    merges = sorted(_merges(model), key=lambda merge: -merge[0])
    return BPE(
        vocab=model.ids,
        merges=[(left, right) for _, left, right in merges],
        unk_token=model.unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _unigram(model: SentencePieceModel) -> Unigram:
    from tokenizers.models import Unigram

    lowest = min(piece.score for piece in model.pieces if piece.type == PieceType.NORMAL)
    scores = [
        (piece.text, piece.score if piece.type == PieceType.NORMAL else lowest - _NEVER) for piece in model.pieces
    ]
    return Unigram(scores, model.ids[model.unknown], model.byte_fallback)


def _prove(data: bytes, model: SentencePieceModel, tokenizer: Tokenizer, path: str) -> None:
    """Compare with SentencePiece, which takes some seconds for 100,000 pieces.

    Raises:
        PackError: a text is split differently, or there is nothing to compare with.
    """
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        hint = f"pip install 'estream-pack[sentencepiece]', or {HINT}"
        raise PackError(
            "reading it needs the package sentencepiece, which is not installed", path=path, hint=hint
        ) from None
    original = SentencePieceProcessor(model_proto=data)
    for text in _texts(model):
        if tokenizer.encode(text, add_special_tokens=False).ids != original.encode(text):
            raise PackError(f"{text[:80]!r} would be split differently", path=path, hint=HINT)


def _texts(model: SentencePieceModel) -> Iterator[str]:
    """What is compared: the text of each piece, alone and inside others; spaces; and characters of all categories.

    Of over `_PROVEN` pieces it is every second, third and so on, so that no model takes minutes.
    """
    yield from ("", " ", "  a  b   ", f" {SPACE} a{SPACE}", "\r\n\t\n", "\0a", "a" * 50, " " * 50)
    for piece in model.pieces[:: -(-len(model.pieces) // _PROVEN)]:
        if piece.type not in (PieceType.CONTROL, PieceType.UNKNOWN):
            text = piece.text.replace(SPACE, " ")
            yield text
            yield f"a{text}{text}b"
    codes = (*range(_COMMON), *range(_COMMON, sys.maxunicode, _STEP))
    chosen = [chr(code) for code in codes if unicodedata.category(chr(code)) != "Cs"]
    for start in range(0, len(chosen), _LINE):
        yield "".join(chosen[start : start + _LINE])
