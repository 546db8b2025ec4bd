"""Memory on its way between machines, and the seam for a compression of it.

Memory is packed just before `torch.distributed` sums it over the machines; the sum is copied back into it. So
what a pack returns has as many elements, in any dtype, and its sum stands for that of the memories.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flowdp.options import Payload

__all__ = ["PACKS", "Pack"]

Pack = Callable[[Tensor], Tensor]
"""Makes of memory what travels; the memory itself where nothing is to be done."""


def _full(memory: Tensor) -> Tensor:
    return memory


def _half(memory: Tensor) -> Tensor:
    """Half the bytes of float32; float64 was asked for by the user, and stays."""
    return memory.bfloat16() if memory.dtype == torch.float32 else memory


PACKS: dict[Payload, Pack] = {"full": _full, "bf16": _half}
"""The pack of each `MachineOptions.payload`."""
