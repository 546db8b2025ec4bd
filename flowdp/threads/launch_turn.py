"""Turns to launch: at most some of the ranks of a process are in the launching part of a step at once.

The launching part is the user's loss, which is Python, and the optimizer's step where that is; backward runs
without the interpreter lock and needs no turn. `flowdp.policy.launch_limit` decides how many ranks may have
one, from the measurements here.

A turn changes the time of a launch, never its content. So nothing depends on it, and no rank waits for it for
long: a holder may wait for another rank, in a lock of the user's, or for its device in an `.item()`. One
that has waited for `TIMEOUT_S` goes on without a turn, and the limit is lifted for all; after a few times
for good. Where a loss waits for its device at each step the measured speed decides, as for anything else.
Correctness does not lean on the interpreter lock: places are counted under a lock of their own, and
counters have one writer each.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import ParamSpec, TypeVar

from flowdp.policy.launch_limit import Calls, LaunchLimit, Window

__all__ = ["LaunchTurn", "RankTurn"]

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_S = 1.0
"""Longest wait for a turn."""

EVERY = 8
"""One of so many calls of a rank is measured; while limits are tried, each is."""

OLD_S = 30.0
"""Age at which a window is out of date: captured steps launch nothing that is measured."""

KEPT = 64
"""Measured calls of a window that are kept, per rank and part of a step."""


class _Tally:
    """The calls of one part of a rank's steps.

    Attributes:
        count: So far. Written by the rank alone.
        measured: (time, CPU time, wait for a turn) of calls since the window began, in seconds.
    """

    __slots__ = ("count", "measured")

    def __init__(self) -> None:
        self.count = 0
        self.measured: list[tuple[float, float, float]] = []


@dataclass(frozen=True, slots=True)
class _Begin:
    """The beginning of a window.

    Attributes:
        s: The time.
        samples: Samples of all ranks before it.
        ahead_s: Time that hosts had waited for their devices before it, of all ranks together.
        counts: Forwards and optimizer steps of all ranks before it.
    """

    s: float
    samples: int
    ahead_s: float
    counts: list[int]


class LaunchTurn:
    """The turns of the ranks of one run.

    Args:
        ranks: Number of ranks; at least 2.
        tell: Called once, with `waiting`, by a rank, when launching has limited the ranks for a while.
        limit: Policy; None: a new `LaunchLimit`.

    Attributes:
        ranks: One turn each. Shape (ranks,).
        limit: Ranks that may launch at once; None: all.
        covers_step: Whether the optimizer's step needs a turn, too.
        every: One of so many calls is measured.
        waited_ms: Time that a rank has waited to launch, on average over the ranks, in all windows so far.
    """

    def __init__(
        self,
        ranks: int,
        tell: Callable[[float], object] | None = None,
        limit: LaunchLimit | None = None,
    ) -> None:
        self._tell = tell
        self._policy = LaunchLimit(ranks) if limit is None else limit
        self.limit: int | None = None
        self.covers_step = False
        self.every = EVERY
        self.waited_ms = 0.0
        self.ranks = [RankTurn(self) for _ in range(ranks)]
        self._left = 0
        self._lock = threading.Lock()  # guards the places: `limit`, and the three below
        self._held = 0
        self._waiting: deque[RankTurn] = deque()
        self._judge = threading.Lock()  # guards the policy and the window; taken before `_lock`
        self._begin: _Begin | None = None  # of the window; None: the limit is new
        self._skipped = 0  # forwards of all ranks when the limit changed
        # Written by any rank: a lost write shifts a statistic by one forward.
        self._last_s = 0.0
        self._gap_s = 0.0
        self._obey()

    def waiting(self) -> float | None:
        """Part of the ranks' time that they waited to launch, lately; None: not known.

        Threads:
            Any.
        """
        begin = self._begin
        is_old = begin is None or perf_counter() - begin.s > OLD_S
        return None if is_old and not self._policy.is_trying else self._policy.waiting

    def take(self, rank: RankTurn) -> bool:
        """Wait for a place; False where none is needed: then none is to be given back."""
        with self._lock:
            if self.limit is None:
                return False
            if self._held < self.limit and not self._waiting:
                self._held += 1
                return True
            rank.has_place = False
            self._waiting.append(rank)
        try:
            if rank.wake.acquire(timeout=TIMEOUT_S):
                return rank.has_place
        except BaseException:  # an interrupt: the main thread may be a rank of a loop of one's own
            if self._has_come(rank) and rank.has_place:
                self.give()
            raise
        if self._has_come(rank):
            return rank.has_place
        with self._judge:
            if self.limit is not None:  # else another rank has given up
                self._policy.gave_up()
                self._obey()
        return False

    def _has_come(self, rank: RankTurn) -> bool:
        """Whether a rank that waits no longer was woken just now; else it is taken off the list."""
        with self._lock:
            is_late = rank in self._waiting
            if is_late:
                self._waiting.remove(rank)
        if not is_late:
            rank.wake.acquire(blocking=False)  # it has been released, and an interrupt may come behind this
        return not is_late

    def give(self) -> None:
        """Give a place back."""
        with self._lock:
            self._held -= 1
            self._hand_on()

    def leave(self) -> None:
        """A rank launches no more; called by its own thread."""
        with self._judge:
            self._left += 1
            self._policy.left()
            self._obey()

    def launched(self, now_s: float, *, looks: bool) -> None:
        """A forward has ended; with `looks`, see whether the window is long enough."""
        gap_s, self._last_s = now_s - self._last_s, now_s
        if gap_s > self._gap_s:
            self._gap_s = gap_s
        if looks and self._judge.acquire(blocking=False):
            try:
                self._look(now_s)
            finally:
                self._judge.release()

    def _look(self, now_s: float) -> None:
        forwards = sum(rank.forward.count for rank in self.ranks)
        if self._begin is None:
            # The first forwards under a new limit began under the old one.
            if forwards - self._skipped >= len(self.ranks) - self._left:
                self._begin_window(now_s)
            return
        ms = (now_s - self._begin.s) * 1e3
        if not self._policy.is_enough(ms, forwards - self._begin.counts[0]):
            return
        limit = self.limit
        self._policy.seen(self._window(self._begin, ms))
        self.waited_ms += ms * (self._policy.waiting or 0.0)
        if self._policy.is_bound and (tell := self._tell) is not None:
            self._tell = None
            tell(self._policy.waiting or 0.0)
        self._obey()
        if self.limit == limit:
            self._begin_window(now_s)
        else:
            self._begin, self._skipped = None, forwards

    def _begin_window(self, now_s: float) -> None:
        for tallies in self._parts():
            for tally in tallies:
                tally.measured.clear()
        self._begin = _Begin(now_s, self._samples(), self._ahead_s(), self._counts())
        self._gap_s = 0.0

    def _window(self, begin: _Begin, ms: float) -> Window:
        # Copies: the ranks go on.
        forward, step = (
            Calls.of(now - before, [one for tally in tallies for one in tally.measured.copy()])
            for tallies, before, now in zip(self._parts(), begin.counts, self._counts(), strict=True)
        )
        ahead_ms = (self._ahead_s() - begin.ahead_s) * 1e3
        return Window(ms, self._gap_s * 1e3, self._samples() - begin.samples, forward, step, ahead_ms)

    def _parts(self) -> list[list[_Tally]]:
        parts = zip(*((rank.forward, rank.step) for rank in self.ranks), strict=True)
        return [list(tallies) for tallies in parts]

    def _counts(self) -> list[int]:
        return [sum(tally.count for tally in tallies) for tallies in self._parts()]

    def _samples(self) -> int:
        return sum(rank.samples for rank in self.ranks)

    def _ahead_s(self) -> float:
        return sum(rank.ahead_s() for rank in self.ranks)

    def _obey(self) -> None:
        policy = self._policy
        self.covers_step = policy.covers_step
        self.every = 1 if policy.is_trying else EVERY
        with self._lock:
            self.limit = policy.limit
            self._hand_on()

    def _hand_on(self) -> None:
        """Wake the ranks that have waited longest, as places are free; all where none is needed."""
        while self._waiting and (self.limit is None or self._held < self.limit):
            rank = self._waiting.popleft()
            rank.has_place = self.limit is not None
            self._held += rank.has_place
            rank.wake.release()


class RankTurn:
    """The turn of one rank.

    Threads:
        The rank's worker.

    Attributes:
        turns: Turns of all ranks.
        samples: Samples of its forwards so far.
        forward: Calls of the user's loss.
        step: Steps of its optimizer.
        ahead_s: Returns the time that its host has waited for its device.
        wake: Released when it need not wait any longer.
        has_place: Whether it was woken with a place.
    """

    __slots__ = (
        "_has_launched",
        "_holds",
        "_outside",
        "ahead_s",
        "forward",
        "has_place",
        "samples",
        "step",
        "turns",
        "wake",
    )

    def __init__(self, turns: LaunchTurn) -> None:
        self.turns = turns
        self.samples = 0
        self.forward, self.step = _Tally(), _Tally()
        self.ahead_s: Callable[[], float] = float
        self.wake = threading.Lock()
        self.wake.acquire()
        self.has_place = False
        self._holds = False  # a turn
        self._has_launched = False  # a forward of the step under way
        # Of the call: time and CPU time without its turn, and the wait to have it back.
        self._outside = (0.0, 0.0, 0.0)

    @property
    def is_limited(self) -> bool:
        """Whether ranks take turns now."""
        return self.turns.limit is not None

    def launch_forward(self, samples: int, compute: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call the user's loss in turn, on so many samples."""
        turns, tally = self.turns, self.forward
        tally.count += 1
        self._has_launched = True
        looks = not tally.count % turns.every
        result = self._launch(tally, turns.limit is not None, looks, compute, *args, **options)
        self.samples += samples
        turns.launched(perf_counter(), looks=looks)
        return result

    def launch_step(self, compute: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call the optimizer's step, in turn where that pays; not behind a forward that was no launch."""
        if not self._has_launched:
            return compute(*args, **options)
        self._has_launched = False
        turns, tally = self.turns, self.step
        tally.count += 1
        has_turn = turns.covers_step and turns.limit is not None
        return self._launch(tally, has_turn, not tally.count % turns.every, compute, *args, **options)

    def run_outside(self, compute: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call something that needs no turn, as the backward of a loss; the turn is given away meanwhile."""
        if not self._holds:
            return compute(*args, **options)
        self._holds = False
        self.turns.give()
        begin_s, begin_cpu_s = perf_counter(), thread_time()
        result = compute(*args, **options)
        end_s, end_cpu_s = perf_counter(), thread_time()
        self._holds = self.turns.take(self)
        s, cpu_s, place_s = self._outside
        self._outside = (
            s + end_s - begin_s,
            cpu_s + end_cpu_s - begin_cpu_s,
            place_s + perf_counter() - end_s,
        )
        return result

    def leave(self) -> None:
        """The rank launches no more."""
        self.turns.leave()

    def _launch(
        self,
        tally: _Tally,
        in_turn: bool,
        is_measured: bool,
        compute: Callable[P, T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        if not in_turn and not is_measured:
            return compute(*args, **options)
        asked_s = perf_counter()
        self._outside = (0.0, 0.0, 0.0)
        try:
            self._holds = in_turn and self.turns.take(self)
            if not is_measured or len(tally.measured) >= KEPT:
                return compute(*args, **options)
            begin_s, begin_cpu_s = perf_counter(), thread_time()
            result = compute(*args, **options)
            cpu_s, end_s = thread_time() - begin_cpu_s, perf_counter()
            outside_s, outside_cpu_s, place_s = self._outside
            s = end_s - begin_s - outside_s - place_s
            tally.measured.append((s, cpu_s - outside_cpu_s, begin_s - asked_s + place_s))
            return result
        finally:
            if self._holds:
                self._holds = False
                self.turns.give()
