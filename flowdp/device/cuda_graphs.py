"""CUDA graphs: work that is recorded once, on a stream of its own, and launched again by one call.

A replay holds no interpreter lock, and launches hundreds of kernels in the time of a few. While a stream
captures, its thread may do nothing that waits for a device. Other threads may, because the capture is
`thread_local`; but some of their calls would still reach it, or be reached by it:

- Torch allows one capture at a time in a process, and a graph that is made into something that can be
  launched allocates and may wait for a device, which must not be while a collective is half launched. Both
  are `QUIET`'s: it is held for the whole capture. A rank that captures is on its way to the gate, so no
  collective of its run is launched meanwhile, and those of others wait. Prefetch threads allocate and pin
  under it, too.
- A thread that records an event on a capturing stream, or lets one wait for outside work, spoils the capture.
  Memory that was handed to the allocator with `record_stream` does the first when it is freed. So graphs are
  captured on `StreamLane.capturing`, which no other thread and no tensor knows, and launched on `compute`.
- Below torch 2.13 a capture marks the generator of the whole card: another rank of the card that draws would
  fail. Such ranks do not capture, see `flowdp.graphs.cuda_graph`.

So the ranks need not stand at a gate: one captures where it is, between two steps, and others train on.

`torch.cuda.graph` is not used: it waits for the whole device and empties the allocator's cache, which may
wait for every device of the process; and after an invalid capture it leaves the stream current.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from flowdp.device.streams import QUIET, StreamLane

__all__ = ["Graph", "GraphPool"]


class Graph(Protocol):
    """Recorded work; `torch.cuda.CUDAGraph` is one."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Record the work enqueued on the current stream."""
        ...

    def capture_end(self) -> None:
        """Stop recording."""
        ...

    def replay(self) -> None:
        """Launch it on the current stream, without the interpreter lock."""
        ...

    def reset(self) -> None:
        """Free it; a launch under way is finished."""
        ...


class GraphPool:
    """The graphs of one rank and the memory that they share.

    They share one pool because they are never under way at once: all are launched on the rank's stream, which
    is `compute` or, in a loop that the user owns, the first rank's current one. A tensor that
    a graph has made keeps its memory for as long as it is referenced; all else is written over by the next
    graph.

    Args:
        lane: Lane of the rank.

    Threads:
        The rank's worker.
    """

    def __init__(self, lane: StreamLane) -> None:
        self._lane = lane
        self._pool = lane.device_module.graph_pool_handle()
        self._before, self._behind = lane.event(), lane.event()
        self._graphs: list[Graph] = []

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record the work that `work` enqueues on the current stream; nothing of it runs yet.

        All kernels of it must have run before in this thread: anything loaded, tuned or made at its first use
        cannot be captured.

        Raises:
            Exception: As `work` has raised it, or RuntimeError: the driver has found something in it that
                cannot be captured. No stream captures then, and the memory is given back.
        """
        lane = self._lane
        here = lane.current()
        graph: Graph = lane.device_module.CUDAGraph()
        with QUIET:
            # Torch's writes around a capture, to the state of the generator, are ordered with the replays.
            self._before.record(here)
            lane.capturing.wait_event(self._before)
            with lane.on(lane.capturing):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                except BaseException:
                    self._abandon(graph)
                    raise
                try:
                    graph.capture_end()
                except BaseException:
                    self._end_allocation()
                    raise
            self._behind.record(lane.capturing)
            here.wait_event(self._behind)
        self._graphs.append(graph)
        return graph

    def clear(self) -> None:
        """Free all graphs and their memory, once their launches are done."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def _abandon(self, graph: Graph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._end_allocation()
        else:
            graph.reset()

    def _end_allocation(self) -> None:
        """Take the allocator back from the pool, which torch leaves undone where a capture ends invalid.

        Where torch has done so, the first call says that nothing is under way.

        Source:
            torch 2.13, `CUDAGraph::capture_end`: all behind `cudaStreamEndCapture` is left out if that fails.
        """
        memory, index = self._lane.device_module.memory, self._lane.device.index
        with suppress(RuntimeError, AttributeError):
            memory._cuda_endAllocateToPool(index, self._pool)
            memory._cuda_releasePool(index, self._pool)
