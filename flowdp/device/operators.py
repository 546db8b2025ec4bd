"""Torch's Python objects of its operators, which threads must not make at the same time.

Torch makes the object of an operator (`torch.ops.aten.add.Tensor`) when Python first asks for it. In a
`TorchDispatchMode` (selective checkpoints, a counter of operations, `OwnDraws`) and for tensors with a
`__torch_dispatch__` of their own, C++ asks, and keeps a bare pointer. When two threads ask for the same one
at once, each makes its own, and the second takes the first one's place; the pointer may be that of the first.
The process then dies by a segmentation fault at any later use.
"""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["make_operators"]


@cache
def make_operators() -> int:
    """Make the objects of all operators, once in the life of the process: some 0.1 s, 8 MB.

    Returns:
        How many there are.

    Threads:
        The one that starts the workers, before they exist.

    Source:
        torch 2.13, `OpOverloadPacket.__getattr__`, `c10::PyHandleCache::ptr_or`.
    """
    made = 0
    for operator in torch._C._dispatch_get_all_op_names():
        space, _, rest = operator.partition("::")
        name, _, overload = rest.partition(".")
        try:
            getattr(getattr(getattr(torch.ops, space), name), overload or "default")
        except (AttributeError, RuntimeError):  # a kernel without a schema: Python cannot reach it at all
            continue
        made += 1
    return made
