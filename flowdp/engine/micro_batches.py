"""A step's batches, taken from the feed as they come and put together to micro-batches.

A batch that is not there yet does not hold the thread: the worker reads its inbox and asks again, and the
step goes on where it was.

A step that runs out of device memory begins again with its own samples. First the batches ahead on the
device give their memory. Where they had none, each micro-batch comes in twice as many pieces; batch norm sees
a piece then, as under gradient accumulation, and later steps are made of as many pieces from the start.
Nothing of the first attempt is left: gradients, buffers, the loss, recorded numbers and the generator of a
CUDA device are as they were when the step began. Not restored is anything outside the replica: a batch that
the loss has written to, counters of the user's own, and the CPU's generator, which belongs to the process.
Ranks that share a card share its generator, so that another one may draw some numbers twice.
"""

from __future__ import annotations

import logging
import traceback
from contextlib import suppress
from dataclasses import dataclass

import torch

from flowdp.data.batches import Portion, joined
from flowdp.data.source import Batch, Feed, Source
from flowdp.device.compiled import FirstCalls
from flowdp.device.gathered import made
from flowdp.device.trees import described, flatten
from flowdp.device.worker_context import CurrentWorker
from flowdp.engine.error_context import ErrorContext
from flowdp.engine.meter import Meter
from flowdp.machine.worker import Step, WorkerMachine
from flowdp.replica.loss import of_model_and_batch
from flowdp.replica.replica import Replica
from flowdp.threads.stacks import is_own

__all__ = ["MicroBatch", "MicroBatcher", "first_call", "without_frames"]

log = logging.getLogger("flowdp")

SHOWN = 6
"""Leaves of a batch that an error describes."""


@dataclass(slots=True)
class MicroBatch:
    """Input of one forward.

    Attributes:
        batch: On the device; a `Gathered` where it is still to be made.
        samples: Number of samples.
        share: Its share of the step, if the step's other micro-batches are as large as its first.
    """

    batch: Batch
    samples: int
    share: float


class MicroBatcher:
    """Groups the batches of a step into micro-batches of `replica.width` batches, and trains these.

    Args:
        feed: Brings the batches; may hold some ahead, and so memory.
        source: Source of the batches.
        replica: Replica of the rank.
        current: The rank's record for the user's loss.
        meter: Holds the values that the loss recorded.
        place: The step under way.

    Attributes:
        taken: Batches of the step under way so far.
        samples: Samples in the micro-batches handed on.
        factor: Factor that makes their shares sum to 1.
        fed: The machine's plans that the feed knows, by their number.
        micros: Micro-batches handed on, kept while the step may have to begin again.

    Threads:
        The rank's worker.
    """

    def __init__(
        self,
        feed: Feed,
        source: Source,
        replica: Replica,
        current: CurrentWorker,
        meter: Meter,
        place: ErrorContext,
    ) -> None:
        self.taken = 0
        self.samples = 0
        self.factor = 1.0
        self.fed = 0
        self.micros: list[MicroBatch] = []
        self._feed, self._source, self._replica = feed, source, replica
        self._current, self._meter, self._place = current, meter, place
        self._samples_in = source.samples_in
        self._width = replica.width
        self._calls = FirstCalls(replica.module, replica.function)
        self._open: list[Batch] = []  # of them, those of the next micro-batch
        self._sizes: list[int] = []  # samples of each
        self._planned = 0  # samples of the step, if all micro-batches were as large as the first
        # Batches that no mean holds yet, where the source keeps them.
        self._trained: list[tuple[int, int]] = []

    def follow(self, machine: WorkerMachine) -> None:
        """Tell the feed the next batches, before a report lets the batches of a void plan be dealt anew."""
        if self.fed != machine.plans:
            self.fed = machine.plans
            # Those of a step under way are the machine's until it is done, and the feed has handed some out.
            self._feed.follow(machine.upcoming()[self.taken :])

    def next(self, step: Step) -> MicroBatch | None:
        """The next micro-batch of the step; None where a batch of it is not there yet.

        Args:
            step: The one under way, or a new one. Its end may have been cut off meanwhile.

        Raises:
            DataError: See `Feed.take`.
        """
        batches, at = step.batches, self.taken
        if self._width == 1 or (at + 1 == len(batches) and not self._open):
            batch = self._feed.take(step.epoch, batches[at], step.part)
            if batch is None:
                return None
            part = step.part
            samples = self._samples_in(step.epoch, batches[at]) if part is None else part.samples
            self.taken = at + 1
        elif not self._fill(step):
            return None
        else:
            batch, samples = joined(self._open, self._sizes), sum(self._sizes)
            self._open.clear()
            self._sizes.clear()
        if not self.samples:
            self._planned = samples if len(batches) == 1 else samples * -(-len(batches) // self._width)
        self.samples += samples
        self.factor = self._planned / self.samples
        micro = MicroBatch(batch, samples, samples / self._planned)
        self.micros.append(micro)
        return micro

    def _fill(self, step: Step) -> bool:
        """Take the batches of a micro-batch; False where one is not there yet."""
        while self.taken < len(step.batches) and len(self._open) < self._width:
            batch = self._feed.take(step.epoch, step.batches[self.taken])
            if batch is None:
                return False
            self._open.append(made(batch))
            self._sizes.append(self._samples_in(step.epoch, step.batches[self.taken]))
            self.taken += 1
        return True

    def add(self, micro: MicroBatch) -> None:
        """Forward and backward of the micro-batch that was handed on last, in pieces that have room.

        Raises:
            OutOfDeviceMemory: A sample alone has no room, or the batch cannot be cut.
            torch.OutOfMemoryError: The step is the user's own, and may have stepped an optimizer already.
        """
        failed = self._attempt(micro)
        while failed is not None:
            if not self._replica.can_repeat:
                raise failed
            if self._feed.shrink():
                log.warning(
                    "rank %d on %s ran out of memory %s: batches ahead on the device give theirs up, and the "
                    "step is tried again; fewer are held ahead from now on",
                    self._current.rank,
                    self._replica.device,
                    str(self._place),
                )
            else:
                self._halve(micro, failed)
            self._replica.undo()
            self._meter.discard()
            for micro in self.micros:
                failed = self._attempt(micro)
                if failed is not None:
                    break

    def _attempt(self, micro: MicroBatch) -> torch.OutOfMemoryError | None:
        """Forward and backward of a micro-batch; returns the error where there is no room for it."""
        replica, current, calls = self._replica, self._current, self._calls
        current.samples = micro.samples
        try:
            if calls.are_compiled and not replica.meets:  # other ranks reuse its compilations
                with calls.turn(micro.samples):
                    replica.add(micro.batch, current, micro.share)
            else:
                replica.add(micro.batch, current, micro.share)
        except torch.OutOfMemoryError as error:
            return without_frames(error)
        except Exception as error:
            if not replica.has_stepped and not is_own(error):
                self._place.call = first_call(replica, micro, error)
            raise
        return None

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

    def is_last(self, step: Step) -> bool:
        """Whether the last micro-batch ended the step."""
        return self.taken >= len(step.batches) and not self._open

    def end(self, step: Step) -> None:
        """End the step."""
        if self._source.keeps:
            self._trained += ((step.epoch, batch) for batch in step.batches)
        self.taken = self.samples = 0
        self.micros.clear()

    def settle(self) -> None:
        """Settle all steps so far: a mean holds them, or they are lost for good (those of a bad replica)."""
        if self._trained:
            self._source.settle(self._trained)
            self._trained = []

    def lose(self, rank: int) -> None:
        """Return the batches of a lost rank that no mean holds, so that others train them."""
        with suppress(Exception):  # of a device that is dead; its feed asks for nothing more all the same
            self._feed.follow(())
        self._source.reclaim(rank)


def first_call(replica: Replica, micro: MicroBatch, error: Exception) -> str:
    """Description of a step that fails before any has succeeded: the batch, and the loss to write."""
    batch = made(micro.batch.rows(0, micro.samples) if isinstance(micro.batch, Portion) else micro.batch)
    leaves, form = flatten(batch)
    paths = [f"batch{path}" for path in form.paths()]
    shown = [
        f"{path} is {str(getattr(leaf, 'dtype', '')).removeprefix('torch.')} {described(leaf)}"
        for path, leaf in zip(paths[:SHOWN], leaves, strict=False)
    ]
    text = f" ({', '.join(shown)}{', ...' if len(paths) > SHOWN else ''})"
    # A function of an output and a target has used the model as though it were a tensor.
    is_misused = isinstance(error, TypeError | AttributeError) and type(replica.module).__name__ in str(error)
    if is_misused and replica.steps is None and len(paths) > 1:
        text += f"; {of_model_and_batch(replica.function, *paths[:2])}"
    return text


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
