"""CUDA graphs without a GPU: work on a capturing stream is recorded and not run, and a replay runs it.

While a stream captures, an operation runs on copies of its tensors, only for the shapes of its results. These
hold NaN, or zeros for integers, until a replay fills them, so that early reads show. Like CUDA, a capture
refuses to wait for an event from outside, to be synchronised or queried, memory from elsewhere, and values on
the host; the first of these makes the whole capture invalid, and its end reports that again. The mode decides
what other threads may do meanwhile.

Capture and replay both write the generator's state, as in torch, on the current stream: streams without an
order between them show as a race.

As in torch 2.13, a capture that ends invalid leaves the allocator diverted to its pool, and the pool alive:
its user has to end that.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["NOT_PERMITTED", "Capture", "Captures", "FakeGraph"]

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
INVALID = "CUDA error: operation failed due to a previous error during capture"
ISOLATION = "CUDA error: dependency created on uncaptured work in another stream"
UNJOINED = "CUDA error: capturing stream has unjoined work"
OF_A_CAPTURE = "CUDA error: operation not permitted on an event last recorded in a capturing stream"

READING = {"aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.masked_select", "aten.equal"}
"""Operators that need a value on the host."""

Pool = tuple[int, int]


@dataclass(eq=False)
class _Step:
    """One recorded operation.

    Attributes:
        func: The operator.
        args: Arguments, with the tensors that it read and wrote.
        kwargs: Keyword arguments, likewise.
        made: Result tensors allocated for it; None for those passed in.
    """

    func: Any
    args: Any
    kwargs: Any
    made: list[Tensor | None]


@dataclass(eq=False)
class Capture:
    """A capture, under way or ended.

    Attributes:
        owner: All captures.
        stream: Stream of its begin.
        mode: Mode, as named by torch.
        thread: Thread that began it.
        pool: Pool of its allocations.
        error: The first reason why it is invalid.
        steps: Recorded operations, in order.
        nbytes: Bytes allocated.
        forked: Other streams that have joined it, and whether it has waited for them since.
        is_trying: Whether an operation is running on copies.
    """

    owner: Captures
    stream: Any
    mode: str
    pool: Pool
    thread: int = field(default_factory=threading.get_ident)
    error: str | None = None
    steps: list[_Step] = field(default_factory=list)
    nbytes: int = 0
    forked: dict[Any, bool] = field(default_factory=dict)
    is_trying: bool = False

    def fail(self, message: str) -> None:
        """Make it invalid, and raise the error."""
        self.error = self.error or message
        raise RuntimeError(message)

    def take(self, func: Any, args: Any, kwargs: Any, is_view: bool) -> Any:
        """Record an operation instead of running it."""
        if self.is_trying:  # re-entrant for the same thread
            return func(*args, **kwargs)
        self.is_trying = True
        try:
            return self._take(func, args, kwargs, is_view)
        finally:
            self.is_trying = False

    def _take(self, func: Any, args: Any, kwargs: Any, is_view: bool) -> Any:
        if self.error is not None:
            raise RuntimeError(INVALID)
        name = f"{func.namespace}.{func._schema.name.partition('::')[2]}"
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in READING or any(self.owner.is_host(tensor) for tensor in given):
            self.fail(NOT_PERMITTED)
        if is_view:
            return func(*args, **kwargs)
        originals: dict[int, Tensor] = {}

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            twin = leaf.detach().clone()
            originals[id(twin)] = leaf
            return twin

        copies = tree_map(copied, (args, kwargs))
        random = torch.get_rng_state()
        results = func(*copies[0], **copies[1])
        torch.set_rng_state(random)
        made: list[Tensor | None] = []

        def returned(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in originals:
                made.append(None)
                return originals[id(leaf)]
            leaf.fill_(math.nan if leaf.is_floating_point() or leaf.is_complex() else 0)
            self.nbytes += leaf.nbytes
            made.append(leaf.detach())
            return leaf

        results = tree_map(returned, results)
        bare_args, bare_kwargs = tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        if not name.startswith("aten.empty"):
            self.steps.append(_Step(func, bare_args, bare_kwargs, made))
        return results


class Captures:
    """All captures of a fake CUDA, and the part of `torch.cuda.memory` that they need.

    Attributes:
        current: Captures under way, by stream.
        pools: Captures and graphs that use each private pool.
        diverted: Pools to which the allocator is diverted.
        unsafe_calls: Unsafe calls of threads without a capture, during one.
        replays: Replays of all graphs.
        generator_states: Memory of the generator's state, for the graphs of each rank.
    """

    def __init__(self) -> None:
        self.current: dict[Any, Capture] = {}
        self.pools: Counter[Pool] = Counter()
        self.diverted: list[Pool] = []
        self.unsafe_calls: list[str] = []
        self.replays = 0
        self.generator_states: dict[Any, Tensor] = {}
        self._hosts: list[tuple[int, int, Tensor]] = []
        self._events: dict[Any, Capture] = {}  # the last operation of a capture

    def of(self, stream: Any) -> Capture | None:
        """The capture of a stream."""
        return self.current.get(stream)

    def host(self, tensor: Tensor) -> Tensor:
        """Treat a tensor as one on the host; returns it."""
        self._hosts.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, tensor))
        return tensor

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the host."""
        return any(start <= tensor.data_ptr() < stop for start, stop, _ in self._hosts)

    def unsafe(self, what: str, stream: Any = None, event: Any = None) -> None:
        """A call that may wait for a device, or allocate.

        Args:
            what: Name of the call.
            stream: Stream waited for; None: none.
            event: Event queried or waited for; None: none.
        """
        if event is not None and event in self._events:
            raise RuntimeError(OF_A_CAPTURE)
        for capture in list(self.current.values()):
            is_own = capture.thread == threading.get_ident()
            if is_own or capture.mode == "global" or stream is capture.stream:
                capture.fail(NOT_PERMITTED)
            self.unsafe_calls.append(what)

    def recorded(self, event: Any, stream: Any) -> None:
        """Record an event."""
        self._events.pop(event, None)
        if (capture := self.of(stream)) is not None:
            self._events[event] = capture

    def awaited(self, event: Any, stream: Any) -> None:
        """Make a stream wait for an event."""
        own, others = self.of(stream), self._events.get(event)
        if others is not None and self.of(others.stream) is not others:
            others = None
        if own is None and others is not None:  # it joins the capture
            self.current[stream] = others
            others.forked[stream] = False
        elif own is not None and others is not own:
            own.fail(ISOLATION)
        elif own is not None and others is own and stream is own.stream:
            own.forked = dict.fromkeys(own.forked, True)

    # ------------------------------------------------------------ torch.cuda.memory
    def _cuda_endAllocateToPool(self, device: int, pool: Pool) -> None:
        if pool not in self.diverted:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.diverted.remove(pool)

    def _cuda_releasePool(self, device: int, pool: Pool) -> None:
        self.pools[pool] -= 1
        assert self.pools[pool] >= 0, "a pool was released once too often"
        self.pools += Counter()  # without pools at zero


class FakeGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._captures: Captures = cuda.captures
        self._capture: Capture | None = None
        self._is_ready = False

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        stream = self._cuda.current_stream()
        assert stream is not self._cuda.default, "CUDA graphs must be captured on a non-default stream"
        assert not self._captures.current, "only one capture may be underway at a time in the process"
        pool = pool or (next(_pools), 0)
        self._capture = Capture(self._captures, stream, capture_error_mode, pool)
        self._write_state("the beginning of a capture")
        self._captures.pools[pool] += 1
        self._captures.diverted.append(pool)
        self._captures.current[stream] = self._capture

    def capture_end(self) -> None:
        capture = self._capture
        assert capture is not None
        assert self._cuda.current_stream() is capture.stream, "it must end on the stream it began on"
        for stream in [s for s, one in self._captures.current.items() if one is capture]:
            del self._captures.current[stream]
        if capture.error is not None:
            raise RuntimeError(INVALID)
        if not all(capture.forked.values()):
            raise RuntimeError(UNJOINED)
        self._captures.diverted.remove(capture.pool)
        self._is_ready = True

    def replay(self) -> None:
        assert self._is_ready, "replay without a preceding successful capture"
        assert self._capture is not None
        assert self._captures.of(self._cuda.current_stream()) is None, NOT_PERMITTED
        self._captures.replays += 1
        self._write_state("a replay")
        with torch.no_grad():
            for step in self._capture.steps:
                results = tree_leaves(step.func(*step.args, **step.kwargs))
                tensors = [leaf for leaf in results if isinstance(leaf, Tensor)]
                for made, result in zip(step.made, tensors, strict=True):
                    if made is not None:
                        made.copy_(result)

    def _write_state(self, what: str) -> None:
        assert self._capture is not None
        states = self._captures.generator_states
        if self._capture.stream not in states:
            states[self._capture.stream] = torch.zeros(2)
            self._cuda.watch("the generator's state for graphs", states[self._capture.stream])
        self._cuda.access(self._cuda.current_stream(), what, [], [states[self._capture.stream]])

    def reset(self) -> None:
        if self._is_ready:
            assert self._capture is not None
            self._captures._cuda_releasePool(0, self._capture.pool)
        self._capture = None
        self._is_ready = False


_pools = itertools.count(1)
