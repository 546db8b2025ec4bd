"""Dividing samples among ranks of different speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace

from flowdp.errors import OptionError

__all__ = [
    "ThroughputBalance",
    "changed_shares",
    "format_shares",
    "hinted_weights",
    "normalised_ratios",
    "part_sizes",
]

MOVED = 0.02
"""Change of a share that is reported: quotas are whole steps, and vary by one."""

_CALIBRATION_STEPS = 10
_REBALANCE_STEPS = 50
_SMOOTHING = 0.3
_MIN_RATIO = 0.05


def hinted_weights(world_size: int, speed_hint: tuple[int, float] | None) -> tuple[float, ...]:
    """Relative speeds before any is measured: by the hint, else equal.

    Args:
        world_size: Ranks.
        speed_hint: (slow rank, how many times faster the others are).

    Returns:
        Positive weights, not normalised. Shape (world_size,).
    """
    slow_rank, ratio = speed_hint or (0, 1.0)
    return tuple(1.0 if rank == slow_rank else ratio for rank in range(world_size))


def changed_shares(reported: Sequence[float], weights: Sequence[float]) -> tuple[float, ...]:
    """Shares in proportion to these weights, where they differ from those reported last; else empty."""
    whole = math.fsum(weights)
    shares = tuple(weight / whole for weight in weights) if whole else ()
    moved = (abs(was - share) for was, share in zip(reported, shares, strict=False))
    return shares if max(moved, default=0.0) >= MOVED else ()


def format_shares(shares: Sequence[float]) -> str:
    """Shares in whole percent: "40 % 60 %"."""
    return " ".join(f"{100 * share:.0f} %" for share in shares)


def normalised_ratios(ratios: Sequence[float], world_size: int) -> tuple[float, ...]:
    """The ratios, scaled to sum to 1. Shape (world_size,).

    Raises:
        OptionError: Not one per device, or one that is not positive and finite.
    """
    if len(ratios) != world_size:
        raise OptionError(
            f"partition_ratios has {len(ratios)} ratios for {world_size} devices: give one for each device"
        )
    for ratio in ratios:
        if not 0.0 < ratio < math.inf:
            raise OptionError(
                f"partition_ratios must be positive and finite, not {ratio!r} in {tuple(ratios)!r}"
            )
    whole = math.fsum(ratios)
    return tuple(ratio / whole for ratio in ratios)


def part_sizes(samples: int, ratios: Sequence[float], least: int = 1) -> tuple[int, ...]:
    """Split the samples of one step of all ranks so that they finish together.

    No rank pays for the rounding of the others, and the last one finishes as early as whole samples allow:
    ratios that are nearly equal give equal sizes. Every rank gets at least `least`, so that its speed stays
    known, while they last; else the slowest ranks get none.

    Args:
        samples: To split.
        ratios: In any scale; a rank with 0 gets none. Shape (ranks,).
        least: Samples of a rank that has any. Fewer in all go to one rank.

    Returns:
        Sizes that sum to `samples`. Shape (ranks,).
    """
    fastest_first = sorted(range(len(ratios)), key=lambda rank: -ratios[rank])
    for count in range(sum(ratio > 0.0 for ratio in ratios), 0, -1):
        taking = sorted(fastest_first[:count])
        sizes = _finishing_together(samples, [ratios[rank] for rank in taking])
        while samples >= least * count and min(sizes) < least:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[sizes.index(min(sizes))] += 1
        if count == 1 or all(size == 0 or size >= least for size in sizes):
            break
    whole = dict(zip(taking, sizes, strict=True))
    return tuple(whole.get(rank, 0) for rank in range(len(ratios)))


def _finishing_together(samples: int, speeds: Sequence[float]) -> list[int]:
    """Sizes whose longest time is the shortest: each sample left by rounding ends as early as it can."""
    whole = sum(speeds)
    sizes = [math.floor(samples * speed / whole) for speed in speeds]
    ends = [((size + 1) / speed, rank) for rank, (size, speed) in enumerate(zip(sizes, speeds, strict=True))]
    heapify(ends)
    for _ in range(samples - sum(sizes)):
        soonest = ends[0][1]
        sizes[soonest] += 1
        heapreplace(ends, ((sizes[soonest] + 1) / speeds[soonest], soonest))
    return sizes


class ThroughputBalance:
    """Ratios that follow the measured speed of each rank, for splitting single batches.

    They are recomputed after some steps and at an interval from there, in proportion to a moving average of
    the throughput. No rank falls below a floor, so that a slow one is still measured.

    Args:
        ratios: The ratios until then, scaled to sum to 1: equal ones, or from a speed hint. Shape (ranks,).
        calibration: Steps before the ratios are recomputed for the first time.
        interval: Steps between two times.
        floor: Least ratio of a rank.
        steady: Relative change of a ratio up to which all stay as they are.

    Attributes:
        ratios: Fraction of a batch per rank; they sum to 1. Shape (ranks,).

    Raises:
        OptionError: A ratio is not positive and finite.

    Threads: no locks; one owner.
    """

    def __init__(
        self,
        ratios: Sequence[float],
        *,
        calibration: int = _CALIBRATION_STEPS,
        interval: int = _REBALANCE_STEPS,
        floor: float = _MIN_RATIO,
        steady: float = 0.0,
    ) -> None:
        self._steady = steady
        self.ratios = normalised_ratios(ratios, len(ratios))
        self._calibration = calibration
        self._interval = interval
        self._floor = floor
        self._throughput = [0.0] * len(ratios)
        self._steps = 0

    @property
    def throughput(self) -> tuple[float, ...]:
        """Smoothed samples per millisecond; 0 for a rank never measured. Shape (ranks,)."""
        return tuple(self._throughput)

    def update(self, samples: Sequence[int], ms: Sequence[float]) -> bool:
        """Count one step and take in its times.

        Args:
            samples: Samples per rank; a rank without any is not measured. Shape (ranks,).
            ms: Time of the step per rank; 0 or less is no measurement. Shape (ranks,).

        Returns:
            Whether the ratios were recomputed.
        """
        self._steps += 1
        for rank, (count, took_ms) in enumerate(zip(samples, ms, strict=True)):
            if count > 0 and 0.0 < took_ms < math.inf:
                known, seen = self._throughput[rank], count / took_ms
                self._throughput[rank] = _SMOOTHING * seen + (1.0 - _SMOOTHING) * known if known else seen
        since = self._steps - self._calibration
        if since < 0 or since % self._interval or not any(self._throughput):
            return False
        found = _floored(self._throughput, self._floor)
        if any(
            abs(now - known) > self._steady * known for now, known in zip(found, self.ratios, strict=True)
        ):
            self.ratios = found
        return True


def _floored(throughput: Sequence[float], floor: float) -> tuple[float, ...]:
    """Ratios in proportion to `throughput`, none below the floor; the others pay for it in proportion."""
    whole = sum(throughput)
    ratios = [max(value / whole, floor) for value in throughput]
    deficit = sum(ratios) - 1.0
    above = sum(ratio for ratio in ratios if ratio > floor + 1e-9)
    paid = [
        max(ratio - deficit * (ratio / above), floor) if ratio > floor + 1e-9 else ratio for ratio in ratios
    ]
    # A rank that pays may itself reach the floor, so the sum can still be off.
    return normalised_ratios(paid, len(paid))
