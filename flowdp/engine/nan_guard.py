"""Check of losses and replicas for NaN and inf before a mean.

On a device the verdict is made behind the last step of a round, and the mean obeys it there: a replica that
is not finite leaves itself out. The host reads the verdict one round late, when the device has the next steps
to do; or at once, where it has to be known at the gate. One round is enough: a whole step lies on the device
while the host waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowdp.device.streams import QUIET
from flowdp.engine.clocks import wait_for
from flowdp.engine.error_context import ErrorContext
from flowdp.engine.meter import Meter
from flowdp.machine.worker import Step, WorkerMachine
from flowdp.options import OnNan
from flowdp.replica.replica import Replica

__all__ = ["FiniteVerdict", "NanGuard", "note_nonfinite"]


def note_nonfinite(parts: Sequence[Tensor], losses: Tensor | None, out: Tensor) -> None:
    """Write whether any number is not finite, without reading it back.

    Args:
        parts: The memory. Shape (elements,) each.
        losses: See `Meter.losses`.
        out: On the same device. Bool, shape [].
    """
    numbers = [part.sum(dtype=torch.float64) for part in parts]
    if losses is not None:
        numbers.append(losses)
    total = numbers[0]
    for number in numbers[1:]:
        total = total + number
    torch.ne(total - total, 0.0, out=out)  # of infinity and NaN it is NaN


@dataclass(slots=True)
class FiniteVerdict:
    """A verdict of the device on its replica, copied to the host.

    Attributes:
        round: The meter's.
        last: The last step that it is about.
        bad: (epoch, batch) of the step that first gave NaN or infinity; None: there was none, or the verdict
            has not been read.
    """

    round: int
    last: Step
    bad: tuple[int, int] | None = None


class NanGuard:
    """Keeps replicas with NaN or inf parameters out of the means, or ends the run.

    Args:
        replica: Replica of the rank.
        machine: It tells the gate.
        meter: It reads the losses.
        place: The step that the rank is in.
        on_nan: Whether such numbers end the run.
        is_late: The device leaves the replica out of a mean by itself; the host hears of it behind the gate.

    Threads:
        The rank's worker.

    Attributes:
        bad: (epoch, batch) of the step in which that was seen, since the last report; None: in none.
        verdict: Verdict of the last mean until the host has read it; else None.
    """

    def __init__(
        self,
        replica: Replica,
        machine: WorkerMachine,
        meter: Meter,
        place: ErrorContext,
        on_nan: OnNan,
        *,
        is_late: bool,
    ) -> None:
        lane = self._lane = replica.lane
        self._replica = replica
        self._machine = machine
        self._meter = meter
        self._place = place
        self._on_nan = on_nan
        self._is_late = is_late
        self.bad: tuple[int, int] | None = None
        self.verdict: FiniteVerdict | None = None
        if lane.is_async:
            with QUIET:
                self._told = lane.pinned((), torch.bool)
            with lane.on(lane.compute):
                self._odd = torch.zeros((), dtype=torch.bool, device=lane.device)
            self._passed = lane.event()

    def judge(self) -> Tensor | None:
        """Look at losses and replica before a mean; see `Judge`. On a device, `read` returns the result.

        Raises:
            FloatingPointError: On the CPU: they are not finite, and on_nan is "raise".

        Streams:
            Enqueued on `compute`.
        """
        last = self._place.step
        if not self._lane.is_async:
            # Losses were looked at behind each step.
            is_due = not self._machine.is_bad and self._machine.steps
            if is_due and last is not None and not self._replica.is_finite():
                self.mark_bad(last, _REST)
            return None
        losses = self._meter.losses()
        if self._machine.is_bad or not self._machine.steps or last is None:
            return None
        watched = self._replica.watched
        parts = [] if watched is None else watched.trained()
        if not parts and losses is None:
            return None
        note_nonfinite(parts, losses, self._odd)
        self._told.copy_(self._odd, non_blocking=True)
        self._passed.record(self._lane.compute)
        self.verdict = FiniteVerdict(self._meter.round, last)
        return self._odd if self._is_late else None

    def decide(self) -> None:
        """Read the verdict on this round now, unless it may be late.

        Under exact it may where every rank has a part of the window: a mean over no rank is NaN, and so are
        the parameters behind the step, but then every rank is bad, and that ends the run. Of a window in
        which only some have a part, and all of these are bad, no step must be taken.

        Raises:
            FloatingPointError: See `read`.
        """
        step = self._place.step
        is_of_some = step is not None and step.part is not None and not step.part.by_all
        if is_of_some or not self._is_late:
            self.read()

    def read(self, *, is_reported: bool = False) -> None:
        """Read the verdict on its way, if there is one.

        Args:
            is_reported: A report tells it, in which all its losses are.

        Raises:
            FloatingPointError: It is bad, and on_nan is "raise".

        Streams:
            The host waits until the device has passed it.
        """
        verdict, self.verdict = self.verdict, None
        if verdict is None:
            return
        wait_for(self._passed)
        if not self._told:
            return
        if not is_reported:
            self._meter.look()  # which step's loss it was
        step = self._meter.bad.get(verdict.round)
        bad, what = (verdict.last, _REST) if step is None else (step, _LOSS)
        verdict.bad = bad.epoch, bad.batches[0]
        if verdict.round == self._meter.round:
            self.mark_bad(bad, what)
        elif self._on_nan == "raise":
            self.mark_bad(bad, f"{what}; the mean of that round was taken without it")
        else:
            # Where gradients are averaged the others' step is its own, and a report is enough.
            self._machine.is_bad = not self._replica.steps_at_gate
            if not is_reported:
                self.bad = verdict.bad

    def check_losses(self) -> None:
        """Look for a loss that is not finite; if it is of this round, the next mean does without the replica.

        Raises:
            FloatingPointError: on_nan is "raise".
        """
        step = self._meter.bad.get(self._meter.round)
        # The device sees it, too. How soon the host does is chance, and not to decide about a mean.
        if step is not None and not (self._is_late and self._on_nan == "quarantine"):
            self.mark_bad(step, _LOSS)

    def mark_bad(self, step: Step, what: str) -> None:
        """Note that the replica has NaN or inf values in this step; `what` names the value.

        Raises:
            FloatingPointError: on_nan is "raise".
        """
        if self._on_nan == "raise":
            self._place.step = step
            raise FloatingPointError(what)
        if not self._machine.is_bad:
            self._machine.is_bad = True
            self.bad = self.bad or (step.epoch, step.batches[0])

    def take_bad(self) -> tuple[int, int] | None:
        """The value of `bad`, for a report; the next one is of what comes now."""
        bad, self.bad = self.bad, None
        return bad

    def met(self) -> None:
        """Note that a mean was held."""
        self._meter.end_round(None if self.verdict is None else self.verdict.round)


_LOSS = "the loss is not finite"
_REST = "the loss is finite, but parameters or buffers have NaN or inf after the step"
