"""Decoding: whatever is cached, read ahead, late or out of order, logits are the same to the last bit."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, zip_longest
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from estream_loader import Package, open_package
from estream_loader.slots import Slots
from estream_loader.source import ByteSource
from estream_packer.build import build
from estream_packer.editing import Changes, NewSection, edit_package
from estream_packer.recipe import BuildOptions
from estream_packer.sample import write_sample
from estream_runtime import Session
from estream_runtime.batch import Batch
from estream_runtime.prefetching import Pace, Prediction
from estream_spec.constants import SectionType
from estream_spec.errors import IntegrityError, LinkError
from estream_spec.prefetch_router import encode_prefetch_router
from fixtures.olmoe import EXPERTS, LAYERS, token_ids
from fixtures.packed import FamilyFactory, PackageFactory
from fixtures.prefetching import prefetch_router_for
from fixtures.retentions import RETENTIONS
from fixtures.sources import FaultySource, fails_at

Floats = npt.NDArray[np.float32]
Routing = Mapping[int, Sequence[int]]
"""Of one token, the experts of each layer."""
RECORD: Final = 16384
PROMPT: Final[list[int]] = token_ids("decoding", 20).tolist()
TOKENS: Final = 64


class HesitantSource:
    """Reads of another source, some of which take far longer than others, so that later ones overtake them."""

    def __init__(self, source: ByteSource):
        self.name, self._source, self._random = source.name, source, random.Random(7)
        self.overtaken = 0
        self._begun: list[int] = []

    def available(self) -> int:
        return self._source.available()

    def read_into(self, buffer: memoryview, offset: int) -> int:
        self._begun.append(offset)
        if self._random.random() < 0.1:
            time.sleep(0.002)
        count = self._source.read_into(buffer, offset)
        self.overtaken += offset != self._begun[-1]
        return count

    def close(self) -> None:
        self._source.close()


class Told:
    """A predictor that was told what the layers will be routed to, and makes of it what it likes.

    Args:
        said: takes the experts that the layer needs and those that it does not; gives what is predicted.
    """

    def __init__(self, said: Callable[[list[int], list[int]], list[int]], experts: int):
        self._said, self._experts = said, experts
        self.token: Routing = {}
        self.found: list[Routing] = [{}]

    def predict(self, layer: int, x: Floats) -> Prediction:
        needed = list(self.token.get(layer, ()))
        said = self._said(needed, [each for each in range(self._experts) if each not in needed])
        return Prediction(said, [1.0] * len(said))

    def routed(self, layer: int, experts: Sequence[int]) -> None:
        self.found[-1] = {**self.found[-1], layer: list(experts)}


_RANDOM: Final = random.Random(5)
SAYINGS: Final[dict[str, Callable[[list[int], list[int]], list[int]]]] = {
    "right": lambda needed, others: needed,
    "wrong": lambda needed, others: others,
    "half": lambda needed, others: [others[0], *needed[:1], *others[1:], *needed[1:]],
    "random": lambda needed, others: _RANDOM.sample([*needed, *others], len(needed)),
    "nothing": lambda needed, others: [],
}


class Eager(Pace):
    """Has time for everything."""

    def read(self, records: float, seconds: float) -> None:
        self.record_s = 1e-9

    def before_need(self, layer: int) -> float:
        return 1.0


def predict(session: Session, said: str) -> Told:
    """Let a session's decoding read ahead what a stand-in says, always and without asking whether it pays."""
    decoding = session.interpreter.decoding
    told = Told(SAYINGS[said], max(session.package.expert_shape.counts))
    decoding.predictor, decoding.judge, decoding.pace = told, None, Eager()
    return told


def decoded(
    session: Session, prompt: Sequence[int], forced: Sequence[int], told: Told | None, routing: Sequence[Routing]
) -> Floats:
    """Logits f32 `[1 + forced, vocabulary]` after a prompt and after each of the tokens that follow it."""
    context, rows = session.new_context(), []
    for number, unseen in enumerate([prompt, *([token] for token in forced)]):
        if told is not None:
            told.token = routing[number - 1] if number and routing else {}
        rows.append(session._next_logits(np.array(unseen, np.int64), context.cache))
    return np.stack(rows)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample model as a package, read only."""
    folder = tmp_path_factory.mktemp("sample")
    write_sample(folder / "sample")
    options = BuildOptions(prefetch=str(folder / "sample" / "model.prefetch"))
    build(folder / "sample", folder / "sample.emoe", options)
    return folder / "sample.emoe"


class Expected:
    """What the sample model makes of five prompts, decoded with all experts in memory.

    Attributes:
        prompts: of different lengths.
        tokens: the likeliest that follow each.
        logits: of each, f32 `[1 + TOKENS, vocabulary]`.
        routing: of each, the experts of each of its tokens.
    """

    def __init__(self, path: Path):
        self.prompts: list[list[int]] = []
        self.tokens, self.logits, self.routing = list[list[int]](), list[Floats](), list[list[Routing]]()
        with open_package(path) as package, Session(package, threads=1, arena_bytes=1 << 40) as session:
            text = package.tokenizer.encode(
                " ".join(["Once upon a time there was a fox who lived in a wood."] * 20)
            ).ids
            for start, length in ((0, 1), (5, 2), (9, 17), (30, 33), (2, 130)):
                self.prompts.append(text[start : start + length])
            for prompt in self.prompts:
                tokens = list(session.generate(prompt, TOKENS))
                assert len(tokens) == TOKENS
                told = predict(session, "nothing")
                context, rows, found = session.new_context(), [], []
                for number, unseen in enumerate([prompt, *([token] for token in tokens)]):
                    told.found.append({})
                    rows.append(session._next_logits(np.array(unseen, np.int64), context.cache))
                    if number:
                        found.append(told.found[-1])
                session.interpreter.decoding.predictor = None
                self.tokens.append(tokens)
                self.logits.append(np.stack(rows))
                self.routing.append(found)


@pytest.fixture(scope="module")
def expected(sample: Path) -> Expected:
    return Expected(sample)


@pytest.mark.parametrize("retention", sorted(RETENTIONS))
@pytest.mark.parametrize("slots", [4, 11, 24, 64])
def test_logits_do_not_depend_on_what_is_cached_or_read_ahead_or_late(
    slots: int, retention: str, sample: Path, expected: Expected
) -> None:
    """Five prompts and 64 tokens after each, one prompt for each way to predict, with reads that are slow and overtake.

    Which prompt is predicted in which way differs with the policy.
    """
    ways = [None, "learned", *SAYINGS]
    turn = sorted(RETENTIONS).index(retention) + slots
    with open_package(sample) as package:
        record = package.expert_shape.bank_bytes(1)
        package.source = source = HesitantSource(package.source)
        with Session(package, threads=1, arena_bytes=slots * record, lanes=4) as session:
            decoding, learned = session.interpreter.decoding, session.interpreter.decoding.predictor
            decoding.slots = Slots(session.interpreter.pager, package.expert_shape, RETENTIONS[retention])
            for number, prompt in enumerate(expected.prompts):
                said = ways[(number + turn) % len(ways)]
                told = decoding.predictor = decoding.judge = None
                if said == "learned":
                    decoding.predictor, decoding.pace = learned, Eager()
                elif said is not None:
                    told = predict(session, said)
                found = decoded(session, prompt, expected.tokens[number], told, expected.routing[number])
                assert np.array_equal(found, expected.logits[number])
            stats = decoding.stats
    assert source.overtaken
    assert stats.tokens == 5 * TOKENS + 1  # the first prompt is a single token
    assert (stats.prefetched > 0) == (4 * 4 < slots < 64)


def edited(path: Path, copy: Path) -> Path:
    """A copy of a package that has a prefetch router which nobody trained."""

    def add(package: Package) -> Changes:
        data = encode_prefetch_router(prefetch_router_for(package))
        return Changes(add=[NewSection(type=SectionType.PREFETCH_ROUTER, id=0, data=data)])

    shutil.copy(path, copy)
    edit_package(copy, add)
    return copy


def test_a_prefetch_router_changes_nothing_but_what_is_read_when(packed: PackageFactory, tmp_path: Path) -> None:
    path = edited(packed(), tmp_path / "predicting.emoe")
    texts, stats = [], []
    with open_package(path) as package:
        for prefetch in (True, False):
            with Session(package, threads=1, arena_bytes=16 * RECORD, prefetch=prefetch) as session:
                session.interpreter.decoding.pace = Eager()
                run = session.generate(PROMPT, 30)
                texts.append(list(run))
                stats.append(run.stats)
    assert texts[0] == texts[1]
    with_it, without = (each.decoding for each in stats)
    assert with_it is not None
    assert without is not None
    assert with_it.prefetched > 0
    assert without.prefetched == 0
    assert stats[0].prefetching.startswith(("on", "off: it"))
    assert stats[1].prefetching == "off: not asked for"


@pytest.mark.parametrize(
    ("slots", "why"), [(3, "off: the arena has no room for it"), (24, "off: all experts are in the arena")]
)
def test_where_nothing_can_be_read_ahead_nothing_is_compared(
    slots: int, why: str, packed: PackageFactory, tmp_path: Path
) -> None:
    path = edited(packed(), tmp_path / "predicting.emoe")
    with open_package(path) as package, Session(package, threads=1, arena_bytes=slots * RECORD) as session:
        run = session.generate(PROMPT, 30)
        assert len(list(run)) == 30
        assert run.stats.prefetching == why


def sessions(package: Package, backend: str | None, *arenas: int) -> Iterator[Session]:
    record = package.expert_shape.bank_bytes(1)
    for slots in arenas:
        with Session(package, backend, threads=1, arena_bytes=slots * record) as session:
            yield session


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_other_backends(backend: str, packed: PackageFactory) -> None:
    """In an arena of one record, of a token's experts, and of all; the first has no room for a decode program."""
    with open_package(packed()) as package:
        found = [decoded(each, PROMPT[:5], [3, 4, 5, 3], None, ()) for each in sessions(package, backend, 1, 3, 24)]
    assert all(np.array_equal(each, found[0]) for each in found)


@pytest.mark.parametrize(
    "name", ["deepseek_v2-grouped", "deepseek_v3", "ernie4_5_moe", "gpt_oss", "lfm2_moe", "phimoe", "qwen2_moe"]
)
def test_other_families(name: str, packed_family: FamilyFactory) -> None:
    with open_package(packed_family(name)) as package:
        most = sum(package.expert_shape.counts)
        arenas = (1, max(package.expert_shape.top_k), most // 2, most)
        found: list[Floats] = []
        for session in sessions(package, None, *arenas):
            decode = session._programs.decode(predicts=False)
            assert (decode is None) == (arenas[len(found)] < max(package.expert_shape.top_k))
            if len(found) > 1:
                predict(session, "wrong")
            found.append(decoded(session, PROMPT[:9], [7, 8, 9, 7, 8, 9], None, ()))
    assert all(np.array_equal(each, found[0]) for each in found)


def test_a_context_that_goes_on_decodes_the_same(packed: PackageFactory) -> None:
    """Turns of a conversation, one of them a single token, one left half way, while other calls use the arena."""

    def talk(session: Session, between: Callable[[Session], object]) -> list[list[int]]:
        context, text, said = session.new_context(), [*PROMPT], list[list[int]]()
        for more, count in (([], 5), ([9], 6), ([3, 4, 5], 4), ([8], 7)):
            text += more
            run = session.generate(text, 9, context=context)
            said.append([])
            for token in islice(run, count):
                said[-1].append(token)
                between(session)
            text += said[-1]
        return said

    with open_package(packed()) as package:
        [expected] = [talk(each, lambda _: None) for each in sessions(package, None, 24)]
        for session in sessions(package, None, 1, 5, 24):
            for between in (
                lambda _: None,
                lambda other: other.prefill(PROMPT),
                lambda other: other.forward(PROMPT[:2]),
                lambda other: other.score(PROMPT[:3], [[5], [6, 7]]),
                lambda other: next(other.generate([4], 3)),
            ):
                assert talk(session, between) == expected


def test_runs_that_alternate_share_the_slots_and_count_their_own(packed: PackageFactory) -> None:
    other = token_ids("other", 9)
    with open_package(packed()) as package, Session(package, threads=1, arena_bytes=9 * RECORD) as session:
        alone = [session.generate(PROMPT, 12), session.generate(other, 7)]
        expected = [list(each) for each in alone]
        runs = [session.generate(PROMPT, 12), session.generate(other, 7)]
        turns = list(zip_longest(*runs))
        assert [[each for each in tokens if each is not None] for tokens in zip(*turns, strict=True)] == expected
        for run, count in zip(runs, (12, 7), strict=True):
            stats = run.stats.decoding
            assert stats is not None
            assert stats.tokens == count - 1
            assert stats.demanded == stats.tokens * LAYERS * 3


def test_figures_add_up(packed: PackageFactory) -> None:
    with open_package(packed()) as package, Session(package, threads=1, arena_bytes=9 * RECORD) as session:
        run = session.generate(PROMPT, 40)
        next(run)
        first = run.stats
        assert first.decoding is None
        assert len(list(run)) == 39
        stats = run.stats.decoding
    assert stats is not None
    assert (stats.tokens, stats.layers, stats.demanded) == (39, 39 * LAYERS, 39 * LAYERS * 3)
    assert (stats.timely, stats.late, stats.prefetched, stats.dropped, stats.substituted) == (0, 0, 0, 0, 0)
    assert 0 < stats.hits < stats.demanded
    assert stats.bytes_read == (stats.demanded - stats.hits) * RECORD == run.stats.bytes_read - first.bytes_read
    assert 0 < stats.stalls <= stats.layers
    assert 0 < stats.seconds <= run.stats.total_s - first.total_s


@pytest.mark.parametrize("slots", [9, 14, 20])
def test_a_prompts_favourites_are_there_at_the_first_token(slots: int, packed: PackageFactory) -> None:
    """A session that kept what passed through its banks reads less for the first token than one that did not."""
    prompt = token_ids("favourites", 64)
    with open_package(packed()) as package:
        found = []
        for seeded in (True, False):
            with Session(package, threads=1, arena_bytes=slots * RECORD, group_size=2, prefetch_depth=1) as session:
                decode = session._programs.decode(predicts=False)
                assert decode is not None
                context = session.new_context()
                batch = Batch.of(prompt)
                program, _ = session._programs.for_rows(len(prompt), package.manifest.model)
                interpreter = session.interpreter
                next_program = decode if seeded else None
                interpreter.run(program, batch, interpreter.last_logits, context.cache, decode=next_program)
                kept = len(interpreter.pager.beyond)
                assert (kept > 0) == seeded
                logits = session._next_logits(np.array([5]), context.cache)
                found.append((logits, interpreter.decoding.stats.bytes_read))
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1] < found[1][1]


def test_where_everything_finds_room_nothing_is_read_twice(packed: PackageFactory) -> None:
    with open_package(packed()) as package, Session(package, threads=1, arena_bytes=1 << 40) as session:
        for _ in range(2):
            run = session.generate(PROMPT, 20)
            list(run)
        assert run.stats.bytes_read == 0
        assert session.interpreter.pager.stats.bytes_read <= EXPERTS * LAYERS * RECORD


def test_a_failed_read_fails_one_token_and_the_next_call_works(packed: PackageFactory) -> None:
    data = packed().read_bytes()
    source = FaultySource(data, lambda call, offset, length: None)
    with open_package(source) as package, Session(package, threads=1, arena_bytes=4 * RECORD) as session:
        expected = list(session.generate(PROMPT, 12))
        places = [package.experts.place(0, expert).offset for expert in range(EXPERTS)]
        for place in places:
            run = session.generate(PROMPT, 12)
            found = list(islice(run, 3))
            source.fault = fails_at(place)
            with suppress(LinkError):
                found.extend(run)
            source.fault = lambda call, offset, length: None
            assert found == expected[: len(found)]
            assert list(session.generate(PROMPT, 12)) == expected


@pytest.mark.parametrize("slots", [1, 8, 40, 64])
def test_nothing_is_given_out_with_a_prefetch_router_for_another_router(slots: int, sample: Path) -> None:
    """Whether the arena leaves room to read ahead or not."""
    with open_package(sample) as package:
        router = prefetch_router_for(package)
        layers = [*router.layers[:-1], replace(router.layers[-1], router=bytes(32))]
        package.__dict__["prefetch_router"] = replace(router, layers=tuple(layers))
        with Session(package, arena_bytes=slots * max(package.expert_shape.record_lengths)) as session:
            generation = session.generate(PROMPT, max_new_tokens=2)
            with pytest.raises(IntegrityError, match="is for another router of layer 3"):
                next(generation)
        with Session(package, prefetch=False) as session:
            assert len(list(session.generate(PROMPT, max_new_tokens=2))) == 2
