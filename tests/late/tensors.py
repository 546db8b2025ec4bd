"""Methods of `torch.Tensor` that name a device, or read memory without an operation.

In C++ a tensor of an emulated device is one of the CPU. These methods say and do what those of a tensor on
CUDA do.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.late.device import LateCuda

__all__ = ["methods"]

HOST = torch.device("cpu")
TRUE: Any = torch._C.TensorBase


def methods(cuda: LateCuda, moves: threading.local) -> dict[str, Any]:
    """Replacements of attributes of `torch.Tensor`, by name.

    Args:
        cuda: The machine.
        moves: Says in `now` whether the thread moves a tensor by its own wish.
    """
    memory = cuda.memory

    def device_of(tensor: Tensor) -> torch.device:
        found = memory.of(tensor)
        own: torch.device = TRUE.device.__get__(tensor)
        return own if found is None else found.stream.device

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            args = (device_of(args[0]), args[0].dtype, *args[1:])
        if len(args) == (3 if args and isinstance(args[0], torch.dtype) else 4):
            args, copy = args[:-1], args[-1]
        device, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cuda":
            device = cuda.place(device)
        named = {} if form is None else {"memory_format": form}
        if device is None or device == device_of(tensor):
            stays: Tensor = TRUE.to(
                tensor, dtype=tensor.dtype if dtype is None else dtype, copy=copy, **named
            )
            return stays
        if "meta" in (device.type, TRUE.device.__get__(tensor).type):
            shape: Tensor = TRUE.to(tensor, device=device, dtype=dtype or tensor.dtype, copy=copy, **named)
            return shape
        if torch.is_grad_enabled() and tensor.requires_grad:
            cast: Tensor = TRUE.to(tensor, dtype=dtype or tensor.dtype, **named)
            far: Tensor = Moved.apply(cast, device, non_blocking)  # type: ignore[no-untyped-call]
            return far
        with moving():
            moved: Tensor = torch.ops.aten._to_copy.default(
                tensor, dtype=dtype, device=device, non_blocking=non_blocking, **named
            )
        return moved

    class Moved(torch.autograd.Function):
        """A move whose gradient comes back to the source's device: C++ takes both for the CPU."""

        @staticmethod
        def forward(ctx: Any, tensor: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
            ctx.source = device_of(tensor)
            return to(tensor, device, non_blocking=non_blocking)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
            return to(gradient, ctx.source), None, None

    @contextmanager
    def moving() -> Iterator[None]:
        moves.now = True
        try:
            yield
        finally:
            moves.now = False

    def cpu(tensor: Tensor, **kwargs: Any) -> Tensor:
        return to(tensor, HOST, **kwargs)

    def to_cuda(tensor: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
        return to(tensor, cuda.place(device), non_blocking=non_blocking)

    def tolist(tensor: Tensor) -> Any:
        return TRUE.tolist(cpu(tensor.detach()))

    def numpy(tensor: Tensor, **kwargs: Any) -> Any:
        if memory.of(tensor) is not None:
            raise TypeError(f"can't convert {device_of(tensor)} device type tensor to numpy")
        return TRUE.numpy(tensor, **kwargs)

    def record_stream(tensor: Tensor, stream: Any) -> None:
        # The call, or that of the function around it.
        if cuda.is_removed(sys._getframe(1)) or cuda.is_removed(sys._getframe(2)):
            return
        found = memory.of(tensor)
        assert found is not None, "the memory of the host knows no streams"
        with cuda.lock:
            memory.record(found, stream)

    def is_pinned(tensor: Tensor, device: Any = None) -> bool:
        return memory.is_pinned(tensor)

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        if memory.is_pinned(tensor):
            return tensor
        pinned = torch.empty_like(tensor, pin_memory=True)
        return pinned.copy_(tensor)

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if memory.of(tensor) is None or not tensor.is_leaf:
            return true_deepcopy(tensor, memo)
        if id(tensor) not in memo:
            made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            made.grad = None if tensor.grad is None else tensor.grad.detach().clone()
            memo[id(tensor)] = made
        return memo[id(tensor)]

    true_deepcopy: Callable[..., Any] = Tensor.__deepcopy__
    return {
        "device": property(device_of),
        "is_cuda": property(lambda tensor: device_of(tensor).type == "cuda"),
        "is_cpu": property(lambda tensor: device_of(tensor).type == "cpu"),
        "to": to,
        "cpu": cpu,
        "cuda": to_cuda,
        "tolist": tolist,
        "numpy": numpy,
        "record_stream": record_stream,
        "is_pinned": is_pinned,
        "pin_memory": pin_memory,
        "__deepcopy__": deepcopy,
    }
