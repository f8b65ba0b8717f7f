"""Replay what tokens were routed to and count how often each policy has the record when it is demanded.

    python tests/bench/retention.py                      # the sample model on its held-out text; even and skewed traces
    python tests/bench/retention.py --calibration        # the same on its calibration text, for several memories of LFU
    python tests/bench/retention.py --package FILE       # a package without a tokenizer, on random tokens

The text is read in windows, and within a window token by token: a forward pass routes its tokens as decoding them one
after the other does. The first tokens of a window are the prompt; they seed the cache and are not counted. Then every
policy is given the same tokens. Each layer keeps so many records from one token to the next, and a hit is a routed
expert whose record the layer had kept: nothing is prefetched, so a miss is a read that has to be waited for.

Beside the policies stand what bounds them: records dropped at random; Belady's optimum, which drops what is needed
again last and so needs to know the future; and one LRU over the records of all layers, of as many in total, which hits
nothing while the other layers of a token fill it. Exits 1 unless the default policy beats LRU at every size above the
working set of a token, and equals it where routing is even. Takes five minutes.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from estream_loader import Package, open_package
from estream_loader.retention import MEMORY, AgeingFrequency, Retention
from estream_packer.build import build
from estream_packer.sample import write_sample
from estream_runtime import Session
from fixtures.retentions import CHOSEN, RETENTIONS

Token = tuple[int, ...]
"""The experts that a layer routed a token to."""
Stream = Sequence[Token]
"""What one layer routed the tokens of a window to, one after the other."""
Make = Callable[[Stream, int], Retention]
"""A policy for what follows the prompt, in a layer of so many experts."""
MEMORIES: Final = (2, 4, 8, 16, 32, 64, 128)
"""Of LFU, tried on the calibration text."""
SKEW: Final = 1.0
"""Of the skewed traces: the n-th most popular expert weighs `n ** -SKEW`, and a token draws without replacement."""
ERRORS: Final = 3
"""Standard errors that chance is allowed."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Routing of one kind.

    Attributes:
        windows: by window and layer.
        experts: of a layer.
        prompt: tokens of each window that only seed.
    """

    windows: Sequence[Sequence[Stream]]
    experts: int
    prompt: int

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return len(self.windows[0][0][0])

    @property
    def streams(self) -> list[Stream]:
        """Of all windows and layers."""
        return [stream for window in self.windows for stream in window]

    @property
    def choices(self) -> npt.NDArray[np.int64]:
        """int64 `[streams, tokens, top_k]`."""
        return np.asarray(self.streams, np.int64)


class Random:
    """Drops anything."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(0)

    def seed(self, counts: Sequence[int]) -> None:
        """Learns nothing."""

    def note(self, experts: Sequence[int]) -> None:
        """Learns nothing."""

    def order(self, held: Iterable[int]) -> list[int]:
        """See `Retention.order`."""
        return [int(expert) for expert in self._generator.permutation(list(held))]


class Foresight:
    """Belady's optimum: drops what is needed again last.

    Args:
        stream: the tokens that will be noted.
        experts: of the layer.
    """

    def __init__(self, stream: Stream, experts: int):
        self._needed = [[len(stream)] * experts]
        for token in range(len(stream) - 1, -1, -1):
            needed = list(self._needed[-1])
            for expert in stream[token]:
                needed[expert] = token
            self._needed.append(needed)

    def seed(self, counts: Sequence[int]) -> None:
        """The past does not matter."""

    def note(self, experts: Sequence[int]) -> None:
        """Goes on by a token."""
        self._needed.pop()

    def order(self, held: Iterable[int]) -> list[int]:
        """See `Retention.order`."""
        return sorted(held, key=lambda expert: (-self._needed[-1][expert], -expert))


def hits(stream: Stream, prompt: int, experts: int, keep: int, make: Make, seeded: bool = True) -> int:
    """Routed experts behind the prompt whose records a layer had kept.

    Args:
        stream: all tokens of a window.
        prompt: how many of them are the prompt.
        experts: of the layer.
        keep: records that it keeps from one token to the next.
        make: the policy.
        seeded: whether the prompt leaves its records; the layer begins with none otherwise.
    """
    follows = stream[prompt:]
    policy, kept, found = make(follows, experts), set[int](), 0
    if seeded:
        policy.seed(np.bincount(np.ravel(stream[:prompt]), minlength=experts).tolist())
        kept = set(policy.order(range(experts))[-keep:])
    for token in follows:
        found += len(kept.intersection(token))
        policy.note(token)
        kept = set(policy.order(kept.union(token))[-keep:])
    return found


def global_hits(window: Sequence[Stream], prompt: int, slots: int) -> int:
    """Routed experts behind the prompt that one LRU over the records of all layers holds.

    Args:
        window: the tokens of each layer; the prompt's pass through the cache as all others do.
        prompt: how many of them are the prompt.
        slots: records that it holds of all layers together.
    """
    held, found = OrderedDict[tuple[int, int], None](), 0
    for number, token in enumerate(zip(*window, strict=True)):
        for layer, routed in enumerate(token):
            for expert in routed:
                found += (layer, expert) in held and number >= prompt
                held[layer, expert] = None
                held.move_to_end((layer, expert))
            while len(held) > slots:
                held.popitem(last=False)
    return found


def policies() -> dict[str, Make]:
    """What is compared, by name."""

    def plain(make: Callable[[int], Retention]) -> Make:
        return lambda _, experts: make(experts)

    named = {name: plain(make) for name, make in RETENTIONS.items()}
    return {**named, "random": lambda *_: Random(), "optimum": Foresight}


def recorded(package: Package, tokens: npt.NDArray[np.int64], prompt: int) -> Trace:
    """What a model routes windows of tokens, int64 `[windows, tokens]`, to."""
    experts = {count for count in package.manifest.model.expert_counts if count}
    if len(experts) != 1:
        raise click.ClickException(f"the layers of {package.source.name} have different numbers of experts: {experts}")
    with Session(package) as session:
        windows = [_routed(session, window) for window in tokens]
    return Trace(windows, experts.pop(), prompt)


def _routed(session: Session, tokens: npt.NDArray[np.int64]) -> list[Stream]:
    """What each layer with experts routes the tokens of a window, int64 `[tokens]`, to."""
    found: dict[int, list[npt.NDArray[np.int32]]] = {}

    def on_route(layer: int, expert_ids: npt.NDArray[np.int32], _: object) -> None:
        found.setdefault(layer, []).append(expert_ids.copy())

    session.forward(tokens, on_route)
    return [_stream(np.concatenate(expert_ids)) for expert_ids in found.values()]


def drawn(like: Trace, skew: float) -> Trace:
    """Tokens that choose independently, by a law of popularity; each window and layer has favourites of its own.

    Args:
        like: a trace of as many windows, layers, tokens and experts.
        skew: exponent of the law; 0 is even.
    """
    generator = np.random.default_rng(0)

    def stream(tokens: int) -> Stream:
        popularity = generator.permutation(-skew * np.log(np.arange(1, like.experts + 1)))
        # The largest of scores with Gumbel noise are a draw without replacement.
        scores = popularity + generator.gumbel(size=(tokens, like.experts))
        return _stream(np.argsort(-scores, axis=1)[:, : like.top_k])

    return Trace([[stream(len(each)) for each in window] for window in like.windows], like.experts, like.prompt)


def _stream(chosen: npt.NDArray[np.integer]) -> Stream:
    """Experts, integers `[tokens, top_k]`, as a stream, each token's in ascending order."""
    return [tuple(token) for token in np.sort(chosen, axis=1).tolist()]


def rates(trace: Trace, keep: int, make: Make, seeded: bool = True) -> npt.NDArray[np.float64]:
    """Hit rate of each stream of a trace, f64 `[streams]`."""
    choices = (len(trace.streams[0]) - trace.prompt) * trace.top_k
    return np.array([hits(each, trace.prompt, trace.experts, keep, make, seeded) / choices for each in trace.streams])


def gain(trace: Trace, one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> tuple[float, float]:
    """How much one hit rate is over another on average, and the standard error; only windows are independent."""
    differences = (one - other).reshape(len(trace.windows), -1).mean(axis=1)
    return float(differences.mean()), float(differences.std(ddof=1) / np.sqrt(len(differences)))


def compare(console: Console, title: str, trace: Trace) -> list[tuple[int, float, float]]:
    """Print the table of a trace; returns records kept, gain of the default policy over LRU and its standard error."""
    made = policies()
    choices = trace.choices
    counts = np.stack([np.bincount(each.ravel(), minlength=trace.experts) for each in choices])
    shares = counts / counts.sum(axis=1, keepdims=True)
    entropy = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(axis=1).mean()
    again = np.mean([len(np.intersect1d(a, b)) for each in choices for a, b in pairwise(each)])
    console.print(
        f"\n{title}: {len(trace.windows)} windows of {choices.shape[1]} tokens, {trace.prompt} of them the prompt; "
        f"{choices.shape[0] // len(trace.windows)} layers, {trace.top_k} of {trace.experts} experts; entropy of their "
        f"popularity {entropy:.2f} of {np.log2(trace.experts):.2f} bits; {again / trace.top_k:.1%} routed to by the "
        "token before too"
    )
    table = Table("records a layer", *made, "one LRU for all", f"{CHOSEN} unseeded", f"{CHOSEN} - lru", "to optimum")
    found = []
    for keep in sizes(trace):
        measured = {name: rates(trace, keep, make) for name, make in made.items()}
        unseeded = rates(trace, keep, made[CHOSEN], seeded=False)
        total = (choices.shape[1] - trace.prompt) * trace.top_k * len(trace.windows[0])
        layers = len(trace.windows[0])
        everywhere = np.mean([global_hits(window, trace.prompt, keep * layers) / total for window in trace.windows])
        better, error = gain(trace, measured[CHOSEN], measured["lru"])
        distance, _ = gain(trace, measured["optimum"], measured[CHOSEN])
        table.add_row(
            str(keep),
            *(f"{each.mean():.2%}" for each in measured.values()),
            f"{everywhere:.2%}",
            f"{unseeded.mean():.2%}",
            f"{better * 100:+.2f} ± {error * 100:.2f}",
            f"{distance * 100:.2f}",
        )
        found.append((keep, better, error))
    console.print(table)
    return found


def sizes(trace: Trace) -> list[int]:
    """Records that a layer keeps: from one on, all of them left out; at most about 16 sizes."""
    step = max(trace.experts // 16, 1)
    return sorted({*range(step, trace.experts, step), trace.top_k, trace.top_k + 1, trace.experts - 1})


def tune(console: Console, trace: Trace) -> None:
    """Print what LFU gains over LRU by how far it looks back."""
    table = Table("records a layer", *(f"memory {memory}" for memory in MEMORIES))
    for keep in sizes(trace):
        least_recent = rates(trace, keep, policies()["lru"])
        gains = [gain(trace, rates(trace, keep, _lfu(memory)), least_recent)[0] for memory in MEMORIES]
        table.add_row(str(keep), *(f"{each * 100:+.2f}" for each in gains))
    console.print(f"\nlfu - lru on the calibration text, by what lfu looks back on ({MEMORY} is its own)", table)


def _lfu(memory: int) -> Make:
    return lambda _, experts: AgeingFrequency(experts, memory)


def faults(top_k: int, real: Sequence[tuple[int, float, float]], even: Sequence[tuple[int, float, float]]) -> list[str]:
    """What the default policy fails at: sizes at which it does not beat LRU, or is not its equal on an even trace."""
    worse = [
        f"{CHOSEN} does not beat lru at {keep} records a layer"
        for keep, better, _ in real
        if keep > top_k and better <= 0
    ]
    odd = [
        f"{CHOSEN} is not lru's equal on an even trace at {keep} records a layer"
        for keep, better, error in even
        if abs(better) > ERRORS * error
    ]
    return worse + odd


def sample_tokens(folder: Path, package: Package, name: str, length: int) -> npt.NDArray[np.int64]:
    """A text of the sample, int64 `[windows, length]`."""
    ids = np.asarray(package.tokenizer.encode((folder / name).read_text(encoding="utf-8")).ids, np.int64)
    return ids[: len(ids) // length * length].reshape(-1, length)


def show(tables: Mapping[str, Trace], console: Console) -> list[str]:
    """Print the table of each trace, by title: the first is a model's, the last is even; returns what is wrong."""
    compared = [compare(console, title, trace) for title, trace in tables.items()]
    return faults(next(iter(tables.values())).top_k, compared[0], compared[-1])


@click.command()
@click.option("--package", "path", type=click.Path(path_type=Path, exists=True), help="A package that takes token ids.")
@click.option("--calibration", is_flag=True, help="Choose LFU's memory on the sample's calibration text.")
@click.option(
    "--windows", type=click.IntRange(2), help="Windows at most; all of the text if not given, 4 of a package."
)
@click.option("--tokens", type=click.IntRange(2), default=512, show_default=True, help="Tokens of a window.")
@click.option("--prompt", type=click.IntRange(1), default=64, show_default=True, help="Tokens of it that only seed.")
def main(path: Path | None, calibration: bool, windows: int | None, tokens: int, prompt: int) -> None:
    """Compare what a layer keeps by each policy."""
    console = Console(width=160)
    if path is not None:
        with open_package(path) as package:
            vocabulary = package.manifest.model.vocabulary
            ids = np.random.default_rng(0).integers(0, vocabulary, (windows or 4, tokens))
            compare(console, f"{path.name} on random tokens", recorded(package, ids, prompt))
        return
    with TemporaryDirectory() as scratch:
        folder, file = Path(scratch, "sample"), Path(scratch, "sample.emoe")
        write_sample(folder)
        build(folder, file)
        with open_package(file) as package:
            name = "calibration.txt" if calibration else "held-out.txt"
            trace = recorded(package, sample_tokens(folder, package, name, tokens)[:windows], prompt)
    if calibration:
        tune(console, trace)
        return
    tables = {
        "sample model on its held-out text": trace,
        f"drawn, popularity by the power -{SKEW:g} of the rank": drawn(trace, SKEW),
        "drawn, even": drawn(trace, 0),
    }
    found = show(tables, console)
    for fault in found:
        console.print(fault)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
