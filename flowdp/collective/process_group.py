"""Process groups: the collectives of one rank, with one interface for threads and for processes.

The ranks are threads of this process (`flowdp.local_groups`), processes of a launcher
(`ProcessGroup.from_torch`), or one rank alone (`ProcessGroup.single`). Each makes the same calls in the same
order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flowdp.collective.mean import Op, arithmetic, flat_view, write_back
from flowdp.device.accelerator import device_module, is_accelerator
from flowdp.errors import OptionError
from flowdp.network.machines import BACKENDS
from flowdp.validators import one_of

__all__ = ["ProcessGroup", "Work"]


class Work:
    """Handle of a collective that has started.

    Args:
        finish: Called by the first `wait` that succeeds; None: nothing is left to do.
    """

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Wait until the result is in the tensor; on CUDA, make the current stream wait for it instead.

        Raises:
            CollectiveError: The call failed on some rank.
        """
        if self._finish is not None:
            self._finish()
            self._finish = None  # not after an error: a call that failed fails again


class ProcessGroup(ABC):
    """The group of ranks that compute together, as seen by one of them.

    ::

        groups = flowdp.local_groups(["cpu", "cpu"])      # one group object for each of two threads
        group.all_reduce(tensor)                          # in each: the mean over the ranks, in place
        work = group.all_reduce(tensor, "sum", async_op=True)
        ...                                               # do not use `tensor` before `wait` returns
        work.wait()

    Attributes:
        rank: Index of this rank.
        size: Number of ranks.
        device: Device of the tensors of this rank.
        backend: "local", "torch" or "single".

    Threads: one at a time.
    """

    rank: int
    size: int
    device: torch.device
    backend: Literal["local", "torch", "single"]

    @staticmethod
    def single(device: torch.device | str = "cpu") -> ProcessGroup:
        """A group of one rank: no call changes a tensor."""
        return _SingleGroup(torch.device(device))

    @staticmethod
    def from_torch(group: dist.ProcessGroup | None = None) -> ProcessGroup:
        """A group over `torch.distributed`, for processes that a launcher such as torchrun has started.

        Args:
            group: Group of `torch.distributed`; None: the default group. `close()` does not close it.

        Raises:
            OptionError: `torch.distributed` is not initialised, or this process is not in the group.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise OptionError(
                "torch.distributed is not initialised: run under torchrun and call "
                "torch.distributed.init_process_group(...) first, or use flowdp.local_groups(devices)"
            )
        if dist.get_rank(group) < 0:
            raise OptionError("this process is not a member of the group")
        return _TorchGroup(group)

    def all_reduce(self, tensor: Tensor, op: Op = "mean", *, async_op: bool = False) -> Work:
        """Replace the tensor by its reduction over the ranks; float16 and bfloat16 are added in float32.

        Args:
            tensor: Has the same shape and dtype on every rank.
            op: "sum", "mean", "max" or "min"; a mean of integers is an error.
            async_op: Return at once. The tensor is ready after `wait()` of the returned handle.

        Raises:
            OptionError: The operation is not defined for the tensor.
            CollectiveError: The ranks' calls differ; every rank raises it.
            CollectiveAborted: Another rank failed.
            CollectiveTimeout: Another rank did not make this call within the timeout.
        """
        one_of("op", op, Op)
        if op != "sum" and tensor.is_complex() and op != "mean":
            raise OptionError(f"{op!r} is not defined for complex numbers, which have no order")
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise OptionError(
                f"a mean of {tensor.dtype} would not be exact in {tensor.dtype}: use op='sum', or convert "
                "to a float dtype"
            )
        return self._start(tensor, f"all_reduce {op!r}", op, async_op)

    def broadcast(self, tensor: Tensor, src: int = 0, *, async_op: bool = False) -> Work:
        """Replace the tensor by that of rank `src`; raises the errors of `all_reduce`."""
        if not 0 <= src < self.size:
            raise OptionError(f"src must be a rank from 0 to {self.size - 1}, not {src!r}")
        return self._start(tensor, f"broadcast from rank {src}", None, async_op, gives=self.rank == src)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Copies of the tensors of all ranks, in the order of the ranks, this one included."""
        rows = tensor.detach().new_zeros((self.size, *tensor.shape))
        rows[self.rank] = tensor.detach()
        self._reduce(flat_view(rows).view(torch.uint8), "sum", _describe("all_gather", tensor)).wait()
        return list(rows)

    @abstractmethod
    def all_gather_object(self, thing: Any) -> list[Any]:
        """The objects of all ranks, in the order of the ranks; within one process not copied."""

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_gather_object(None)

    def twin(self) -> ProcessGroup:
        """This group with a second, independent order of calls; itself where ranks are processes."""
        return self

    def abort(self, reason: str) -> None:  # noqa: B027 - nothing to do for torch's ranks, or for one alone
        """Make all present and later calls of every rank raise `CollectiveAborted` at once.

        With `from_torch` it has no effect: the other processes end by torch's own timeout.
        """

    def close(self) -> None:  # noqa: B027 - torch's group is not closed
        """End this rank's part; a rank that waits for it, or will, raises `CollectiveAborted`."""

    @abstractmethod
    def _reduce(self, flat: Tensor, op: Op, call: str) -> Work:
        """Begin to reduce memory in place; `call` is equal on all ranks."""

    def _start(self, tensor: Tensor, what: str, op: Op | None, async_op: bool, *, gives: bool = True) -> Work:
        """Begin a call; without `op` all ranks get the bytes of the one that gives."""
        if tensor.layout is not torch.strided:
            raise OptionError(
                f"a collective needs a dense tensor, not {tensor.layout}; call to_dense() first"
            )
        flat = flat_view(tensor)
        if not gives:
            flat.zero_()
        work = self._reduce(flat if op else flat.view(torch.uint8), op or "sum", _describe(what, tensor))
        if flat.data_ptr() != tensor.data_ptr():  # a copy, as the tensor is not contiguous
            work = Work(partial(_wait_and_write_back, work, flat, tensor))
        if not async_op:
            work.wait()
        return work


class _SingleGroup(ProcessGroup):
    rank, size = 0, 1
    backend = "single"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def all_gather_object(self, thing: Any) -> list[Any]:
        return [thing]

    def _reduce(self, _flat: Tensor, _op: Op, _call: str) -> Work:
        return Work()


class _TorchGroup(ProcessGroup):
    """Calls `torch.distributed`, which also decides how calls end that differ between the ranks."""

    backend = "torch"

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # `get_backend` returns "undefined" where `init_process_group` was called without a name.
        config = dist.get_backend_config(group)
        kind = next((kind for kind, backend in BACKENDS.items() if backend in config), "cpu")
        self.device = torch.device(kind)
        if is_accelerator(self.device):
            self.device = torch.device(kind, device_module(self.device).current_device())

    def all_gather_object(self, thing: Any) -> list[Any]:
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing, group=self._group)
        return things

    def _reduce(self, flat: Tensor, op: Op, _call: str) -> Work:
        is_float = flat.dtype.is_floating_point and op in ("sum", "mean")
        wide = flat.to(arithmetic(flat.dtype)) if is_float else flat
        # Without torch's own mean, which gloo does not have.
        operation = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op, dist.ReduceOp.SUM)
        handle = dist.all_reduce(wide, operation, group=self._group, async_op=True)

        def finish() -> None:
            handle.wait()
            if op == "mean":
                wide.div_(self.size)
            if wide is not flat:
                flat.copy_(wide)

        return Work(finish)


def _describe(what: str, tensor: Tensor) -> str:
    return f"{what} of {tensor.dtype}, shape {tuple(tensor.shape)}"


def _wait_and_write_back(work: Work, flat: Tensor, tensor: Tensor) -> None:
    work.wait()
    with torch.no_grad():
        write_back(flat, tensor)
