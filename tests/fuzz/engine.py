"""The search: damage an input, run a target on it, keep what got an answer nobody had before.

Everything follows from the seed: the same seed and count make the same inputs in the same order.
"""

from __future__ import annotations

import mmap
import re
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random
from types import FrameType, TracebackType
from typing import Final, Self

from estream_spec.errors import EmoeError
from fuzz.targets import TARGETS, Target

MAX_SECONDS: Final = 1.0
"""Longest that any input may take."""
MAX_GROWTH: Final = 150_000_000
"""Bytes by which the process may grow while it searches: inputs that are kept, and what readers take."""
SLOW: Final = 0.01
"""Seconds from which on an input may have filled much memory."""
HANG_SECONDS: Final = 20.0
"""After so long a run is broken off."""
MOST_FOUND: Final = 24_000_000
"""Bytes of inputs that are kept for one target."""
MOST_INPUT: Final = 1 << 18
"""Bytes of an input; longer ones are cut."""
STEPS: Final = (*14 * (1,), 2, 3)
"""How many faults an input may get at once."""
LOOK_EVERY: Final = 256
"""Inputs after which memory is looked at, which takes longer than most of them; and after every one that took long."""
MOST_FAULTS: Final = 50
"""Faults after which a search ends."""


class Hang(BaseException):
    """A run that did not end. No `Exception`, so that nothing on the way takes it for one."""


@dataclass(slots=True)
class Tally:
    """What became of one target's inputs.

    Attributes:
        seconds: spent in the target alone.
        slowest: seconds of the slowest input.
        answers: how often each class of error came, or `value`.
        distinct: every answer there was: class, rule and place.
        rules: rules that were found broken.
    """

    seconds: float = 0.0
    slowest: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)
    distinct: set[str] = field(default_factory=set)
    rules: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Report:
    """What a search found.

    Attributes:
        tallies: by name of the target.
        faults: one line for each input that got anything but a value or an `EmoeError` in time and memory.
        grown: bytes by which the process's peak memory rose.
        peak: bytes of the process's peak memory.
    """

    tallies: dict[str, Tally] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    grown: int = 0
    peak: int = 0

    @property
    def executions(self) -> int:
        """Inputs run."""
        return sum(tally.answers.total() for tally in self.tallies.values())


@dataclass(slots=True)
class Corpus:
    """Inputs to damage: those given, and those that got a new answer."""

    seeds: list[bytes]
    found: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, data: bytes) -> None:
        """Keep an input; the oldest ones found make room for it."""
        self.found.append(data)
        self.size += len(data)
        while self.size > MOST_FOUND:
            self.size -= len(self.found.pop(0))

    def pick(self, random: Random) -> bytes:
        """A seed or, as likely, an input that was found."""
        return random.choice(self.found if self.found and random.random() < 0.5 else self.seeds)


class Fuzzer:
    """One search.

    Args:
        seed: what decides everything.
        folder: where inputs are written that found a fault; also the last input before a crash of the process.
        max_growth: bytes by which the process may grow; None in a process that does other things, too.
    """

    def __init__(self, seed: str, folder: Path, max_growth: int | None = None):
        self.random = Random(seed)
        self.report = Report(tallies={target.name: Tally() for target in TARGETS})
        self._seed, self._folder, self._max_growth = seed, folder, max_growth
        self._too_large = False
        self._watchdog = Watchdog()
        self._corpora = {target.name: Corpus(target.seeds()) for target in TARGETS}
        self._began_with = peak_memory()
        self._shares = [target.share for target in TARGETS]
        folder.mkdir(parents=True, exist_ok=True)
        self._last = _LastInput(folder / f"last-{seed}.input".replace("/", "-"))

    def run(self, goes_on: Callable[[int], bool]) -> Report:
        """Search for as long as `goes_on`, which is told how many inputs there were, says so."""
        number = 0
        with self._watchdog:
            for target in TARGETS:
                for data in self._corpora[target.name].seeds:
                    self._try(target, data, look=True)
            while goes_on(number) and len(self.report.faults) < MOST_FAULTS:
                target = self.random.choices(TARGETS, self._shares)[0]
                self._try(target, self._damaged(target), look=number % LOOK_EVERY == 0)
                number += 1
        self._last.remove()
        self.report.peak = peak_memory()
        self.report.grown = self.report.peak - self._began_with
        return self.report

    def _damaged(self, target: Target) -> bytes:
        random, corpus = self.random, self._corpora[target.name]
        data = corpus.pick(random)
        for _ in range(random.choice(STEPS)):
            data = random.choice(target.mutators)(data, random, corpus.pick(random))[:MOST_INPUT]
        return target.mend(data) if random.random() < 0.5 else data

    def _try(self, target: Target, data: bytes, *, look: bool) -> None:
        self._last.note(target.name, data)
        tally = self.report.tallies[target.name]
        seconds, slug, answer, fault = execute(target, data, self._watchdog)
        if seconds > MAX_SECONDS and fault is None:
            # Something else may have held the processor; an input is slow if it is slow every time.
            seconds = min(seconds, *(execute(target, data, self._watchdog)[0] for _ in range(3)))
            if seconds > MAX_SECONDS:
                fault = f"took {seconds:.1f} s, the limit is {MAX_SECONDS}"
        tally.answers[slug] += 1
        tally.seconds += seconds
        tally.slowest = max(tally.slowest, seconds)
        look = self._max_growth is not None and (look or seconds > SLOW)
        if look and not self._too_large and (grown := peak_memory() - self._began_with) > (self._max_growth or 0):
            self._too_large, fault = True, f"process has grown by {grown} bytes, the limit is {self._max_growth}"
        if answer not in tally.distinct:
            tally.distinct.add(answer)
            tally.rules.update(re.findall(r"EMOE-\w+-\d+", answer))
            self._corpora[target.name].add(data)
        if fault is not None:
            path = self._folder / f"{target.name.replace(' ', '-')}-{sha256(data).hexdigest()[:12]}.input"
            path.write_bytes(data)
            self.report.faults.append(f"{path} (seed {self._seed}): {fault}")


def execute(target: Target, data: bytes, watchdog: Watchdog) -> tuple[float, str, str, str | None]:
    """Run a target once.

    Returns:
        Seconds, class of the answer, the answer without its numbers, and what is wrong with it, if anything is.
    """
    fault, started = None, time.perf_counter()
    watchdog.started = started
    try:
        target.run(data)
        slug = answer = "value"
    except EmoeError as error:
        slug = error.slug
        place = re.sub(r"\d+", "", error.path or "")[:60]
        answer = f"{slug} {error.rule} {place}"
        str(error)
    except (Exception, Hang) as error:  # that is what the search is for
        where = traceback.extract_tb(error.__traceback__)[-1]
        slug = "fault"
        fault = answer = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"[:300]
    finally:
        watchdog.started = None
    return time.perf_counter() - started, slug, answer, fault


def peak_memory() -> int:
    """Most bytes this process has had in memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Watchdog:
    """Breaks off a run that does not end: an alarm that rings every second and looks how long the run has taken."""

    def __init__(self) -> None:
        self.started: float | None = None
        """When the run at work began; None between runs."""

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self.started is not None and time.perf_counter() - self.started > HANG_SECONDS:
            self.started = None
            raise Hang(f"no end after {HANG_SECONDS} s")


class _LastInput:
    """The input at work, in a file that survives the process: a crash of native code leaves nothing else behind."""

    def __init__(self, path: Path):
        self._path = path
        with path.open("w+b") as file:
            file.truncate(MOST_INPUT + 64)
            self._memory = mmap.mmap(file.fileno(), 0)

    def note(self, target: str, data: bytes) -> None:
        """Remember that this input is about to run."""
        head = f"{target}:{len(data)}\n".encode()[:64].ljust(64)
        self._memory[: 64 + len(data)] = head + data

    def remove(self) -> None:
        """The process has survived."""
        self._memory.close()
        self._path.unlink()
