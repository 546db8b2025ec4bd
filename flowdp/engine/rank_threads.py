"""Threads of all ranks for a call that waits for them: a validation, a prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from flowdp.device import worker_context
from flowdp.device.compiled import make_room
from flowdp.device.cores import pool_sizes
from flowdp.device.dispatch import prepare_torch
from flowdp.device.failed_device import keep_memory
from flowdp.device.openmp import set_own_threads
from flowdp.device.process_tuning import tuned_process
from flowdp.device.streams import Lane
from flowdp.device.worker_context import CurrentWorker
from flowdp.engine.error_context import ErrorContext
from flowdp.engine.shared_batches import EvaluatedReplica, SharedBatches
from flowdp.errors import FlowdpError
from flowdp.options import ProcessTuning
from flowdp.threads.crew import Crew

__all__ = ["on_all_ranks"]

T = TypeVar("T")


def on_all_ranks(
    task: Callable[[int, EvaluatedReplica, Callable[[], bool]], T],
    replicas: Sequence[EvaluatedReplica],
    batches: SharedBatches,
    tuning: ProcessTuning,
    doing: str,
    then: Callable[[int, EvaluatedReplica, Callable[[], bool]], T] | None = None,
) -> list[T]:
    """Execute a task on a thread for each rank, and wait for all; no thread is left, whatever happens.

    An error of one rank, or a Ctrl-C, ends the others behind their batch.

    Args:
        task: Called as `task(rank, replica, wait)`, with the wait that `SharedBatches.take` needs.
        replicas: One per rank.
        batches: Batches that they share; closed at the end.
        tuning: Settings of the process meanwhile.
        doing: Description of the task in errors: "predicts".
        then: Called in the same way on the first rank's thread, when all have done theirs.

    Returns:
        The results of the ranks, and of `then`.

    Raises:
        DataError: The dataset failed.
        StepError: The user's code raised; it has rank, device, batch and the indices of the samples.
        OutOfDeviceMemory: A device had no room for a batch.

    Threads:
        The user's.
    """
    woken: list[SimpleQueue[bool]] = [SimpleQueue() for _ in replicas]

    def work(rank: int, do: Callable[[int, EvaluatedReplica, Callable[[], bool]], T]) -> T:
        replica = replicas[rank]
        worker = CurrentWorker(rank, replica.device, replica.module, sink=lambda *_: None)
        try:
            with worker_context.bound(worker):
                return do(rank, replica, woken[rank].get)
        except FlowdpError:
            batches.cut()
            raise
        except BaseException as error:
            keep_memory([replica.lane])
            batches.cut()
            raise ErrorContext(worker, replica.lane, batches.source).explain(error, doing) from error

    make_room(len(replicas))
    lanes = [replica.lane for replica in replicas]
    threads = pool_sizes([lane.device for lane in lanes], tuning, adapts=True)
    with ExitStack() as stack:
        stack.callback(batches.source.close)
        if len(replicas) > 1:
            prepare_torch()
        stack.enter_context(tuned_process(tuning))
        wake_all = partial(_wake_all, woken)
        batches.start(wake=lambda rank, *_: woken[rank].put(True), failed=wake_all)
        crew = Crew(
            [f"flowdp-worker-{rank}" for rank in range(len(replicas))],
            lambda rank: _around(lanes[rank], threads[rank]),
        )
        stack.callback(crew.close)
        stack.callback(batches.cut)  # before that: an interrupt leaves jobs that wait
        done = crew.run([partial(work, rank, task) for rank in range(len(replicas))])
        if then is not None:
            done += crew.run([partial(work, 0, then), *[None] * (len(replicas) - 1)])
        return [result for result in done if result is not None]


def _wake_all(woken: Sequence[SimpleQueue[bool]], _error: object) -> None:
    for queue in woken:
        queue.put(True)


@contextmanager
def _around(lane: Lane, threads: int) -> Iterator[None]:
    """Context of a rank's thread."""
    set_own_threads(threads)
    with lane.on(lane.compute):
        yield
