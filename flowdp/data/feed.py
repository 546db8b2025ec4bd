"""A worker's access to the data: batches on its device, and the list of those it will need.

A feed stands between a rank and the `Source` of all ranks. On the CPU the source's batches are used as they
are (`Feed`). On CUDA they are copied ahead into a ring (`PrefetchFeed`), or the whole dataset lies on the
device and a batch is a gather (`ResidentFeed`). A worker treats all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowdp.data.source import Batch, Source
from flowdp.protocol.messages import SampleRange

__all__ = ["Feed"]


class Feed:
    """The batches of one rank, as the source has them: those of a CPU device lie in its memory already.

    In a round the worker calls `take`, once or more, enqueues the work on the batches, and calls `release`,
    again and again; `follow` whenever the list of its batches has changed.

    Args:
        source: Source of all ranks' batches.
        rank: Rank index.

    Threads:
        The worker of the rank, unless a method says otherwise.
    """

    def __init__(self, source: Source, rank: int) -> None:
        self._source = source
        self._rank = rank
        self._notify: Callable[[int, int], None]

    def start(self, notify: Callable[[int, int], None]) -> None:
        """Start fetching. Call it once, after the source was started.

        Args:
            notify: Called as `notify(epoch, batch)` once a batch is there that `take` did not have, or
                `take` would raise. Must not block.

        Threads:
            The one that starts the run.
        """
        self._notify = notify

    def follow(self, upcoming: Sequence[tuple[int, int, SampleRange | None]]) -> None:
        """Announce the batches that this rank will train if nothing changes.

        Level-triggered: pass the full list whenever it differs from the last one minus the steps already
        taken. A batch that was fetched and is not in it is back at the source when this returns.

        Args:
            upcoming: (epoch, batch, part) of each, in order.
        """
        self._source.expect(self._rank, upcoming)

    def take(self, epoch: int, batch: int, part: SampleRange | None = None) -> Batch | None:
        """Hand a batch over, on the device; None where it is not there yet, and `notify` follows.

        With a `part` it is a `Portion` of these samples, else the whole batch.

        Streams:
            `compute` waits for the batch's copy.

        Raises:
            DataError: The dataset failed, or its batches cannot be cut.
            IndexError: There is no such batch.
            ProtocolError: The batch was taken before, or too many before it were not released.
            RuntimeError: The device failed.
        """
        return self._source.take(self._rank, epoch, batch, part)

    def release(self) -> None:
        """All that uses the batches taken so far is enqueued; their memory may be written again.

        Streams:
            A mark is recorded on `compute`.
        """

    def wake(self, epoch: int, batch: int) -> None:
        """Note that the source has read a batch that it did not have before.

        Threads:
            The source's own. Does not block.
        """
        self._notify(epoch, batch)

    def fit(self) -> None:
        """Note that a whole step has been taken, so that the memory left may be measured, and used.

        Call it whenever a mean is in.
        """

    def shrink(self) -> bool:
        """Give all memory of batches ahead back: a step has run out of memory.

        Returns:
            False where there was none.
        """
        return False

    def close(self) -> bool:
        """End its threads and free its memory; takes 1 s at most, and may be called twice.

        No batch is taken afterwards.

        Returns:
            False where a thread still waits for the device; it ends with that wait.

        Threads:
            Any but the feed's own.
        """
        return True
