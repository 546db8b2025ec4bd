"""Steps of each rank in the next round: El Che, the divergence guard, the hint and the ratios.

One value object per run, fed once a round. Before anything is measured, or where the user fixed the shares,
the times are guessed: only their ratios matter then.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowdp.options import CadenceOptions
from flowdp.policy.drift import DivergenceGuard, GuardAction, GuardDecision
from flowdp.policy.el_che import ElChe, fitted_quotas
from flowdp.policy.recovery import OutlierFilter, Probes, is_far

__all__ = ["Cadence"]

PROBE_STEPS = 3
"""Steps of every rank in the first round: long enough to measure, short enough to cost nothing."""

WINDOW_STEPS = 20
"""Steps that a known pace is worth beside those of the next round: `bench/LOG.md` has others. First steps are
slow, and a pace that follows by a tenth a round keeps fast devices waiting for many rounds."""


class Cadence:
    """The quotas of planned and asynchronous rounds.

    Args:
        world_size: Ranks, at least 2.
        options: The user's.
        ratios: Fixed shares, summing to 1; None: by measured speed. Shape (world_size,).

    Attributes:
        el_che: Anchor and measured times.
        guard: Watches the drift.
        action: Last action of the guard.
        ms_per_step: Time of one step per rank as far as known, else in proportion to the hint. Shape
            (world_size,).
        quotas: Steps per rank in the next round; 0 for one that is gone. Shape (world_size,).
    """

    def __init__(
        self, world_size: int, options: CadenceOptions, ratios: Sequence[float] | None = None
    ) -> None:
        self.options = options
        self.ratios = None if ratios is None else tuple(ratios)
        self.el_che = ElChe(
            world_size,
            options.anchor,
            overhead_target=options.overhead_target,
            max_anchor=options.max_anchor,
            max_batch_diff=options.max_batch_diff,
            speed_hint=options.speed_hint,
            window=WINDOW_STEPS,
        )
        self.guard = DivergenceGuard(options.divergence_threshold)
        self.action = GuardAction.STABLE
        self._outliers = OutlierFilter(world_size)
        self._probes = Probes(world_size)
        self._sync_ms = 0.0  # of the round before
        self._gone: set[int] = set()
        self._fit()

    def restore(self, anchor: int, pace_ms: Sequence[float], drifts: Sequence[float] = ()) -> None:
        """Begin with the measurements of an earlier run on the same ranks.

        Args:
            anchor: See `ElChe.restore`.
            pace_ms: See there.
            drifts: Drifts that the guard had seen.
        """
        self.el_che.restore(anchor, pace_ms)
        self.guard = DivergenceGuard(self.options.divergence_threshold, drifts)
        self._probes.start()
        self._fit()

    def leave(self, rank: int) -> None:
        """Remove a rank: its quota is 0 from now on."""
        self._gone.add(rank)
        self.el_che.forget(rank)
        self._fit()

    @property
    def anchor(self) -> int:
        """Steps of the slowest rank that a round aims at."""
        return self.el_che.anchor

    @property
    def is_known(self) -> bool:
        """Whether the speeds are known: measured, hinted or fixed."""
        return self.el_che.is_calibrated or self.el_che.has_speed_hint or self.ratios is not None

    @property
    def is_guarded(self) -> bool:
        """Whether rounds are shorter than the first ones, as the guard wanted them."""
        return self.el_che.anchor < min(self.options.anchor, self.el_che.max_anchor)

    @property
    def round_ms(self) -> float:
        """Time that a round is expected to take; 0 before the first measurement."""
        if not self.el_che.is_calibrated:
            return 0.0
        return max(q * ms for q, ms in zip(self.quotas, self.el_che.ms_per_batch, strict=True))

    @property
    def due(self) -> tuple[int, ...]:
        """Ranks that get at least one step in the next round, however slow they seem; see `Probes`."""
        if self.ratios is not None:
            return ()
        return tuple(rank for rank in self._probes.due if rank not in self._gone)

    def measured(
        self,
        pace_ms: Sequence[float],
        steps: Sequence[int],
        sync_ms: float,
        drifts: Sequence[float] | None,
        rounds: int = 1,
    ) -> str:
        """Take the measurements of a round, or of several together.

        The guard acts first: growth is held, or the anchor halved, before the quotas are computed. One odd
        number changes nothing: a pace far from the known one, and a longer averaging, count when the next
        round confirms them.

        Args:
            pace_ms: Time of one step per rank; 0 where not measured. Shape (world_size,).
            steps: Steps per rank, in all of the rounds. Shape (world_size,).
            sync_ms: Averaging time of one round, without waiting.
            drifts: Relative distance from the mean of each rank that took part; None where not measured.
            rounds: How many.

        Returns:
            Reason of the guard's action; "" while all is well.
        """
        decision = GuardDecision(GuardAction.STABLE)
        if drifts is not None and self.options.divergence_guard:
            decision = self.guard.report(drifts, sum(steps) / rounds)
        self.action = decision.action
        hold = self.action is not GuardAction.STABLE
        # Read once, as each reading copies the times of all ranks; forgetting one changes no other's.
        measured = zip(pace_ms, steps, self.el_che.ms_per_batch, strict=True)
        paces = [self._believed(rank, ms, n, known) for rank, (ms, n, known) in enumerate(measured)]
        self._probes.held(steps, [rank for rank in range(len(steps)) if self._outliers.is_holding(rank)])
        wall_ms = [ms * n for ms, n in zip(paces, steps, strict=True)]
        # The first averaging also sets up memory and streams: its time would stretch the rounds.
        sync_ms, self._sync_ms = min(sync_ms, self._sync_ms), sync_ms
        sync_ms = sync_ms if self.el_che.is_calibrated else 0.0
        # An epoch's last round may be short, and to its time a mean is dear that is cheap to a whole round's.
        if max(wall_ms) < self.round_ms * rounds:
            sync_ms *= max(wall_ms) / (self.round_ms * rounds)
        self.el_che.report_timing(wall_ms, steps, sync_ms * rounds, hold=hold)
        if self.action is GuardAction.TIGHTEN:
            self.el_che.nudge_anchor_down(0.5)
        self._fit()
        return decision.reason

    def _believed(self, rank: int, ms: float, steps: int, known: float) -> float:
        """A measured pace as far as it counts; one that is far from the known pace replaces it."""
        ms = self._outliers.confirmed(rank, ms if steps else 0.0, steps, known)
        if ms > 0.0 and known > 0.0 and is_far(ms, known):
            self.el_che.forget(rank)
        return ms

    def _fit(self) -> None:
        """Set the quotas by what is known."""
        self.ms_per_step = self._known_ms_per_step()
        anchor = self.el_che.anchor if self.is_known else min(self.el_che.anchor, PROBE_STEPS)
        quotas = fitted_quotas(
            self.ms_per_step, anchor, max_lead=self.options.max_batch_diff, max_anchor=self.el_che.max_anchor
        )
        self.quotas = tuple(0 if rank in self._gone else quota for rank, quota in enumerate(quotas))

    def _known_ms_per_step(self) -> tuple[float, ...]:
        if self.ratios is not None:
            return tuple(1.0 / ratio for ratio in self.ratios)
        measured = self.el_che.ms_per_batch
        if not any(measured):
            return tuple(1.0 / count for count in self.el_che.batch_counts)
        # A rank that has had no batch yet is taken for the slowest.
        return tuple(ms or max(measured) for ms in measured)
