"""Retry of a step that ran out of device memory.

Forward and backward begin again with the step's own samples. First the batches ahead on the device give their
memory. Where they had none, each micro-batch comes in twice as many pieces; batch norm sees a piece then, as
under gradient accumulation, and later steps are made of as many pieces from the start.

Nothing of the first attempt is left: gradients, buffers, the loss, recorded numbers and the generator of a
CUDA device are as they were when the step began. Not restored is anything outside the replica: a batch that
the loss has written to, counters of the user's own, and the CPU's generator, which belongs to the process.
Ranks that share a card share its generator, so that another one may draw some numbers twice.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence

import torch

from flowdp.data.feed import Feed
from flowdp.device.worker_context import CurrentWorker
from flowdp.engine.error_context import ErrorContext
from flowdp.engine.meter import Meter
from flowdp.engine.micro_batches import MicroBatch
from flowdp.replica.replica import Replica

__all__ = ["OomRetry", "without_frames"]

log = logging.getLogger("flowdp")


class OomRetry:
    """Repeats forward and backward of a rank's steps.

    Args:
        replica: Replica of the rank.
        current: The rank's record for the user's loss.
        meter: Holds the values that the loss recorded.
        feed: May hold batches ahead, and so memory.
        place: The step under way.
    """

    def __init__(
        self, replica: Replica, current: CurrentWorker, meter: Meter, feed: Feed, place: ErrorContext
    ) -> None:
        self._replica = replica
        self._current = current
        self._meter = meter
        self._feed = feed
        self._place = place

    def run(self, micros: Sequence[MicroBatch], error: torch.OutOfMemoryError) -> None:
        """Repeat the failed step with more memory, then in ever smaller pieces.

        Call it outside of the `except` block: an error that is being handled keeps its frames.

        Args:
            micros: Micro-batches of the step so far; the last one had no room.
            error: Torch's error, `without_frames`.

        Raises:
            OutOfDeviceMemory: A sample alone has no room, or the batch cannot be cut.
            torch.OutOfMemoryError: The step is the user's own, and may have stepped an optimizer already.
        """
        if not self._replica.can_repeat:
            raise error
        full, failed = micros[-1], error
        while True:
            if self._feed.shrink():
                log.warning(
                    "rank %d on %s ran out of memory %s: batches ahead on the device give theirs up, and the "
                    "step is tried again; fewer are held ahead from now on",
                    self._current.rank,
                    self._replica.device,
                    str(self._place),
                )
            else:
                self._halve(full, failed)
            self._replica.undo()
            self._meter.discard()
            for full in micros:
                self._current.samples = full.samples
                try:
                    self._replica.add(full.batch, self._current, full.share)
                except torch.OutOfMemoryError as again:
                    failed = without_frames(again)
                    break
            else:
                return

    def _halve(self, full: MicroBatch, error: torch.OutOfMemoryError) -> None:
        replica, samples = self._replica, full.samples
        before = replica.forwards(full.batch, samples)
        replica.pieces *= 2
        after = replica.forwards(full.batch, samples)
        if before == after:
            why = f"its {samples} samples cannot be cut into more parts than {before}"
            raise self._place.out_of_memory(error, why)
        log.warning(
            "rank %d on %s ran out of memory %s: forward and backward take %d samples at a time instead of "
            "%d from now on",
            self._current.rank,
            replica.device,
            str(self._place),
            -(-samples // after),
            -(-samples // before),
        )


def without_frames(error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
    """Drop an error's frames and the tensors of the forward that they hold.

    Where it came from stands in a note on it. One frame that is kept keeps its callers, ours among them.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.add_note("".join(traceback.format_tb(link.__traceback__)))
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
