"""Keeping measured speeds right after a disturbance.

A pace decides how much work a rank gets, and only work renews it: one wrong number could leave a rank
without work for ever. `OutlierFilter` keeps a single odd step from setting a pace, `Probes` gives a rank that
its pace leaves without work a step from time to time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["FAR", "LONGEST_GAP", "OutlierFilter", "Probes"]

FAR = 4.0
"""A measurement this many times slower or faster than the known pace is an outlier, until repeated."""

FEW_STEPS = 2
"""A pace leaves out the longest step, so one of so few steps rests on a single step."""

LONGEST_GAP = 32
"""Most rounds between two probes of a rank. The gap doubles up to here, so that a rank that is as slow as it
seems costs the others little."""


class OutlierFilter:
    """Decides which measurements count.

    Args:
        world_size: Ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._held = [0.0] * world_size  # an outlier that waits for the next measurement

    def confirmed(self, rank: int, ms: float, steps: int, known_ms: float) -> float:
        """The measurement, or 0 while it is an outlier that the next one has to confirm.

        Of two outliers in a row on the same side the one nearer to the known pace counts. A faster pace of
        several steps counts at once: no hiccup makes steps faster.

        Args:
            rank: The rank measured.
            ms: Time of one step; 0 where not measured.
            steps: Steps that it was measured over.
            known_ms: The known pace; 0 where there is none.
        """
        if ms <= 0.0 or known_ms <= 0.0:
            return ms
        held, self._held[rank] = self._held[rank], 0.0
        if not is_far(ms, known_ms) or (ms < known_ms and steps > FEW_STEPS):
            return ms
        if held > 0.0 and (held > known_ms) == (ms > known_ms):
            return min(held, ms) if ms > known_ms else max(held, ms)
        self._held[rank] = ms
        return 0.0

    def is_holding(self, rank: int) -> bool:
        """Whether an outlier of the rank waits to be confirmed."""
        return self._held[rank] > 0.0


def is_far(ms: float, known_ms: float) -> bool:
    """Whether a measured pace is an outlier."""
    return not known_ms / FAR <= ms <= known_ms * FAR


class Probes:
    """Counts the rounds that a rank has been without work, and says when it is due for a step.

    The first probe follows one round without work, the next ones 2, 4, 8, ... rounds later, at most
    `LONGEST_GAP`, until the rank has work without a probe.

    Args:
        world_size: Ranks.

    Attributes:
        due: Ranks that get at least one step in the round planned next.
    """

    def __init__(self, world_size: int) -> None:
        self.due: tuple[int, ...] = ()
        self._idle = [0] * world_size  # rounds since the rank last had work without a probe
        self._asked = [False] * world_size  # a probe of the rank is planned or under way

    def start(self) -> None:
        """Probe all ranks in the first round: their paces come from another run."""
        self.due = tuple(range(len(self._idle)))

    def held(self, steps: Sequence[int], doubted: Collection[int] = ()) -> None:
        """Take in a round.

        Args:
            steps: Steps per rank. Shape (world_size,).
            doubted: Ranks with an outlier to confirm: the gaps of one that had steps begin anew.
        """
        for rank, count in enumerate(steps):
            is_probe = count > 0 and self._asked[rank]
            self._asked[rank] &= not is_probe
            has_work = count > 0 and (not is_probe or rank in doubted)
            self._idle[rank] = 0 if has_work else self._idle[rank] + 1
        self.due = tuple(rank for rank, idle in enumerate(self._idle) if _is_due(idle))
        for rank in self.due:
            self._asked[rank] = True


def _is_due(idle: int) -> bool:
    """Whether a rank is due after so many rounds: after 1, 3, 7, 15, 31, and then in every 32nd."""
    return idle > 0 and (
        (idle + 1) & idle == 0 if idle < LONGEST_GAP else idle % LONGEST_GAP == LONGEST_GAP - 1
    )
