"""Averages gradients over the ranks of a group, bucket by bucket, while the backward pass runs.

Every rank has the same buckets and reduces them in the same order, in whatever order its gradients are
made. The end of each bucket holds a flag for each parameter: 1 where the rank has a gradient, 0 where it
has none. So a gradient that is missing on one rank counts as zero, and one that is missing on all ranks
stays None, without a second call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowdp.collective.process_group import ProcessGroup, Work
from flowdp.ddp.buckets import BUCKET_BYTES, GradientBucket, bucketed
from flowdp.errors import CollectiveError, OptionError
from flowdp.validators import one_of

__all__ = ["GradientSynchronizer", "Strategy"]

Strategy = Literal["synchronous", "overlapped", "none"]


class GradientSynchronizer:
    """Averages the gradients of one rank's parameters over its group.

    With `automatic`, in each backward pass, until it is garbage collected::

        synchronizer = GradientSynchronizer(model.parameters(), group, strategy="overlapped")
        loss.backward()                       # gradients are means when it returns

    or by explicit calls::

        synchronizer = GradientSynchronizer(model.parameters(), group, automatic=False)
        loss.backward()
        synchronizer.sync_all()

    A gradient that was averaged may be added to and averaged again: the mean of equal terms is that term, so
    accumulated gradients come out right.

    Args:
        parameters: Parameters of this rank, with or without names: the same on every rank, in the same order.
            Frozen ones are left out until they are unfrozen, on every rank.
        group: Process group of this rank.
        strategy: "synchronous" averages at the end of the backward pass; "overlapped" starts each bucket as
            soon as its gradients and all earlier buckets are complete; "none" averages by `sync_all` alone.
        bucket_bytes: Capacity of a bucket in bytes.
        gradient_as_bucket_view: Make `.grad` a view of the bucket, which saves a second copy of each
            gradient. It changes when the next backward pass is averaged: clone a gradient to keep it.
        automatic: Average in every backward pass; False with "none". It may be changed between two of them.

    Raises:
        OptionError: Unknown strategy, or a capacity that is not positive.

    Threads: the thread that runs the rank's backward passes, one at a time. Ranks that share a CUDA device
        call `torch.autograd.set_multithreading_enabled(False)` first, each in its own thread: autograd has
        one thread per device, in which one rank would wait for the other for ever.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        group: ProcessGroup,
        *,
        strategy: Strategy = "synchronous",
        bucket_bytes: int = BUCKET_BYTES,
        gradient_as_bucket_view: bool = True,
        automatic: bool = True,
    ) -> None:
        one_of("strategy", strategy, Strategy)
        if bucket_bytes <= 0:
            raise OptionError(f"bucket_bytes must be positive, not {bucket_bytes!r}")
        self.strategy = strategy
        self.automatic = automatic and strategy != "none"
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._as_view = gradient_as_bucket_view
        named = [item if isinstance(item, tuple) else ("", item) for item in parameters]
        self._names = {parameter: name or f"number {at}" for at, (name, parameter) in enumerate(named)}
        self._places: dict[nn.Parameter, tuple[_Bucket, int]] = {}
        self._buckets: list[_Bucket] = []
        self._next = 0  # index of the first bucket whose reduction has not started
        # The callback at the end of the backward pass. Autograd alone keeps it: a pass that failed drops it.
        self._end: weakref.ref[Callable[[], None]] | None = None
        hook = partial(_has_grad, weakref.ref(self))
        hooks = [_hooked(parameter, hook) for parameter in self._names if _can_learn(parameter)]
        weakref.finalize(self, _remove, hooks)
        self.prepare()

    def prepare(self) -> None:
        """Make the buckets: parameters in reverse order, separately for each dtype.

        It is called automatically, also after parameters were frozen or unfrozen. Call it, on every rank,
        only before `add_gradient` of a parameter that was just unfrozen.
        """
        trained = [parameter for parameter in self._names if parameter.requires_grad]
        self._buckets = [_Bucket(some) for some in bucketed(reversed(trained), self._bucket_bytes)]
        self._places = {
            parameter: (bucket, place)
            for bucket in self._buckets
            for place, parameter in enumerate(bucket.parameters)
        }
        self._reset()

    @property
    def is_stale(self) -> bool:
        """Whether parameters were frozen or unfrozen since the buckets were made."""
        return any(parameter.requires_grad != (parameter in self._places) for parameter in self._names)

    def add_gradient(self, parameter: nn.Parameter) -> None:
        """Copy a parameter's gradient to its bucket; with "overlapped", start the bucket when it is complete.

        Raises:
            OptionError: The parameter is not averaged, or its gradient is sparse.
            CollectiveError: The reduction of its bucket has started.
        """
        if parameter not in self._places:
            raise OptionError(
                "the parameter is not averaged: it was not given to this synchronizer, or was frozen when "
                "the buckets were made (call prepare() on every rank after unfreezing it)"
            )
        bucket, place = self._places[parameter]
        if bucket.work is not None:
            raise CollectiveError(
                f"parameter {self._names[parameter]!r} got another gradient while the first was being "
                "averaged; if reentrant checkpoints share it, pass use_reentrant=False to them"
            )
        self._take(bucket, place)
        if self.strategy == "overlapped":
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._start(self._buckets[self._next])

    def sync_all(self) -> None:
        """Average all gradients and wait: each `.grad` is then the mean.

        Raises:
            OptionError: A gradient is sparse.
            CollectiveError: The group failed, and gradients may or may not be averaged.
        """
        if self.is_stale:
            self.prepare()
        try:
            for bucket in self._buckets[self._next :]:
                for place in sorted(bucket.missing):
                    if bucket.parameters[place].grad is not None:
                        self._take(bucket, place)
                self._start(bucket)
            for bucket in self._buckets:
                self._finish(bucket)
        finally:
            self._reset()

    def clear(self) -> None:
        """Forget which gradients were added, and wait for the reductions that have started."""
        try:
            for bucket in self._buckets[: self._next]:
                assert bucket.work is not None
                bucket.work.wait()
        finally:
            self._reset()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Count a gradient that the backward pass has accumulated; at the first one, register the end."""
        if not self.automatic or not parameter.requires_grad:  # one frozen since the forward has no gradient
            return
        if self._end is None or self._end() is None:
            if self.is_stale:
                self.prepare()
            else:
                self._reset()
            end = partial(_end_of_backward, weakref.ref(self))
            self._end = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
            del end  # the traceback of an error raised below would keep it
        if self.strategy == "overlapped":
            self.add_gradient(parameter)

    def _take(self, bucket: _Bucket, place: int) -> None:
        parameter, view = bucket.parameters[place], bucket.views[place]
        grad = parameter.grad
        if grad is None:
            raise OptionError(f"parameter {self._names[parameter]!r} has no gradient to add")
        if grad.layout is not torch.strided:
            raise OptionError(
                f"the gradient of parameter {self._names[parameter]!r} is sparse, and buckets are dense: "
                "make the layer with sparse=False"
            )
        if grad.data_ptr() != view.data_ptr():
            view.copy_(grad.detach())
            if self._as_view:
                parameter.grad = view
        bucket.missing.discard(place)

    def _start(self, bucket: _Bucket) -> None:
        bucket.write_flags()
        self._next += 1
        bucket.work = self._group.all_reduce(bucket.data, "mean", async_op=True)

    def _finish(self, bucket: _Bucket) -> None:
        assert bucket.work is not None
        bucket.work.wait()
        elsewhere = bucket.present_elsewhere()
        for place, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            if place not in bucket.missing:
                if not self._as_view:
                    assert parameter.grad is not None
                    parameter.grad.detach().copy_(view)
            elif place in elsewhere:
                parameter.grad = view if self._as_view else view.clone()

    def _reset(self) -> None:
        self._next = 0
        self._end = None
        for bucket in self._buckets:
            bucket.work = None
            bucket.missing = set(range(len(bucket.parameters)))


class _Bucket:
    """Parameters and the memory of their gradients.

    Attributes:
        data: The gradients, then one flag for each. Shape (elements + parameters,).
        views: The gradients, in the shapes of the parameters.
        missing: Indices of the parameters without a gradient so far.
        work: The reduction; None before it starts.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing: set[int] = set()
        self.work: Work | None = None
        first = parameters[0]
        flags = first.detach().new_zeros(len(parameters))
        nbytes = sum(parameter.nbytes for parameter in parameters) + flags.nbytes
        bucket = GradientBucket(nbytes, first.dtype, first.device)
        for tensor in (*parameters, flags):
            bucket.add(tensor)
        self.data = bucket.data
        *self.views, self._flags = bucket.extract()

    def write_flags(self) -> None:
        """Set the flags, and the gradients that are missing to zero."""
        self._flags.fill_(1.0)
        for place in self.missing:
            self.views[place].zero_()
            self._flags[place] = 0.0

    def present_elsewhere(self) -> list[int]:
        """Indices of missing gradients that another rank has; reads the device only if any is missing."""
        if not self.missing:
            return []
        flags: list[Any] = self._flags.tolist()
        return [place for place in self.missing if flags[place]]


def _can_learn(parameter: nn.Parameter) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()


def _hooked(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes no hook for a frozen one; the hook stays when it is frozen
    try:
        return parameter.register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(is_trained)


def _has_grad(owner: weakref.ref[GradientSynchronizer], parameter: Tensor) -> None:
    synchronizer = owner()
    if synchronizer is not None:
        assert isinstance(parameter, nn.Parameter)
        synchronizer._on_gradient(parameter)


def _end_of_backward(owner: weakref.ref[GradientSynchronizer]) -> None:
    synchronizer = owner()
    if synchronizer is not None:
        with torch.no_grad():
            synchronizer.sync_all()


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
