"""States of torch that belong to a thread: a new thread starts with none of them as its caller set them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flowdp.options import Precision

__all__ = ["Autocast", "caller_modes", "unhooked", "watcher"]

DTYPES: dict[Precision, torch.dtype | None] = {"32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of autocast for each precision; None: there is none."""


class Autocast:
    """Autocast of a rank. It is a state of the thread: entered where a step runs, and per step.

    Args:
        device: Device of the rank.
        precision: Option of the run.
        caches: Whether a weight that is used twice is cast only once. Torch's cache of casts is the
            process's, and each rank that leaves autocast empties it: of several ranks none has it, or the
            rounding of their gradients would be a matter of chance.

    Attributes:
        dtype: Type that it casts to; None: there is no autocast.
    """

    def __init__(self, device: torch.device, precision: Precision, *, caches: bool) -> None:
        self.dtype = DTYPES[precision]
        self._kind, self._caches = device.type, caches

    def __call__(self) -> AbstractContextManager[object]:
        """A context of it."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self._kind, dtype=self.dtype, cache_enabled=self._caches)


def caller_modes(kinds: frozenset[str]) -> Callable[[], AbstractContextManager[None]]:
    """Read the calling thread's modes, to enter them in other threads: grad, inference, autocast, device.

    ::

        modes = caller_modes(frozenset({"cuda"}))      # in the thread that asks
        with modes():                                  # in the thread that works, once for each use
            ...

    Args:
        kinds: Device types whose autocast counts, "cpu" or "cuda", for instance.
    """
    has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
    has_default = any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
    default = torch.get_default_device() if has_default else None

    @contextmanager
    def modes() -> Iterator[None]:
        with ExitStack() as stack:
            if is_inference is not torch.is_inference_mode_enabled():
                # Not said twice: even "off" switches the threads of autograd on, where they were off.
                stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(torch.set_grad_enabled(has_grad))
            if default is not None:
                stack.enter_context(default)
            for kind, dtype in casts:
                # The cache of casts is the process's: each thread that leaves autocast empties it for all,
                # and how often a weight is cast that is used twice would be a matter of chance.
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            yield

    return modes


@contextmanager
def unhooked() -> Iterator[None]:
    """Suspend hooks on saved tensors (offloading, `torch.utils.checkpoint`): another thread has none."""
    stack = torch._C._autograd
    held = []
    while (hooks := stack._top_saved_tensors_default_hooks(True)) is not None:
        held.append(hooks)
        stack._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(held):
            stack._push_saved_tensors_default_hooks(pack, unpack)


def watcher() -> str | None:
    """Something that sees the operations of the calling thread and of no other; None: there is nothing.

    Counters of operations, traces, derivatives of other kinds than autograd's, hooks on saved
    tensors, and hooks on all modules.
    """
    if torch.compiler.is_compiling():
        return "torch.compile or torch.export"
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "a trace"
    modes = [
        mode
        for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
        if not isinstance(mode, DeviceContext)
    ]
    if modes:
        return type(modes[0]).__name__
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "a hook on saved tensors"
    if parametrize._cache_enabled:
        return "parametrize.cached()"
    return "a hook on all modules" if _has_any_global_hook() else None
