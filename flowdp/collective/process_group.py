"""A process group: the collectives that one rank takes part in, whoever the others are.

Ranks are threads of this process (`flowdp.local_groups`), processes of a launcher
(`ProcessGroup.from_torch`), or one alone (`ProcessGroup.single`). All make the same calls in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flowdp.collective.base import arithmetic
from flowdp.collective.reduction import Op, flat_view
from flowdp.errors import OptionError
from flowdp.options import one_of

__all__ = ["ProcessGroup", "Work"]


class Work:
    """A collective on its way.

    Args:
        finish: What `wait` does, once.
    """

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Return when the result is in the tensor; on CUDA, when the current stream waits for it.

        Raises:
            CollectiveError: The call failed on any rank.
        """
        if self._finish is not None:
            self._finish()
            self._finish = None  # a call that failed fails again


class ProcessGroup(ABC):
    """One rank's place among those that it computes with.

    ::

        groups = flowdp.local_groups(["cpu", "cpu"])      # one for each of two threads
        group.all_reduce(tensor)                          # in each: the mean over the ranks, in place
        work = group.all_reduce(tensor, "sum", async_op=True)
        ...                                               # `tensor` is not to be touched meanwhile
        work.wait()

    Attributes:
        rank: Its number, from 0.
        size: Ranks in the group.
        device: Where its tensors lie.
        backend: "local", "torch" or "single".
        shares_device: Whether another rank of this process is on the same CUDA device. Autograd has one
            thread for each, so ranks wait for each other inside a backward pass only where it runs in the
            calling thread.

    Threads: one at a time.
    """

    rank: int
    size: int
    device: torch.device
    backend: Literal["local", "torch", "single"]
    shares_device: bool = False

    @staticmethod
    def single(device: torch.device | str = "cpu") -> ProcessGroup:
        """A group of one rank: every call leaves the tensor as it is."""
        return _SingleGroup(torch.device(device))

    @staticmethod
    def from_torch(group: dist.ProcessGroup | None = None) -> ProcessGroup:
        """The ranks of `torch.distributed`, processes that a launcher such as torchrun has started.

        Args:
            group: A group of torch's; the default one if None. Closing ours leaves it alone.

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

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self.size

    def all_reduce(self, tensor: Tensor, op: Op = "mean", *, async_op: bool = False) -> Work:
        """Replace the tensor by its reduction over the ranks; float16 and bfloat16 are added in float32.

        Args:
            tensor: Of the same shape and dtype on every rank.
            op: "sum", "mean", "max" or "min"; a mean of integers has no dtype of its own and is refused.
            async_op: Return at once. The tensor is ready after `wait()` of what is returned.

        Raises:
            OptionError: The tensor cannot be reduced so.
            CollectiveError: The ranks' calls differ; every rank is told.
            CollectiveAborted: Another rank failed.
            CollectiveTimeout: Another rank did not come.
        """
        one_of("op", op, Op)
        if op != "sum" and tensor.is_complex() and op != "mean":
            raise OptionError(f"complex numbers have no order, so no {op!r}")
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise OptionError(f"a mean of {tensor.dtype} is not {tensor.dtype}; take op='sum', or floats")
        return self._start(
            tensor, f"all_reduce {op!r}", lambda flat, call: self._reduce(flat, op, call), async_op
        )

    def broadcast(self, tensor: Tensor, src: int = 0, *, async_op: bool = False) -> Work:
        """Replace the tensor by that of rank `src`; raises as `all_reduce` does."""
        if not 0 <= src < self.size:
            raise OptionError(f"src must be a rank from 0 to {self.size - 1}, not {src!r}")
        what = f"broadcast from rank {src}"
        return self._start(tensor, what, lambda flat, call: self._broadcast(flat, src, call), async_op)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order: copies, also of this rank's own."""
        flat = flat_view(_strided(tensor))
        outputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._gather(flat, [flat_view(output) for output in outputs], _describe("all_gather", tensor))
        return outputs

    @abstractmethod
    def all_gather_object(self, thing: Any) -> list[Any]:
        """What each rank gives, in their order; in one process the very objects."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called this."""

    def twin(self) -> ProcessGroup:
        """A group of the same ranks whose calls have an order of their own. Every rank calls it.

        What ends this group ends it, too.
        """
        return self

    def abort(self, reason: str) -> None:  # noqa: B027 - torch's ranks and one alone have nobody to tell
        """Let the others' calls, this one and all later ones, raise `CollectiveAborted` at once.

        Ranks of `from_torch` cannot be told: they find out by torch's own timeout.
        """

    def close(self) -> None:  # noqa: B027 - what is not ours stays
        """Take no further part; a rank that waits for this one is told."""

    @abstractmethod
    def _reduce(self, flat: Tensor, op: Op, call: str) -> Work: ...

    @abstractmethod
    def _broadcast(self, flat: Tensor, src: int, call: str) -> Work: ...

    @abstractmethod
    def _gather(self, flat: Tensor, outputs: list[Tensor], call: str) -> None: ...

    def _start(self, tensor: Tensor, what: str, start: Callable[[Tensor, str], Work], async_op: bool) -> Work:
        flat = flat_view(_strided(tensor))
        work = start(flat, _describe(what, tensor))
        if flat.data_ptr() != tensor.data_ptr():  # the tensor is not contiguous
            work = Work(_copied_back(work, flat, tensor))
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

    def barrier(self) -> None:
        pass

    def _reduce(self, flat: Tensor, op: Op, call: str) -> Work:  # noqa: ARG002
        return Work()

    def _broadcast(self, flat: Tensor, src: int, call: str) -> Work:  # noqa: ARG002
        return Work()

    def _gather(self, flat: Tensor, outputs: list[Tensor], call: str) -> None:  # noqa: ARG002
        outputs[0].copy_(flat)


class _TorchGroup(ProcessGroup):
    """Calls `torch.distributed`. Calls that differ between the ranks end as torch ends them."""

    backend = "torch"

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # Not `get_backend`: without a name in `init_process_group` it says "undefined".
        is_cuda = "nccl" in dist.get_backend_config(group)
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")

    def all_gather_object(self, thing: Any) -> list[Any]:
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing, group=self._group)
        return things

    def barrier(self) -> None:
        dist.barrier(self._group)

    def _reduce(self, flat: Tensor, op: Op, call: str) -> Work:  # noqa: ARG002
        is_float = flat.dtype.is_floating_point and op in ("sum", "mean")
        wide = flat.to(arithmetic(flat.dtype)) if is_float else flat
        # Not torch's own mean: gloo has none.
        operation = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op, dist.ReduceOp.SUM)
        handle = dist.all_reduce(wide, operation, group=self._group, async_op=True)

        def finish() -> None:
            handle.wait()
            if op == "mean":
                wide.div_(self.size)
            if wide is not flat:
                flat.copy_(wide)

        return Work(finish)

    def _broadcast(self, flat: Tensor, src: int, call: str) -> Work:  # noqa: ARG002
        handle = dist.broadcast(_bytes(flat), group_src=src, group=self._group, async_op=True)
        return Work(handle.wait)

    def _gather(self, flat: Tensor, outputs: list[Tensor], call: str) -> None:  # noqa: ARG002
        dist.all_gather([_bytes(output) for output in outputs], _bytes(flat), group=self._group)


def _strided(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        raise OptionError(f"a collective needs a dense tensor, not {tensor.layout}; call to_dense() first")
    return tensor


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)  # gloo knows few dtypes, and these calls compute nothing


def _describe(what: str, tensor: Tensor) -> str:
    return f"{what} of {tensor.dtype}, shape {tuple(tensor.shape)}"


def _copied_back(work: Work, flat: Tensor, tensor: Tensor) -> Callable[[], None]:
    def finish() -> None:
        work.wait()
        with torch.no_grad():
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            real.copy_(flat.view(real.shape))

    return finish
