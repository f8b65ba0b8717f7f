"""Conversations: turns that go on where the last one ended, in a context that is not endless."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream_loader import Package, open_package
from estream_runtime import Conversation, Session
from estream_runtime.cache import KeyValues
from estream_runtime.interpreter import Interpreter
from estream_runtime.text import encode_continuation
from estream_spec.errors import LinkError, TrapError
from fixtures.chats import CONTEXT, chat_package
from fixtures.olmoe import token_ids


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    with open_package(chat_package(tmp_path_factory.mktemp("chat"))) as opened:
        yield opened


@pytest.fixture
def session(package: Package) -> Iterator[Session]:
    with Session(package) as opened:
        yield opened


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass through the layers."""
    rows, run = list[int](), Interpreter.run

    def counted(self: Interpreter, program: Any, batch: Any, *rest: Any) -> Any:
        rows.append(len(batch.token_ids))
        return run(self, program, batch, *rest)

    monkeypatch.setattr(Interpreter, "run", counted)
    return rows


def test_the_model_sees_all_of_the_conversation(session: Session) -> None:
    conversation, pieces = Conversation(session, "s"), list[str]()
    first = conversation.answer("hi", pieces.append, max_new_tokens=3)
    assert "".join(pieces) == first.text
    said = [*conversation.messages]
    assert said == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first.text},
    ]
    second = conversation.answer("so", max_new_tokens=4)
    prompt = f"s:s\nu:hi\na:{first.text}<|endoftext|>\nu:so\na:"
    prompt_ids = encode_continuation(session.package, prompt)
    assert second.token_ids == list(session.generate(prompt_ids, 4))
    assert second.stats.prompt_tokens == len(prompt_ids)
    conversation.forget()
    assert conversation.messages == said[:1]
    assert conversation.answer("hi", max_new_tokens=3).token_ids == first.token_ids


def test_only_what_is_new_is_computed(session: Session, computed: list[int]) -> None:
    prompt, context = token_ids("context", 20), session.new_context()
    first = list(session.generate(prompt, 3, context=context))
    assert computed == [20, 1, 1]
    longer = np.concatenate([prompt, first, token_ids("more", 4)])
    expected = list(session.generate(longer, 2))
    computed.clear()
    assert list(session.generate(longer, 2, context=context)) == expected
    assert computed == [len(longer) - 22, 1]  # the last token given was never put in
    other = np.concatenate([prompt[:10], token_ids("other", 6)])
    expected = list(session.generate(other, 2))
    computed.clear()
    assert list(session.generate(other, 2, context=context)) == expected
    assert computed == [6, 1]
    computed.clear()
    assert list(session.generate(other, 1, context=context)) == expected[:1]
    assert computed == [1]


def test_a_pass_that_fails_leaves_the_context_as_it_was(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, context = token_ids("context", 20), session.new_context()
    expected = list(session.generate(prompt, 4))
    assert next(session.generate(prompt[:12], 1, context=context)) >= 0
    attend, calls = Interpreter._attend, list[int]()

    def interrupted(self: Interpreter, rows: Any, layer: int) -> None:
        attend(self, rows, layer)
        calls.append(layer)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Interpreter, "_attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(session.generate(prompt, 4, context=context))
    assert calls == [0]
    assert list(session.generate(prompt, 4, context=context)) == expected


def test_what_a_pass_that_failed_left_behind_reaches_no_result(session: Session) -> None:
    prompt, context = token_ids("context", 20), session.new_context()
    expected = list(session.generate(prompt, 4))
    assert list(session.generate(prompt, 4, context=context)) == expected

    def fail() -> None:
        with context.extended(np.arange(4)):
            for held in context.cache:
                assert isinstance(held, KeyValues)
                keys, values = (np.full((each.shape[0], 4, each.shape[2]), np.nan, np.float32) for each in held.whole())
                held.append(keys, values)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(session.generate(prompt, 4, context=context)) == expected


def test_one_call_at_a_time_goes_on_with_a_context(session: Session) -> None:
    prompt, context = token_ids("context", 20), session.new_context()
    expected = list(session.generate(prompt, 4))
    first = session.generate(prompt, 4, context=context)
    assert [next(first), next(first)] == expected[:2]
    second = session.generate(prompt, 4, context=context)
    with pytest.raises(TrapError, match="another call has begun to use the context"):
        next(first)
    assert list(second) == expected


def test_statistics_are_of_the_rows_that_are_computed(session: Session) -> None:
    prompt, context = token_ids("context", 20), session.new_context()
    policies = []
    for _ in range(2):
        generation = session.generate(prompt, 1, context=context)
        next(generation)
        policies.append(generation.stats.policy)
        assert generation.stats.prompt_tokens == 20
    assert policies == [session.prefill(each).stats.policy for each in (prompt, prompt[:1])]
    assert policies[0] != policies[1]


def test_a_context_of_another_session_is_refused(session: Session, package: Package) -> None:
    with Session(package) as other, pytest.raises(TrapError, match="the context is of another session"):
        session.generate([1, 2], 1, context=other.new_context())


def test_a_conversation_keeps_the_last_message_of_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = chat_package(tmp_path, special=("<|channel|>", "<|message|>", "<|end|>"))
    with open_package(path) as package, Session(package) as session:
        said = "<|channel|>hm<|message|>the the<|end|><|channel|>so<|message|>Hi the"
        made = [*encode_continuation(package, said), 0]
        monkeypatch.setattr("estream_runtime.sampling.Sampler.choose", lambda *_: made.pop(0))
        conversation, pieces = Conversation(session), list[str]()
        assert conversation.answer("hi", pieces.append).text == "Hi the"
        assert "".join(pieces) == "hm\nthe theso\nHi the"
        assert conversation.messages[-1] == {"role": "assistant", "content": "Hi the"}


def test_an_answer_that_is_interrupted_stays_as_far_as_it_came(session: Session) -> None:
    conversation = Conversation(session)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    answer = conversation.answer("hi", lambda piece: interrupt(piece) if piece else None, max_new_tokens=9)
    assert answer.ended == "interrupted"
    assert 1 <= len(answer.token_ids) < 9
    assert conversation.messages[-1] == {"role": "assistant", "content": answer.text}
    assert conversation.answer("go", max_new_tokens=2).ended == "length"


def test_an_answer_ends_with_an_end_token(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("estream_runtime.sampling.Sampler.choose", lambda *_: 0)
    answer = Conversation(session).answer("hi")
    assert (answer.text, answer.token_ids, answer.ended) == ("", [0], "end")


# Buglog A73: prompts around the length of the context.
@pytest.mark.parametrize(
    ("length", "made"), [(1, CONTEXT - 1), (CONTEXT - 1, 1), (CONTEXT, 0), (CONTEXT + 1, None), (10 * CONTEXT, None)]
)
def test_a_prompt_as_long_as_the_context(length: int, made: int | None, session: Session, monkeypatch: Any) -> None:
    monkeypatch.setattr("estream_runtime.sampling.Sampler.choose", lambda *_: 5)
    prompt = token_ids("long", length)
    if made is None:
        with pytest.raises(TrapError, match=f"prompt has {length} tokens, the context holds {CONTEXT}"):
            session.generate(prompt, 10 * CONTEXT)
    else:
        assert list(session.generate(prompt, 10 * CONTEXT)) == [5] * made
    with pytest.raises(TrapError, match="prompt has no tokens"):
        session.generate([])
    assert list(session.generate([1, 2], 2)) == [5, 5]


def test_a_conversation_that_outgrows_the_context(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("estream_runtime.sampling.Sampler.choose", lambda *_: 98)
    conversation = Conversation(session)
    first = conversation.answer("hi", max_new_tokens=20)
    assert first.ended == "length"
    held = [*conversation.messages]
    with pytest.raises(
        TrapError, match=rf"the conversation has \d+ tokens, the context holds {CONTEXT} with an answer"
    ):
        conversation.answer("x" * CONTEXT)
    assert conversation.messages == held
    second = conversation.answer("more", max_new_tokens=999)
    assert second.ended == "context"
    assert second.stats.prompt_tokens + len(second.token_ids) == CONTEXT
    with pytest.raises(TrapError, match="the context holds"):
        conversation.answer("?")
    conversation.forget()
    assert conversation.answer("hi", max_new_tokens=20).token_ids == first.token_ids


def test_a_package_that_cannot_chat_is_refused(tmp_path: Path) -> None:
    with (
        open_package(chat_package(tmp_path, template=None)) as package,
        Session(package) as session,
        pytest.raises(LinkError, match="the package has no chat template"),
    ):
        Conversation(session)


def test_a_template_that_takes_no_such_message(session: Session) -> None:
    conversation = Conversation(session)
    conversation.messages = [{"role": "tool", "content": "x"}]
    with pytest.raises(TrapError, match="does not take the conversation: no tools"):
        conversation.answer("hi")


def test_text_that_is_no_text_is_refused(session: Session) -> None:
    conversation = Conversation(session)
    with pytest.raises(TrapError, match="text is not valid UTF-8 from character 3 on"):
        conversation.answer("a\udcff")
    assert conversation.messages == []
