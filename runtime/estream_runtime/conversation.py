"""A conversation with a model, turn by turn; what a turn has in common with those before it is not computed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from estream_runtime.chat import chat_template_of
from estream_runtime.session import Generation, Session
from estream_runtime.stats import Stats
from estream_runtime.text import TextStream, encode_continuation
from estream_spec.errors import TrapError

Ended = Literal["end", "length", "context", "interrupted"]
"""Why an answer ended: with an end token, after the most tokens asked for, since the context is full, by Ctrl-C."""

MAX_NEW_TOKENS: Final = 512
"""Most tokens of an answer, unless one is asked for that may be longer or is to be shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model said.

    Attributes:
        text: without special tokens; of a model that thinks in a channel of its own, the last message only.
        token_ids: of the answer, the end token included.
        ended: why there is no more.
        stats: what it cost; the prompt is all of the conversation, however little of it was computed anew.
    """

    text: str
    token_ids: list[int]
    ended: Ended
    stats: Stats


class Conversation:
    """Messages that a session's model answers. Not for several threads at a time.

    Args:
        session: an open session, which must stay open.
        system: what the model is told before all else; None tells it nothing.

    Attributes:
        messages: the conversation so far, each with `role` and `content`.

    Raises:
        LinkError: the package has no chat template or no tokenizer, or one that cannot be used.
    """

    def __init__(self, session: Session, system: str | None = None):
        self._session, self._template = session, chat_template_of(session.package)
        self._tokenizer = session.package.tokenizer
        # Of harmony, which tells a message's channel in front of this token; a template writes that anew.
        channels = self._tokenizer.token_to_id("<|channel|>") is not None
        self._begins_message = self._tokenizer.token_to_id("<|message|>") if channels else None
        self._begin = [] if system is None else [{"role": "system", "content": system}]
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.messages, self._context = list[dict[str, str]](self._begin), self._session.new_context()

    def answer(
        self,
        text: str,
        on_piece: Callable[[str], object] = lambda piece: None,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Answer:
        """Say something, and hear the answer.

        An answer that is interrupted, by KeyboardInterrupt, stays in the conversation as far as it came.

        Args:
            text: what to say.
            on_piece: told of each piece of text as it comes, those of every channel.
            max_new_tokens: most tokens of the answer; this and what follows is as `Session.generate` takes it.
            temperature: 0 takes the likeliest token.
            top_p: only the fewest tokens whose probabilities reach this sum are drawn from.
            seed: the same seed makes the same choices; None takes one that differs every time.

        Raises:
            TrapError: the conversation does not fit the context, the template does not take it, or computing fails.
                The conversation is then as it was before.
        """
        said = [*self.messages, {"role": "user", "content": text}]
        prompt = encode_continuation(self._session.package, self._template.render(said))
        room = self._session.most_tokens - len(prompt)
        if room < 1:
            hint = "say it in fewer words, or begin anew"
            message = f"the conversation has {len(prompt)} tokens, the context holds {self._session.most_tokens}"
            raise TrapError(f"{message} with an answer of at least one", hint=hint)
        generation = self._session.generate(prompt, max_new_tokens, temperature, top_p, seed, self._context)
        answer = self._heard(generation, prompt, room, on_piece)
        self.messages = [*said, {"role": "assistant", "content": answer.text}]
        return answer

    def _heard(self, generation: Generation, prompt: list[int], room: int, on_piece: Callable[[str], object]) -> Answer:
        stream, pieces, token_ids = TextStream(self._tokenizer, prompt), list[str](), list[int]()
        ended: Ended | None = None
        try:
            for token in generation:
                token_ids.append(token)
                if token == self._begins_message:
                    pieces.clear()
                    on_piece("\n")
                if token in self._session.package.manifest.model.end_tokens:
                    ended = "end"
                else:
                    pieces.append(stream.push(token))
                    on_piece(pieces[-1])
        except KeyboardInterrupt:
            ended = "interrupted"
        pieces.append(stream.finish())
        on_piece(pieces[-1])
        return Answer(
            text="".join(pieces),
            token_ids=token_ids,
            ended=ended or ("context" if len(token_ids) == room else "length"),
            stats=generation.stats,
        )
