"""Where the time of computing goes: seconds by activity always, and each activity by itself while somebody traces."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from estream_spec.trace import ACTIVITIES, Activity


class Timed(NamedTuple):
    """One activity, from beginning to end as `time.perf_counter` counts seconds, and what it was about."""

    activity: Activity
    begun: float
    ended: float
    layer: int | None
    group: int | None
    expert: int | None
    tokens: int | None


class Recorder:
    """Adds up seconds by activity. Activities come one after the other, never one inside another.

    Attributes:
        seconds: spent on each activity so far.
        events: what is kept of each activity; None where nothing is kept.
    """

    def __init__(self) -> None:
        self.seconds: Final = dict.fromkeys(ACTIVITIES, 0.0)
        self.events: list[Timed] | None = None

    def during(
        self,
        activity: Activity,
        layer: int | None = None,
        group: int | None = None,
        expert: int | None = None,
        tokens: int | None = None,
    ) -> _Stretch:
        """A context in which an activity goes on; it counts even if it fails."""
        return _Stretch(self, activity, layer, group, expert, tokens)


class _Stretch:
    """One activity under way; a class, since a generator would take twice as long."""

    __slots__ = ("_about", "_activity", "_begun", "_recorder")

    def __init__(self, recorder: Recorder, activity: Activity, *about: int | None):
        self._recorder, self._activity, self._about = recorder, activity, about

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        ended = time.perf_counter()
        recorder = self._recorder
        recorder.seconds[self._activity] += ended - self._begun
        if recorder.events is not None:
            recorder.events.append(Timed(self._activity, self._begun, ended, *self._about))
