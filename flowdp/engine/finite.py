"""Whether what a rank brings to a mean is made of numbers, and what becomes of it if not."""

from __future__ import annotations

from math import isfinite

from torch import Tensor, float64

from flowdp.device.streams import QUIET, Lane
from flowdp.device.tensors import FlatTensors
from flowdp.engine.meter import Meter
from flowdp.engine.place import Place
from flowdp.engine.replica import Replica
from flowdp.machine.worker import Step, WorkerMachine
from flowdp.options import OnNan

__all__ = ["Finite", "Numbers"]


class Finite:
    """Looks at flat memory, once before each meeting.

    A finite loss does not promise finite parameters: the gradient may be infinite in the last step before the
    meeting, and no loss follows it.

    Args:
        lane: The rank's.

    Threads:
        The rank's worker.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        with QUIET:
            self._told = lane.pinned((), float64)
        self._passed = lane.event()

    def __call__(self, tensors: FlatTensors) -> bool:
        """Whether all numbers that training has changed are finite.

        Streams:
            The host waits until the device is here: all steps before the meeting have run then.
        """
        # A sum is by far the fastest look. It overflows before its terms do: then every one is looked at.
        return isfinite(self._read(tensors.total())) or isfinite(self._read(tensors.largest()))

    def _read(self, number: Tensor) -> float:
        self._told.copy_(number, non_blocking=True)
        self._passed.record(self._lane.compute)
        self._passed.synchronize()
        return float(self._told)


class Numbers:
    """Keeps a replica that has left the numbers out of the means, or ends the run.

    Args:
        replica: Whose.
        machine: Says at the gate whether it is bad.
        meter: Sees the losses.
        place: The step under way.
        on_nan: What to do.

    Threads:
        The rank's worker.

    Attributes:
        bad: (epoch, batch) of the step in which that was seen; None while it is sound.
    """

    def __init__(
        self, replica: Replica, machine: WorkerMachine, meter: Meter, place: Place, on_nan: OnNan
    ) -> None:
        self._watched = replica.watched
        self._is_finite = Finite(replica.lane)
        self._machine = machine
        self._meter = meter
        self._place = place
        self._on_nan = on_nan
        self.bad: tuple[int, int] | None = None

    def look(self) -> None:
        """Look at losses and replica before a mean.

        Raises:
            FloatingPointError: They are not finite, and on_nan is "raise".

        Streams:
            The host waits until the device has run all steps so far: once per mean, never per step.
        """
        last = self._place.step
        if self._machine.is_bad:
            self._meter.look()  # what is on its way is of before the mean, and must not land behind it
            return
        if not self._machine.steps or last is None:
            return
        is_finite = self._watched is None or self._is_finite(self._watched)
        self._meter.look()
        if self._meter.bad is not None:
            self.left(self._meter.bad, "the loss is")
        elif not is_finite:
            self.left(last, "the loss is finite, and what the step made of it is")

    def left(self, step: Step, what: str) -> None:
        """The replica has left the numbers in this step.

        Raises:
            FloatingPointError: on_nan is "raise".
        """
        if self._on_nan == "raise":
            self._place.step = step
            raise FloatingPointError(f"{what} not finite")
        if not self._machine.is_bad:
            self._machine.is_bad = True
            self.bad = step.epoch, step.batches[0]
