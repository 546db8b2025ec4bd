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
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.data.trees import tensors_of
from flowdp.data_parallel.machine_memory import GradientMemory, average_over_machines, spread
from flowdp.data_parallel.machine_report import (
    MachineReport,
    batch_checksum,
    difference_of,
    message_of,
    rate_of,
    reports_in,
)
from flowdp.errors import CollectiveError, FlowdpError
from flowdp.network.machines import Machines
from flowdp.options import Payload

__all__ = ["MachineSum"]

T = TypeVar("T")

MOST_LEFT = 64
"""Most records kept of backwards that have not ended: those that failed leave theirs."""


class _Passed(NamedTuple):
    """Calls of one module that a backward of the caller's has come through.

    Attributes:
        samples: Samples of the largest call whose gradients are to be summed; 0: none.
        kept: Those of the largest call inside `no_sync`.
        reaches: Whether it adds to the gradient of a parameter.
    """

    samples: int = 0
    kept: int = 0
    reaches: bool = False


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
        self._memory = GradientMemory({}, payload)
        self._is_agreed = False  # the machines' gradients have the same places in memory
        self._count = sum(1 for _ in module.parameters())
        self._optimizer: Callable[[], Optimizer | None] = lambda: None
        self._steps = 0
        self._sums = 0
        self._sums_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._samples = 0  # since the last sum, of backwards inside no_sync
        self._seen = 0  # samples of sums since the last step, for the buffers
        self._last = _Passed(1)
        self._kept: list[int] = []  # versions of the gradients that they have left
        self._is_quiet = False
        self._batch = 0
        self._hooks: list[tuple[Any, Any]] = []
        # By layers: the kernel of BatchNorm does not count its writes to the running statistics.
        self._owners = [part for part in module.modules() if part._buffers]
        self._known = self._states()
        self._changed = [False] * len(self._owners)

    # ------------------------------------------------------------------ calls and backwards
    def attend(self, outputs: Any, samples: int | None, *, syncs: bool) -> None:
        """Note a call of the module whose graph has been made.

        Args:
            outputs: Its outputs.
            samples: Samples of its batch; None: it has none, and counts as one.
            syncs: Whether a backward through it sums the gradients.
        """
        self._hook_parameters()
        self._last = _Passed(samples or 1) if syncs else _Passed(kept=samples or 1)
        note = partial(_note, weakref.ref(self), self._last)
        for leaf in tensors_of(outputs):
            if leaf.requires_grad and not leaf.is_leaf:
                leaf.register_hook(note)
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
        self._end_backward(_Passed(samples) if syncs else _Passed(kept=samples))

    def _hook_parameters(self) -> None:
        """See to it that a backward which adds to a parameter's gradient is noticed."""
        trained = {name: one for name, one in self._module.named_parameters() if one.requires_grad}
        if list(map(id, trained.values())) == list(map(id, self._memory.parameters)):
            return
        self._unhook()
        self._memory, self._is_agreed = GradientMemory(trained, self._payload), False
        note = partial(_note, weakref.ref(self), _Passed(reaches=True))
        for parameter in trained.values():
            # At the node of the graph: hooks of the parameter itself are the user's.
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._hooks.append((node, node.register_hook(note)))

    def _unhook(self) -> None:
        for _, handle in self._hooks:
            handle.remove()
        self._hooks = []

    def _end_backward(self, passed: _Passed) -> None:
        """Sum the gradients, or keep them; a backward through calls of both kinds does both."""
        if not passed.samples and not passed.kept:  # of a penalty of gradients alone, or a checkpoint
            passed = self._last
        self._samples += passed.samples or passed.kept
        if passed.samples:
            self.reduce()
        if passed.kept:
            self._samples = max(self._samples, passed.kept)
            self._kept = self._versions()

    # ------------------------------------------------------------------ accumulation
    def is_due(self) -> bool:
        """Whether each machine has gradients of backwards inside `no_sync` that no sum has had.

        Raises:
            FlowdpError: They have been written to since.
        """
        self._drop_zeroed()
        if self._kept and self._kept != self._versions():
            raise FlowdpError(
                "gradients have been written to (clipped or scaled) while no_sync() had left those of other "
                "machines there: let the last backward be outside no_sync(), or clip by clip_grad_norm_() of "
                "what setup() returned"
            )
        return self._samples > 0

    def _versions(self) -> list[int]:
        """Writes to each gradient that torch has counted; -1: there is none."""
        return [-1 if one.grad is None else one.grad._version for one in self._memory.parameters]

    def _drop_zeroed(self) -> None:
        """Forget gradients that are kept, where the user has dropped or zeroed them all."""
        if self._kept and self._kept != self._versions():
            gradients = (one.grad for one in self._memory.parameters)
            if not any(grad is not None and grad.any() for grad in gradients):
                self.drop()

    def drop(self) -> None:
        """Forget the gradients that wait for a sum."""
        self._samples, self._kept = 0, []

    # ------------------------------------------------------------------ the sum
    @torch.no_grad()
    def reduce(self) -> None:
        """Replace the gradients of all machines by their mean, weighted by samples.

        Raises:
            FlowdpError: The machines do not do the same, and all of them raise it; or see `GradientMemory`.
            CollectiveError: A machine was lost, or does not come.
        """
        samples = self._samples
        self.drop()
        self._look_at_buffers()
        has = [one.grad is not None for one in self._memory.parameters]
        # As many flags as parameters, so that the message is as long where others are frozen.
        padding = [False] * (self._count - len(has))
        total, flags, sums = self._exchange(samples, [*has, *padding, *self._changed])
        self._sums += 1
        self._seen += samples
        self._memory.unpack(sums, total, flags[: len(has)])
        self._changed = flags[self._count :]

    def epoch(self, windows: Iterable[T]) -> Iterator[T]:
        """The windows of an epoch, which ends on all machines at once where it has trained.

        Raises:
            FlowdpError: Another machine still trains behind the last window.
            CollectiveError: A machine was lost, or does not come.
        """
        before = self._sums
        yield from windows
        if self._sums > before:  # not of an evaluation, which one machine may do alone
            with torch.no_grad():
                self._exchange(0, [False] * (self._count + len(self._changed)), has_ended=True)

    def _exchange(
        self, samples: int, flags: Sequence[bool], *, has_ended: bool = False
    ) -> tuple[float, list[bool], list[Tensor]]:
        """Samples and flags of all machines together, and the sums of their gradients.

        Raises:
            FlowdpError: The machines do not do the same.
        """
        count = self.machines.count
        report = MachineReport(
            ended=has_ended,
            layout=self._memory.checksum,
            steps=self._steps,
            rate=rate_of(self._optimizer()),
            batch=0 if self._sums else self._batch,
            samples=samples,
        )
        message = message_of(report, self.machines.index, count, flags)
        sums = self._memory.pack(samples)
        if self._is_agreed and not has_ended:
            self._call(lambda: self.machines.reduce([message, *sums]))
        else:
            # Gradients of other forms than elsewhere cannot travel: the reports go before. Machines that
            # still train wait for those of one that has ended, too, before they look.
            self._call(lambda: self.machines.reduce([message]))
            reports, _ = reports_in(message, count)
            train = any(not one.ended for one in reports)
            if train and all(one.layout == report.layout for one in reports):
                self._call(lambda: self.machines.reduce(sums))
        reports, any_flags = reports_in(message, count)
        if found := difference_of(reports, self.machines.names):
            raise FlowdpError(found)
        self._is_agreed = True
        return sum(one.samples for one in reports), any_flags, sums

    def _call(self, exchange: Callable[[], None]) -> None:
        try:
            exchange()
        except CollectiveError as error:
            others = [name for k, name in enumerate(self.machines.names) if k != self.machines.index]
            raise type(error)(
                f"the gradients of step {self._steps} could not be summed with those of "
                f"{', '.join(others)}: a machine was lost, has ended its loop before the others (each must "
                "make the same number of backward passes: give each as many batches), or did not come "
                f"within {self.machines.timeout_s:g} s (MachineOptions(timeout=...)): {error}"
            ) from error

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
        own = set(self._module.parameters())
        groups = optimizer.param_groups
        if any(p.grad is not None and p in own for group in groups for p in group["params"]):
            raise FlowdpError(
                f"{type(optimizer).__name__} would step by gradients of this machine alone: since its last "
                "step no backward has gone through a call of what setup() returned; compute the loss by such "
                "a call, not by its .module"
            )

    @torch.no_grad()
    def stepped(self) -> None:
        """Count a step of the first optimizer, and share the buffers that have changed on any machine.

        Raises:
            CollectiveError: A machine was lost, or does not come.
        """
        self._steps += 1
        samples, self._seen = self._seen, 0
        changed = [part for part, flag in zip(self._owners, self._changed, strict=True) if flag]
        if not changed:
            return
        buffers = [one for part in changed for one in part.buffers(recurse=False)]
        if self._averages:
            self._call(partial(average_over_machines, self.machines, buffers, samples))
        else:
            self._call(partial(spread, self.machines, buffers))
        self._changed = [False] * len(self._owners)
        self._known = self._states()

    def _look_at_buffers(self) -> None:
        """See which layers have written to a buffer since it was shared."""
        self._changed = [
            flag or new != old
            for flag, new, old in zip(self._changed, self._states(), self._known, strict=True)
        ]

    def _states(self) -> list[list[tuple[int, int]]]:
        """Identity and version of the buffers of each layer."""
        return [
            [(id(one), -1 if one.is_inference() else one._version) for one in part.buffers(recurse=False)]
            for part in self._owners
        ]

    def close(self) -> None:
        """Leave the other machines: one that still waits for this one fails at once."""
        self._unhook()
        self.machines.close()


_NUMBERS = itertools.count()

_UNDER_WAY: dict[int, dict[Callable[[], MachineSum | None], _Passed]] = {}
"""Calls that each backward under way has come through, by its number in torch and the sum of the module."""

_LOCK = threading.Lock()
"""Held where records of backwards are made and written: torch has a thread for each CUDA device."""


def _note(sums: Callable[[], MachineSum | None], more: _Passed, *_: object) -> None:
    """Note what the backward that calls this has come through."""
    if (alive := sums()) is None or alive._is_quiet:
        return
    task = torch._C._current_graph_task_id()
    with _LOCK:
        if task not in _UNDER_WAY:
            if len(_UNDER_WAY) >= MOST_LEFT:
                _UNDER_WAY.clear()
            _UNDER_WAY[task] = {}
            torch.autograd.Variable._execution_engine.queue_callback(partial(_end, task))
        before = _UNDER_WAY[task].get(sums, _Passed())
        _UNDER_WAY[task][sums] = _Passed(
            max(before.samples, more.samples), max(before.kept, more.kept), before.reaches or more.reaches
        )


def _end(task: int) -> None:
    """Sum all gradients that a backward has made: everywhere in the order in which `setup` was called."""
    with _LOCK:
        records = _UNDER_WAY.pop(task, {})
    due = [
        (one, passed) for sums, passed in records.items() if passed.reaches and (one := sums()) is not None
    ]
    for one, passed in sorted(due, key=lambda pair: pair[0]._number):
        one._end_backward(passed)
