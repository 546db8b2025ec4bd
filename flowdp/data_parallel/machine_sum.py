"""Sums of gradients over the machines of a job, in a loop that the user owns.

Each machine's gradients come out of a backward summed over its devices. At the end of that backward, before
the user's thread has it back, they travel once through the host's memory: each times the samples of its
machine's batch, and the sum is divided by all of these. So clipping and every optimizer see the gradients of
one device with the batches of all machines. A few numbers of each machine go before them, so that machines
which no longer do the same fail, all of them, instead of training apart.
"""

from __future__ import annotations

import itertools
import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowdp.errors import CollectiveError, FlowdpError
from flowdp.network.machines import Machines, Reduction
from flowdp.options import Payload

__all__ = ["MachineSum"]

DIFFERENCES = (
    "they have taken different numbers of optimizer steps; each must step after the same backwards",
    "their gradients are of different parameters (a checksum); freeze and thaw the same on each",
    "the learning rates differ; a schedule must not depend on a value of one machine alone",
)
"""Errors for the first numbers that machines exchange, in their order: each must be the same everywhere."""


class MachineSum:
    """Sums of the gradients of a module over all machines, one at the end of each backward.

    Args:
        machines: All of them; closed by `close`.
        module: The user's, alike on all machines.
        payload: Numbers on the way: "bf16" halves the bytes of float32.
        averages: Whether buffers are averaged over the machines, weighted by samples; else they are machine
            0's. Those that a forward on any machine has written to travel with the gradients.

    Attributes:
        machines: As given.
        optimizer: The one whose steps and learning rate are compared between machines; None: there is none.

    Threads: the user's, and torch's in a backward.

    Streams: the caller's current one of the module's device; the host waits for the gradients.
    """

    def __init__(
        self, machines: Machines, module: nn.Module, *, payload: Payload = "full", averages: bool = False
    ) -> None:
        self.machines = machines
        self.optimizer: Optimizer | None = None
        self._module = module
        self._is_narrow = payload == "bf16"
        self._averages = averages
        self._number = next(_NUMBERS)
        self._is_syncing = True
        self._size = 1  # samples of the last call
        self._samples = 0  # of backwards whose gradients wait for a sum
        self._steps = 0
        self._sums = 0
        self._sums_at_step = 0
        self._layout = 0
        self._trained: dict[str, nn.Parameter] = {}
        self._hooks: list[tuple[Any, Any]] = []
        # By layers: the kernel of BatchNorm does not count its writes to the running statistics.
        self._layers = [part for part in module.modules() if list(part.buffers(recurse=False))]
        self._known = self._states()
        self._hook_parameters()

    # ------------------------------------------------------------------ calls and backwards
    def attend(self, samples: int | None) -> None:
        """Note a call of the module whose graph has been made.

        Args:
            samples: Samples of its batch, the weight of the backward that follows; None: it has none, and
                counts as one.
        """
        self._size = samples or 1
        self._hook_parameters()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context for backwards whose gradients wait for the sum of a later one."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def end_backward(self) -> None:
        """Sum the gradients over the machines, or let them wait for the next sum."""
        self._samples += self._size
        if self._is_syncing:
            self.reduce()

    def _hook_parameters(self) -> None:
        """See to it that a backward which adds to a parameter's gradient is noticed."""
        trained = {name: one for name, one in self._module.named_parameters() if one.requires_grad}
        if list(map(id, trained.values())) == list(map(id, self._trained.values())):
            return
        self._unhook()
        self._trained = trained
        self._layout = zlib.crc32(repr([(name, one.shape) for name, one in trained.items()]).encode())
        for parameter in trained.values():
            # At the node of the graph: hooks of the parameter itself are the user's.
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._hooks.append((node, node.register_prehook(self._note)))

    def _unhook(self) -> None:
        for _, handle in self._hooks:
            handle.remove()
        self._hooks = []

    def _note(self, *_: object) -> None:
        """Note that a backward is about to add to a gradient."""
        with _LOCK:
            due = _UNDER_WAY.setdefault(torch._C._current_graph_task_id(), set())
            if self in due:
                return
            if not due:
                torch.autograd.Variable._execution_engine.queue_callback(partial(_end, due))
            due.add(self)
        if all(one.grad is None for one in self._trained.values()):
            self.drop()  # as the user has dropped those of earlier backwards

    def drop(self) -> None:
        """Forget the gradients that wait for a sum."""
        self._samples = 0

    # ------------------------------------------------------------------ the sum
    def collect(self) -> None:
        """Sum the gradients that backwards inside `no_sync` have left at the machines; raises as `reduce`."""
        if self._samples:
            self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace the gradients of all machines by their mean, weighted by samples, and share buffers.

        Raises:
            FlowdpError: The machines do not do the same, and all of them raise it; or a gradient has a graph,
                or is sparse.
            CollectiveError: A machine was lost, or does not come.
        """
        samples, parameters = self._samples, list(self._trained.values())
        self.drop()
        gradients = [self._gradient_of(name, one) for name, one in self._trained.items()]
        states = self._states()
        changed = [new != old for new, old in zip(states, self._known, strict=True)]
        total, changed = self._agree(samples, changed)
        is_wide = any(one.dtype in (torch.float64, torch.complex128) for one in gradients)
        row = _row(gradients, torch.float64 if is_wide else torch.float32).mul_(samples)
        sent = row.to("cpu", torch.bfloat16 if self._is_narrow and not is_wide else row.dtype)
        is_there = torch.tensor([one.grad is not None for one in parameters], dtype=torch.uint8)
        layers = [part for part, is_one in zip(self._layers, changed, strict=True) if is_one]
        # As data: a graph may have saved a buffer, so the writes are not counted, as a batch norm's own.
        buffers = [one.data for part in layers for one in part.buffers(recurse=False)]
        floats = [one for one in buffers if one.is_floating_point() or one.is_complex()]
        integers = [one for one in buffers if not (one.is_floating_point() or one.is_complex())]
        means, counts = _row(floats, torch.float64).cpu(), _row(integers, torch.int64).cpu()
        if self._averages:
            means.mul_(samples / total)
        elif not self.machines.leads:
            means.zero_()
            counts.zero_()
        of_counts: Reduction = "max" if self._averages else "sum"
        self._call([sent, is_there, means, counts], ["sum", "max", "sum", of_counts])
        _fill(gradients, sent.to(row.device, row.dtype).div_(total))
        _fill(floats, means)
        _fill(integers, counts)
        for parameter, gradient, is_one in zip(parameters, gradients, is_there.tolist(), strict=True):
            if is_one:  # on any machine; else it stays None
                parameter.grad = gradient
        self._known = states
        self._sums += 1

    def _gradient_of(self, name: str, parameter: nn.Parameter) -> Tensor:
        """The gradient of a parameter; zeros where there is none."""
        grad = parameter.grad
        if grad is None:
            return torch.zeros_like(parameter)
        if grad.requires_grad or grad.layout is not torch.strided:
            raise FlowdpError(
                f"the gradient of {name!r} has a graph or is sparse, and cannot be summed over machines: "
                "take gradients with a graph by torch.autograd.grad(), and make embeddings with sparse=False"
            )
        return grad

    def _states(self) -> list[list[tuple[int, int]]]:
        """Identity and version of the buffers of each layer."""
        return [
            [(id(one), 0 if one.is_inference() else one._version) for one in part.buffers(recurse=False)]
            for part in self._layers
        ]

    # ------------------------------------------------------------------ what machines tell each other
    def _agree(self, samples: int, changed: Sequence[bool]) -> tuple[float, list[bool]]:
        """Samples of all machines together, and whether any has changed the buffers of each layer.

        Args:
            samples: Weight of this machine's gradients.
            changed: Whether this machine has changed the buffers of each layer.

        Raises:
            FlowdpError: The machines do not do the same.
            CollectiveError: A machine was lost, or does not come.
        """
        rate = 0 if self.optimizer is None else self.optimizer.param_groups[0].get("lr")
        own = [self._steps, self._layout, float(rate or 0), samples, *changed]
        table = torch.zeros(self.machines.count, len(own), dtype=torch.float64)
        table[self.machines.index] = torch.tensor(own, dtype=torch.float64)
        self._call([table])
        columns = table.T.tolist()
        for text, values in zip(DIFFERENCES, columns, strict=False):
            if len(set(values)) > 1:
                of_each = zip(values, self.machines.names, strict=True)
                found = ", ".join(f"{value:.12g} on {name}" for value, name in of_each)
                raise FlowdpError(f"the machines do not do the same: {text}: {found}")
        sizes, *flags = columns[len(DIFFERENCES) :]
        return sum(sizes), [any(column) for column in flags]

    def _call(self, tensors: Sequence[Tensor], operations: Sequence[Reduction] = ()) -> None:
        """Reduce tensors over the machines, with an error that says which step it was."""
        try:
            self.machines.reduce(tensors, operations)
        except CollectiveError as error:
            others = [name for k, name in enumerate(self.machines.names) if k != self.machines.index]
            raise type(error)(
                f"the gradients of step {self._steps} could not be summed with those of "
                f"{', '.join(others)}: a machine was lost, has ended its loop before the others (each must "
                "make the same number of backward passes: give each as many batches), or did not come "
                f"within {self.machines.timeout_s:g} s (MachineOptions(timeout=...)): {error}"
            ) from error

    # ------------------------------------------------------------------ steps
    def check_step(self, optimizer: Optimizer) -> None:
        """Check, before the first optimizer steps, that its gradients have been summed.

        Raises:
            FlowdpError: There has been no sum since its last step, or since the last backward.
        """
        is_summed = self._sums > self._sums_at_step and not self._samples
        if is_summed or all(one.grad is None for one in self._module.parameters()):
            return
        raise FlowdpError(
            f"{type(optimizer).__name__} would step by gradients of this machine alone: since its last step "
            "no backward outside no_sync() has summed them over the machines; let the last backward be "
            "outside, or clip and step by clip_grad_norm_() and step() of what setup() returned"
        )

    def stepped(self) -> None:
        """Count a step of the first optimizer."""
        self._steps += 1
        self._sums_at_step = self._sums

    def close(self) -> None:
        """Leave the other machines: one that still waits for this one fails at once."""
        self._unhook()
        self.machines.close()


_NUMBERS = itertools.count()

_UNDER_WAY: weakref.WeakValueDictionary[int, set[MachineSum]] = weakref.WeakValueDictionary()
"""Sums that are due at the end of each backward under way, by its number in torch. The callback at its end
keeps them, which goes with a backward that fails."""

_LOCK = threading.Lock()
"""Held where backwards are noted: torch has a thread for each CUDA device."""


def _end(due: set[MachineSum]) -> None:
    """Sum all gradients that a backward has made: everywhere in the order in which `setup` was called."""
    for one in sorted(due, key=lambda one: one._number):
        one.end_backward()


def _row(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Copies of tensors of one device in a row; two numbers for a complex one. Shape (numbers,)."""
    real = [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in tensors]
    parts = [one.reshape(-1).to(dtype) for one in real]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)


def _fill(tensors: Sequence[Tensor], row: Tensor) -> None:
    """Write a row, as `_row` makes it, into tensors."""
    sizes = [one.numel() * (2 if one.is_complex() else 1) for one in tensors]
    for one, part in zip(tensors, row.split(sizes), strict=True):
        numbers = torch.complex(*part.view(-1, 2).unbind(1)) if one.is_complex() else part
        one.copy_(numbers.view(one.shape))
