"""The tokenizer of a package splits text exactly as the checkpoint's own `tokenizer.json` does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Final

import pytest
from tokenizers import Tokenizer

from estream_loader import Package, open_package
from estream_packer.build import build
from estream_packer.recipe import BuildOptions
from estream_packer.sample import sample_files
from fixtures.texts import of_all_categories

SPECIAL: Final = "<|endoftext|>"
CONTRACTIONS: Final = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
TEXTS: Final = (
    *("", " ", "  ", "   a", "a   ", " " * 200, " " * 200 + "x", "x" + " " * 200 + "y", "\t", "\t\tif", " \t \t x"),
    *("\n", "\r", "\r\n", "\r\n\r\n", "a\r\nb", "a\n\nb", "a \n b", "\n  \n", "a\u2028b", "a\x0bb\x0cc", "a\x85b"),
    *("\0", "a\0b", "\0\0\0", "\x01\x7f\x1b[0m", "\ufeffbom", "\ufffd", "\u200b", "\u00a0", "a\u00a0b", "\u3000"),
    *("4", " 4", "20000", " 20000", "1,234.56", "3.14e-10", "0x1F", "1 2 3", "12:34:56", "x1y2", "²³", "٣٤٥", "Ⅷ½"),
    *("def f(x):\n    return x**2\n", "for (int i = 0; i < 10; ++i) { a[i] += b[i]; }", "a==b!=c<=d=>e->f::g"),
    *('{"key": [1, null, true]}', "<div class='a'>&amp;</div>", "SELECT * FROM t WHERE a='b';", "\\n\\t\\\\", "$x_y-z"),
    *(
        "https://example.org/a?b=c&d=%20#e",
        "C:\\path\\to",
        "#!/bin/sh",
        "// note\n/* note */",
        "____",
        "-----",
        "...!?",
    ),
    *("中文", "你好，世界。", "日本語のテキスト", "カタカナ ひらがな", "한국어 문장", "中a文b", "𠀀𪚥", " 中 文 "),
    *("🙂", "👩‍👩‍👧‍👦", "👍🏽", "🇩🇪🇫🇷", "a🙂b", "🙂 🙂", "❤️", "1️⃣", "🏴󠁧󠁢󠁥󠁮󠁧󠁿"),
    *(
        "e\u0301",
        "é",
        "n\u0303o",
        "a\u0300\u0301\u0302\u0303",
        "\u0301",
        " \u0301x",
        "Z\u0351\u036b\u0343a\u0321lgo",
        "Å\u212b",
    ),
    *("Привет, мир", "Ελληνικά", "שלום עולם", "مرحبا بالعالم", "हिन्दी", "ไทย", "ﬁﬂ", "ｆｕｌｌ", "ǅ", "ß ẞ", "İ ı"),
    *("naïve café", "“quoted” — dash…", "it’s", "don''t", "'", "''", "'S'", "rock 'n' roll", "O'Neill", "x'sy", " 's"),
    *(f"{word}{ending}" for word, ending in product(("we", " WE"), CONTRACTIONS)),
    *(f"{word}{ending.upper()}" for word, ending in product(("we", " WE"), CONTRACTIONS)),
    *("word " * 50, "a" * 300, "aB" * 100, "\U0010ffff", "\ue000", "<|endoftext", "<|", "|>", "<| endoftext |>"),
)
"""What splits words, digits and spaces in unusual ways; none has the special token."""
WITH_SPECIAL: Final = (
    *(SPECIAL, f"a{SPECIAL}b", f" {SPECIAL} ", SPECIAL * 3, f"{SPECIAL}\n", f"'{SPECIAL}'s", f"<{SPECIAL}>"),
    *(SPECIAL.upper(), f"中{SPECIAL}🙂", f"\0{SPECIAL}", f"print('{SPECIAL}')"),
)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    """The sample model, packed."""
    path = tmp_path_factory.mktemp("sample") / "sample.emoe"
    build(Path(str(sample_files())), path, BuildOptions(experts="f32", dense="f32"))
    with open_package(path) as package:
        yield package


@pytest.fixture(scope="module")
def original() -> Tokenizer:
    """The tokenizer of the sample's checkpoint."""
    return Tokenizer.from_file(str(sample_files() / "tokenizer.json"))


def test_no_text_is_split_in_another_way(sample: Package, original: Tokenizer) -> None:
    assert len(set(TEXTS)) >= 100
    for text in TEXTS + WITH_SPECIAL:
        assert sample.tokenizer.encode(text).ids == original.encode(text).ids, text


def test_nor_is_one_of_characters_of_any_category(sample: Package, original: Tokenizer) -> None:
    words = ("the", " ", "  ", "\n", "'s", " 20", SPECIAL, "<|")
    for text in of_all_categories(words, 500):
        token_ids = sample.tokenizer.encode(text).ids
        assert token_ids == original.encode(text).ids, text
        assert sample.tokenizer.decode(token_ids, skip_special_tokens=False) == text


def test_every_text_comes_back(sample: Package) -> None:
    for text in TEXTS:
        assert sample.tokenizer.decode(sample.tokenizer.encode(text).ids) == text
    for text in WITH_SPECIAL:
        assert sample.tokenizer.decode(sample.tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_special_token_inside_text_is_one_token(sample: Package) -> None:
    tokenizer = sample.tokenizer
    end = tokenizer.token_to_id(SPECIAL)
    before, after = tokenizer.encode("a").ids, tokenizer.encode("b").ids
    assert tokenizer.encode(f"a{SPECIAL}b").ids == [*before, end, *after]
