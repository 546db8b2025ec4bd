"""States of torch that belong to a thread: a new thread starts with none of them as its caller set them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

__all__ = ["caller_modes", "unhooked"]


def caller_modes(kinds: frozenset[str]) -> Callable[[], AbstractContextManager[None]]:
    """Read the calling thread's grad, inference and autocast modes, to enter them in other threads.

    ::

        modes = caller_modes(frozenset({"cuda"}))      # in the thread that asks
        with modes():                                  # in the thread that works, once for each use
            ...

    Args:
        kinds: Device types whose autocast counts, "cpu" or "cuda", for instance.
    """
    has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]

    @contextmanager
    def modes() -> Iterator[None]:
        with ExitStack() as stack:
            if is_inference is not torch.is_inference_mode_enabled():
                # Not said twice: even "off" switches the threads of autograd on, where they were off.
                stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(torch.set_grad_enabled(has_grad))
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
