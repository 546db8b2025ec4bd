"""Sums of gradients over the machines of a job, in a loop that the user owns.

All machines begin with the parameters and buffers of machine 0. A machine's gradients come out of a backward
summed over its devices. At the end of that backward, before the user's thread has it back, they travel once
through the host's memory: each times the samples of its machine's batch, and the sum is divided by all of
these. So clipping and every optimizer see the gradients of one device with the batches of all machines.

Some numbers of the parameters go before them. Machines that no longer do the same have other parameters, and
fail, all of them, instead of training apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.collective.batch_norm import SharedStatistics
from flowdp.collective.machines_mean import PACKS
from flowdp.device.streams import HostLane
from flowdp.errors import CollectiveError, FlowdpError, OptionError
from flowdp.network.machines import Machines, Reduction, find_machines
from flowdp.options import MachineOptions, Payload
from flowdp.replica.factories import equal_machines

__all__ = ["TIMEOUT_S", "MachineSum", "check_machines", "open_machine_sum"]

TIMEOUT_S = 600.0
"""Longest wait for another machine, with `machines=True`. Longer than the Trainer's: in a loop that the user
owns a machine may evaluate or save for minutes while the others wait for its gradients."""

COMPARED, NUMBERS = 128, 8
"""Parameters that are compared with other machines' before each sum, and the first numbers of each."""


def check_machines(option: object, model: nn.Module) -> MachineOptions | None:
    """Options for the other machines of the job; None: they are not wanted, or there is nothing to train.

    Raises:
        OptionError: It is something else, or has options that a loop of the user's own cannot follow.
    """
    if option is False:
        return None
    if option is True:
        option = MachineOptions(timeout=TIMEOUT_S)
    if not isinstance(option, MachineOptions):
        raise OptionError(f"machines must be True, False or MachineOptions(...), not {option!r}")
    if option != MachineOptions(timeout=option.timeout, payload=option.payload):
        raise OptionError(
            f"machines={option!r}: setup() takes timeout and payload, and sums all machines' gradients in "
            "every backward outside no_sync(); rounds, overlap and stream are for a Trainer: leave them out"
        )
    # A model that is used as it is, by one machine to evaluate for instance, needs no other.
    return option if any(parameter.requires_grad for parameter in model.parameters()) else None


def open_machine_sum(options: MachineOptions, model: nn.Module, *, averages: bool) -> MachineSum | None:
    """The sum of a model's gradients over the machines of this job; None: there is one machine.

    Raises:
        OptionError: A layer needs the batch of all machines, or the machines have different models.
        CollectiveError: Not all machines came here in time.
    """
    machines = find_machines(timeout_s=options.timeout)
    if machines is None:
        return None
    try:
        if SharedStatistics(model):
            raise OptionError(
                "SyncBatchNorm takes the statistics of the devices of one machine, and this job has several "
                "machines: leave the model unconverted (each device normalises its part), or use GroupNorm"
            )
        return MachineSum(machines, model, payload=options.payload, averages=averages)
    except BaseException:
        machines.close()
        raise


class MachineSum:
    """Sums of the gradients of a module over all machines, one at the end of each backward.

    Args:
        machines: All of them; closed by `close`.
        module: The user's; its parameters and buffers become those of machine 0.
        payload: Numbers on the way: "bf16" halves the bytes of float32.
        averages: Whether buffers are averaged over the machines, weighted by samples; else they are machine
            0's. Those that a forward on any machine has written to travel with the gradients.

    Raises:
        OptionError: The machines have different models; every machine raises it, with the first difference.
        CollectiveError: A machine was lost, or does not come.

    Threads: the user's, and torch's in a backward.

    Streams: the caller's current one of the module's device; the host waits for the gradients.
    """

    def __init__(
        self, machines: Machines, module: nn.Module, *, payload: Payload = "full", averages: bool = False
    ) -> None:
        equal_machines([module], [HostLane(next(module.parameters()).device)], machines)
        self._machines = machines
        self._module = module
        self._pack = PACKS[payload]
        self._averages = averages
        self._is_syncing = True
        self._size = 1  # samples of the last call
        self._samples = 0  # of backwards whose gradients wait for a sum
        self._backward = -1  # number of the last backward in torch
        self._trained: list[nn.Parameter] = []
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

    def collect(self) -> None:
        """Sum the gradients that backwards inside `no_sync` have left at the machines."""
        if self._samples and any(parameter.grad is not None for parameter in self._trained):
            self._reduce()

    def _hook_parameters(self) -> None:
        """See to it that a backward which adds to a parameter's gradient is noticed."""
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        if list(map(id, trained)) == list(map(id, self._trained)):
            return
        self._unhook()
        self._trained = trained
        for parameter in trained:
            # At the node of the graph: hooks of the parameter itself are the user's.
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._hooks.append((node, node.register_prehook(self._note)))

    def _unhook(self) -> None:
        for _, handle in self._hooks:
            handle.remove()
        self._hooks = []

    def _note(self, *_: object) -> None:
        """Note that a backward is about to add to a gradient."""
        number = torch._C._current_graph_task_id()
        if number == self._backward:
            return
        self._backward = number
        if all(parameter.grad is None for parameter in self._trained):
            self._samples = 0  # the user has dropped the gradients of earlier backwards
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """Sum the gradients over the machines, or let them wait for the next sum."""
        self._samples += self._size
        if self._is_syncing:
            self._reduce()

    # ------------------------------------------------------------------ the sum
    @torch.no_grad()
    def _reduce(self) -> None:
        """Replace the gradients of all machines by their mean, weighted by samples, and share buffers.

        Raises:
            FlowdpError: The machines do not do the same, and all of them raise it.
            CollectiveError: A machine was lost, or does not come.
        """
        samples, self._samples = self._samples, 0
        states = self._states()
        changed = self._agree([new != old for new, old in zip(states, self._known, strict=True)])
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self._trained
        ]
        is_wide = any(gradient.dtype in (torch.float64, torch.complex128) for gradient in gradients)
        row = _row(gradients, torch.float64 if is_wide else torch.float32)
        is_there = row.new_tensor([parameter.grad is not None for parameter in self._trained])
        sent = self._pack(torch.cat([row.mul_(samples), is_there])).cpu()
        # As data: a graph may have saved a buffer, so the writes are not counted, as a batch norm's own.
        layers = [part for part, is_one in zip(self._layers, changed, strict=True) if is_one]
        buffers = [buffer.data for part in layers for buffer in part.buffers(recurse=False)]
        means = _row(buffers, torch.float64).cpu()
        if self._averages:
            means.mul_(samples)
        elif self._machines.index:
            means.zero_()
        means = torch.cat([means, torch.tensor([samples], dtype=torch.float64)])
        self._call([sent, means])
        total = means[-1].item()
        _fill(gradients, sent[: len(row)].to(row.device, row.dtype).div_(total))
        _fill(buffers, means[:-1] / total if self._averages else means[:-1])
        for parameter, gradient, count in zip(self._trained, gradients, sent[len(row) :], strict=True):
            if count:  # on any machine; else it stays None
                parameter.grad = gradient
        self._known = states

    def _agree(self, changed: Sequence[bool]) -> list[bool]:
        """Whether any machine has changed the buffers of each layer.

        Args:
            changed: Whether this machine has.

        Raises:
            FlowdpError: The machines do not do the same.
            CollectiveError: A machine was lost, or does not come.
        """
        trained = self._trained
        some = _row(
            [parameter.reshape(-1)[:NUMBERS] for parameter in trained[:COMPARED]], torch.float64
        ).cpu()
        numbers = torch.zeros(1 + 2 * COMPARED * NUMBERS, dtype=torch.float64)  # complex numbers are two
        numbers[0], numbers[1 : 1 + len(some)] = sum(parameter.numel() for parameter in trained), some
        flags = torch.tensor(changed, dtype=torch.float64)
        table = torch.cat([numbers, -numbers, flags])
        self._call([table], ["max"])
        most, least = table[: len(numbers)], -table[len(numbers) : 2 * len(numbers)]
        apart = (most - least)[1:].max().item()
        # Machines of different kinds may round differently.
        limit = (
            max(torch.finfo(parameter.dtype).eps for parameter in trained) ** 0.5
            * most[1:].maximum(-least[1:]).max()
        )
        if most[0] != least[0] or apart > limit:
            difference = f"their parameters differ by up to {apart:.3g}"
            if most[0] != least[0]:
                difference = f"one trains {least[0]:.0f} numbers, and another {most[0]:.0f}"
            raise FlowdpError(
                f"the machines do not do the same: {difference}. All must freeze the same parameters and "
                "take the same steps, with the same learning rates and state of the optimizer, by gradients "
                "that have been summed: by a backward outside no_sync(), or step() or clip_grad_norm_() of dp"
            )
        return table[2 * len(numbers) :].bool().tolist()

    def _states(self) -> list[list[tuple[int, int]]]:
        """Identity and version of the buffers of each layer."""
        return [
            [
                (id(buffer), 0 if buffer.is_inference() else buffer._version)
                for buffer in part.buffers(recurse=False)
            ]
            for part in self._layers
        ]

    def _call(self, tensors: Sequence[Tensor], operations: Sequence[Reduction] = ()) -> None:
        """Reduce tensors over the machines."""
        try:
            self._machines.reduce(tensors, operations)
        except CollectiveError as error:
            error.add_note(
                "flowdp: in the sum of gradients at the end of a backward; each machine must make as many of "
                "them, so give each as many batches. MachineOptions(timeout=...) is the longest wait"
            )
            raise

    def close(self) -> None:
        """Leave the other machines: one that still waits for this one fails at once."""
        self._unhook()
        self._machines.close()


def _row(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Copies of tensors of one device in a row; two numbers for a complex one. Shape (numbers,)."""
    real = [
        torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors
    ]
    parts = [tensor.reshape(-1).to(dtype) for tensor in real]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)


def _fill(tensors: Sequence[Tensor], row: Tensor) -> None:
    """Write a row, as `_row` makes it, into tensors; integers are rounded."""
    sizes = [tensor.numel() * (2 if tensor.is_complex() else 1) for tensor in tensors]
    for tensor, part in zip(tensors, row.split(sizes), strict=True):
        if tensor.is_complex():
            part = torch.complex(*part.view(-1, 2).unbind(1))
        elif not tensor.is_floating_point():
            part = part.round()
        tensor.copy_(part.view(tensor.shape))
