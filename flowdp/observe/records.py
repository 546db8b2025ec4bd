"""Records of a run so far, for any number of readers at their own pace."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from flowdp.checkpoint.writer import Checkpoint
from flowdp.policy.tally import EpochMetrics
from flowdp.protocol.commands import EpochStarted, EvaluationEnded, Finish, RoundEnded
from flowdp.threads.inbox import LISTEN_S

__all__ = ["Record", "RecordStream", "Records"]

KEPT_ROUNDS = 4096
"""Round records that are kept; epoch records are all kept."""

KEPT_CHECKPOINTS = 4
"""Checkpoints that may wait for callbacks; each holds the model and every optimizer."""


R = TypeVar("R")

Record = EpochStarted | EpochMetrics | EvaluationEnded | RoundEnded | Checkpoint


class RecordStream:
    """All records in the order in which they came, for the one thread that takes them.

    A slow one loses the oldest rounds that wait, and the oldest checkpoints, but never an epoch.

    Args:
        rounds: Whether it is told of rounds; if not, a round does not wake it.

    Threads:
        `put` and `end`: any. `take`: the reader.

    Attributes:
        dropped: Rounds and checkpoints that it lost.
    """

    def __init__(self, *, rounds: bool) -> None:
        self.dropped = 0
        self._kept = {RoundEnded: KEPT_ROUNDS if rounds else 0, Checkpoint: KEPT_CHECKPOINTS}
        self._waiting: deque[Record] = deque()
        self._counts: Counter[type] = Counter()  # of these, by their kinds
        self._is_ended = False
        self._changed = threading.Condition()  # guards everything here

    def put(self, record: Record) -> None:
        """Append a record; does not wait for the reader. Records after the end are dropped."""
        kind = Checkpoint if isinstance(record, Checkpoint) else type(record)
        kept = self._kept.get(kind)
        with self._changed:
            if self._is_ended or kept == 0:
                return
            if self._counts[kind] == kept:
                self._waiting.remove(next(old for old in self._waiting if isinstance(old, kind)))
                self._counts[kind] -= 1
                self.dropped += 1
            self._counts[kind] += 1
            self._waiting.append(record)
            self._changed.notify()

    def end(self) -> None:
        """Note that nothing more comes."""
        with self._changed:
            self._is_ended = True
            self._changed.notify()

    def take(self) -> list[Record]:
        """All records that have come since the last call; waits for one. Empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ended or bool(self._waiting))
            fresh, self._waiting = self._waiting, deque()
            self._counts.clear()
        return list(fresh)


class Records:
    """Epoch and round records, and the end of the run.

    Args:
        history: Records of the epochs that were complete before, of a run that is resumed.

    Threads:
        The coordinator adds and marks; any thread reads.

    Attributes:
        epochs: All epoch records, in order.
        before: Number of these that were complete before.
        evaluations: All records of evaluations by steps, in order.
        finish: How the run ended; None before, and where a failure of flowdp's own ended it.
        is_ended: The run is over, or a failure is known though some thread may not have left yet.
        is_over: Every thread has left.
        is_paused: All workers stand still.
    """

    def __init__(self, history: Sequence[EpochMetrics] = ()) -> None:
        self.epochs = list(history)
        self.before = len(self.epochs)
        self.evaluations: list[EvaluationEnded] = []
        self.finish: Finish | None = None
        self.is_ended = False
        self.is_over = False
        self.is_paused = False
        self._taken_requests = 0
        self._readers = 0
        self._is_heard = False
        self._rounds: deque[RoundEnded] = deque(maxlen=KEPT_ROUNDS)
        self._round_count = 0
        self._feed: RecordStream | None = None
        self._problems: dict[object, tuple[str, int]] = {}  # the first text, and how often
        self._changed = threading.Condition()  # guards everything here

    def feed(self, *, rounds: bool) -> RecordStream:
        """All records in one order, `rounds` or not, for the observer; called once, before the run begins."""
        self._feed = RecordStream(rounds=rounds)
        return self._feed

    def add(self, record: Record) -> None:
        """Append a record. Checkpoints and starts of epochs are not kept here: they go to the feed alone."""
        with self._changed:
            if isinstance(record, RoundEnded):
                self._rounds.append(record)
                self._round_count += 1
            elif isinstance(record, EpochMetrics):
                self.epochs.append(record)
            elif isinstance(record, EvaluationEnded):
                self.evaluations.append(record)
            self._changed.notify_all()
        if self._feed is not None:
            self._feed.put(record)

    def complain(self, text: str, about: object = None) -> bool:
        """Note something that went wrong without ending the run; returns whether it is the first of its kind.

        Args:
            text: The problem, in words.
            about: Key of similar texts: of texts with the same key, the first is kept and the others are
                counted; None: of the same text.
        """
        with self._changed:
            first, times = self._problems.get(about or text, (text, 0))
            self._problems[about or text] = first, times + 1
            return not times

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems that did not end the run, in words."""
        with self._changed:
            known = list(self._problems.values())
        return tuple(text + (f" ({times} times)" if times > 1 else "") for text, times in known)

    def pause(self, is_paused: bool) -> None:
        """Note that all workers stand still, or move again."""
        with self._changed:
            self.is_paused = is_paused
            self._changed.notify_all()

    def count_request(self) -> None:
        """Note that one more request of the user has been taken, in the order in which they were made."""
        with self._changed:
            self._taken_requests += 1
            self._changed.notify_all()

    def end(self, finish: Finish | None, *, over: bool) -> None:
        """Note that a failure is known, or that the run is over."""
        with self._changed:
            self.finish = finish
            self.is_ended = True
            self.is_over = over
            self._changed.notify_all()
        if self._feed is not None:
            self._feed.end()

    @property
    def last_round(self) -> RoundEnded | None:
        """The newest round record."""
        with self._changed:
            return self._rounds[-1] if self._rounds else None

    @property
    def rounds(self) -> list[RoundEnded]:
        """The round records that are kept, in order."""
        with self._changed:
            return list(self._rounds)

    def wait(self, *, over: bool = False, timeout_s: float | None = None) -> bool:
        """Wait until the run has ended; False when the time is up.

        Args:
            over: Until every thread has left, failure or not.
            timeout_s: How long at most; None: for ever.
        """
        with self._changed:
            return self._await(lambda: self.is_over if over else self.is_ended, timeout_s)

    def wait_for_pause(self, request: int) -> None:
        """Wait until all workers stand still, or the run has ended.

        Args:
            request: Number of the request to pause. A barrier from before it was taken may be about to end.
        """
        with self._changed:
            self._await(lambda: self.is_ended or (self.is_paused and self._taken_requests >= request))

    @contextmanager
    def reader(self) -> Iterator[None]:
        """Register a caller that will raise the run's error, so that it is not also printed."""
        with self._changed:
            self._readers += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._is_heard |= self.is_ended

    def wait_for_reader(self, timeout_s: float) -> bool:
        """Whether a caller waits for the end, or asks for it within this time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_heard or self._readers > 0, timeout_s)

    def epoch_records(self) -> Iterator[EpochMetrics]:
        """The epoch records of this run, from its first; ends with it."""
        return self._follow(self.epochs, lambda: len(self.epochs), self.before)

    def evaluation_records(self) -> Iterator[EvaluationEnded]:
        """The records of evaluations by steps, from the first of this run; ends with it."""
        return self._follow(self.evaluations, lambda: len(self.evaluations))

    def round_records(self) -> Iterator[RoundEnded]:
        """The round records that are kept, from the oldest; ends with the run."""
        return self._follow(self._rounds, lambda: self._round_count)

    def step_records(self, every: int) -> Iterator[RoundEnded]:
        """Records of the rounds in which each further `every` steps of all ranks were complete."""
        reached = 0
        for record in self.round_records():
            if record.global_step // every > reached:
                reached = record.global_step // every
                yield record

    def _await(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for a condition, and stay open to Ctrl-C; False when the time is up.

        A signal that comes between Python's last look at its signals and the start of a wait on a lock does
        not end that wait: rare, 1 of 240 on two busy cores.
        """
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._changed.wait_for(condition, min(LISTEN_S, end - time.monotonic())):
            if time.monotonic() >= end:
                return False
        return True

    def _follow(self, kept: Sequence[R], count: Callable[[], int], seen: int = 0) -> Iterator[R]:
        """Yield records as they come: the last ones of all `count()` are kept."""

        def has_more() -> bool:
            return count() > seen or self.is_ended

        while True:
            with self._changed:
                self._await(has_more)
                total = count()
                fresh = list(kept)[max(0, len(kept) - (total - seen)) :]
                seen = total
            if not fresh:
                return
            yield from fresh
