from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from estream_loader import open_package
from estream_packer.build import build
from estream_packer.recipe import BuildOptions
from estream_runtime import Session
from estream_runtime.cache import CHUNK
from estream_spec.errors import LinkError, TrapError
from fixtures.olmoe import CONTEXT_LENGTH, EXPERTS, VOCABULARY, token_ids, write_checkpoint
from fixtures.packed import UNQUANTISED, PackageFactory
from fixtures.reference import GREEDY_PROMPT, ReferenceLoader

PROMPT = token_ids("generate", 20)


@pytest.fixture
def session(packed: PackageFactory) -> Iterator[Session]:
    with open_package(packed()) as package, Session(package, threads=1) as opened:
        yield opened


def test_remembering_keys_and_values_equals_computing_anew(packed: PackageFactory) -> None:
    """Over the edge at which their room grows."""
    prompt = np.resize(PROMPT, CHUNK - 6)
    with open_package(packed("grouped", UNQUANTISED)) as package, Session(package, threads=1) as session:
        found = list(session.generate(prompt, 12))
        text = prompt.tolist()
        for token in found:
            assert token == int(session.prefill(text).logits.argmax())
            text.append(token)
    assert len(found) == 12


@pytest.mark.parametrize("options", [UNQUANTISED, BuildOptions()], ids=["f32", "w4"])
def test_long_texts_do_not_depend_on_the_arena(options: BuildOptions, packed: PackageFactory) -> None:
    texts = []
    with open_package(packed("base", options)) as package:
        length = package.experts.table.ranges[0].record_length
        for slots, group_size in ((2 * EXPERTS, EXPERTS), (1, 1), (EXPERTS, 4), (3, 2)):
            with Session(package, arena_bytes=slots * length, group_size=group_size, threads=1) as session:
                texts.append(list(session.generate(PROMPT, 64, temperature=0.7, seed=1)))
    assert texts == texts[:1] * 4


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (0.8, 0.9)])
def test_the_same_seed_gives_the_same_text(temperature: float, top_p: float, session: Session) -> None:
    texts = [list(session.generate(PROMPT, 16, temperature, top_p, seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert (texts[0] == texts[2]) == (temperature == 0)


def test_without_a_seed_texts_differ(session: Session) -> None:
    assert list(session.generate(PROMPT, 30, 1.5)) != list(session.generate(PROMPT, 30, 1.5))


def test_two_texts_can_be_made_in_turns(session: Session) -> None:
    other = token_ids("other", 9)
    expected = [list(session.generate(prompt, 10)) for prompt in (PROMPT, other)]
    first, second = session.generate(PROMPT, 10), session.generate(other, 10)
    turns = list(zip(first, second, strict=True))
    assert [list(tokens) for tokens in zip(*turns, strict=True)] == expected
    assert (first.stats.prompt_tokens, second.stats.prompt_tokens) == (len(PROMPT), len(other))


@pytest.mark.parametrize(("beyond", "made"), [(-1, 1), (-5, 5), (0, 0)])
def test_prompt_and_output_together_fill_the_context(beyond: int, made: int, session: Session) -> None:
    prompt = np.resize(PROMPT, CONTEXT_LENGTH + beyond)
    assert len(list(session.generate(prompt, 32))) == made


def test_no_more_tokens_than_asked_for(session: Session) -> None:
    assert list(session.generate(PROMPT, 0)) == []
    assert len(list(session.generate(PROMPT, 7))) == 7
    assert len(list(session.generate(PROMPT))) == 32


def test_an_end_token_is_the_last_one(tmp_path: Path, reference: ReferenceLoader) -> None:
    expected = reference().greedy.tolist()
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "base")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "eos_token_id": [expected[4], VOCABULARY - 2]}))
    build(checkpoint, tmp_path / "ends.emoe", UNQUANTISED)
    with open_package(tmp_path / "ends.emoe") as package, Session(package, threads=1) as session:
        tokens = session.generate(reference().prompts[GREEDY_PROMPT].tokens, 16)
        assert list(tokens) == expected[:5]
        assert list(tokens) == []


def test_rows_without_a_token_are_never_chosen(tmp_path: Path, reference: ReferenceLoader) -> None:
    """A model with more rows than its tokenizer has tokens; the row beyond is the likeliest third token."""
    padding = VOCABULARY - 1
    prompt = reference().prompts[GREEDY_PROMPT].tokens
    assert reference().greedy[2] == padding
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "base")
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"].pop("Ġthe")
    tokenizer["model"]["merges"].pop()
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert Tokenizer.from_file(str(checkpoint / "tokenizer.json")).get_vocab_size() == padding
    build(checkpoint, tmp_path / "padded.emoe", UNQUANTISED)
    with open_package(tmp_path / "padded.emoe") as package, Session(package, threads=1) as session:
        found = list(session.generate(prompt, 16))
        logits = session.prefill([*prompt, *found[:2]]).logits
        assert found[:2] == reference().greedy[:2].tolist()
        assert found[2] == int(logits[:padding].argmax())
        assert padding not in found
        assert padding not in list(session.generate(prompt, 100, temperature=5.0, seed=1))


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"top_p": 0.0}, {"seed": -1}, {"max_new_tokens": -1}, {"max_new_tokens": 1.5}],
)
def test_options_out_of_range_are_refused_before_the_first_token(options: dict[str, float], session: Session) -> None:
    with pytest.raises(TrapError, match=r"is -?\d.*, expected"):
        session.generate(PROMPT, **options)  # type: ignore[arg-type]
    assert len(list(session.generate(PROMPT, 2))) == 2


def test_a_tokenizer_that_knows_no_token_of_the_model_is_refused(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = WordLevel({"a": VOCABULARY, "b": VOCABULARY + 7}, "a")
    monkeypatch.setitem(vars(session.package), "tokenizer", Tokenizer(elsewhere))
    with pytest.raises(LinkError, match="the tokenizer knows no token of the model's"):
        session.generate(PROMPT)


def test_a_text_left_half_way_does_no_harm(session: Session) -> None:
    expected = list(session.generate(PROMPT, 8))
    assert list(islice(session.generate(PROMPT, 8), 3)) == expected[:3]
    assert list(session.generate(PROMPT, 8)) == expected


def test_stats_grow_with_the_text(session: Session) -> None:
    tokens = session.generate(PROMPT, 5)
    assert tokens.stats.new_tokens == tokens.stats.bytes_read == 0
    next(tokens)
    first = tokens.stats
    assert first.new_tokens == 1
    assert first.ttft_s == first.total_s > 0
    assert first.decode_tokens_per_s is None
    assert len(list(tokens)) == 4
    last = tokens.stats
    assert (last.prompt_tokens, last.new_tokens) == (len(PROMPT), 5)
    assert last.ttft_s == first.ttft_s < last.total_s
    assert last.bytes_read > first.bytes_read > 0
    assert last.decode_tokens_per_s is not None
    assert last.decode_tokens_per_s > 0
