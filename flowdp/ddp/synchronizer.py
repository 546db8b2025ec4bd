"""Gradients averaged over the ranks of a group, bucket by bucket, while the backward pass still runs.

Every rank lays out the same buckets and starts them in the same order, whatever its gradients are ready in.
Which gradients a rank had rides at the end of each bucket: one per parameter, 1 or 0. So a gradient that is
missing on one rank counts as zero, and one that is missing on all of them stays None, without another call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowdp.collective.process_group import ProcessGroup, Work
from flowdp.ddp.buckets import BUCKET_BYTES, GradientBucket
from flowdp.errors import CollectiveError, OptionError
from flowdp.options import one_of

__all__ = ["GradientSynchronizer", "Strategy"]

Strategy = Literal["synchronous", "overlapped", "none"]


class GradientSynchronizer:
    """Averages the gradients of one rank's parameters over its group.

    By itself, at the end of each backward pass, for as long as it is kept (`automatic`)::

        synchronizer = GradientSynchronizer(model.parameters(), group, strategy="overlapped")
        loss.backward()                       # the gradients are means when it returns

    or by hand::

        synchronizer = GradientSynchronizer(model.parameters(), group, automatic=False)
        loss.backward()
        synchronizer.sync_all()

    A gradient that comes once more, by accumulation, may be averaged again: the mean of equal terms is the
    term. So an averaged gradient plus a rank's own new one becomes what it should.

    Args:
        parameters: Of this rank, with or without names: the same on every rank, in the same order. Frozen
            ones are left out, until they are unfrozen, on every rank.
        group: This rank's.
        strategy: "synchronous" averages when the backward pass is over; "overlapped" starts each bucket as
            soon as its gradients, and all buckets before it, are there; "none" never does anything.
        bucket_bytes: Capacity of a bucket.
        gradient_as_bucket_view: Let `.grad` be a view of the bucket, so that no gradient is kept twice or
            copied back. It then changes when the next backward pass is averaged: clone what is to be kept.
        automatic: Average by itself. It may be changed at any time outside of a backward pass.

    Raises:
        OptionError: A strategy or capacity that there is not.

    Threads: those in which the backward passes of the rank run, one at a time. Ranks that share a CUDA device
        call `torch.autograd.set_multithreading_enabled(False)` first, each in its thread: autograd has one
        thread for the device, and in it one rank would wait for the other for ever.
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
        self.automatic = automatic
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._as_view = gradient_as_bucket_view
        named = [item if isinstance(item, tuple) else ("", item) for item in parameters]
        self._names = {parameter: name or f"number {at}" for at, (name, parameter) in enumerate(named)}
        self._places: dict[nn.Parameter, tuple[_Bucket, int]] = {}
        self._buckets: list[_Bucket] = []
        self._next = 0  # of the buckets, to be started
        # What autograd calls at the end of a backward pass. It alone keeps it: one that failed drops it.
        self._end: Callable[[], Callable[[], None] | None] = _no_end
        hooks: list[Any] = []
        weakref.finalize(self, _remove, hooks)
        if strategy != "none":
            hook = partial(_has_grad, weakref.ref(self))
            hooks += [_hooked(parameter, hook) for parameter in self._names if _can_learn(parameter)]
        self.prepare()

    def prepare(self) -> None:
        """Lay out the buckets: parameters in reverse order, each dtype apart.

        Done by itself, also when parameters were frozen or unfrozen; before an `add_gradient` of one of those
        call it, on every rank.
        """
        self._buckets = []
        self._places = {}
        spans: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        room: dict[tuple[torch.dtype, torch.device], int] = {}
        for parameter in reversed([parameter for parameter in self._names if parameter.requires_grad]):
            key = parameter.dtype, parameter.device
            left = room.get(key, 0) - parameter.nbytes
            if key not in spans or left < 0:
                left = self._bucket_bytes - parameter.nbytes
                spans[key] = []
                self._buckets.append(_Bucket(spans[key]))
            spans[key].append(parameter)
            room[key] = left
        for bucket in self._buckets:
            bucket.lay_out()
            for place, parameter in enumerate(bucket.parameters):
                self._places[parameter] = bucket, place
        self._reset()

    @property
    def is_stale(self) -> bool:
        """Whether parameters were frozen or unfrozen since the buckets were laid out."""
        return any(parameter.requires_grad != (parameter in self._places) for parameter in self._names)

    def add_gradient(self, parameter: nn.Parameter) -> None:
        """Bring a parameter's gradient into its bucket; "overlapped" starts the bucket when it is complete.

        Raises:
            OptionError: The parameter is not one of those that are averaged, or its gradient is sparse.
            CollectiveError: Its bucket is on its way already.
        """
        if self.strategy == "none":
            return
        if parameter not in self._places:
            raise OptionError(
                "the parameter is not averaged: it was frozen when the buckets were laid out, or is none of "
                "those that the synchronizer was made for"
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
        """Average all gradients as they are now, and wait; `.grad` is the mean afterwards.

        Raises:
            OptionError: A gradient is sparse.
            CollectiveError: The group failed, and gradients may be averaged or not; or parameters were frozen
                or unfrozen when some were on their way.
        """
        if self.strategy == "none":
            return
        if self.is_stale:
            if self._next:
                raise CollectiveError(
                    "a parameter was frozen or unfrozen when some gradients were on their way: do it before "
                    "the backward pass, on every rank"
                )
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
        """Forget which gradients were added; what is on its way is waited for."""
        try:
            for bucket in self._buckets[: self._next]:
                assert bucket.work is not None
                bucket.work.wait()
        finally:
            self._reset()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """A backward pass has accumulated into a parameter."""
        if not self.automatic:
            return
        if not parameter.requires_grad:  # frozen since the forward pass: nothing was accumulated
            return
        if self._end() is None:
            if self._group.shares_device and torch._C._is_multithreading_enabled():
                raise OptionError(
                    "ranks that share a CUDA device also share autograd's thread for it, where they cannot "
                    "wait for each other: call torch.autograd.set_multithreading_enabled(False) in the "
                    "thread of each rank, and backward runs there"
                )
            if self._next:
                raise CollectiveError(
                    "the last backward pass failed when some of its gradients were on their way to the other "
                    "ranks: they wait for the rest; call abort() on the process group to release them"
                )
            if self.is_stale:
                self.prepare()
            else:
                self._reset()
            end = partial(_end_of_backward, weakref.ref(self))
            self._end = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
            del end  # or the traceback of what may be raised below would keep it
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
                "make it with sparse=False"
            )
        if grad.data_ptr() != view.data_ptr():
            view.copy_(grad.detach())
            if self._as_view:
                parameter.grad = view
        bucket.missing.discard(place)

    def _start(self, bucket: _Bucket) -> None:
        bucket.tell_missing()
        self._next += 1
        bucket.work = self._group.all_reduce(bucket.data, "mean", async_op=True)

    def _finish(self, bucket: _Bucket) -> None:
        assert bucket.work is not None
        bucket.work.wait()
        found = bucket.found_elsewhere()
        for place, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            if place not in bucket.missing:
                if not self._as_view:
                    assert parameter.grad is not None
                    parameter.grad.detach().copy_(view)
            elif place in found:
                parameter.grad = view if self._as_view else view.clone()

    def _reset(self) -> None:
        self._next = 0
        self._end = _no_end
        for bucket in self._buckets:
            bucket.work = None
            bucket.missing = set(range(len(bucket.parameters)))


class _Bucket:
    """Some parameters, and where their gradients lie.

    Attributes:
        data: The gradients, then for each one whether it is there. Shape (elements + parameters,).
        views: The gradients, in the shapes of the parameters.
        missing: Places without a gradient, so far.
        work: Its reduction; None before it is started.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing: set[int] = set()
        self.work: Work | None = None

    def lay_out(self) -> None:
        first = self.parameters[0]
        flags = first.detach().new_zeros(len(self.parameters))
        nbytes = sum(parameter.nbytes for parameter in self.parameters) + flags.nbytes
        bucket = GradientBucket(nbytes, first.dtype, first.device)
        for tensor in (*self.parameters, flags):
            bucket.add(tensor)
        self.data = bucket.data
        *self.views, self._flags = bucket.extract()

    def tell_missing(self) -> None:
        self._flags.fill_(1.0)
        for place in self.missing:
            self.views[place].zero_()
            self._flags[place] = 0.0

    def found_elsewhere(self) -> list[int]:
        """Places without a gradient here that have one on another rank; asks the device only if needed."""
        if not self.missing:
            return []
        flags: list[Any] = self._flags.tolist()
        return [place for place in self.missing if flags[place]]


def _no_end() -> None:
    return None


def _can_learn(parameter: nn.Parameter) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()


def _hooked(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch hooks no frozen one; the hook stays when it is frozen
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
    while hooks:
        hooks.pop().remove()
