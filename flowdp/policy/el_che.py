"""El Che: how many steps each rank takes before the replicas are averaged.

The slowest rank takes `anchor` steps and every faster one fills the same wall time. The anchor grows while
averaging costs more than its target share of the compute time. `ElChe` holds the measured pace and the
anchor; `fitted_quotas` turns both into the quotas of a planned round. Neither reads a clock.

Source: flodl's El Che, a cadence for unequal devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowdp.errors import OptionError

__all__ = ["ElChe", "fitted_quotas"]

_DEFAULT_MAX_ANCHOR = 200
_DEAD_ZONE = 0.10
_FULL = 0.97
"""Part of a round in steps, on average over the ranks, that is worth no longer round."""


def _round_half_up(value: float) -> int:
    return math.floor(value + 0.5)


def _is_measured(ms: float) -> bool:
    return 0.0 < ms < math.inf


class ElChe:
    """The cadence of a group of devices: measured pace in, steps per rank out.

    ::

        che = ElChe(world_size=2, anchor=10)
        che.batch_counts                            # (10, 10): nothing is measured yet
        che.report_timing([100.0, 200.0], [10, 10], sync_ms=5.0)
        che.batch_counts                            # (20, 10): rank 0 is twice as fast

    Args:
        world_size: Devices, at least 2.
        anchor: Steps of the slowest rank, at first and (but for `nudge_anchor_down`) at least.
        overhead_target: Averaging time over compute time to stay below; clamped to 0.01..0.50.
        max_anchor: Most steps of the slowest rank, at least 1; a smaller one than `anchor` lowers the anchor.
            None is 200, or `anchor` where that is more.
        max_batch_diff: Most steps by which one report may move a count that was measured before.
            None is no limit.
        speed_hint: (slow rank, how many times faster every other rank is), until measured. A ratio below 1
            counts as 1.
        window: Steps that a known pace is worth beside those of a new report; None: a report counts by how
            far it is from the known pace, whatever its steps.

    Attributes:
        world_size: As given.
        anchor: Steps of the slowest rank between two averagings.
        max_anchor: Most such steps.
        overhead_target: As given, clamped.
        max_batch_diff: As given.
        is_calibrated: Whether anything was measured.

    Raises:
        OptionError: Fewer than 2 devices, an anchor below 1, or a slow rank that is not there.

    Threads: no locks; one owner.
    """

    def __init__(
        self,
        world_size: int,
        anchor: int = 10,
        *,
        overhead_target: float = 0.10,
        max_anchor: int | None = _DEFAULT_MAX_ANCHOR,
        max_batch_diff: int | None = None,
        speed_hint: tuple[int, float] | None = None,
        window: int | None = None,
    ) -> None:
        if world_size < 2:
            raise OptionError(
                f"El Che balances at least 2 devices, not {world_size}; one device needs no cadence"
            )
        if anchor < 1:
            raise OptionError(f"anchor must be at least 1 step, not {anchor}")
        self.world_size = world_size
        self.max_anchor = max(_DEFAULT_MAX_ANCHOR, anchor) if max_anchor is None else max(max_anchor, 1)
        self.anchor = self._min_anchor = min(anchor, self.max_anchor)
        self.overhead_target = min(max(overhead_target, 0.01), 0.50)
        self.max_batch_diff = max_batch_diff
        self.is_calibrated = False
        self._window = window
        self._ms = [0.0] * world_size
        # A cap below the anchor leaves the first counts as they are: they follow at the first report.
        self._counts = [anchor] * world_size
        if speed_hint is not None:
            self._apply_hint(*speed_hint)

    def _apply_hint(self, slow_rank: int, ratio: float) -> None:
        if not 0 <= slow_rank < self.world_size:
            raise OptionError(
                f"speed_hint names rank {slow_rank} as the slow one, but the ranks are "
                f"0..{self.world_size - 1}"
            )
        self._counts = [_round_half_up(self.anchor * max(ratio, 1.0))] * self.world_size
        self._counts[slow_rank] = self.anchor

    # ---------------------------------------------------------------- state
    @property
    def batch_counts(self) -> tuple[int, ...]:
        """Steps per rank. Shape (world_size,)."""
        return tuple(self._counts)

    @property
    def total_batches(self) -> int:
        """Steps of all ranks together."""
        return sum(self._counts)

    @property
    def ms_per_batch(self) -> tuple[float, ...]:
        """Smoothed milliseconds per step; 0 for a rank that was never measured. Shape (world_size,)."""
        return tuple(self._ms)

    @property
    def anchor_wall_ms(self) -> float:
        """Wall time between two averagings that the counts aim at; 0 until measured."""
        return self.anchor * max(self._ms)

    @property
    def has_speed_hint(self) -> bool:
        """Whether the counts differ, by a hint or by measurement."""
        return len(set(self._counts)) > 1

    def batches(self, rank: int) -> int:
        """Steps of one rank."""
        return self._counts[rank]

    # ---------------------------------------------------------------- updates
    def report_timing(
        self, wall_ms: Sequence[float], actual_batches: Sequence[int], sync_ms: float, *, hold: bool = False
    ) -> None:
        """Take in the times of a round, then set the anchor and the counts of the next one.

        A rank without steps, and a time that is not positive and finite, is no measurement. The pace is an
        average whose weight is the relative error of the prediction, within 0.1..0.8: jitter is nearly
        ignored, a real change is adopted in a report or two. With a `window` a report of many steps, which
        has little jitter, weighs more. The anchor grows by the factor that the overhead exceeds its target,
        and falls one step at a time below half of it. One that was nudged below the first anchor comes back
        to it one step at a time.

        Args:
            wall_ms: Time in steps per rank. Shape (world_size,).
            actual_batches: Steps taken in that time, not the planned ones. Shape (world_size,).
            sync_ms: Time of the averaging itself, without waiting.
            hold: Do not let the anchor grow this time; the divergence guard asked.

        Raises:
            OptionError: A length is not the number of devices.
        """
        self._check_length("wall_ms", wall_ms)
        self._check_length("actual_batches", actual_batches)
        for rank, (wall, steps) in enumerate(zip(wall_ms, actual_batches, strict=True)):
            if steps > 0 and _is_measured(wall):
                self._observe(rank, wall / steps, steps)
        if not any(self._ms):
            return
        compute_ms = max((wall for wall in wall_ms if _is_measured(wall)), default=0.0)
        if compute_ms > 0.0 and _is_measured(sync_ms):
            self._tune_anchor(sync_ms / compute_ms, hold)
        self._recount()

    def nudge_anchor_down(self, factor: float) -> None:
        """Meet sooner: multiply the anchor by `factor`, clamped to 0.1..1, and round up.

        It may go below the first anchor, because replicas that drift apart weigh more than overhead; later
        reports raise it again.
        """
        self.anchor = math.ceil(self.anchor * min(max(factor, 0.1), 1.0))
        self._recount()

    def restore(self, anchor: int, ms_per_batch: Sequence[float]) -> None:
        """Begin with the measurements of an earlier run.

        Args:
            anchor: Its anchor; clamped to this one's limits.
            ms_per_batch: Its times, 0 where a rank was never measured. Shape (world_size,).

        Raises:
            OptionError: The number of times is not that of the devices.
        """
        self._check_length("ms_per_batch", ms_per_batch)
        self._ms = [ms if _is_measured(ms) else 0.0 for ms in ms_per_batch]
        self.anchor = max(1, min(anchor, self.max_anchor))
        self._recount()

    def forget(self, rank: int) -> None:
        """Drop the measurements of a rank that is gone, or whose speed has changed."""
        self._ms[rank] = 0.0
        self._recount()

    def clamp_total(self, max_total: int) -> tuple[int, ...]:
        """Counts scaled down to `max_total` steps of all ranks, in the same proportions.

        A rank whose part would round down to nothing keeps one step; by those the sum may exceed `max_total`.
        """
        total = self.total_batches
        if total <= max_total:
            return self.batch_counts
        scale = max_total / total
        counts = [max(1, math.floor(count * scale)) for count in self._counts]
        for rank in range(max_total - sum(counts)):
            counts[rank] += 1
        return tuple(counts)

    # ---------------------------------------------------------------- the parts
    def _check_length(self, name: str, values: Sequence[float]) -> None:
        if len(values) != self.world_size:
            raise OptionError(f"{name} has {len(values)} values for {self.world_size} devices; give one each")

    def _observe(self, rank: int, ms: float, steps: int) -> None:
        known = self._ms[rank]
        if known <= 0.0:
            self._ms[rank] = ms
            return
        evidence = 0.0 if self._window is None else steps / (steps + self._window)
        alpha = min(max(abs(ms - known) / known, evidence, 0.1), 0.8)
        self._ms[rank] = alpha * ms + (1.0 - alpha) * known

    def _tune_anchor(self, overhead: float, hold: bool) -> None:
        if overhead > self.overhead_target:
            if not hold:
                wanted = math.ceil(self.anchor * (overhead / self.overhead_target))
                self.anchor = min(max(wanted, self._min_anchor), self.max_anchor)
        elif self.anchor < self._min_anchor:
            if not hold:
                self.anchor += 1
        elif overhead < self.overhead_target * 0.5 and self.anchor > self._min_anchor:
            # Growth is fast and decay slow, so that the two cannot swing against each other.
            self.anchor -= 1

    def _recount(self) -> None:
        """Set the counts by what is measured, if anything is."""
        slowest = max(self._ms)
        if not slowest:
            return
        for rank, ms in enumerate(self._ms):
            target = max(1, _round_half_up(self.anchor * (slowest / ms))) if ms > 0.0 else self.anchor
            count = self._counts[rank]
            if self.is_calibrated:
                # Below a tenth of the count a change is jitter, and following it would only oscillate.
                if abs(target - count) <= count * _DEAD_ZONE:
                    continue
                if self.max_batch_diff is not None:
                    low, high = count - self.max_batch_diff, count + self.max_batch_diff
                    target = min(max(target, low), high)
            self._counts[rank] = target
        self.is_calibrated = True


def fitted_quotas(
    ms_per_step: Sequence[float], anchor: int, *, max_anchor: int | None = None, max_lead: int | None = None
) -> tuple[int, ...]:
    """Steps per rank of a planned round, so that all ranks finish as nearly together as whole steps allow.

    Rounding a fast rank's time to whole steps leaves devices idle, and how many depends on the anchor; so
    the anchors up to a quarter above the one asked for are tried and the one whose quotas fill the round
    best is taken, the nearest one on ties. A small anchor, where rounding costs most, may grow by two steps
    while more than 3 % are idle. `ElChe.batch_counts` would not do: their dead zone leaves up to a tenth of
    each round idle.

    Args:
        ms_per_step: Milliseconds per step per rank, all positive. Shape (world_size,).
        anchor: Steps of the slowest rank, at least 1.
        max_anchor: Most steps of the slowest rank, at least `anchor`: no larger anchor is tried.
        max_lead: Most steps by which a rank may lead the slowest. No quota exceeds `max_lead + 1`: the
            anchor shrinks until the fastest rank fits, and where even an anchor of 1 is too much its quota
            is cut. 0 gives one step each.

    Returns:
        Steps per rank, each at least 1. Shape (world_size,).
    """
    slowest = max(ms_per_step)
    near = -(-5 * anchor // 4)
    last = max(near, anchor + 2)
    if max_anchor is not None:
        last = min(last, max_anchor)
    if max_lead is not None:
        last = min(last, max(1, int((max_lead + 1.5) * min(ms_per_step) / slowest)))
    best: list[int] = []
    best_fill = 0.0
    for candidate in _candidates(anchor, last):
        if candidate > near and best_fill >= _FULL * len(ms_per_step):
            break
        quotas = [max(1, int(candidate * slowest / ms + 0.5)) for ms in ms_per_step]
        if max_lead is not None:
            quotas = [min(quota, max_lead + 1) for quota in quotas]
        times = [quota * ms for quota, ms in zip(quotas, ms_per_step, strict=True)]
        fill = sum(times) / max(times)
        if fill > best_fill + 1e-9:
            best, best_fill = quotas, fill
    return tuple(best)


def _candidates(anchor: int, last: int) -> range:
    """Anchors to try, the nearest one first: from `anchor` up, or from `last` down where that is below it."""
    first = anchor if last >= anchor else -(-4 * last // 5)
    # The longer the round, the less rounding costs: nine are enough, and this runs once a round.
    stride = max(1, -(-(last - first) // 8))
    return range(first, last + 1, stride) if last >= anchor else range(last, first - 1, -stride)
