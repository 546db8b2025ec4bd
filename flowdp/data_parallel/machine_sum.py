"""Sums of gradients over the machines of a job, in a loop that the user owns.

Each machine's gradients come out of a backward summed over its devices. At the end of that backward, before
the user's thread has it back, they travel once through the host's memory: each times the samples of its
machine's batch, and the sum is divided by all of these. So clipping and every optimizer see the gradients of
one device with the batches of all machines. A report of each machine travels along, so that machines which no
longer do the same fail, all of them, instead of training apart.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from flowdp.data.trees import tensors_of
from flowdp.data_parallel.machine_memory import GradientMemory, average_over_machines, spread
from flowdp.data_parallel.machine_report import (
    MachineReport,
    batch_checksum,
    difference_of,
    message_of,
    rate_bits,
    reports_in,
)
from flowdp.errors import CollectiveError, FlowdpError, MachineLostError
from flowdp.network.machines import Machines
from flowdp.options import Payload

__all__ = ["MachineSum"]

T = TypeVar("T")

MOST_LEFT = 64
"""Most records kept of backwards that have not ended: those that failed leave theirs."""


class _Backward:
    """A backward of the caller's that is under way.

    Attributes:
        samples: Samples of the largest call in it whose gradients are to be summed; 0: none.
        kept: Those of the largest call inside `no_sync`.
        reaches: Whether it adds to the gradient of a parameter.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.kept = 0
        self.reaches = False


class MachineSum:
    """Sums of the gradients of a module over all machines, one at the end of each backward.

    Args:
        machines: All of them; closed by `close`.
        module: The user's, alike on all machines.
        payload: Numbers on the way: "bf16" halves the bytes of float32.
        averages: Whether buffers are averaged over the machines, weighted by samples; else they are machine
            0's.

    Attributes:
        machines: As given.

    Threads: the user's, and torch's at the end of a backward.

    Streams: the caller's current one of the module's device; the host waits for the gradients.
    """

    def __init__(
        self, machines: Machines, module: nn.Module, *, payload: Payload = "full", averages: bool = False
    ) -> None:
        self.machines = machines
        self._module = module
        self._payload: Payload = payload
        self._averages = averages
        self._number = next(_NUMBERS)
        self._memory: GradientMemory | None = None
        self._count = sum(1 for _ in module.parameters())
        self._trained: list[nn.Parameter] = []
        self._optimizer: Callable[[], Optimizer | None] = lambda: None
        self._steps = 0
        self._sums = 0
        self._sums_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._samples = 0  # since the last sum, of backwards inside no_sync
        self._seen = 0  # samples of sums since the last step, for the buffers
        self._last = (1, 0)  # samples of the last call that are summed, and kept
        self._kept: dict[nn.Parameter, tuple[TensorWeakRef, int]] = {}
        self._backwards: dict[int, _Backward] = {}  # under way, by torch's number
        self._is_quiet = False
        self._batch = 0
        self._failure: BaseException | None = None
        self._hooks: list[tuple[nn.Parameter, Any, Any]] = []
        self._owners = [part for part in module.modules() if part._buffers]
        self._known = [_versions(part) for part in self._owners]
        self._changed = [False] * len(self._owners)
        self._shapes = [buffer.shape for buffer in module.buffers()]

    # ------------------------------------------------------------------ calls and backwards
    def attend(self, outputs: Any, samples: int | None, *, syncs: bool) -> None:
        """Note a call of the module whose graph has been made.

        Args:
            outputs: Its outputs.
            samples: Samples of its batch; None: it has none, and counts as one.
            syncs: Whether a backward through it sums the gradients.
        """
        self._hook_parameters()
        count = samples or 1
        self._last = (count, 0) if syncs else (0, count)
        passed: list[int] = []  # the backward that has last come through
        note = partial(_note_call, weakref.ref(self), passed, count, syncs)
        for leaf in tensors_of(outputs):
            if leaf.requires_grad and not leaf.is_leaf:
                leaf.register_hook(note)
        if self._samples:
            self._drop_zeroed()

    def compare(self, batch: Any) -> None:
        """Compare the first batch, or the first device's part of it, with other machines' in the next sum."""
        if not self._sums and not self._batch:
            self._batch = batch_checksum(batch)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context for backwards of a window: gradients are summed by `add`, behind all of them."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def add(self, samples: int, *, syncs: bool) -> None:
        """Sum the gradients of a window's backwards over the machines, or keep them for the next sum."""
        self._hook_parameters()
        self._end_backward(samples if syncs else 0, 0 if syncs else samples)

    def _hook_parameters(self) -> None:
        """See to it that the end of a backward is noticed which adds to a parameter's gradient."""
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        if len(trained) == len(self._trained) and all(map(_is_same, trained, self._trained)):
            return
        for _, _, handle in self._hooks:
            handle.remove()
        self._trained, self._hooks, self._memory = trained, [], None
        reach = partial(_note_parameter, weakref.ref(self))
        for parameter in trained:
            # At the node of the graph: hooks of the parameter itself are the user's.
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._hooks.append((parameter, node, node.register_hook(reach)))

    def _enter(self) -> _Backward:
        """The record of the backward under way; hold `_LOCK`."""
        task = torch._C._current_graph_task_id()
        if task not in self._backwards:
            if len(self._backwards) >= MOST_LEFT:
                self._backwards.clear()
            self._backwards[task] = _Backward()
            if task not in _DUE:
                if len(_DUE) >= MOST_LEFT:
                    _DUE.clear()
                _DUE[task] = []
                torch.autograd.Variable._execution_engine.queue_callback(partial(_end, task))
            _DUE[task].append(weakref.ref(self))
        return self._backwards[task]

    def _leave(self, task: int) -> None:
        """End a backward, all of whose gradients are there."""
        backward = self._backwards.pop(task, None)
        if backward is None or not backward.reaches:
            return
        if not backward.samples and not backward.kept:  # of a penalty of gradients alone, or a checkpoint
            backward.samples, backward.kept = self._last
        self._end_backward(backward.samples, backward.kept)

    def _end_backward(self, samples: int, kept: int) -> None:
        """Sum the gradients, where there are `samples`, and keep the rest, where there are some `kept`."""
        self._samples += samples or kept
        if samples:
            self.reduce()
        if kept:
            self._samples = max(self._samples, kept)
            self._kept = {
                one: (TensorWeakRef(one.grad), one.grad._version)
                for one in self._trained
                if one.grad is not None
            }

    # ------------------------------------------------------------------ accumulation
    def is_due(self) -> bool:
        """Whether each machine has gradients of backwards inside `no_sync` that no sum has had.

        Raises:
            FlowdpError: They have been written to since.
        """
        self._drop_zeroed()
        if not self._samples:
            return False
        if any(True for _ in self._written()):
            raise FlowdpError(
                "gradients have been written to (clipped or scaled) while no_sync() had left those of other "
                "machines there: let the last backward be outside no_sync(), or clip by clip_grad_norm_() of "
                "what setup() returned"
            )
        return True

    def _written(self) -> Iterator[Tensor | None]:
        for parameter, (left, version) in self._kept.items():
            grad = parameter.grad
            if grad is None or grad is not left() or grad._version != version:
                yield grad

    def _drop_zeroed(self) -> None:
        """Forget gradients that are kept, where the user has dropped or zeroed them all."""
        written = list(self._written())
        is_other = bool(self._kept) and len(written) == len(self._kept)
        if is_other and all(grad is None or not grad.any() for grad in written):
            self.drop()

    def drop(self) -> None:
        """Forget the gradients that wait for a sum."""
        self._samples, self._kept = 0, {}

    # ------------------------------------------------------------------ the sum
    @torch.no_grad()
    def reduce(self) -> None:
        """Replace the gradients of all machines by their mean, weighted by samples.

        Raises:
            FlowdpError: The machines do not do the same; every machine raises it.
            CollectiveError: A machine was lost, or does not come.
        """
        is_known = self._memory is not None
        memory = self._memory = self._memory or self._open()
        gradients = [parameter.grad for parameter in memory.parameters]
        for name, grad in zip(memory.names, gradients, strict=True):
            if grad is not None and (grad.requires_grad or grad.layout is not torch.strided):
                kind = "a graph (create_graph=True)" if grad.requires_grad else "a sparse layout"
                raise FlowdpError(
                    f"the gradient of {name!r} has {kind}, and cannot be summed over machines: take "
                    "gradients with a graph by torch.autograd.grad()"
                )
        samples = self._samples
        self.drop()
        memory.pack(samples)
        self._look_at_buffers()
        # As many flags as parameters, so that the message is as long where others are frozen.
        has = [grad is not None for grad in gradients] + [False] * (self._count - len(gradients))
        report = self._report(memory, samples)
        reports, flags, sums = self._exchange(memory, report, [*has, *self._changed], is_known=is_known)
        self._check(reports)
        self._sums += 1
        self._seen += samples
        memory.unpack(sums, sum(one.samples for one in reports), flags[: len(has)])
        self._changed = flags[len(has) :]

    def epoch(self, windows: Iterable[T]) -> Iterator[T]:
        """The windows of an epoch, which ends on all machines at once where it has trained.

        Raises:
            FlowdpError: Another machine still trains behind the last window.
            CollectiveError: A machine was lost, or does not come.
        """
        before = self._sums
        yield from windows
        if self._sums > before:  # not of an evaluation, which one machine may do alone
            self._end_epoch()

    @torch.no_grad()
    def _end_epoch(self) -> None:
        memory = self._memory = self._memory or self._open()
        report = self._report(memory, 0)
        report.ended = 1
        flags = [False] * (self._count + len(self._changed))
        memory.clear()  # others that train wait for these gradients, too, before they look
        reports, *_ = self._exchange(memory, report, flags, is_known=False)
        self._check(reports)

    def _open(self) -> GradientMemory:
        named = [(name, one) for name, one in self._module.named_parameters() if one.requires_grad]
        return GradientMemory(named, self._payload)

    def _report(self, memory: GradientMemory, samples: int) -> MachineReport:
        return MachineReport(
            layout=memory.checksum,
            steps=self._steps,
            rate=rate_bits(self._optimizer()),
            batch=0 if self._sums else self._batch,
            samples=samples,
        )

    def _exchange(
        self, memory: GradientMemory, report: MachineReport, flags: Sequence[bool], *, is_known: bool
    ) -> tuple[list[MachineReport], list[bool], list[Tensor]]:
        """Reports and flags of all machines, and the sums of their gradients."""
        count = self.machines.count
        message = message_of(report, self.machines.index, count, flags)
        sums = memory.sendable()
        if is_known:
            self._call(lambda: self.machines.reduce([message, *sums]))
        else:
            # Gradients of other forms than elsewhere cannot travel: the reports go before.
            self._call(lambda: self.machines.reduce([message]))
            reports, _ = reports_in(message, count)
            train = any(not one.ended for one in reports)
            if train and all(one.layout == report.layout for one in reports):
                self._call(lambda: self.machines.reduce(sums))
        return (*reports_in(message, count), sums)

    def _call(self, exchange: Callable[[], None]) -> None:
        if self._failure is not None:
            kind = MachineLostError if isinstance(self._failure, MachineLostError) else CollectiveError
            raise kind("the machines of this job have failed before") from self._failure
        try:
            exchange()
        except CollectiveError as error:
            others = [name for k, name in enumerate(self.machines.names) if k != self.machines.index]
            self._failure = error
            raise type(error)(
                f"the gradients of step {self._steps} could not be summed with those of "
                f"{', '.join(others)}: a machine was lost, has ended its loop before the others (each must "
                "make the same number of backward passes: give each as many batches), or did not come "
                f"within {self.machines.timeout_s:g} s (MachineOptions(timeout=...)): {error}"
            ) from error

    def _check(self, reports: Sequence[MachineReport]) -> None:
        """Check that all machines do the same.

        Raises:
            FlowdpError: They do not.
        """
        first = reports[0].batch
        if found := difference_of(reports, self.machines.names):
            self._failure = FlowdpError(f"the machines do not do the same: {found}")
            raise self._failure
        if not self._sums and first and all(report.batch == first for report in reports):
            self._failure = FlowdpError(
                "every machine has begun with the same batch, so all would train the same samples: give each "
                "its own, by a torch.utils.data.DistributedSampler, or a shard of the data; if it is meant, "
                "call the model in a loop over the loader"
            )
            raise self._failure

    # ------------------------------------------------------------------ steps
    def lead_by(self, optimizer: Optimizer | None) -> None:
        """Set the optimizer whose steps are compared between machines."""
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)

    def check_step(self, optimizer: Optimizer) -> None:
        """Check, before an optimizer steps, that its gradients have been summed.

        Raises:
            FlowdpError: There has been no sum since its last step.
        """
        before = self._sums_at.get(optimizer, 0)
        self._sums_at[optimizer] = self._sums
        if before < self._sums:
            return
        own = {id(parameter) for parameter in self._trained or self._module.parameters()}
        groups = optimizer.param_groups
        if any(p.grad is not None and id(p) in own for group in groups for p in group["params"]):
            raise FlowdpError(
                f"{type(optimizer).__name__} would step by gradients of this machine alone: since its last "
                "step no backward has gone through a call of what setup() returned; compute the loss by such "
                "a call, not by its .module"
            )

    @torch.no_grad()
    def stepped(self) -> None:
        """Count a step of the first optimizer, and share the buffers that have changed on any machine.

        Raises:
            FlowdpError: A buffer has another shape than at `setup`.
            CollectiveError: A machine was lost, or does not come.
        """
        self._steps += 1
        samples, self._seen = self._seen, 0
        changed = [part for part, flag in zip(self._owners, self._changed, strict=True) if flag]
        if not changed:
            return
        buffers = _buffers_of(changed)
        if [buffer.shape for buffer in self._module.buffers()] != self._shapes:
            raise FlowdpError(
                "a buffer of the model has another shape than at setup(), and buffers are shared between "
                "machines: keep it in a plain attribute"
            )
        if self._averages:
            self._call(partial(average_over_machines, self.machines, buffers, samples))
        else:
            self._call(partial(spread, self.machines, buffers))
        self._changed = [False] * len(self._owners)
        self._known = [_versions(part) for part in self._owners]

    def _look_at_buffers(self) -> None:
        now = [_versions(part) for part in self._owners]
        self._changed = [
            flag or new != old for flag, new, old in zip(self._changed, now, self._known, strict=True)
        ]

    def close(self) -> None:
        """Leave the other machines: one that still waits for this one fails at once."""
        for _, _, handle in self._hooks:
            handle.remove()
        self._hooks, self._trained = [], []
        self.machines.close()


_NUMBERS = itertools.count()

_DUE: dict[int, list[Callable[[], MachineSum | None]]] = {}
"""The sums that a backward is to end by, by its number in torch."""

_LOCK = threading.Lock()
"""Held where records of backwards are made and written: torch has a thread for each CUDA device."""


def _end(task: int) -> None:
    """Sum all gradients that a backward has made: everywhere in the order in which `setup` was called."""
    with _LOCK:
        due = [found for one in _DUE.pop(task, []) if (found := one()) is not None]
    for one in sorted(due, key=lambda found: found._number):
        one._leave(task)


def _note_call(
    sums: Callable[[], MachineSum | None], passed: list[int], samples: int, syncs: bool, _gradient: Tensor
) -> None:
    task = torch._C._current_graph_task_id()
    if passed == [task] or (alive := sums()) is None or alive._is_quiet:
        return
    passed[:] = [task]
    with _LOCK:
        backward = alive._enter()
        if syncs:
            backward.samples = max(backward.samples, samples)
        else:
            backward.kept = max(backward.kept, samples)


def _note_parameter(sums: Callable[[], MachineSum | None], *_: object) -> None:
    if (alive := sums()) is not None and not alive._is_quiet:
        with _LOCK:
            alive._enter().reaches = True


def _is_same(one: object, other: object) -> bool:
    return one is other


def _versions(part: nn.Module) -> list[tuple[int, int]]:
    own = (one for one in part._buffers.values() if one is not None)
    return [(id(one), -1 if one.is_inference() else one._version) for one in own]


def _buffers_of(parts: Sequence[nn.Module]) -> list[Tensor]:
    """Buffers of modules, each once."""
    found = {id(one): one for part in parts for one in part._buffers.values() if one is not None}
    return list(found.values())
