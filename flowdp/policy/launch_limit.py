"""Limit of ranks that may launch at once, found by measuring.

Ranks of one process share the interpreter lock, and the forward of a model is Python that takes and gives it
at each operation. With many ranks in their forwards at once each operation waits for the lock, and all ranks
together may be slower than one; backward needs no lock. So it can pay to let one rank, or two, launch at a
time. How many, and whether at all, differs by machine, model and number of ranks: the limits are tried, and
the samples per second of all ranks decide. That is a matter of timing alone: the numbers that are computed
do not depend on it, so ranks need not agree on it, and it may change at any moment.

To try costs little where steps are short, and is done again at growing distances. Of long steps, whose
launching is short beside them, limits are tried only if they are seen to wait: a forward takes much longer
than the CPU time of its thread. It may wait for something else, too: a core that other programs have, a
device, a file. It does so with one rank at a time as well, and that much is taken out once it is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Calls", "LaunchLimit", "Window"]

WATCH_MS = 250.0
"""Length of a window, at least, while nothing is tried ..."""

TRY_MS = 60.0
"""... and of one in which a limit is tried. A scheduler gives slices of 3 to 10 ms."""

WATCH_CALLS, TRY_CALLS = 16, 6
"""Forwards per rank in such windows, at least: fewer would tell where in a round the window fell."""

LONG_MS = 4000.0
"""Half as many forwards are enough in a window of this length."""

SHORT_MS = 50.0
"""A forward that takes longer is tried under other limits only if ..."""

SUSPICION = 0.1
"""... this part of the ranks' time is lost in waiting to launch."""

SUSPICIONS = 2
"""Windows in a row that must call for a search. In the first of a run much is done for the only time."""

ROUNDS = 8
"""Each limit is tried so often ..."""

CLEAR_ROUNDS = 3
"""... or only so often, where it is far slower than the best."""

WAITS = 0.5
"""... or once, where besides a forward waits for this part of its time though no other rank launches: for a
file, or its device. With turns the others would wait with it."""

FAR = 2 / 3
"""A limit below this part of the best rate is far slower, ..."""

CLEAR = 1.2
"""... and one whose fastest window is slower than the slowest of the best by this factor."""

LOST_ROUNDS = 1
"""A faster limit is slower in so many rounds at most. Of two that are equal one would be chosen in 1 of 28
searches, by chance, were it not for `GAIN`."""

GAIN = 1.05
"""Gain in samples per second for which a limit is changed ..."""

LOSS = 1.01
"""... and the gain below which one is given up: a limit at the border is not taken and given up in turns."""

PAUSE_MS = 10_000.0
"""Shortest time between two searches; it doubles with each, up to ..."""

LONGEST_PAUSE_MS = 600_000.0
"""... this."""

PRICE = 30.0
"""A search may cost one part in so many of the time until the next."""

CHANGE = 1.5
"""A rate that differs by this factor from that of the last search calls for another one ..."""

CHANGES = 4
"""... if it is seen in so many windows in a row."""

SHARE_OF_STEP = 0.25
"""An optimizer that takes this part of a forward's CPU time is launched under the limit, too."""

TIMEOUTS = 3
"""Waits that were given up after which no limit is tried in this run."""

AHEAD = 0.05
"""Where hosts wait for their devices for this part of the time, devices are the limit, and not launching."""

BOUND = 0.25
"""Part of the ranks' time lost in waiting to launch from which a run is called launch-bound ..."""

BOUND_WINDOWS = 6
"""... if it is lost in so many windows in a row."""

OUTLIER = 4.0
"""A call that takes so many times the usual time does not count."""

BARRIER_PART = 1 / 3
"""A gap between two forwards that is this part of a window was a barrier of all ranks: an evaluation."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The forwards of all ranks in a window, or their optimizer steps.

    Attributes:
        count: Calls.
        ms: Mean time of a call, without the wait for a place.
        cpu_ms: Mean CPU time of its thread.
        place_ms: Mean wait for a place.
    """

    count: int = 0
    ms: float = 0.0
    cpu_ms: float = 0.0
    place_ms: float = 0.0

    @property
    def idle_ms(self) -> float:
        """Mean time of a call in which its thread did not run."""
        return max(0.0, self.ms - self.cpu_ms)

    @classmethod
    def of(cls, count: int, measured: Sequence[tuple[float, float, float]]) -> Calls:
        """Sum up measured steps: (time, CPU time, wait for a place) each, in seconds.

        Far outliers are left out: the first calls of a run, checks that come back at growing distances.
        """
        if not measured:
            return cls(count)
        limit = OUTLIER * median(one[0] for one in measured)
        usual = [one for one in measured if one[0] <= limit]
        ms, cpu_ms, place_ms = (1e3 * sum(column) / len(usual) for column in zip(*usual, strict=True))
        return cls(count, ms, cpu_ms, place_ms)


@dataclass(frozen=True, slots=True)
class Window:
    """All ranks over some time, under one limit.

    Attributes:
        ms: Length of the window.
        gap_ms: Longest time in it between the ends of two forwards of any ranks.
        samples: Samples that all ranks trained.
        forward: The forwards.
        step: The optimizers' steps.
        ahead_ms: Time that hosts waited for their devices, of all ranks together.
    """

    ms: float
    gap_ms: float
    samples: int
    forward: Calls
    step: Calls = Calls()
    ahead_ms: float = 0.0

    @property
    def rate(self) -> float:
        """Samples per millisecond, while the ranks moved."""
        return self.samples / self.moving_ms

    @property
    def moving_ms(self) -> float:
        """Length of the window without a barrier."""
        return self.ms - self.gap_ms if BARRIER_PART * self.ms < self.gap_ms < self.ms else self.ms


class LaunchLimit:
    """Decides how many ranks may launch at once.

    Args:
        ranks: That train.

    Attributes:
        limit: Ranks that may be in the launching part of a step at once; None: all.
        covers_step: Whether the optimizer's step belongs to that part.
        waiting: Part of the ranks' time that they waited to launch, lately; 0 where no limit gains much, and
            where devices are behind. None: not known.
        is_bound: Launching has limited the ranks for a while.

    Threads: no locks; one caller at a time.
    """

    def __init__(self, ranks: int) -> None:
        self.limit: int | None = None
        self.covers_step = False
        self.waiting: float | None = None
        self.is_bound = False
        self._ranks = ranks
        self._search: _Search | None = None
        self._since_ms = 0.0  # of work, since the last search
        self._pause_ms = 0.0  # until the next one, from the last
        self._least_ms = 0.0  # by its price
        self._searches = 0  # since the rate has changed
        self._usual = 0.0  # rate that the last search found
        self._changes = 0  # windows in a row with another rate
        self._idle_ms: tuple[float, ...] = (0.0, 0.0)  # that a forward, a step waits for something else
        self._has_searched = False
        self._suspicions = 0
        self._timeouts = 0
        self._recent: deque[float] = deque(maxlen=3)  # of `waiting`
        self._bound_windows = 0

    @property
    def is_trying(self) -> bool:
        """Whether limits are being tried: each forward is measured then."""
        return self._search is not None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to decide: one rank trains."""
        return self._ranks < 2

    def is_enough(self, ms: float, forwards: int) -> bool:
        """Whether a window of this length, with so many forwards of all ranks, tells anything."""
        least_ms, calls = (TRY_MS, TRY_CALLS) if self.is_trying else (WATCH_MS, WATCH_CALLS)
        if ms >= LONG_MS:
            calls //= 2
        return ms >= least_ms and forwards >= calls * self._ranks

    def seen(self, window: Window) -> None:
        """Learn from a window that was spent under the limit; sets the limit of the next."""
        if self.is_over:
            return
        if self._search is None:
            self._watch(window)
        else:
            self._try(self._search, window)

    def gave_up(self) -> None:
        """A rank has waited for a place too long: the holder may wait for that very rank."""
        self._timeouts += 1
        self._end_search(None)

    def left(self) -> None:
        """A rank has ended; it will not launch any more."""
        self._ranks -= 1
        if self._ranks < 2:
            self._search, self.limit, self.waiting, self.is_bound = None, None, None, False
        elif self._search is not None or self.limit is not None:
            self._search = None
            self._begin_search()

    def _watch(self, window: Window) -> None:
        self._since_ms += window.moving_ms
        lost = self._lost(window)
        self._tell(window, lost)
        may_gain = lost >= SUSPICION or window.forward.ms < SHORT_MS
        self._suspicions = self._suspicions + 1 if may_gain else 0
        self._look_for_change(window.rate)
        if self._timeouts >= TIMEOUTS or self._since_ms < max(self._pause_ms, self._least_ms):
            return
        if self.limit is not None or self._suspicions >= SUSPICIONS:
            calls = window.forward.count, window.step.count
            cpu_ms = window.forward.cpu_ms * calls[0], window.step.cpu_ms * calls[1]
            self.covers_step = cpu_ms[1] >= SHARE_OF_STEP * cpu_ms[0]
            self._begin_search()

    def _tell(self, window: Window, lost: float) -> None:
        if self.limit is None:
            # With all ranks at once a forward may wait for a core as well: the lock shows where turns help.
            self._recent.clear()
            self.waiting = 0.0 if self._has_searched else None
        else:
            is_ahead = window.ahead_ms >= AHEAD * window.moving_ms * self._ranks
            self._recent.append(0.0 if is_ahead else lost)
            self.waiting = median(self._recent)
        is_bound = self.waiting is not None and self.waiting >= BOUND
        self._bound_windows = self._bound_windows + 1 if is_bound else 0
        self.is_bound = self._bound_windows >= BOUND_WINDOWS

    def _look_for_change(self, rate: float) -> None:
        """Have the limits tried sooner where steps have become faster or slower by much."""
        if not self._usual:
            return
        is_change = not self._usual / CHANGE <= rate <= self._usual * CHANGE
        self._changes = self._changes + 1 if is_change else 0
        if self._changes == CHANGES:
            self._usual, self._changes, self._searches = rate, 0, 0
            self._pause_ms = PAUSE_MS

    def _lost(self, window: Window) -> float:
        """Part of the ranks' time that they waited to launch."""
        forward, step = window.forward, window.step
        lost_ms = forward.count * (forward.place_ms + max(0.0, forward.idle_ms - self._idle_ms[0]))
        lost_ms += step.count * (step.place_ms + max(0.0, step.idle_ms - self._idle_ms[1]))
        return min(1.0, lost_ms / (window.moving_ms * self._ranks))

    def _begin_search(self) -> None:
        limits = (None, 1, 2) if self._ranks > 2 else (None, 1)
        self._search = _Search(limits)
        self._before = self.limit
        self.limit = self._search.limit

    def _try(self, search: _Search, window: Window) -> None:
        if search.limit == 1:
            search.idle.append((window.forward.idle_ms, window.step.idle_ms))
            search.waits = window.forward.idle_ms >= WAITS * window.forward.ms > 0.0
        if not search.tried(window.rate, window.moving_ms):
            self.limit = search.limit
            return
        self._idle_ms = tuple(map(median, zip(*search.idle, strict=True)))
        self._has_searched = True
        chosen = search.choice(self._before)
        self._usual = median(search.rates[chosen])
        self._least_ms = PRICE * search.cost_ms
        self._end_search(chosen)

    def _end_search(self, limit: int | None) -> None:
        self.limit = limit
        self._search = None
        self._since_ms, self._suspicions, self._changes = 0.0, 0, 0
        self._pause_ms = min(PAUSE_MS * 2.0**self._searches, LONGEST_PAUSE_MS)
        self._searches += 1


class _Search:
    """Tries limits in turn: each in a window, then each again in the other order.

    Args:
        limits: To try.

    Attributes:
        rates: Samples per millisecond, of each limit's windows so far.
        idle: Time that a forward, and a step, waited though no other rank launched, per window.
        waits: Whether that was much of a forward, in the last of these windows.
    """

    def __init__(self, limits: Sequence[int | None]) -> None:
        self.rates: dict[int | None, list[float]] = {limit: [] for limit in limits}
        self.idle: list[tuple[float, float]] = []
        self.waits = False
        self._spent: list[tuple[float, float]] = []  # (milliseconds, rate) of each window
        self._order = [*limits]
        self._next = deque(self._order)

    @property
    def limit(self) -> int | None:
        """The limit that is tried now."""
        return self._next[0]

    @property
    def cost_ms(self) -> float:
        """Time that the search has cost: the same samples would have been trained so much sooner."""
        best = max(median(rates) for rates in self.rates.values())
        return sum(ms * max(0.0, 1.0 - rate / best) for ms, rate in self._spent)

    def tried(self, rate: float, ms: float) -> bool:
        """Take in a window of the limit that was tried; whether it was the last."""
        self.rates[self._next.popleft()].append(rate)
        self._spent.append((ms, rate))
        if self._next:
            return False
        ahead = max(self._order, key=lambda limit: median(self.rates[limit]))
        best = self.rates[ahead]
        if self._rounds >= CLEAR_ROUNDS:
            self._order = [limit for limit in self._order if self._may_win(limit, best)]
        elif self.waits and ahead is None:
            far = FAR * median(best)
            self._order = [limit for limit in self._order if max(self.rates[limit]) >= far]
        self._order.reverse()
        self._next.extend(self._order)
        return self._rounds == ROUNDS or len(self._order) == 1

    def choice(self, before: int | None) -> int | None:
        """The limit to use: that of before, or off, unless another one is clearly faster."""
        rates = {limit: self.rates[limit] for limit in self._order}
        best = max(rates, key=lambda limit: median(rates[limit]))
        # Off is preferred, and then the limit of before; each change has to be worth it.
        gains = {before: GAIN, None: GAIN if before is None else LOSS}
        for known in (None, before):
            if known in rates and not _is_faster(rates[best], rates[known], gains[known]):
                return known
        return best

    def _may_win(self, limit: int | None, best: Sequence[float]) -> bool:
        if max(self.rates[limit]) < max(FAR * median(best), min(best) / CLEAR):
            return False
        return (
            limit is None
            or None not in self._order
            or _lost(self.rates[limit], self.rates[None]) <= LOST_ROUNDS
        )

    @property
    def _rounds(self) -> int:
        return max(map(len, self.rates.values()))


def _is_faster(rates: Sequence[float], others: Sequence[float], gain: float) -> bool:
    """Whether rates are higher than those measured beside them, by a factor; one window may be lost."""
    return median(rates) >= gain * median(others) and _lost(rates, others) <= LOST_ROUNDS


def _lost(rates: Sequence[float], others: Sequence[float]) -> int:
    return sum(one <= other for one, other in zip(rates, others, strict=True))
